// The task table of a cluster. Narrow views hide columns.

import type { Confirm } from './clusterTools';
import { h, KeyedList, MoreButton } from './dom';
import type { History } from './history';
import type { Link } from './link';
import type { ICluster } from './protocol';
import { COLUMNS, TaskRow } from './taskRow';
import type { IActions } from './view';

const MAX_ROWS = 50;
/** States that are shown first in a long table. */
const URGENT = ['failed', 'lost', 'hung', 'restarting', 'starting', 'planned'];

export class TaskTable {
  readonly node = h('div', { class: 'tfd-scroll tfd-tasks' });
  private readonly _rows = new Map<HTMLElement, TaskRow>();
  private readonly _bodies: KeyedList<HTMLElement>;
  private readonly _more: MoreButton;

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
    this._bodies = new KeyedList<HTMLElement>(
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
    this._more = new MoreButton('tasks', MAX_ROWS, () => {
      const snapshot = link.cluster(cluster);
      if (snapshot) {
        this.show(snapshot, link.state === 'ready');
      }
    });
    this.node.append(table, this._more.node);
  }

  show(snapshot: ICluster, connected: boolean): void {
    const names = this._more.select(
      snapshot.order.filter(name => name in snapshot.tasks),
      name => URGENT.includes(snapshot.tasks[name].state)
    );
    this._bodies.update(names, (node, name) => {
      const history = this._history.tasks.get(name) ?? [];
      this._rows.get(node)?.show(snapshot.tasks[name], history, connected);
    });
  }

  dispose(): void {
    for (const row of this._rows.values()) {
      row.dispose();
    }
  }
}
