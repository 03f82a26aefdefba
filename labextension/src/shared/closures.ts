// The closures of a coordinator as typed columns, updated in place.

import { CLOSURE_STATES, type IValuesMessage } from './protocol';

type Column = Float64Array | Int32Array | Int16Array | Uint16Array | Uint8Array;

const KINDS: Record<string, { new (buffer: ArrayBuffer): Column; new (length: number): Column }> = {
  f8: Float64Array,
  i4: Int32Array,
  i2: Int16Array,
  u2: Uint16Array,
  u1: Uint8Array
};

/** Ids of changed rows that are kept; a reader that is further behind reads all rows. */
const MAX_LOGGED = 50_000;

/** An attempt that ended with a lost worker. */
export interface ILostAttempt {
  id: number;
  worker: number;
  dispatched: number;
  ended: number;
}

/** Closures in the order of their ids, which have no gaps. */
export class ClosureTable {
  /** Incremented with every change. */
  version = 0;
  length = 0;
  first = 0;
  functions: string[] = [];
  errors = new Map<number, string>();
  lost: ILostAttempt[] = [];
  paused = false;
  /** Seconds since the Unix epoch by the kernel's clock. */
  now = 0;
  /** Local time at which `now` was received, in seconds of `performance.now`. */
  receivedAt = 0;
  /** Maximum number of rows that the kernel sends. */
  maxRows = Infinity;
  function: Column = new Int32Array(0);
  state: Column = new Uint8Array(0);
  worker: Column = new Int16Array(0);
  attempts: Column = new Uint16Array(0);
  queued: Column = new Float64Array(0);
  dispatched: Column = new Float64Array(0);
  started: Column = new Float64Array(0);
  fetching: Column = new Float64Array(0);
  finished: Column = new Float64Array(0);

  private _initialized = false;
  private _log: { version: number; ids: Float64Array | null }[] = [];

  /** Apply a message; changes are ignored until the first full table. */
  apply(message: IValuesMessage, buffers: readonly (ArrayBuffer | ArrayBufferView)[]): void {
    if (!message.full && !this._initialized) {
      return;
    }
    const columns = new Map<string, Column>();
    message.columns.forEach(([name, kind], i) => {
      columns.set(name, new KINDS[kind](copied(buffers[i])));
    });
    this.functions = message.functions;
    this.paused = message.paused;
    this.now = message.now;
    this.receivedAt = performance.now() / 1000;
    this.maxRows = message.max_rows;
    this.lost = message.lost.map(([id, worker, dispatched, ended]) => ({
      id,
      worker,
      dispatched,
      ended
    }));
    const ids = columns.get('id')! as Float64Array;
    this.version += 1;
    if (message.full) {
      this._initialized = true;
      this.errors.clear();
      this.length = message.count;
      this.first = message.count ? ids[0] : 0;
      for (const [name, column] of columns) {
        if (name in this && name !== 'id') {
          (this as unknown as Record<string, Column>)[name] = column;
        }
      }
      this._log = [{ version: this.version, ids: null }];
    } else {
      this._update(ids, columns);
      this._logChange(ids);
      for (const id of ids) {
        this.errors.delete(id);
      }
    }
    for (const [id, text] of Object.entries(message.errors)) {
      this.errors.set(Number(id), text);
    }
    this._drop();
  }

  /** Return the ids that changed after `version`, possibly with duplicates; null for all rows. */
  changedSince(version: number): Float64Array | null {
    if (version === this.version) {
      return new Float64Array(0);
    }
    const log = this._log.filter(entry => entry.version > version);
    if (log.length !== this.version - version || log.some(entry => entry.ids === null)) {
      return null;
    }
    const all = new Float64Array(log.reduce((sum, entry) => sum + entry.ids!.length, 0));
    let offset = 0;
    for (const { ids } of log) {
      all.set(ids!, offset);
      offset += ids!.length;
    }
    return all;
  }

  /** Return the displayed state of a row. */
  stateOf(row: number): string {
    const name = CLOSURE_STATES[this.state[row]];
    return this.paused && name === 'queued' ? 'paused' : name;
  }

  functionOf(row: number): string {
    return this.functions[this.function[row]] ?? '';
  }

  errorOf(row: number): string {
    return this.errors.get(this.first + row) ?? '';
  }

  /** Return how long a closure ran, in seconds; a failed one has no result to fetch. */
  ranOf(row: number): number {
    const end = Number.isNaN(this.fetching[row]) ? this.finished[row] : this.fetching[row];
    return end - this.started[row];
  }

  private _logChange(ids: Float64Array): void {
    this._log.push({ version: this.version, ids });
    let sum = 0;
    let first = this._log.length;
    while (first > 0 && sum <= MAX_LOGGED) {
      first -= 1;
      sum += this._log[first].ids?.length ?? 0;
    }
    this._log.splice(0, first);
  }

  /** Drop the oldest rows when the table is 25 % larger than what the kernel sends. */
  private _drop(): void {
    if (this.length <= 1.25 * this.maxRows) {
      return;
    }
    const count = this.length - this.maxRows;
    for (const name of NAMES) {
      this[name].copyWithin(0, count, this.length);
    }
    this.first += count;
    this.length -= count;
    for (const id of this.errors.keys()) {
      if (id < this.first) {
        this.errors.delete(id);
      }
    }
  }

  private _update(ids: Column, columns: Map<string, Column>): void {
    if (!this.length && ids.length) {
      this.first = ids[0];
    }
    const rows = new Int32Array(ids.length);
    let last = this.length - 1;
    for (let i = 0; i < ids.length; i++) {
      rows[i] = ids[i] - this.first;
      last = Math.max(last, rows[i]);
    }
    this._grow(last + 1);
    for (const [name, column] of columns) {
      if (name === 'id') {
        continue;
      }
      const target = (this as unknown as Record<string, Column | undefined>)[name];
      if (target !== undefined) {
        for (let i = 0; i < rows.length; i++) {
          if (rows[i] >= 0) {
            target[rows[i]] = column[i];
          }
        }
      }
    }
  }

  private _grow(length: number): void {
    if (length > this.state.length) {
      const capacity = Math.max(length, Math.ceil(this.state.length * 1.5), 1024);
      for (const name of NAMES) {
        const target = this[name];
        const Kind = target.constructor as new (length: number) => Column;
        const larger = new Kind(capacity);
        larger.set(target);
        this[name] = larger;
      }
    }
    this.length = Math.max(this.length, length);
  }
}

const NAMES = [
  'function',
  'state',
  'worker',
  'attempts',
  'queued',
  'dispatched',
  'started',
  'fetching',
  'finished'
] as const;

function copied(buffer: ArrayBuffer | ArrayBufferView): ArrayBuffer {
  // A view may start at any byte, but a typed array requires an aligned offset.
  return ArrayBuffer.isView(buffer)
    ? (buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength) as ArrayBuffer)
    : buffer.slice(0);
}
