// One cluster: state, bottlenecks, tasks, streams, coordinator and notices.

import { AlertStrip } from './alertStrip';
import { announce } from './announce';
import { BottleneckList } from './bottleneck';
import { ClusterTools, type Confirm } from './clusterTools';
import { CoordinatorPart } from './coordinatorPart';
import { h, setTruncatedText, setText, show } from './dom';
import { duration, plural, signed, tone, formatInteger, total } from './figures';
import { GpuStrip } from './gpuStrip';
import { useHistory } from './history';
import type { Link } from './link';
import { NoticeList } from './noticeList';
import { hasEnded, type ICluster } from './protocol';
import { RankList } from './rankList';
import { SparkPart, sparkSummary } from './sparkPart';
import { StreamList } from './streamList';
import { TaskTable } from './taskTable';
import { type IActions, View } from './view';

export interface IClusterOptions {
  /** Use the layout for a narrow panel. */
  compact?: boolean;
}

export class ClusterView extends View {
  private readonly _name = h('span', { class: 'tfd-name tfd-cut' });
  private readonly _state = h('span');
  private readonly _ready = h('span');
  private readonly _launcher = h('span', { class: 'tfd-quiet' });
  private readonly _facts = h('span', { class: 'tfd-quiet' });
  private readonly _alerts: AlertStrip;
  private readonly _roles = h('div', { class: 'tfd-warn tfd-wrap' });
  private readonly _bottlenecks = new BottleneckList();
  private readonly _tools: ClusterTools;
  private readonly _tasks: TaskTable;
  private readonly _gpus = new GpuStrip();
  private readonly _spark = new SparkPart();
  private readonly _ranks = new RankList();
  private readonly _streams: StreamList;
  private readonly _coordinator: CoordinatorPart;
  private readonly _notices = new NoticeList();
  private _announced = '';

  constructor(link: Link, cluster: string, actions: IActions, options: IClusterOptions = {}) {
    super(link, cluster, actions, `tfd-cluster${options.compact ? ' tfd-compact' : ''}`);
    this.node.setAttribute('aria-label', `cluster ${cluster}`);
    const { history, end } = useHistory(link, cluster);
    this.onDispose(end);
    const confirm: Confirm = (question, near) => this.confirm(question, near);
    this._alerts = new AlertStrip(link, cluster, actions);
    this._tools = new ClusterTools(link, cluster, actions, confirm);
    this._tasks = new TaskTable(link, cluster, actions, history, confirm);
    this._streams = new StreamList();
    this._coordinator = new CoordinatorPart();
    this.onDispose(() => {
      this._alerts.dispose();
      this._bottlenecks.dispose();
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
        this._facts
      ),
      this._alerts.node,
      this._roles,
      this._bottlenecks.node,
      this._tools.node,
      this._spark.node,
      this._tasks.node,
      this._gpus.node,
      this._ranks.node,
      this._streams.node,
      this._coordinator.node,
      this._notices.node
    );
    this.begin();
  }

  protected draw(snapshot: ICluster | undefined): void {
    setTruncatedText(this._name, this.cluster);
    for (const part of [
      this._alerts,
      this._tools,
      this._spark,
      this._tasks,
      this._gpus,
      this._ranks,
      this._streams,
      this._coordinator,
      this._notices
    ]) {
      show(part.node, snapshot !== undefined);
    }
    if (!snapshot) {
      return;
    }
    const [planned, observed] = [total(snapshot.planned), total(snapshot.observed)];
    setText(this._state, signed(snapshot.state));
    this._state.className = `tfd-${tone(snapshot.state)}`;
    setText(
      this._ready,
      snapshot.spark
        ? sparkSummary(snapshot.spark)
        : hasEnded(snapshot)
          ? ''
          : `${formatInteger(observed)} of ${plural(planned, 'task')} ready`
    );
    setText(this._launcher, snapshot.launcher);
    const left = (snapshot.expires ?? 0) - Date.now() / 1000;
    const kept = Math.max(0, (snapshot.lease ?? 0) - Date.now() / 1000);
    setText(
      this._facts,
      [
        adaptationText(snapshot),
        snapshot.expires && left > 0 ? `stops in ${duration(left)}` : '',
        snapshot.lease ? `detached, lease ends in ${duration(kept)}` : ''
      ]
        .filter(Boolean)
        .join('; ')
    );
    this._alerts.show(snapshot, this.connected);
    const differs = hasEnded(snapshot) ? [] : differences(snapshot);
    setText(this._roles, differs.join('\n'));
    this._roles.style.whiteSpace = 'pre-line';
    show(this._roles, differs.length > 0);
    this._bottlenecks.show(snapshot);
    this._tools.show(snapshot, this.connected);
    this._spark.show(snapshot.spark);
    this._tasks.show(snapshot, this.connected);
    show(this._tasks.node, !snapshot.spark);
    this._gpus.show(Object.values(snapshot.gpus ?? {}));
    this._ranks.show(snapshot);
    this._streams.show(snapshot);
    this._coordinator.show(snapshot.coordinator);
    this._notices.show(snapshot.notices);
    this._announce(snapshot);
  }

  private _announce(snapshot: ICluster): void {
    const phase = snapshot.spark ? `, ${snapshot.spark.phase}` : '';
    const text = `cluster ${snapshot.name} ${snapshot.state}${phase}`;
    if (this._announced && this._announced !== text) {
      announce(text);
    }
    this._announced = text;
  }
}

function adaptationText({ adaptation }: ICluster): string {
  return adaptation
    ? `adapts ${adaptation.minimum} to ${plural(adaptation.maximum, 'data worker')}`
    : '';
}

/** Describe the roles whose planned, requested and observed numbers differ. */
export function differences(snapshot: ICluster): string[] {
  const roles = new Set([
    ...Object.keys(snapshot.planned),
    ...Object.keys(snapshot.requested),
    ...Object.keys(snapshot.observed)
  ]);
  const lines: string[] = [];
  for (const role of roles) {
    const [planned, requested, observed] = [
      snapshot.planned,
      snapshot.requested,
      snapshot.observed
    ].map(counts => counts[role] ?? 0);
    if (planned === requested && requested === observed) {
      continue;
    }
    const why: string[] = [];
    if (planned > requested) {
      why.push(`${planned - requested} not requested yet`);
    } else if (planned < requested) {
      why.push(`${requested - planned} to be stopped`);
    }
    const missing = Object.values(snapshot.tasks).filter(
      task => task.role === role && task.state !== 'ready'
    );
    for (const task of missing.slice(0, 3)) {
      why.push(`${task.task} ${task.state}${task.reason ? ` (${task.reason})` : ''}`);
    }
    if (missing.length > 3) {
      why.push(`and ${missing.length - 3} more`);
    }
    const counts = `${role}: ${planned} planned, ${requested} requested, ${observed} observed`;
    lines.push(why.length ? `${counts}; ${why.join('; ')}` : counts);
  }
  return lines;
}
