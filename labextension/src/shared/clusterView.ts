// One cluster: what it is, what limits it, its tasks, streams, coordinator and notices.

import { announce } from './announce';
import { ClusterTools } from './clusterTools';
import { CoordinatorPart } from './coordinatorPart';
import { h, Keyed, setCut, setText, show } from './dom';
import { duration, plural, signed, tone, whole } from './figures';
import { GpuStrip } from './gpuStrip';
import { useHistory } from './history';
import type { Link } from './link';
import { NoticeList } from './noticeList';
import { hasEnded, type ICluster } from './protocol';
import { SparkPart, sparkWords } from './sparkPart';
import { StreamList } from './streamList';
import { TaskTable } from './taskTable';
import { type IActions, View } from './view';

export interface IClusterOptions {
  /** For a narrow panel. */
  compact?: boolean;
}

export class ClusterView extends View {
  private readonly _name = h('span', { class: 'tfd-name tfd-cut' });
  private readonly _state = h('span');
  private readonly _ready = h('span');
  private readonly _launcher = h('span', { class: 'tfd-quiet' });
  private readonly _expires = h('span', { class: 'tfd-quiet' });
  private readonly _roles = h('div', { class: 'tfd-warn tfd-wrap' });
  private readonly _limits = h('div');
  private readonly _limitRows: Keyed<HTMLElement>;
  private readonly _tools: ClusterTools;
  private readonly _tasks: TaskTable;
  private readonly _gpus = new GpuStrip();
  private readonly _spark = new SparkPart();
  private readonly _streams: StreamList;
  private readonly _coordinator: CoordinatorPart;
  private readonly _notices = new NoticeList();
  private _said = '';

  constructor(link: Link, cluster: string, actions: IActions, options: IClusterOptions = {}) {
    super(link, cluster, actions, `tfd-cluster${options.compact ? ' tfd-compact' : ''}`);
    this.node.setAttribute('aria-label', `cluster ${cluster}`);
    const { history, end } = useHistory(link, cluster);
    this.onDispose(end);
    const ask = (question: string, near: HTMLElement) => this.confirm(question, near);
    this._limitRows = new Keyed<HTMLElement>(this._limits, () => h('div', { class: 'tfd-limit' }));
    this._tools = new ClusterTools(link, cluster, actions, ask);
    this._tasks = new TaskTable(link, cluster, actions, history, ask);
    this._streams = new StreamList();
    this._coordinator = new CoordinatorPart();
    this.onDispose(() => {
      this._tools.dispose();
      this._tasks.dispose();
    });
    this.body.append(
      h(
        'div',
        { class: 'tfd-head' },
        this._name,
        this._state,
        this._ready,
        this._launcher,
        this._expires
      ),
      this._roles,
      this._limits,
      this._tools.node,
      this._spark.node,
      this._tasks.node,
      this._gpus.node,
      this._streams.node,
      this._coordinator.node,
      this._notices.node
    );
    this.begin();
  }

  protected draw(seen: ICluster | undefined): void {
    setCut(this._name, this.cluster);
    for (const part of [
      this._tools,
      this._spark,
      this._tasks,
      this._gpus,
      this._streams,
      this._coordinator,
      this._notices
    ]) {
      show(part.node, seen !== undefined);
    }
    if (!seen) {
      return;
    }
    const [planned, observed] = [total(seen.planned), total(seen.observed)];
    setText(this._state, signed(seen.state));
    this._state.className = `tfd-${tone(seen.state)}`;
    setText(
      this._ready,
      seen.spark
        ? sparkWords(seen.spark)
        : hasEnded(seen)
          ? ''
          : `${whole(observed)} of ${plural(planned, 'task')} ready`
    );
    setText(this._launcher, seen.launcher);
    const left = (seen.expires ?? 0) - Date.now() / 1000;
    const stays = Math.max(0, (seen.lease ?? 0) - Date.now() / 1000);
    setText(
      this._expires,
      [
        seen.expires && left > 0 ? `stops in ${duration(left)}` : '',
        seen.lease ? `detached, stays for ${duration(stays)}` : ''
      ]
        .filter(Boolean)
        .join('; ')
    );
    const differs = hasEnded(seen) ? [] : differences(seen);
    setText(this._roles, differs.join('\n'));
    this._roles.style.whiteSpace = 'pre-line';
    show(this._roles, differs.length > 0);
    const limits = limitsOf(seen);
    this._limitRows.update(Object.keys(limits), (row, key) => setText(row, limits[key]));
    this._tools.show(seen, this.alive);
    this._spark.show(seen.spark);
    this._tasks.show(seen, this.alive);
    show(this._tasks.node, !seen.spark);
    this._gpus.show(Object.values(seen.gpus ?? {}));
    this._streams.show(seen);
    this._coordinator.show(seen.coordinator);
    this._notices.show(seen.notices);
    this._announce(seen);
  }

  private _announce(seen: ICluster): void {
    const phase = seen.spark ? `, ${seen.spark.phase}` : '';
    const words = `cluster ${seen.name} ${seen.state}${phase}`;
    if (this._said && this._said !== words) {
      announce(words);
    }
    this._said = words;
  }
}

function total(counts: Record<string, number>): number {
  return Object.values(counts).reduce((sum, number) => sum + number, 0);
}

/** What limits now, by where that is seen. */
function limitsOf(seen: ICluster): Record<string, string> {
  const limits: Record<string, string> = {};
  if (seen.coordinator?.limit && !hasEnded(seen)) {
    limits.coordinator = seen.coordinator.limit;
  }
  for (const stream of Object.values(seen.streams)) {
    if (stream.limit && stream.state === 'running') {
      limits[`stream ${stream.name}`] = `${stream.name}: ${stream.limit}`;
    }
  }
  return limits;
}

/** Roles of which planned, requested and observed are not the same, and why. */
export function differences(seen: ICluster): string[] {
  const roles = new Set([
    ...Object.keys(seen.planned),
    ...Object.keys(seen.requested),
    ...Object.keys(seen.observed)
  ]);
  const lines: string[] = [];
  for (const role of roles) {
    const [planned, requested, observed] = [seen.planned, seen.requested, seen.observed].map(
      counts => counts[role] ?? 0
    );
    if (planned === requested && requested === observed) {
      continue;
    }
    const why: string[] = [];
    if (planned > requested) {
      why.push(`${planned - requested} not requested yet`);
    } else if (planned < requested) {
      why.push(`${requested - planned} no longer wanted`);
    }
    const unseen = Object.values(seen.tasks).filter(
      task => task.role === role && task.state !== 'ready'
    );
    for (const task of unseen.slice(0, 3)) {
      why.push(`${task.task} ${task.state}${task.reason ? ` (${task.reason})` : ''}`);
    }
    if (unseen.length > 3) {
      why.push(`and ${unseen.length - 3} more`);
    }
    const counts = `${role}: ${planned} planned, ${requested} requested, ${observed} observed`;
    lines.push(why.length ? `${counts}; ${why.join('; ')}` : counts);
  }
  return lines;
}
