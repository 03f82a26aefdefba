// The timeline of closures: one lane per worker, times in seconds since the Unix epoch.

import type { ClosureTable, ILostAttempt } from './closures';
import { CLOSURE_STATES } from './protocol';

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

/** Return the number of lanes. */
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

/** Return the time span of all bars; null without bars. */
export function spanOf(table: ClosureTable, now: number): [number, number] | null {
  let [low, high] = [Infinity, -Infinity];
  for (let row = 0; row < table.length; row++) {
    const end = endOf(table, row, now);
    if (end >= table.dispatched[row]) {
      low = Math.min(low, table.dispatched[row]);
      high = Math.max(high, end);
    }
  }
  for (const { dispatched, ended } of table.lost) {
    low = Math.min(low, dispatched);
    high = Math.max(high, ended);
  }
  return low <= high ? [low, high] : null;
}

/** Return true if any closure is in flight. */
export function anyInFlight(table: ClosureTable): boolean {
  for (let row = table.length - 1; row >= 0; row--) {
    if (IN_FLIGHT.has(table.state[row])) {
      return true;
    }
  }
  return false;
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
  { kind: 'closure'; row: number } | { kind: 'lost'; attempt: ILostAttempt } | null;

/** Return the closure or lost attempt of a lane at `time`, with a tolerance of `near` seconds. */
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
