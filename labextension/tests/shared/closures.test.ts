import { describe, expect, test } from 'vitest';

import { ClosureIndex, type IFilter, type SortColumn } from '../../src/shared/closureIndex';
import { ClosureTable } from '../../src/shared/closures';
import { adjacentRow, endOf, pick, spanOf } from '../../src/shared/timelineModel';
import { FUNCTIONS, type IRow, packed } from './kernel';

function apply(table: ClosureTable, rows: readonly IRow[], full: boolean, maxRows = 100_000): void {
  const { message, buffers } = packed(rows, full);
  table.apply({ ...message, max_rows: maxRows }, buffers);
}

const range = (from: number, to: number) =>
  Array.from({ length: to - from }, (_, i) => ({ id: from + i }));

describe('the table', () => {
  test('ignores changes before the first full table', () => {
    const table = new ClosureTable();
    apply(table, range(0, 3), false);
    expect(table.length).toBe(0);
  });

  test('grows and changes in place', () => {
    const table = new ClosureTable();
    apply(table, range(10, 20), true);
    apply(table, [{ id: 12, state: 5, worker: 3, error: 'no' }, ...range(20, 5000)], false);
    expect([table.first, table.length]).toEqual([10, 4990]);
    expect(table.stateOf(2)).toBe('failed');
    expect(table.errorOf(2)).toBe('no');
    expect(table.worker[2]).toBe(3);
    expect(table.queued[4989]).toBe(4999);
    apply(table, [{ id: 12, state: 4 }], false);
    expect(table.errorOf(2)).toBe('');
  });

  test('accepts unaligned buffers', () => {
    const table = new ClosureTable();
    const { message, buffers } = packed(range(0, 4), true);
    const views = buffers.map(buffer => {
      const moved = new Uint8Array(buffer.byteLength + 1);
      moved.set(new Uint8Array(buffer), 1);
      return new DataView(moved.buffer, 1);
    });
    table.apply(message, views);
    expect(table.queued[3]).toBe(3);
  });

  test('drops its oldest rows', () => {
    const table = new ClosureTable();
    apply(table, range(0, 100), true, 100);
    apply(table, [{ id: 3, error: 'old' }, ...range(100, 125)], false, 100);
    expect(table.length).toBe(125);
    apply(table, range(125, 130), false, 100);
    expect([table.first, table.length]).toEqual([30, 100]);
    expect(table.queued[0]).toBe(30);
    expect(table.errors.size).toBe(0);
    apply(table, [{ id: 5 }, { id: 31, worker: 9 }], false, 100);
    expect(table.worker[1]).toBe(9);
  });

  test('returns the ids changed since a version', () => {
    const table = new ClosureTable();
    apply(table, range(0, 10), true);
    const { version } = table;
    expect(table.changedSince(version - 1)).toBeNull();
    apply(table, [{ id: 1 }], false);
    apply(table, [{ id: 2 }], false);
    expect([...table.changedSince(version)!]).toEqual([1, 2]);
    expect([...table.changedSince(version + 1)!]).toEqual([2]);
    expect([...table.changedSince(table.version)!]).toEqual([]);
    apply(table, range(0, 10), true);
    expect(table.changedSince(version)).toBeNull();
  });

  test('shows queued closures as paused', () => {
    const table = new ClosureTable();
    const { message, buffers } = packed(range(0, 1), true);
    table.apply({ ...message, paused: true }, buffers);
    expect(table.stateOf(0)).toBe('paused');
  });
});

describe('the index', () => {
  let seed = 1;
  const random = (below: number) => {
    seed = (seed * 48271) % 2147483647;
    return seed % below;
  };
  const row = (id: number): IRow => ({
    id,
    function: random(3),
    state: random(8),
    worker: random(5) - 1,
    dispatched: random(3) ? random(50) : NaN,
    finished: random(3) ? 50 + random(50) : NaN,
    error: random(4) ? undefined : `error ${random(9)}`
  });

  /** Return the ids in the order of a full sort. */
  function expected(
    table: ClosureTable,
    sort: SortColumn,
    descending: boolean,
    filter: IFilter
  ): number[] {
    const value = (i: number): number | string => {
      const spans: Partial<Record<SortColumn, number>> = {
        waited: table.dispatched[i] - table.queued[i],
        ran: table.fetching[i] - table.started[i],
        fetched: table.finished[i] - table.fetching[i],
        id: table.first + i,
        worker: table.worker[i] < 0 ? NaN : table.worker[i]
      };
      if (sort === 'function') {
        return table.functionOf(i);
      }
      if (sort === 'error') {
        return table.errorOf(i).slice(0, 6) || NaN;
      }
      return spans[sort] ?? table[sort as 'state'][i];
    };
    const rows = [...Array(table.length).keys()].filter(
      i =>
        (filter.state === null || table.state[i] === filter.state) &&
        (filter.worker === null || table.worker[i] === filter.worker) &&
        (filter.function === null || table.function[i] === filter.function)
    );
    rows.sort((a, b) => {
      const [left, right] = [value(a), value(b)];
      const [missingLeft, missingRight] = [Number.isNaN(left), Number.isNaN(right)];
      const order = missingLeft || missingRight ? 0 : left < right ? -1 : left > right ? 1 : 0;
      if (missingLeft !== missingRight) {
        return missingLeft ? 1 : -1;
      }
      return descending ? -order || b - a : order || a - b;
    });
    return rows.map(i => table.first + i);
  }

  const ids = (index: ClosureIndex, table: ClosureTable) =>
    [...index.rows.subarray(0, index.length)].map(i => table.first + i);

  const none = { state: null, worker: null, function: null };
  const sorts: SortColumn[] = [
    'id',
    'function',
    'state',
    'worker',
    'attempts',
    'queued',
    'waited',
    'ran',
    'fetched',
    'error'
  ];
  const filters: IFilter[] = [
    none,
    { ...none, state: 4 },
    { ...none, worker: 1, function: 2 },
    { state: 0, worker: -1, function: null }
  ];

  test.each(sorts)('incremental updates sorted by %s equal a full sort', sort => {
    for (const descending of [false, true]) {
      for (const filter of filters) {
        const table = new ClosureTable();
        const index = new ClosureIndex(table);
        let next = 40 + random(60);
        apply(
          table,
          range(7, next).map(({ id }) => row(id)),
          true,
          100
        );
        index.choose(sort, descending, filter);
        expect(ids(index, table)).toEqual(expected(table, sort, descending, filter));
        for (let round = 0; round < 12; round++) {
          for (let message = 0; message <= random(3); message++) {
            const changed = [...Array(random(20)).keys()].map(() =>
              row(table.first + random(table.length))
            );
            const unique = [...new Map(changed.map(row => [row.id, row])).values()];
            const fresh = range(next, next + random(15)).map(({ id }) => row(id));
            next += fresh.length;
            apply(
              table,
              [...unique, ...fresh].sort((a, b) => a.id - b.id),
              false,
              100
            );
          }
          index.update(table);
          expect(ids(index, table)).toEqual(expected(table, sort, descending, filter));
        }
      }
    }
  });

  test('follows another table and new functions', () => {
    const table = new ClosureTable();
    const index = new ClosureIndex(table);
    apply(
      table,
      [
        { id: 0, function: 0 },
        { id: 1, function: 2 }
      ],
      true
    );
    index.choose('function', false, none);
    expect(ids(index, table)).toEqual([1, 0]);
    const { message, buffers } = packed([{ id: 2, function: 3 }], false);
    table.apply({ ...message, functions: [...FUNCTIONS, 'b'] }, buffers);
    index.update(table);
    expect(ids(index, table)).toEqual([1, 2, 0]);
    const other = new ClosureTable();
    apply(other, range(5, 8), true);
    expect(index.update(other)).toBe(true);
    expect(ids(index, other)).toEqual([5, 6, 7]);
    expect(index.update(other)).toBe(false);
  });
});

describe('the timeline', () => {
  const table = new ClosureTable();
  apply(
    table,
    [
      { id: 0, state: 4, worker: 0, dispatched: 10, finished: 12 },
      { id: 1, state: 2, worker: 1, dispatched: 11 },
      { id: 2, state: 0 },
      { id: 3, state: 5, worker: 0, dispatched: 14, finished: 15 }
    ],
    true
  );

  test('has bars of dispatched closures, and of running ones up to now', () => {
    expect([0, 1, 3].map(i => endOf(table, i, 20))).toEqual([12, 20, 15]);
    expect(endOf(table, 2, 20)).toBeNaN();
    expect(spanOf(table, [], 20)).toEqual([10, 20]);
  });

  test('has bars of started ranks, and of running ones up to now', () => {
    const rank = { task: 'worker:0', rank: 0, state: 'running', attempt: 1 };
    const empty = new ClosureTable();
    expect(spanOf(empty, [rank], 20)).toBeNull();
    expect(spanOf(empty, [{ ...rank, started: 12 }], 20)).toEqual([12, 20]);
    expect(spanOf(empty, [{ ...rank, started: 12, ended: 14 }], 20)).toEqual([12, 14]);
  });

  test('finds the bar at a position and the adjacent bars', () => {
    expect(pick(table, 0, 11, 0.1, 20)).toEqual({ kind: 'closure', row: 0 });
    expect(pick(table, 0, 13, 0.1, 20)).toBeNull();
    expect(pick(table, 0, 13.8, 0.5, 20)).toEqual({ kind: 'closure', row: 3 });
    expect(adjacentRow(table, 0, 10, true)).toBe(3);
    expect(adjacentRow(table, 0, 10, false)).toBe(-1);
  });
});
