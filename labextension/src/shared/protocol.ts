// Messages between kernel and browser; see docs/bus.md.

/** Incremented with every incompatible change of the messages. */
export const PROTOCOL = 4;

export const CLOSURE_STATES = [
  'queued',
  'dispatched',
  'running',
  'fetching',
  'ready',
  'failed',
  'cancelled',
  'retrying'
] as const;

export interface ITask {
  task: string;
  role: string;
  index: number;
  host?: string;
  address?: string;
  pid?: number;
  state: string;
  reason?: string;
  cpu_percent?: number;
  rss_mb?: number;
  pss_mb?: number;
  gpu?: string;
  open_to?: string;
  restarts: number;
  bytes_sent?: number;
  bytes_per_s?: number;
}

export interface IStream {
  name: string;
  kind: string;
  state: string;
  elements: number;
  bytes: number;
  elements_per_s: number;
  bytes_per_s: number;
  wait_fraction?: number;
  history: number[];
  error?: string;
  limit?: string;
  epoch?: string;
  job?: string;
}

/** The process in which `cluster.run` calls a function for a training worker. */
export interface IRank {
  task: string;
  rank: number;
  host?: string;
  state: string;
  function?: string;
  attempt: number;
  reason?: string;
  /** Seconds since the Unix epoch. */
  started?: number;
  ended?: number;
}

/** A GPU of the cluster. Utilization and memory include processes of other users. */
export interface IGpu {
  host: string;
  index: number;
  name?: string;
  /** The task to which it is assigned. */
  task?: string;
  use_percent?: number;
  used_mb?: number;
  memory_mb?: number;
}

export interface ICoordinatedWorker {
  index: number;
  state: string;
  id?: number;
  function?: string;
  seconds?: number;
  done: number;
  failed: number;
  lost: number;
  built: number;
  unbuilt: number;
}

export interface ICoordinator {
  state: string;
  reason?: string;
  counts: Record<string, number>;
  closures_per_s: number;
  queue_ms?: number[];
  run_ms?: number[];
  left_s?: number[];
  workers: Record<string, ICoordinatedWorker>;
  traces: Record<string, number>;
  ps_bytes: Record<string, number>;
  limit?: string;
  /** Workers on hold, independent of a pause of the coordinator. */
  held: number[];
  break_on_failure: boolean;
  reduced: boolean;
}

/** A node of a cluster on Spark: the process that runs the user's function. */
export interface INode {
  role: string;
  index: number;
  executor?: string;
  host?: string;
  address?: string;
  pid?: number;
  state: string;
  gpu?: string;
  rows: number;
  results: number;
  rows_per_s: number;
  queue_depth?: number;
  queue_capacity?: number;
  batch_age_s?: number;
  log: string[];
  error?: string;
}

export interface ISpark {
  phase: string;
  /** Start of the phase in seconds since the Unix epoch. */
  since: number;
  reserved: number;
  needed: number;
  input_mode?: string;
  application?: string;
  nodes: Record<string, INode>;
  order: string[];
  reason?: string;
  error?: string;
  tensorboard?: string;
}

export interface INotice {
  time: number;
  severity: string;
  what: string;
  task?: string;
  fix?: string;
}

/** Range and latest decision of adaptive data workers. */
export interface IAdaptation {
  minimum: number;
  maximum: number;
  workers?: number;
  reason?: string;
  since?: number;
}

export interface ICluster {
  name: string;
  launcher: string;
  state: string;
  planned: Record<string, number>;
  requested: Record<string, number>;
  observed: Record<string, number>;
  tasks: Record<string, ITask>;
  order: string[];
  ranks?: Record<string, IRank>;
  streams: Record<string, IStream>;
  gpus?: Record<string, IGpu>;
  notices: INotice[];
  coordinator?: ICoordinator;
  spark?: ISpark;
  adaptation?: IAdaptation;
  expires?: number;
  /** End of the lease in seconds since the Unix epoch. */
  lease?: number;
}

export interface ITree {
  clusters: Record<string, ICluster>;
}

/** The error in the reply to a command. */
export interface IProblem {
  code?: string;
  what: string;
  task?: string | null;
  fix?: string | null;
}

export interface IHello {
  kind: 'hello';
  protocol: number;
  version: string;
  pid: number;
  /** Client that this message answers, or that has to send hello again. */
  known?: string;
  unknown?: string;
}

export interface IStateMessage {
  kind: 'state';
  seq: number;
  full: boolean;
  state: unknown;
}

export interface IValuesMessage {
  kind: 'values';
  seq: number;
  cluster: string;
  full: boolean;
  count: number;
  columns: [string, string][];
  functions: string[];
  errors: Record<string, string>;
  lost: [number, number, number, number][];
  paused: boolean;
  now: number;
  max_rows: number;
}

export interface IReply {
  kind: 'reply';
  client: string;
  request_id: string;
  value?: unknown;
  error?: IProblem;
}

export type Incoming =
  | IHello
  | IStateMessage
  | IValuesMessage
  | IReply
  | { kind: 'alive'; time: number }
  | { kind: 'bye' };

/** Return `target` with a JSON merge patch (RFC 7396) applied; neither is modified. */
export function mergePatch<T>(target: T, patch: unknown): T {
  if (patch === null || typeof patch !== 'object' || Array.isArray(patch)) {
    return patch as T;
  }
  const base = target as unknown;
  const result: Record<string, unknown> =
    base !== null && typeof base === 'object' && !Array.isArray(base)
      ? { ...(base as Record<string, unknown>) }
      : {};
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) {
      delete result[key];
    } else {
      result[key] = mergePatch(result[key], value);
    }
  }
  return result as T;
}

/** Return true if a cluster is stopped, failed, lost, or left to its agents. */
export function hasEnded(cluster: ICluster): boolean {
  return ['stopped', 'failed', 'lost', 'left'].includes(cluster.state);
}

/** Return true if a coordinator can be paused and resumed. */
export function canPause(coordinator: ICoordinator | undefined): boolean {
  return coordinator !== undefined && !coordinator.reduced && coordinator.state !== 'stopped';
}
