// The task table of a cluster. Narrow views hide columns.

import type { Confirm } from './clusterTools';
import { h, KeyedList, MoreButton, setAttribute } from './dom';
import type { History } from './history';
import type { Link } from './link';
import { hasEnded, type ICluster } from './protocol';
import { RoleRow } from './roleRow';
import { topOf } from './sparkline';
import { COLUMNS, TaskRow } from './taskRow';
import type { IActions } from './view';

const MAX_ROWS = 50;
/** Lowest scale of the sparklines in bytes/s; idle tasks send some messages. */
const MIN_TOP = 100_000;
/** States that are shown first in a long table. */
const URGENT = ['failed', 'lost', 'hung', 'restarting', 'starting', 'planned'];
/** A role with more tasks is folded: tasks in the states `FOLDED` have no row. */
const MAX_UNFOLDED = 8;
const FOLDED = ['ready', 'stopped'];
/** Prefix of the keys of roles; names of tasks have no space. */
const ROLE = 'role ';

export class TaskTable {
  readonly node = h('div', { class: 'tfd-scroll tfd-tasks' });
  private readonly _heads: HTMLElement[];
  private readonly _rows = new Map<HTMLElement, TaskRow>();
  private readonly _roles = new Map<HTMLElement, RoleRow>();
  private readonly _bodies: KeyedList<HTMLElement>;
  private readonly _more: MoreButton;
  private readonly _expanded = new Set<string>();
  /** The column by which the table is sorted; -1 for the order of the tasks. */
  private _sorted = -1;
  /** Positions of the tasks by that column. */
  private _ranks = new Map<string, number>();
  private _shown: [ICluster, boolean] | null = null;

  constructor(
    link: Link,
    cluster: string,
    actions: IActions,
    private readonly _history: History,
    confirm: Confirm
  ) {
    this._heads = COLUMNS.map(({ title, name, key }, column) => {
      const onclick = () => this._sortBy(column);
      const sort = h('button', { type: 'button', class: 'tfd-sort', onclick }, title);
      return h('th', { class: name, scope: 'col' }, key ? sort : title);
    });
    const head = h('thead', {}, h('tr', {}, ...this._heads));
    const table = h('table', { 'aria-label': 'tasks' }, head);
    this._bodies = new KeyedList<HTMLElement>(
      table,
      key => {
        if (key.startsWith(ROLE)) {
          const role = new RoleRow(key.slice(ROLE.length), () => this._toggle(key));
          this._roles.set(role.node, role);
          return role.node;
        }
        const row = new TaskRow(link, cluster, key, actions, confirm);
        this._rows.set(row.node, row);
        return row.node;
      },
      node => {
        this._rows.get(node)?.dispose();
        this._rows.delete(node);
        this._roles.delete(node);
      },
      head
    );
    this._more = new MoreButton('tasks', MAX_ROWS, () => this._redraw());
    this.node.append(table, this._more.node);
  }

  show(snapshot: ICluster, connected: boolean): void {
    this._shown = [snapshot, connected];
    const { tasks } = snapshot;
    const histories = Object.keys(tasks).map(name => this._history.tasks.get(name) ?? []);
    const ended = hasEnded(snapshot);
    const state = { connected, ended, top: Math.max(topOf(histories), MIN_TOP) };
    // Hide empty columns.
    for (const field of ['gpu', 'restarts', 'reason'] as const) {
      const filled = Object.values(tasks).some(task => task[field]);
      this.node.classList.toggle(`tfd-no-${field}`, !filled);
    }
    const roles = new Map<string, string[]>();
    for (const name of snapshot.order.filter(name => name in tasks)) {
      const key = `${ROLE}${tasks[name].role}`;
      const names = roles.get(key) ?? [];
      names.push(name);
      roles.set(key, names);
    }
    this._bodies.update(this._listed(snapshot, roles), (node, key) => {
      this._rows.get(node)?.show(tasks[key], this._history.tasks.get(key) ?? [], state);
      this._roles.get(node)?.show(
        (roles.get(key) ?? []).map(name => tasks[name]),
        ended,
        this._expanded.has(key)
      );
    });
  }

  dispose(): void {
    for (const row of this._rows.values()) {
      row.dispose();
    }
  }

  /** Return the keys of the rows: tasks, and before them their roles with many tasks. */
  private _listed(snapshot: ICluster, roles: ReadonlyMap<string, string[]>): string[] {
    const { tasks } = snapshot;
    const opened = [...this._rows.values()].filter(row => row.opened).map(row => row.task);
    const isLong = (key: string) => roles.get(key)!.length > MAX_UNFOLDED;
    const listed = [...roles].map(([key, names]): [string, string[]] => {
      const folded = isLong(key) && !this._expanded.has(key);
      const shown = folded
        ? names.filter(name => !FOLDED.includes(tasks[name].state) || opened.includes(name))
        : names;
      return [key, this._inOrder(snapshot, shown)];
    });
    const chosen = new Set(
      this._more.select(
        listed.flatMap(([, names]) => names),
        name => URGENT.includes(tasks[name].state)
      )
    );
    return listed.flatMap(([key, names]) => [
      ...(isLong(key) ? [key] : []),
      ...names.filter(name => chosen.has(name))
    ]);
  }

  /** Return names in the order of the sorted column. */
  private _inOrder({ tasks, order }: ICluster, names: string[]): string[] {
    const key = COLUMNS[this._sorted]?.key;
    if (!key) {
      return names;
    }
    // Rows with the mouse or the focus do not move.
    const held = [...this._rows.keys()].some(row => row.matches(':hover, :focus-within'));
    if (!this._ranks.size || !held) {
      const known = order.filter(name => name in tasks);
      known.sort((a, b) => compare(key(tasks[a]), key(tasks[b])));
      this._ranks = new Map(known.map((name, rank) => [name, rank]));
    }
    const rank = (name: string) => this._ranks.get(name) ?? this._ranks.size;
    return [...names].sort((a, b) => rank(a) - rank(b));
  }

  /** Sort by a column, or not if it is sorted already. */
  private _sortBy(column: number): void {
    this._sorted = this._sorted === column ? -1 : column;
    this._ranks.clear();
    this._heads.forEach((head, i) => {
      const order = COLUMNS[i].name.includes('tfd-number') ? 'descending' : 'ascending';
      setAttribute(head, 'aria-sort', i === this._sorted ? order : null);
    });
    this._redraw();
  }

  private _toggle(role: string): void {
    if (!this._expanded.delete(role)) {
      this._expanded.add(role);
    }
    this._redraw();
  }

  private _redraw(): void {
    if (this._shown) {
      this.show(...this._shown);
    }
  }
}

/** Compare two keys: large numbers first, then words in their order, then empty words. */
function compare(a: number | string, b: number | string): number {
  return typeof a === 'number' && typeof b === 'number'
    ? b - a
    : Number(!a) - Number(!b) || String(a).localeCompare(String(b), undefined, { numeric: true });
}
