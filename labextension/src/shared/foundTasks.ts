// The tasks of a cluster that was found: a table, those that need a look first where it is long.

import { button, h, Keyed, setCut, setText, show } from './dom';
import { brief, clean, sign, tone, whole } from './figures';

/** A task as it was seen: see `tfd_notebook/model/resolution.py`. */
export interface ISighting {
  job: string;
  task: number;
  address: string;
  state: string;
  identity: string;
  accelerators: string;
  latency_ms: number;
  reason: string;
}

const MOST_ROWS = 50;

/** Title and class of each column; the classes `tfd-c…` give way, c5 first. */
const COLUMNS: readonly [string, string][] = [
  ['task', ''],
  ['state', ''],
  ['address', 'tfd-c4 tfd-where'],
  ['identity', 'tfd-c4 tfd-identity'],
  ['accelerators', 'tfd-c5 tfd-accelerators'],
  ['latency', 'tfd-number tfd-c5'],
  ['reason', 'tfd-wide']
];

export class FoundTasks {
  readonly node = h('div', { class: 'tfd-scroll tfd-found' });
  private readonly _rows: Keyed<HTMLElement>;
  private readonly _more: HTMLButtonElement;
  private _all = false;
  private _seen: readonly ISighting[] = [];

  constructor() {
    const heads = COLUMNS.map(([text, name]) => h('th', { class: name, scope: 'col' }, text));
    const body = h('tbody');
    this._rows = new Keyed(body, () => rowOf());
    this._more = button('', 'show all tasks, or only those that need a look', () => {
      this._all = !this._all;
      this.show(this._seen);
    });
    const table = h('table', { 'aria-label': 'tasks' }, h('thead', {}, h('tr', {}, ...heads)));
    table.append(body);
    this.node.append(table, this._more);
  }

  show(tasks: readonly ISighting[]): void {
    this._seen = tasks;
    show(this.node, tasks.length > 0);
    // Where nobody has anything to say, others have the room.
    for (const field of ['identity', 'accelerators', 'reason'] as const) {
      this.node.classList.toggle(`tfd-no-${field}`, !tasks.some(task => task[field]));
    }
    show(this._more, tasks.length > MOST_ROWS);
    setText(this._more, this._all ? 'Fewer' : `All ${whole(tasks.length)} tasks`);
    const named = new Map(tasks.map(task => [nameOf(task), task]));
    let names = [...named.keys()];
    if (!this._all && names.length > MOST_ROWS) {
      const urgent = names.filter(name => named.get(name)!.state !== 'alive');
      const chosen = new Set([...urgent, ...names].slice(0, MOST_ROWS));
      names = names.filter(name => chosen.has(name));
    }
    this._rows.update(names, (row, name) => fill(row, named.get(name)!));
  }
}

export function nameOf(task: ISighting): string {
  return `${task.job}:${task.task}`;
}

function rowOf(): HTMLElement {
  const cells = COLUMNS.map(([, name]) => h('td', { class: name }));
  cells[1].append(h('span'), h('span', { class: 'tfd-word' }));
  return h('tr', {}, ...cells);
}

function fill(row: HTMLElement, task: ISighting): void {
  const [name, state, ...rest] = row.children;
  setCut(name, nameOf(task), `${nameOf(task)} at ${clean(task.address)}`);
  const [mark, word] = state.children;
  setText(mark, sign(task.state));
  mark.className = `tfd-${tone(task.state)}`;
  setText(word, ` ${task.state}`);
  const reason = clean(task.reason);
  state.setAttribute('title', reason ? `${task.state}: ${reason}` : task.state);
  const words = [
    task.address,
    task.identity,
    task.accelerators,
    brief(task.latency_ms / 1e3),
    reason
  ];
  words.forEach((text, i) => setCut(rest[i], text));
  rest[1].classList.toggle('tfd-bad', task.state === 'mismatch');
}
