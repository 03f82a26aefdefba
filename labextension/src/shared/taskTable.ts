// The tasks of a cluster: a table whose columns give way where there is no room.

import type { Confirm } from './clusterTools';
import { button, h, Keyed, setText, show } from './dom';
import { whole } from './figures';
import type { History } from './history';
import type { Link } from './link';
import type { ICluster } from './protocol';
import { COLUMNS, TaskRow } from './taskRow';
import type { IActions } from './view';

const MOST_ROWS = 50;
/** Those that need a look first, where not all are shown. */
const URGENT = ['failed', 'lost', 'hung', 'restarting', 'starting', 'planned'];

export class TaskTable {
  readonly node = h('div', { class: 'tfd-scroll tfd-tasks' });
  private readonly _rows = new Map<HTMLElement, TaskRow>();
  private readonly _bodies: Keyed<HTMLElement>;
  private readonly _more: HTMLButtonElement;
  private _all = false;

  constructor(
    link: Link,
    cluster: string,
    actions: IActions,
    private readonly _history: History,
    confirm: Confirm
  ) {
    const heads = COLUMNS.map(([text, name]) => h('th', { class: name, scope: 'col' }, text));
    const head = h('thead', {}, h('tr', {}, ...heads));
    const table = h('table', { 'aria-label': 'tasks' }, head);
    this._bodies = new Keyed<HTMLElement>(
      table,
      task => {
        const row = new TaskRow(link, cluster, task, actions, confirm);
        this._rows.set(row.node, row);
        return row.node;
      },
      node => {
        this._rows.get(node)?.dispose();
        this._rows.delete(node);
      },
      head
    );
    this._more = button('', 'show all tasks, or only those that need a look', () => {
      this._all = !this._all;
      const seen = link.cluster(cluster);
      if (seen) {
        this.show(seen, link.state === 'ready');
      }
    });
    this.node.append(table, this._more);
  }

  show(seen: ICluster, alive: boolean): void {
    let names = seen.order.filter(name => name in seen.tasks);
    show(this._more, names.length > MOST_ROWS);
    if (names.length > MOST_ROWS) {
      setText(this._more, this._all ? 'Fewer' : `All ${whole(names.length)} tasks`);
      if (!this._all) {
        const urgent = names.filter(name => URGENT.includes(seen.tasks[name].state));
        const chosen = new Set([...urgent, ...names].slice(0, MOST_ROWS));
        names = names.filter(name => chosen.has(name));
      }
    }
    this._bodies.update(names, (node, name) => {
      const history = this._history.tasks.get(name) ?? [];
      this._rows.get(node)?.show(seen.tasks[name], history, alive);
    });
  }

  dispose(): void {
    for (const row of this._rows.values()) {
      row.dispose();
    }
  }
}
