// Rates of a cluster, one value per second. The page keeps them after the cluster has stopped.

import type { Link } from './link';
import { hasEnded, type ICluster } from './protocol';

export const MAX_SECONDS = 600;
/** Timer delay in seconds that is filled with the next value. */
const MAX_DELAY = 4;

export type Series = (number | null)[];

export class History {
  /** Incremented every second. */
  version = 0;
  /** Time of the first value of every series, in seconds since the Unix epoch. */
  start = 0;
  length = 0;
  readonly streams = new Map<string, Series>();
  readonly tasks = new Map<string, Series>();

  /** Record the rates at `second`; null for a cluster that does not exist. */
  sample(cluster: ICluster | undefined, second: number): void {
    if (this.length === 0) {
      // The kernel sends the last minute of each stream.
      this.start = second - 60;
    }
    const index = second - this.start;
    if (index < 0 || index > this.length + MAX_SECONDS) {
      this._clear(second);
      return this.sample(cluster, second);
    }
    this.length = Math.max(this.length, index + 1);
    if (cluster && !hasEnded(cluster)) {
      for (const stream of Object.values(cluster.streams)) {
        const series = this._series(this.streams, stream.name);
        const known = stream.history;
        for (let back = 1; back < known.length; back++) {
          const at = index - back;
          if (at >= 0 && (series[at] ?? null) === null) {
            series[at] = known[known.length - 1 - back];
          }
        }
        setValue(series, index, stream.state === 'running' ? stream.elements_per_s : null);
      }
      for (const task of Object.values(cluster.tasks)) {
        if (task.bytes_per_s !== undefined && task.role !== 'dispatcher') {
          setValue(this._series(this.tasks, task.task), index, task.bytes_per_s);
        }
      }
    }
    for (const series of [...this.streams.values(), ...this.tasks.values()]) {
      while (series.length < this.length) {
        series.push(null);
      }
    }
    this._drop();
    this.version += 1;
  }

  private _series(all: Map<string, Series>, name: string): Series {
    let series = all.get(name);
    if (!series) {
      series = new Array<number | null>(this.length).fill(null);
      all.set(name, series);
    }
    while (series.length < this.length) {
      series.push(null);
    }
    return series;
  }

  private _drop(): void {
    const count = this.length - MAX_SECONDS;
    if (count <= 0) {
      return;
    }
    this.start += count;
    this.length -= count;
    for (const all of [this.streams, this.tasks]) {
      for (const [name, series] of all) {
        series.splice(0, count);
        if (series.every(value => value === null)) {
          all.delete(name);
        }
      }
    }
  }

  private _clear(second: number): void {
    this.start = second - 60;
    this.length = 60;
    this.streams.clear();
    this.tasks.clear();
  }
}

/** Set a value, including preceding seconds that a delayed timer skipped. */
function setValue(series: Series, index: number, value: number | null): void {
  series[index] = value;
  let known = index - 1;
  while (known >= 0 && known > index - MAX_DELAY && series[known] === null) {
    known -= 1;
  }
  if (known >= 0 && series[known] !== null) {
    series.fill(value, known + 1, index);
  }
}

interface IEntry {
  history: History;
  users: number;
  timer: ReturnType<typeof setInterval> | null;
}

const entries = new WeakMap<Link, Map<string, IEntry>>();

/** Return the history of a cluster; it is recorded until `end` is called. */
export function useHistory(link: Link, cluster: string): { history: History; end: () => void } {
  let all = entries.get(link);
  if (!all) {
    all = new Map();
    entries.set(link, all);
  }
  let entry = all.get(cluster);
  if (!entry) {
    entry = { history: new History(), users: 0, timer: null };
    all.set(cluster, entry);
  }
  const { history } = entry;
  entry.users += 1;
  const sample = () => {
    const snapshot = link.state === 'ready' ? link.cluster(cluster) : undefined;
    // The history of a stopped cluster does not change.
    if (snapshot && !hasEnded(snapshot)) {
      history.sample(snapshot, Math.floor(Date.now() / 1000));
    }
  };
  if (entry.timer === null) {
    sample();
    entry.timer = setInterval(sample, 1000);
  }
  let used = true;
  return {
    history,
    end: () => {
      if (!used) {
        return;
      }
      used = false;
      entry.users -= 1;
      if (entry.users === 0 && entry.timer !== null) {
        clearInterval(entry.timer);
        entry.timer = null;
      }
    }
  };
}
