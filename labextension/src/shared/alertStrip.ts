// The problems of a cluster under its name, the most severe first.

import { button, enable, h, KeyedList, setText } from './dom';
import { clean, errorSummary, sign, tone } from './figures';
import type { Link } from './link';
import { noticeText } from './noticeList';
import { hasEnded, type ICluster, type INotice, type IStream, type ITask } from './protocol';
import { CommandStatus } from './statusLine';
import type { IActions } from './view';

export interface IAlert {
  key: string;
  severity: 'error' | 'warning';
  text: string;
}

/** Time in seconds for which a notice is an alert. */
const RECENT = 300;
const PAUSED = 'paused';

/** Computes the alerts of a cluster, and updates them when its latest notice expires. */
export class AlertWatch {
  private _timer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly _draw: (alerts: IAlert[], snapshot: ICluster) => void) {}

  show(snapshot: ICluster): void {
    clearTimeout(this._timer);
    const now = Date.now() / 1000;
    this._draw(alertsOf(snapshot, now), snapshot);
    const notice = recentNotice(snapshot, now);
    if (notice) {
      const left = Math.min(notice.time + RECENT - now, RECENT);
      this._timer = setTimeout(() => this.show(snapshot), left * 1000 + 1);
    }
  }

  dispose(): void {
    clearTimeout(this._timer);
  }
}

export class AlertStrip {
  // Receives the focus when the focused button is removed.
  readonly node = h('div', { class: 'tfd-alerts', tabindex: -1 });
  private readonly _lists: [IAlert['severity'], KeyedList<HTMLElement>][];
  private readonly _buttons: HTMLButtonElement[];
  private readonly _status: CommandStatus;
  private readonly _watch = new AlertWatch(alerts => this._draw(alerts));

  constructor(link: Link, cluster: string, actions: IActions) {
    this._status = new CommandStatus(link, cluster);
    const run = async (button: HTMLButtonElement, label: string, done: string) => {
      await this._status.run(label, label.toLowerCase(), {}, [button], () => done);
      if (!button.isConnected && document.activeElement === document.body) {
        this.node.focus();
      }
    };
    const control = (label: string, title: string, done: string) =>
      button(label, title, button => void run(button, label, done));
    this._buttons = actions.readOnly
      ? []
      : [
          control('Resume', 'Resume the coordinator', 'Resumed'),
          control('Step', 'Run one closure while paused', 'Released 1 closure')
        ];
    const make = (key: string): HTMLElement =>
      h(
        'div',
        { class: 'tfd-alert' },
        h('span', { 'aria-hidden': 'true' }),
        h('span', { class: 'tfd-clamp' }),
        ...(key === PAUSED ? this._buttons : [])
      );
    // Screen readers announce changes of these elements.
    const [errors, warnings] = [h('div', { role: 'alert' }), h('div', { role: 'status' })];
    this._lists = [
      ['error', new KeyedList(errors, make)],
      ['warning', new KeyedList(warnings, make)]
    ];
    this.node.append(errors, warnings, this._status.node);
  }

  show(snapshot: ICluster, connected: boolean): void {
    this._buttons.forEach(button => enable(button, connected));
    this._watch.show(snapshot);
  }

  dispose(): void {
    this._watch.dispose();
    this._status.dispose();
  }

  private _draw(alerts: IAlert[]): void {
    const focused = this.node.contains(document.activeElement);
    const texts = new Map(alerts.map(({ key, text }) => [key, text]));
    for (const [severity, list] of this._lists) {
      const keys = alerts.filter(alert => alert.severity === severity).map(({ key }) => key);
      list.update(keys, (row, key) => {
        const text = texts.get(key)!;
        row.className = `tfd-alert tfd-alert-${severity}`;
        setText(row.children[0], sign(key === PAUSED ? PAUSED : severity));
        setText(row.children[1], text);
        row.title = text;
      });
    }
    if (focused && !this.node.contains(document.activeElement)) {
      this.node.focus();
    }
  }
}

/** Return the problems of a cluster, the most severe first. */
export function alertsOf(snapshot: ICluster, now: number): IAlert[] {
  const { state } = snapshot;
  if (hasEnded(snapshot)) {
    const text = withReason(`Cluster ${state}`, reasonOf(snapshot));
    return ['stopped', 'left'].includes(state) ? [] : [{ key: 'cluster', severity: 'error', text }];
  }
  const alerts: IAlert[] = [];
  const add = (key: string, isError: boolean, text: string) =>
    alerts.push({ key, severity: isError ? 'error' : 'warning', text });
  const { coordinator } = snapshot;
  if (coordinator?.state === 'paused') {
    const reason = coordinator.reason ?? '';
    // The reason is a failure, or continues the sentence: "from the dashboard".
    const continues = /^(by|from|before) /.test(reason);
    const text = continues ? `Paused ${reason}` : withReason('Paused', reason);
    add(PAUSED, reason.includes(' failed on '), text);
  }
  const streams = failedStreams(snapshot);
  if (streams.length) {
    const { name, error } = streams[streams.length - 1];
    add(
      'stream',
      true,
      withReason(`Stream ${name} failed`, errorSummary(error ?? '')) + more(streams)
    );
  }
  const tasks = tasksWithProblems(snapshot);
  if (tasks.length) {
    const { task, state, reason } = tasks[0];
    const text = withReason(`${task} is ${state}`, clean(reason ?? ''));
    add('tasks', isBad(state), text + more(tasks));
  }
  const notice = recentNotice(snapshot, now);
  if (notice && !tasks.some(({ task }) => task === notice.task)) {
    add('notice', notice.severity === 'error', clean(noticeText(notice)));
  }
  return alerts.sort((a, b) => Number(b.severity === 'error') - Number(a.severity === 'error'));
}

/** Return why a cluster has failed or was lost. */
function reasonOf({ notices, order, spark, tasks }: ICluster): string {
  const ended = order.map(name => tasks[name]).find(task => task && isBad(task.state));
  const notice = notices.filter(({ severity }) => severity === 'error').at(-1);
  const reason = spark?.reason || spark?.error || ended?.reason || (notice && noticeText(notice));
  return errorSummary(reason ?? '');
}

/** Return the failed streams; a later stream of the notebook replaces a failed one. */
function failedStreams({ streams }: ICluster): IStream[] {
  const rows = Object.values(streams);
  const latest = rows.map(({ state }) => !['failed', 'stopped'].includes(state)).lastIndexOf(true);
  return rows.slice(latest + 1).filter(({ state }) => state === 'failed');
}

/** Return the tasks with a problem, the most severe first. */
function tasksWithProblems({ order, state, tasks }: ICluster): ITask[] {
  const broken = (task: ITask | undefined) =>
    task !== undefined &&
    !['ready', 'stopping', 'stopped'].includes(task.state) &&
    (Boolean(task.reason) || tone(task.state) !== 'quiet');
  return state === 'stopping'
    ? []
    : order
        .map(name => tasks[name])
        .filter(broken)
        .sort((a, b) => Number(isBad(b.state)) - Number(isBad(a.state)));
}

function recentNotice({ notices }: ICluster, now: number): INotice | undefined {
  return notices.filter(({ severity, time }) => severity !== 'info' && time > now - RECENT).at(-1);
}

function isBad(state: string): boolean {
  return tone(state) === 'bad';
}

function withReason(text: string, reason: string): string {
  return reason ? `${text}: ${reason}` : text;
}

function more(rows: readonly unknown[]): string {
  return rows.length > 1 ? ` (and ${rows.length - 1} more)` : '';
}
