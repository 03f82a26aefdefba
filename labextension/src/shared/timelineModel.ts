// The timeline: one lane per worker with its closures, then one lane per rank of the latest
// `cluster.run`. Times are in seconds since the Unix epoch.

import type { ClosureTable, ILostAttempt } from './closures';
import { brief, clock, errorSummary } from './figures';
import { CLOSURE_STATES, type IRank } from './protocol';
import { placeOf } from './ranks';

const IN_FLIGHT = new Set(
  (['dispatched', 'running', 'fetching'] as const).map(name => CLOSURE_STATES.indexOf(name))
);
export const FAILED = CLOSURE_STATES.indexOf('failed');

/** Return the current time of the kernel clock; it stops while the kernel is disconnected. */
export function nowOf(table: ClosureTable, connected: boolean): number {
  return connected && table.now
    ? table.now + performance.now() / 1000 - table.receivedAt
    : table.now;
}

/** Return the end of the bar of a rank; NaN if it has no bar. */
export function endOfRank({ started, ended }: IRank, now: number): number {
  return started === undefined ? NaN : (ended ?? Math.max(now, started));
}

/** Return the number of lanes of workers. */
export function lanesOf(table: ClosureTable, workers: number): number {
  let max = workers - 1;
  for (let row = 0; row < table.length; row++) {
    max = Math.max(max, table.worker[row]);
  }
  return table.lost.reduce((top, { worker }) => Math.max(top, worker), max) + 1;
}

/** Return the end of the bar of a row; NaN if it has no bar. */
export function endOf(table: ClosureTable, row: number, now: number): number {
  if (table.worker[row] < 0 || Number.isNaN(table.dispatched[row])) {
    return NaN;
  }
  return IN_FLIGHT.has(table.state[row]) ? now : table.finished[row];
}

/** Return a closure with its state, worker, times and error as one sentence. */
export function closureText(table: ClosureTable, row: number, now: number): string {
  const [start, attempts] = [table.dispatched[row], table.attempts[row]];
  const error = table.errorOf(row);
  const took = brief(endOf(table, row, now) - start);
  return (
    `closure ${table.first + row} ${table.functionOf(row)}: ${table.stateOf(row)}` +
    (table.worker[row] < 0 ? '' : ` on worker ${table.worker[row]}`) +
    (Number.isNaN(start) ? '' : `, from ${clock(start, 3)}`) +
    (took ? `, ${took}` : '') +
    (attempts > 1 ? `, attempt ${attempts}` : '') +
    (error ? `: ${errorSummary(error)}` : '')
  );
}

/** Return a lost attempt as one sentence. */
function attemptText({ id, worker, dispatched, ended }: ILostAttempt): string {
  return (
    `closure ${id} was lost with worker ${worker} after ${brief(ended - dispatched)}, ` +
    `at ${clock(ended, 3)}, and was queued again`
  );
}

/** Return a rank with its state, worker, times and error as one sentence. */
function rankText(rank: IRank, now: number): string {
  const { started, attempt, reason } = rank;
  const times =
    started === undefined
      ? ''
      : `, from ${clock(started, 3)}, ${brief(endOfRank(rank, now) - started)}`;
  return (
    `rank ${rank.rank} ${rank.function || 'function'}: ${rank.state}, ${placeOf(rank)}${times}` +
    (attempt > 1 ? `, attempt ${attempt}` : '') +
    (reason ? `: ${errorSummary(reason)}` : '')
  );
}

/** Return the time span of all bars; null without bars. */
export function spanOf(table: ClosureTable, ranks: IRank[], now: number): [number, number] | null {
  let [low, high] = [Infinity, -Infinity];
  const cover = (start: number, end: number) => {
    if (end >= start) {
      low = Math.min(low, start);
      high = Math.max(high, end);
    }
  };
  for (let row = 0; row < table.length; row++) {
    cover(table.dispatched[row], endOf(table, row, now));
  }
  table.lost.forEach(({ dispatched, ended }) => cover(dispatched, ended));
  ranks.forEach(rank => cover(rank.started ?? NaN, endOfRank(rank, now)));
  return low <= high ? [low, high] : null;
}

/** Return the busy share of each worker between `from` and `to`, 0 to 1. */
export function busyShares(
  table: ClosureTable,
  lanes: number,
  from: number,
  to: number,
  now: number
): Float64Array {
  const shares = new Float64Array(lanes);
  const until = Math.min(to, Math.max(now, from));
  if (until <= from) {
    return shares;
  }
  for (let row = 0; row < table.length; row++) {
    const length = Math.min(endOf(table, row, now), until) - Math.max(table.dispatched[row], from);
    if (length > 0) {
      shares[table.worker[row]] += length / (until - from);
    }
  }
  return shares.map(share => Math.min(share, 1));
}

export type Picked =
  | { kind: 'closure'; row: number }
  | { kind: 'lost'; attempt: ILostAttempt }
  | { kind: 'rank'; rank: IRank }
  | null;

/** Return a bar as one sentence; empty for none. */
export function pickedText(table: ClosureTable, picked: Picked, now: number): string {
  switch (picked?.kind) {
    case 'closure':
      return closureText(table, picked.row, now);
    case 'lost':
      return attemptText(picked.attempt);
    case 'rank':
      return rankText(picked.rank, now);
    default:
      return '';
  }
}

/** Return the closure or lost attempt of a worker at `time`, with a tolerance of `near` seconds. */
export function pick(
  table: ClosureTable,
  lane: number,
  time: number,
  near: number,
  now: number
): Picked {
  let best: Picked = null;
  let distance = near;
  const check = (start: number, end: number, candidate: () => Picked) => {
    const gap = Math.max(start - time, time - end, 0);
    if (gap < distance || (gap === 0 && best === null)) {
      distance = gap;
      best = candidate();
    }
  };
  for (let row = 0; row < table.length; row++) {
    if (table.worker[row] === lane) {
      check(table.dispatched[row], endOf(table, row, now), () => ({ kind: 'closure', row }));
    }
  }
  for (const attempt of table.lost) {
    if (attempt.worker === lane) {
      check(attempt.dispatched, attempt.ended, () => ({ kind: 'lost', attempt }));
    }
  }
  return best;
}

/** Return the closure of a lane dispatched next after `time`, or last before it; -1 if none. */
export function adjacentRow(
  table: ClosureTable,
  lane: number,
  time: number,
  forward: boolean
): number {
  let result = -1;
  for (let row = 0; row < table.length; row++) {
    const at = table.dispatched[row];
    if (table.worker[row] !== lane || !(forward ? at > time : at < time)) {
      continue;
    }
    if (result < 0 || (forward ? at < table.dispatched[result] : at > table.dispatched[result])) {
      result = row;
    }
  }
  return result;
}
