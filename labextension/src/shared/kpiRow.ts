// The key figures of a cluster as tiles; only those that have a value.

import { h, KeyedParts, setText, show } from './dom';
import { brief, count, formatInteger, percent, rate, sum, total } from './figures';
import { type History, type Series, useHistory } from './history';
import type { Link } from './link';
import { hasEnded, type ICluster } from './protocol';
import { POINTS, Sparkline, topOf } from './sparkline';
import { type IActions, View } from './view';

interface IFigure {
  value: string;
  tone?: string;
  history?: Series;
}

export class KpiRow extends View {
  private readonly _list = h('dl', { class: 'tfd-tiles' });
  private readonly _tiles = new KeyedParts(this._list, () => new Tile());
  private readonly _history: History;

  constructor(link: Link, cluster: string, actions: IActions) {
    super(link, cluster, actions, 'tfd-kpis');
    this.node.setAttribute('aria-label', `key figures of ${cluster}`);
    const { history, end } = useHistory(link, cluster);
    this._history = history;
    this.onDispose(end);
    this.body.append(this._list);
    this.begin();
  }

  protected draw(snapshot: ICluster | undefined): void {
    const figures = snapshot ? figuresOf(snapshot, this._history) : {};
    this._tiles.update(Object.keys(figures), (tile, label) => tile.show(label, figures[label]));
    // Not the node: a hidden view is not drawn.
    show(this._list, Object.keys(figures).length > 0);
  }
}

class Tile {
  readonly node = h('div', { class: 'tfd-tile' });
  private readonly _label = h('dt');
  private readonly _value = h('span', { class: 'tfd-cut' });
  private readonly _spark = new Sparkline();

  constructor() {
    this.node.append(this._label, h('dd', {}, this._value, this._spark.node));
  }

  show(label: string, { value, tone, history }: IFigure): void {
    setText(this._label, label);
    setText(this._value, value);
    this._value.className = `tfd-cut${tone ? ` tfd-${tone}` : ''}`;
    this._spark.node.style.display = history ? '' : 'none';
    if (history) {
      this._spark.show(history, topOf([history]), `${label} in the last minute`);
    }
  }
}

/** Return the figures of a cluster by label, in their order. */
function figuresOf(snapshot: ICluster, history: History): Record<string, IFigure> {
  const figures: Record<string, IFigure> = {};
  if (hasEnded(snapshot)) {
    return figures;
  }
  const [planned, observed] = [total(snapshot.planned), total(snapshot.observed)];
  if (planned) {
    figures['tasks ready'] = {
      value: `${formatInteger(observed)} of ${formatInteger(planned)}`,
      tone: observed < planned ? 'warn' : undefined
    };
  }
  const streams = Object.values(snapshot.streams).filter(({ state }) => state === 'running');
  if (streams.length) {
    figures['elements/s'] = {
      value: count(sum(streams.map(stream => stream.elements_per_s))),
      history: summed([...history.streams.values()])
    };
  }
  const workers = Object.values(snapshot.tasks).filter(({ role }) => role === 'data_worker');
  const bytes = workers.flatMap(({ bytes_per_s }) => bytes_per_s ?? []);
  if (bytes.length) {
    figures['bytes/s'] = {
      value: rate(sum(bytes)),
      history: summed(workers.map(({ task }) => history.tasks.get(task) ?? []))
    };
  }
  const waits = streams.flatMap(stream => stream.wait_fraction ?? []);
  if (waits.length) {
    const wait = Math.max(...waits);
    figures['consumer wait'] = {
      value: percent(100 * wait),
      tone: wait > 0.1 ? 'warn' : undefined
    };
  }
  const { coordinator } = snapshot;
  if (coordinator) {
    const { counts, closures_per_s, left_s } = coordinator;
    const queue = (counts.queued ?? 0) + (counts.paused ?? 0) + (counts.retrying ?? 0);
    figures['closures/s'] = { value: count(closures_per_s) };
    figures['queue'] = { value: formatInteger(queue) };
    if (counts.failed) {
      figures['failed'] = { value: formatInteger(counts.failed), tone: 'bad' };
    }
    if (left_s?.length) {
      figures['ETA'] = { value: brief(left_s[0]) };
    }
  }
  return figures;
}

/** Return the sum of the known values of each second of the last minute. */
function summed(all: readonly Series[]): Series {
  const latest = all.map(series => series.slice(-POINTS));
  const length = Math.max(0, ...latest.map(series => series.length));
  return Array.from({ length }, (_, i) => {
    const known = latest.flatMap(series => series[i] ?? []);
    return known.length ? sum(known) : null;
  });
}
