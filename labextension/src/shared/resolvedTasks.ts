// The task table of a resolved cluster. A long table shows tasks with problems first.

import { h, KeyedList, MoreButton, setTruncatedText, setText, show } from './dom';
import { brief, clean, sign, tone } from './figures';

/** The state of a task; see `tfd_notebook/model/resolution.py`. */
export interface ITaskStatus {
  job: string;
  task: number;
  address: string;
  state: string;
  identity: string;
  accelerators: string;
  latency_ms: number;
  reason: string;
}

const MAX_ROWS = 50;

/** Title and class of each column; narrow views hide `tfd-c…` columns, c5 first. */
const COLUMNS: readonly [string, string][] = [
  ['task', ''],
  ['state', ''],
  ['address', 'tfd-c4 tfd-where'],
  ['identity', 'tfd-c4 tfd-identity'],
  ['accelerators', 'tfd-c5 tfd-accelerators'],
  ['latency', 'tfd-number tfd-c5'],
  ['reason', 'tfd-wide']
];

export class ResolvedTasks {
  readonly node = h('div', { class: 'tfd-scroll tfd-found' });
  private readonly _rows: KeyedList<HTMLElement>;
  private readonly _more = new MoreButton('tasks', MAX_ROWS, () => this.show(this._current));
  private _current: readonly ITaskStatus[] = [];

  constructor() {
    const heads = COLUMNS.map(([text, name]) => h('th', { class: name, scope: 'col' }, text));
    const body = h('tbody');
    this._rows = new KeyedList(body, () => rowOf());
    const table = h('table', { 'aria-label': 'tasks' }, h('thead', {}, h('tr', {}, ...heads)));
    table.append(body);
    this.node.append(table, this._more.node);
  }

  show(tasks: readonly ITaskStatus[]): void {
    this._current = tasks;
    show(this.node, tasks.length > 0);
    // Hide empty columns.
    for (const field of ['identity', 'accelerators', 'reason'] as const) {
      this.node.classList.toggle(`tfd-no-${field}`, !tasks.some(task => task[field]));
    }
    const named = new Map(tasks.map(task => [nameOf(task), task]));
    const names = this._more.select([...named.keys()], name => named.get(name)!.state !== 'alive');
    this._rows.update(names, (row, name) => fill(row, named.get(name)!));
  }
}

function nameOf(task: ITaskStatus): string {
  return `${task.job}:${task.task}`;
}

function rowOf(): HTMLElement {
  const cells = COLUMNS.map(([, name]) => h('td', { class: name }));
  cells[1].append(h('span'), h('span', { class: 'tfd-word' }));
  return h('tr', {}, ...cells);
}

function fill(row: HTMLElement, task: ITaskStatus): void {
  const [name, state, ...rest] = row.children;
  setTruncatedText(name, nameOf(task), `${nameOf(task)} at ${clean(task.address)}`);
  const [symbol, stateText] = state.children;
  setText(symbol, sign(task.state));
  symbol.className = `tfd-${tone(task.state)}`;
  setText(stateText, ` ${task.state}`);
  const reason = clean(task.reason);
  state.setAttribute('title', reason ? `${task.state}: ${reason}` : task.state);
  const texts = [
    task.address,
    task.identity,
    task.accelerators,
    brief(task.latency_ms / 1e3),
    reason
  ];
  texts.forEach((text, i) => setTruncatedText(rest[i], text));
  rest[1].classList.toggle('tfd-bad', task.state === 'mismatch');
}
