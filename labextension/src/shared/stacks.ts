// Python stacks of tasks, shown until they are closed.

import { button, h, setText, show } from './dom';
import { brief, clean, plural } from './figures';

interface IPosition {
  function: string;
  file: string;
  line: number | null;
  seconds: number | null;
}

/** One thread of a task, or a task without threads. */
export interface IStack extends IPosition {
  task: string;
  thread: string;
  note: string;
  /** From the outermost to the innermost frame. */
  stack: readonly IPosition[];
}

export class Stacks {
  readonly node = h('section', { class: 'tfd-findings', 'aria-label': 'stacks', hidden: true });
  private readonly _count = h('h4');
  private readonly _list = h('ul', { class: 'tfd-notices' });

  constructor() {
    const close = button('Close', 'Close the stacks', () => show(this.node, false));
    close.className = 'tfd-link';
    this.node.append(h('div', { class: 'tfd-row' }, this._count, close), this._list);
  }

  show(stacks: readonly IStack[]): void {
    setText(this._count, stackCount(stacks));
    this._list.replaceChildren(...stacks.map(itemOf));
    show(this.node, stacks.length > 0);
  }
}

export function stackCount(stacks: readonly IStack[]): string {
  const threads = stacks.filter(({ stack }) => stack.length > 0).length;
  return threads ? plural(threads, 'Python thread') : 'No Python code runs';
}

function itemOf(row: IStack): HTMLElement {
  if (!row.stack.length) {
    return h('li', {}, `${clean(row.task)}: `, h('span', { class: 'tfd-quiet' }, clean(row.note)));
  }
  const frames = row.stack.map(frame => h('div', {}, positionOf(frame, frame.file)));
  return h(
    'li',
    { title: row.thread },
    h(
      'details',
      {},
      h('summary', {}, `${clean(row.task)}: ${positionOf(row, row.file.replace(/^.*\//, ''))}`),
      h('div', { class: 'tfd-quiet' }, ...frames)
    )
  );
}

function positionOf({ function: name, line, seconds }: IPosition, file: string): string {
  const time = seconds === null ? '' : `, ${brief(seconds)}`;
  return clean(`${name} (${file}:${line ?? '?'})${time}`);
}
