// Rates of a cluster, one value per second. The kernel supplies rates from before the view opened,
// and those that the page missed. The page keeps them after the cluster has stopped.

import type { Link } from './link';
import { hasEnded, type ICluster } from './protocol';

export const MAX_SECONDS = 600;

export type Series = (number | null)[];

/** The reply to the command `rates`: one value for each second before the same time. */
interface IRates {
  /** Seconds since the Unix epoch, by the kernel's clock. */
  until: number;
  streams: Record<string, Series>;
  tasks: Record<string, Series>;
}

export class History {
  /** Incremented with every change. */
  version = 0;
  /** Time of the first value of every series, in seconds since the Unix epoch. */
  start = 0;
  length = 0;
  readonly streams = new Map<string, Series>();
  readonly tasks = new Map<string, Series>();

  /** The second after the last sample. */
  get end(): number {
    return this.start + this.length;
  }

  /** Record the rates at `second`. Seconds without a sample remain empty until `fill`. */
  sample(cluster: ICluster, second: number): void {
    if (second < this.start || second > this.end + MAX_SECONDS) {
      this.start = second;
      this.length = 0;
      this.streams.clear();
      this.tasks.clear();
    }
    const index = second - this.start;
    this.length = Math.max(this.length, index + 1);
    for (const { name, state, elements_per_s } of Object.values(cluster.streams)) {
      if (state === 'running') {
        this._series(this.streams, name)[index] = elements_per_s;
      }
    }
    for (const { task, role, bytes_per_s } of Object.values(cluster.tasks)) {
      if (bytes_per_s !== undefined && role !== 'dispatcher') {
        this._series(this.tasks, task)[index] = bytes_per_s;
      }
    }
    this._complete();
  }

  /** Set the rates that the kernel has recorded for the seconds before `until`. */
  fill(rates: IRates, until: number): void {
    const lists = [...Object.values(rates.streams), ...Object.values(rates.tasks)];
    const first = until - Math.max(0, ...lists.map(values => values.length));
    const early = Math.max(0, this.start - first);
    for (const series of [...this.streams.values(), ...this.tasks.values()]) {
      series.unshift(...new Array<null>(early).fill(null));
    }
    this.start -= early;
    this.length += early;
    for (const [all, recorded] of [
      [this.streams, rates.streams],
      [this.tasks, rates.tasks]
    ] as const) {
      for (const [name, values] of Object.entries(recorded)) {
        const series = this._series(all, name);
        values.forEach((value, i) => {
          const index = until - values.length + i - this.start;
          if (value !== null && index >= 0 && index < this.length) {
            series[index] = value;
          }
        });
      }
    }
    this._complete();
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

  /** Make all series equally long, and drop the oldest seconds and series without values. */
  private _complete(): void {
    const count = Math.max(0, this.length - MAX_SECONDS);
    for (const all of [this.streams, this.tasks]) {
      for (const name of [...all.keys()]) {
        const series = this._series(all, name);
        series.splice(0, count);
        if (series.every(value => value === null)) {
          all.delete(name);
        }
      }
    }
    this.start += count;
    this.length -= count;
    this.version += 1;
  }
}

/** Records the history of a cluster while a view uses it. */
class Recorder {
  readonly history = new History();
  private _users = 0;
  private _timer: ReturnType<typeof setInterval> | undefined;
  private _last: ICluster | undefined;
  private _filling = false;
  /** Seconds by which the clock of the kernel is ahead of this page. */
  private _ahead = 0;

  constructor(
    private readonly _link: Link,
    private readonly _cluster: string
  ) {}

  use(): () => void {
    if (this._users++ === 0) {
      this._sample();
      this._timer = setInterval(() => this._sample(), 1000);
    }
    let used = true;
    return () => {
      if (used && --this._users === 0) {
        clearInterval(this._timer);
      }
      used = false;
    };
  }

  private _sample(): void {
    const { _link: link, history } = this;
    const snapshot = link.usable ? link.cluster(this._cluster) : undefined;
    // The history of a stopped cluster does not change. A hidden page fills its gap later.
    if (!snapshot || hasEnded(snapshot) || document.hidden) {
      return;
    }
    const [now, { end }] = [nowInSeconds(), history];
    history.sample(snapshot, now);
    // An idle kernel gets no requests, so that it can be culled.
    if (end < now && snapshot !== this._last && !this._filling) {
      void this._fill(end && end + this._ahead);
    }
    this._last = snapshot;
  }

  private async _fill(since: number): Promise<void> {
    this._filling = true;
    try {
      const rates = (await this._link.command('rates', {
        name: this._cluster,
        since
      })) as IRates;
      this._ahead = rates.until - nowInSeconds();
      this.history.fill(rates, nowInSeconds());
    } catch {
      // Clusters on Spark have no recorded rates: the samples remain.
    } finally {
      this._filling = false;
    }
  }
}

function nowInSeconds(): number {
  return Math.floor(Date.now() / 1000);
}

const recorders = new WeakMap<Link, Map<string, Recorder>>();

/** Return the history of a cluster; it is recorded until `end` is called. */
export function useHistory(link: Link, cluster: string): { history: History; end: () => void } {
  const all = recorders.get(link) ?? new Map<string, Recorder>();
  recorders.set(link, all);
  const recorder = all.get(cluster) ?? new Recorder(link, cluster);
  all.set(cluster, recorder);
  return { history: recorder.history, end: recorder.use() };
}
