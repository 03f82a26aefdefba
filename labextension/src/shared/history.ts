// What the rates of a cluster were, one value a second; kept by the page, also after the cluster.

import type { Link } from './link';
import { hasEnded, type ICluster } from './protocol';

export const MOST_SECONDS = 600;
/** Seconds that a timer may be late. */
const LATE = 4;

export type Series = (number | null)[];

export class History {
  /** Grows with every second. */
  version = 0;
  /** The second, since the epoch, of the first value of every series. */
  start = 0;
  length = 0;
  readonly streams = new Map<string, Series>();
  readonly tasks = new Map<string, Series>();

  /** Note what is at `second`; null for a cluster that does not exist now. */
  sample(cluster: ICluster | undefined, second: number): void {
    if (this.length === 0) {
      // A stream brings its own last minute along.
      this.start = second - 60;
    }
    const place = second - this.start;
    if (place < 0 || place > this.length + MOST_SECONDS) {
      this._clear(second);
      return this.sample(cluster, second);
    }
    this.length = Math.max(this.length, place + 1);
    if (cluster && !hasEnded(cluster)) {
      for (const stream of Object.values(cluster.streams)) {
        const series = this._series(this.streams, stream.name);
        const known = stream.history;
        for (let back = 1; back < known.length; back++) {
          const at = place - back;
          if (at >= 0 && (series[at] ?? null) === null) {
            series[at] = known[known.length - 1 - back];
          }
        }
        put(series, place, stream.state === 'running' ? stream.elements_per_s : null);
      }
      for (const task of Object.values(cluster.tasks)) {
        if (task.bytes_per_s !== undefined && task.role !== 'dispatcher') {
          put(this._series(this.tasks, task.task), place, task.bytes_per_s);
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
    const count = this.length - MOST_SECONDS;
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

/** Set a value; seconds before it that a late timer left out get it, too. */
function put(series: Series, place: number, value: number | null): void {
  series[place] = value;
  let known = place - 1;
  while (known >= 0 && known > place - LATE && series[known] === null) {
    known -= 1;
  }
  if (known >= 0 && series[known] !== null) {
    series.fill(value, known + 1, place);
  }
}

interface IKept {
  history: History;
  users: number;
  timer: ReturnType<typeof setInterval> | null;
}

const kept = new WeakMap<Link, Map<string, IKept>>();

/** The history of a cluster, which grows while somebody uses it. */
export function useHistory(link: Link, cluster: string): { history: History; end: () => void } {
  let all = kept.get(link);
  if (!all) {
    all = new Map();
    kept.set(link, all);
  }
  let mine = all.get(cluster);
  if (!mine) {
    mine = { history: new History(), users: 0, timer: null };
    all.set(cluster, mine);
  }
  const { history } = mine;
  mine.users += 1;
  const sample = () => {
    const seen = link.state === 'ready' ? link.cluster(cluster) : undefined;
    // Of a cluster that has ended the history stays as it is.
    if (seen && !hasEnded(seen)) {
      history.sample(seen, Math.floor(Date.now() / 1000));
    }
  };
  if (mine.timer === null) {
    sample();
    mine.timer = setInterval(sample, 1000);
  }
  let used = true;
  return {
    history,
    end: () => {
      if (!used) {
        return;
      }
      used = false;
      mine.users -= 1;
      if (mine.users === 0 && mine.timer !== null) {
        clearInterval(mine.timer);
        mine.timer = null;
      }
    }
  };
}
