// What travels between kernel and browser: see docs/bus.md.

/** Grows whenever kernel and browser of different versions would misunderstand each other. */
export const PROTOCOL = 1;

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

/** A GPU that tasks may be given; use and memory are of all of it, whoever uses it. */
export interface IGpu {
  host: string;
  index: number;
  name?: string;
  /** The task that sees it. */
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
  /** Workers that get no closure, whether or not all of it is paused. */
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
  /** When the phase began; seconds since the epoch. */
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

export interface ICluster {
  name: string;
  launcher: string;
  state: string;
  planned: Record<string, number>;
  requested: Record<string, number>;
  observed: Record<string, number>;
  tasks: Record<string, ITask>;
  order: string[];
  streams: Record<string, IStream>;
  gpus?: Record<string, IGpu>;
  notices: INotice[];
  coordinator?: ICoordinator;
  spark?: ISpark;
  expires?: number;
  /** Until when it stays without a kernel; seconds since the epoch. */
  lease?: number;
}

export interface ITree {
  clusters: Record<string, ICluster>;
}

/** An error of the kernel's, as it answers a command. */
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
  /** The client whom this answers, or who has to say hello again. */
  known?: string;
  unknown?: string;
}

export interface IStateMessage {
  kind: 'state';
  seq: number;
  whole: boolean;
  state: unknown;
}

export interface IValuesMessage {
  kind: 'values';
  seq: number;
  cluster: string;
  whole: boolean;
  count: number;
  columns: [string, string][];
  functions: string[];
  errors: Record<string, string>;
  lost: [number, number, number, number][];
  paused: boolean;
  now: number;
  most: number;
}

export interface IReply {
  kind: 'reply';
  client: string;
  ask: string;
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

/** Return what `patch` makes of `target`, as RFC 7396 says; neither is changed. */
export function merged<T>(target: T, patch: unknown): T {
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
      result[key] = merged(result[key], value);
    }
  }
  return result as T;
}

/** Whether a cluster has ended and stays so. */
export function hasEnded(cluster: ICluster): boolean {
  return ['stopped', 'failed', 'lost'].includes(cluster.state);
}
