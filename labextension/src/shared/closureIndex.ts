// Filter and sort order of a closure table. After small changes only the changed rows are sorted
// again.

import type { ClosureTable } from './closures';

export type SortColumn =
  | 'id'
  | 'function'
  | 'state'
  | 'worker'
  | 'attempts'
  | 'queued'
  | 'waited'
  | 'ran'
  | 'fetched'
  | 'error';

export interface IFilter {
  /** Index in CLOSURE_STATES; null for all. */
  state: number | null;
  worker: number | null;
  function: number | null;
}

const NO_FILTER: IFilter = { state: null, worker: null, function: null };

export class ClosureIndex {
  /** The shown rows in display order; only the first `length` entries are valid. */
  rows = new Int32Array(0);
  length = 0;
  sort: SortColumn = 'id';
  descending = true;
  filter: IFilter = NO_FILTER;

  private _spare = new Int32Array(0);
  /** Sort keys, smallest first; infinite for unknown values. */
  private _keys = new Float64Array(0);
  private _marked = new Uint8Array(0);
  private _version = -1;
  private _first = 0;
  private _functions: string[] = [];
  private _ranks: number[] = [];

  constructor(private _table: ClosureTable) {}

  /** Change sort order and filter. */
  choose(sort: SortColumn, descending: boolean, filter: IFilter): void {
    this.sort = sort;
    this.descending = descending;
    this.filter = filter;
    this._version = -1;
    this.update(this._table);
  }

  /** Apply changes of the table; return true if the display may have changed. */
  update(table: ClosureTable): boolean {
    if (table !== this._table) {
      this._table = table;
      this._version = -1;
    }
    if (table.version === this._version) {
      return false;
    }
    const ids = this._version < 0 ? null : table.changedSince(this._version);
    const ranked =
      this.sort === 'function' && table.functions.join('\n') !== this._functions.join('\n');
    this._functions = table.functions;
    if (ids === null || ranked) {
      this._build();
    } else {
      this._dropOld();
      this._merge(ids);
    }
    this._version = table.version;
    this._first = table.first;
    return true;
  }

  /** Return the position of a row, -1 if it is not shown. */
  positionOf(row: number): number {
    return this.rows.subarray(0, this.length).indexOf(row);
  }

  private _build(): void {
    const { length } = this._table;
    this._rank();
    this._reserve(length);
    let kept = 0;
    for (let row = 0; row < length; row++) {
      this._keys[row] = this._keyOf(row);
      if (this._matches(row)) {
        this.rows[kept++] = row;
      }
    }
    this.length = kept;
    if (this.sort === 'id') {
      if (this.descending) {
        this.rows.subarray(0, kept).reverse();
      }
    } else {
      this.rows.subarray(0, kept).sort(this._compare);
    }
  }

  /** Remove the oldest rows, which the table has dropped. */
  private _dropOld(): void {
    const count = this._table.first - this._first;
    if (count <= 0) {
      return;
    }
    let kept = 0;
    for (let i = 0; i < this.length; i++) {
      const row = this.rows[i] - count;
      if (row >= 0) {
        this.rows[kept++] = row;
      }
    }
    this.length = kept;
    this._keys.copyWithin(0, count);
  }

  private _merge(ids: Float64Array): void {
    const { first, length } = this._table;
    this._reserve(length);
    const marked = this._marked;
    const changed: number[] = [];
    for (const id of ids) {
      const row = id - first;
      if (row >= 0 && row < length && !marked[row]) {
        marked[row] = 1;
        changed.push(row);
      }
    }
    const { rows, _spare: spare } = this;
    let kept = 0;
    for (let i = 0; i < this.length; i++) {
      if (!marked[rows[i]]) {
        spare[kept++] = rows[i];
      }
    }
    const placed: number[] = [];
    for (const row of changed) {
      marked[row] = 0;
      this._keys[row] = this._keyOf(row);
      if (this._matches(row)) {
        placed.push(row);
      }
    }
    placed.sort(this._compare);
    let from = 0;
    let to = 0;
    for (const row of placed) {
      const position = this._search(spare, from, kept, row);
      rows.set(spare.subarray(from, position), to);
      to += position - from;
      rows[to++] = row;
      from = position;
    }
    rows.set(spare.subarray(from, kept), to);
    this.length = to + kept - from;
  }

  /** Return the first position from `low` on at which `row` can be inserted. */
  private _search(rows: Int32Array, low: number, high: number, row: number): number {
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this._compare(rows[middle], row) < 0) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  private readonly _compare = (a: number, b: number): number => {
    const [left, right] = [this._keys[a], this._keys[b]];
    if (left !== right) {
      return left < right ? -1 : 1;
    }
    return this.descending ? b - a : a - b;
  };

  private _matches(row: number): boolean {
    const { state, worker, function: name } = this.filter;
    const table = this._table;
    return (
      (state === null || table.state[row] === state) &&
      (worker === null || table.worker[row] === worker) &&
      (name === null || table.function[row] === name)
    );
  }

  private _keyOf(row: number): number {
    const value = this._valueOf(row);
    // Unknown values come last in both directions.
    return Number.isNaN(value) ? Infinity : this.descending ? -value : value;
  }

  private _valueOf(row: number): number {
    const table = this._table;
    switch (this.sort) {
      case 'id':
        // Not the row, which changes when old rows are dropped.
        return table.first + row;
      case 'function':
        return this._ranks[table.function[row]] ?? NaN;
      case 'worker':
        return table.worker[row] < 0 ? NaN : table.worker[row];
      case 'waited':
        return table.dispatched[row] - table.queued[row];
      case 'ran':
        return table.ranOf(row);
      case 'fetched':
        return table.finished[row] - table.fetching[row];
      case 'error':
        return prefixKey(table.errorOf(row));
      default:
        return table[this.sort][row];
    }
  }

  private _rank(): void {
    const names = this._table.functions;
    const order = names.map((_, i) => i).sort((a, b) => (names[a] < names[b] ? -1 : 1));
    this._ranks = [];
    order.forEach((position, rank) => (this._ranks[position] = rank));
  }

  private _reserve(length: number): void {
    if (this.rows.length >= length) {
      return;
    }
    const capacity = Math.ceil(length * 1.25) + 1024;
    const grown = <T extends Int32Array | Float64Array | Uint8Array>(larger: T, old: T): T => {
      larger.set(old);
      return larger;
    };
    this.rows = grown(new Int32Array(capacity), this.rows);
    this._spare = new Int32Array(capacity);
    this._keys = grown(new Float64Array(capacity), this._keys);
    this._marked = new Uint8Array(capacity);
  }
}

/** Return the first six characters of a text as a sortable number; NaN for an empty text. */
function prefixKey(text: string): number {
  if (!text) {
    return NaN;
  }
  let key = 0;
  for (let i = 0; i < 6; i++) {
    key = key * 256 + Math.min(i < text.length ? text.charCodeAt(i) : 0, 255);
  }
  return key;
}
