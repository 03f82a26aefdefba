// The table row of a role with many tasks. It shows or hides the rows of its tasks.

import { h, rowWithToggle, setAttribute, setText } from './dom';
import { counted, percent, rate, sum } from './figures';
import type { ITask } from './protocol';
import { COLUMNS } from './taskRow';

export class RoleRow {
  readonly node = h('tbody');
  private readonly _counts = h('span');
  private readonly _figures = h('span', {
    class: 'tfd-quiet',
    title: 'mean CPU per task, and bytes sent per second by all tasks'
  });
  private readonly _toggle: HTMLButtonElement;

  constructor(role: string, onToggle: () => void) {
    this._toggle = h(
      'button',
      { type: 'button', class: 'tfd-toggle', onclick: onToggle },
      h('span', {}, `${role} `, this._counts, this._figures)
    );
    const cell = h('td', { class: 'tfd-role', colspan: COLUMNS.length }, this._toggle);
    this.node.append(rowWithToggle(this._toggle, cell));
  }

  show(tasks: readonly ITask[], ended: boolean, expanded: boolean): void {
    const counts: Record<string, number> = {};
    tasks.forEach(({ state }) => (counts[state] = (counts[state] ?? 0) + 1));
    const ready = counts.ready ?? 0;
    setText(this._counts, ended ? counted(counts) : `${ready}/${tasks.length} ready`);
    this._counts.className = ended || ready === tasks.length ? '' : 'tfd-warn';
    const cpu = tasks.flatMap(task => task.cpu_percent ?? []);
    const sent = tasks.flatMap(task => task.bytes_per_s ?? []);
    setText(
      this._figures,
      [
        cpu.length ? ` · CPU ${percent(sum(cpu) / cpu.length)}` : '',
        sent.length ? ` · ${rate(sum(sent))}` : ''
      ].join('')
    );
    setAttribute(this._toggle, 'aria-expanded', String(expanded));
  }
}
