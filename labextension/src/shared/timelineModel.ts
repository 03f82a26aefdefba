// Where and when closures ran: a lane for each worker, times in seconds since the epoch.

import type { ClosureTable, ILostAttempt } from './closures';
import { CLOSURE_STATES } from './protocol';

const IN_FLIGHT = new Set(
  (['dispatched', 'running', 'fetching'] as const).map(name => CLOSURE_STATES.indexOf(name))
);
export const FAILED = CLOSURE_STATES.indexOf('failed');

/** The kernel's time now, as far as the page knows it; not later while the kernel is gone. */
export function nowOf(table: ClosureTable, alive: boolean): number {
  return alive && table.now ? table.now + performance.now() / 1000 - table.heard : table.now;
}

/** How many lanes there are. */
export function lanesOf(table: ClosureTable, workers: number): number {
  let most = workers - 1;
  for (let row = 0; row < table.length; row++) {
    most = Math.max(most, table.worker[row]);
  }
  return table.lost.reduce((top, { worker }) => Math.max(top, worker), most) + 1;
}

/** Where the bar of a row ends; NaN where it has none. */
export function endOf(table: ClosureTable, row: number, now: number): number {
  if (table.worker[row] < 0 || Number.isNaN(table.dispatched[row])) {
    return NaN;
  }
  return IN_FLIGHT.has(table.state[row]) ? now : table.finished[row];
}

/** From when until when something ran; null where nothing did. */
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

/** Whether anything runs now. */
export function anyInFlight(table: ClosureTable): boolean {
  for (let row = table.length - 1; row >= 0; row--) {
    if (IN_FLIGHT.has(table.state[row])) {
      return true;
    }
  }
  return false;
}

/** Which share of `from` to `to` each worker had closures, 0 to 1. */
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

/** What is in a lane at a time, or less than `near` seconds from it. */
export function pick(
  table: ClosureTable,
  lane: number,
  time: number,
  near: number,
  now: number
): Picked {
  let best: Picked = null;
  let distance = near;
  const look = (start: number, end: number, found: () => Picked) => {
    const away = Math.max(start - time, time - end, 0);
    if (away < distance || (away === 0 && best === null)) {
      distance = away;
      best = found();
    }
  };
  for (let row = 0; row < table.length; row++) {
    if (table.worker[row] === lane) {
      look(table.dispatched[row], endOf(table, row, now), () => ({ kind: 'closure', row }));
    }
  }
  for (const attempt of table.lost) {
    if (attempt.worker === lane) {
      look(attempt.dispatched, attempt.ended, () => ({ kind: 'lost', attempt }));
    }
  }
  return best;
}

/** The closure of a lane that was dispatched next after `time`, or last before it; -1: none. */
export function neighbour(
  table: ClosureTable,
  lane: number,
  time: number,
  forward: boolean
): number {
  let found = -1;
  for (let row = 0; row < table.length; row++) {
    const at = table.dispatched[row];
    if (table.worker[row] !== lane || !(forward ? at > time : at < time)) {
      continue;
    }
    if (found < 0 || (forward ? at < table.dispatched[found] : at > table.dispatched[found])) {
      found = row;
    }
  }
  return found;
}
