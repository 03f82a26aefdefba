// Line charts over time, drawn by uPlot. A separate legend has room for long names.

import uPlot from 'uplot';

import { h, KeyedList, setTruncatedText, setText } from './dom';
import type { Series } from './history';
import { colors } from './theme';

const HEIGHT = 150;
const MAX_NAMED = 12;
const DASHES = [[], [6, 3], [2, 3]];

export class Chart {
  readonly node = h('div');
  private readonly _host = h('div', { class: 'tfd-chart', role: 'img' });
  private readonly _legend = h('div', { class: 'tfd-legend' });
  private readonly _rest = h('span', { class: 'tfd-quiet' });
  private readonly _items: KeyedList<HTMLElement>;
  private readonly _sizes: ResizeObserver | null;
  private _plot: uPlot | null = null;
  private _names: string[] = [];
  private _label = '';
  private _data: uPlot.AlignedData = [[]];

  constructor(
    title: string,
    private readonly _empty: string,
    private readonly _format: (value: number) => string
  ) {
    const list = h('div', { class: 'tfd-legend' });
    this._items = new KeyedList<HTMLElement>(list, () =>
      h('span', {}, h('i'), h('span', { class: 'tfd-cut' }), h('span'))
    );
    this._legend.append(list, this._rest);
    this.node.append(h('h4', {}, title), this._host, this._legend);
    this._host.setAttribute('aria-label', title);
    this._sizes =
      typeof ResizeObserver === 'undefined' ? null : new ResizeObserver(() => this._resize());
    this._sizes?.observe(this._host);
  }

  /** Draw series with one value per second; the first value is at `start`. */
  show(series: ReadonlyMap<string, Series>, start: number, length: number, seconds: number): void {
    const names = [...series.keys()].sort();
    const from = Math.max(0, length - seconds);
    const times = Array.from({ length: length - from }, (_, i) => start + from + i);
    this._data = [times, ...names.map(name => series.get(name)!.slice(from))];
    if (names.join('\n') !== this._names.join('\n')) {
      this._names = names;
      this._destroy();
    }
    this._draw();
    this._updateLegend(series);
  }

  /** Redraw with the current theme. */
  paint(): void {
    this._destroy();
    this._draw();
    this._label = '';
  }

  dispose(): void {
    this._sizes?.disconnect();
    this._destroy();
  }

  private _draw(): void {
    if (!this._names.length) {
      setText(this._host, this._empty);
      return;
    }
    if (this._plot) {
      this._plot.setData(this._data);
    } else {
      this._create();
    }
  }

  private _create(): void {
    const width = this._host.clientWidth;
    if (!width || !this._host.isConnected) {
      return;
    }
    const theme = colors(this._host);
    const font = `11px ${theme.font}`;
    const axis: uPlot.Axis = {
      stroke: theme.quiet,
      font,
      grid: { stroke: theme.dark ? 'rgba(255,255,255,.12)' : 'rgba(0,0,0,.1)', width: 1 },
      ticks: { stroke: theme.line, width: 1, size: 4 }
    };
    this._host.replaceChildren();
    this._plot = new uPlot(
      {
        width,
        height: HEIGHT,
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, points: { size: 5 } },
        scales: { y: { range: (_plot, _low, high) => [0, (high || 1) * 1.08] } },
        axes: [
          { ...axis, size: 28, space: 70, values: '{HH}:{mm}:{ss}' },
          {
            ...axis,
            size: 72,
            space: 30,
            values: (_plot, splits) => splits.map(split => this._format(split))
          }
        ],
        series: [
          {},
          ...this._names.map((name, i) => ({
            label: name,
            stroke: theme.series[i % theme.series.length],
            dash: DASHES[Math.floor(i / theme.series.length) % DASHES.length],
            width: 1.5,
            points: { show: false }
          }))
        ]
      },
      this._data,
      this._host
    );
  }

  private _updateLegend(series: ReadonlyMap<string, Series>): void {
    const theme = colors(this._host);
    const now = (name: string) => {
      const values = series.get(name)!;
      return values[values.length - 1];
    };
    this._items.update(this._names.slice(0, MAX_NAMED), (item, name) => {
      const index = this._names.indexOf(name);
      (item.children[0] as HTMLElement).style.background =
        theme.series[index % theme.series.length];
      setTruncatedText(item.children[1], name);
      const value = now(name);
      setText(item.children[2], value === null ? '–' : this._format(value));
    });
    const rest = this._names.length - MAX_NAMED;
    setText(this._rest, rest > 0 ? `and ${rest} more` : '');
    const descriptions = this._names.slice(0, MAX_NAMED).map(name => {
      const top = series.get(name)!.reduce<number>((high, value) => Math.max(high, value ?? 0), 0);
      const value = now(name);
      return `${name}: ${value === null ? '–' : this._format(value)} now, maximum ${this._format(top)}`;
    });
    const label = descriptions.join('; ') || this._empty;
    if (label !== this._label) {
      this._label = label;
      this._host.setAttribute('aria-label', label);
    }
  }

  private _resize(): void {
    const width = this._host.clientWidth;
    if (!this._plot) {
      this._draw();
    } else if (width && width !== this._plot.width) {
      this._plot.setSize({ width, height: HEIGHT });
    }
  }

  private _destroy(): void {
    this._plot?.destroy();
    this._plot = null;
  }
}
