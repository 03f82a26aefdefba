// Line charts over time, drawn by uPlot. A separate legend has room for long names.

import uPlot from 'uplot';

import { h, KeyedList, setAttribute, setText } from './dom';
import { clock, tone } from './figures';
import type { Series } from './history';
import { noticeText } from './noticeList';
import type { INotice } from './protocol';
import { colors } from './theme';

const HEIGHT = 150;
const MAX_NAMED = 12;
const DASHES = [[], [6, 3], [2, 3]];
/** Minimum distance in pixels of a drag that selects a time range. */
const DRAG_PX = 5;
const NO_SELECTION = { left: 0, top: 0, width: 0, height: 0 };

/** First and last second since the Unix epoch. */
export type TimeRange = readonly [number, number];

export class Chart {
  readonly node = h('div');
  private readonly _time = h('span', { class: 'tfd-quiet' });
  private readonly _host = h('div', { class: 'tfd-chart', role: 'img' });
  /** Lines at the times of notices, above the plot. */
  private readonly _marks = h('div', { class: 'tfd-marks' });
  private readonly _lines = new KeyedList<HTMLElement>(this._marks, () => h('div'));
  private readonly _legend = h('div', { class: 'tfd-legend' });
  private readonly _rest = h('span', { class: 'tfd-quiet' });
  private readonly _items: KeyedList<HTMLElement>;
  private readonly _sizes: ResizeObserver | null;
  private _plot: uPlot | null = null;
  private _names: string[] = [];
  private readonly _hidden = new Set<string>();
  private _series: ReadonlyMap<string, Series> = new Map();
  private _notices: readonly INotice[] = [];
  private _label = '';
  private _data: uPlot.AlignedData = [[]];

  constructor(
    title: string,
    private readonly _empty: string,
    private readonly _format: (value: number) => string,
    /** Charts with the same key share the cursor. */
    private readonly _key: string,
    /** Called with the range that the user has selected, or with null to show the latest values. */
    private readonly _onSelect: (range: TimeRange | null) => void
  ) {
    const list = h('div', { class: 'tfd-legend' });
    this._items = new KeyedList<HTMLElement>(list, name =>
      h(
        'button',
        {
          type: 'button',
          title: `Show or hide ${name}`,
          'aria-pressed': 'true',
          onclick: () => this._toggle(name)
        },
        h('i'),
        h('span', { class: 'tfd-cut' }, name),
        h('span')
      )
    );
    this._legend.append(list, this._rest);
    this.node.append(h('h4', {}, title, this._time), this._host, this._legend);
    this._host.setAttribute('aria-label', title);
    this._host.addEventListener('dblclick', () => this._onSelect(null));
    this._sizes =
      typeof ResizeObserver === 'undefined' ? null : new ResizeObserver(() => this._resize());
    this._sizes?.observe(this._host);
  }

  /** Draw a time range of series with one value per second; the first value is at `start`. */
  show(
    series: ReadonlyMap<string, Series>,
    start: number,
    [from, to]: TimeRange,
    notices: readonly INotice[]
  ): void {
    this._series = series;
    this._notices = notices;
    const names = [...series.keys()].sort();
    const times = Array.from({ length: Math.max(0, to + 1 - from) }, (_, i) => from + i);
    this._data = [
      times,
      ...names.map(name => series.get(name)!.slice(from - start, to + 1 - start))
    ];
    if (names.join('\n') !== this._names.join('\n')) {
      this._names = names;
      this._destroy();
    }
    this._draw();
    this._updateLegend();
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
        cursor: {
          drag: { x: true, setScale: false, dist: DRAG_PX },
          points: { size: 5 },
          sync: {
            key: this._key,
            scales: ['x', null],
            filters: { pub: type => type === 'mousemove' }
          }
        },
        hooks: {
          setCursor: [() => this._updateLegend()],
          setSelect: [plot => this._select(plot)],
          draw: [plot => this._drawMarks(plot)]
        },
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
            show: !this._hidden.has(name),
            width: 1.5,
            points: { show: false }
          }))
        ]
      },
      this._data,
      this._host
    );
    this._plot.over.append(this._marks);
  }

  /** Report the range that the user has selected with the mouse. */
  private _select(plot: uPlot): void {
    const { left, width } = plot.select;
    const [from, to] = [left, left + width].map(x => Math.round(plot.posToVal(x, 'x')));
    plot.setSelect(NO_SELECTION, false);
    if (to - from > 1) {
      this._onSelect([from, to]);
    }
  }

  private _drawMarks(plot: uPlot): void {
    const [from, to] = [this._data[0][0], this._data[0].at(-1)!];
    const shown = this._notices.filter(({ time }) => time >= from && time < to + 1);
    const notices = new Map(
      shown.map(notice => [`${clock(notice.time)} ${noticeText(notice)}`, notice])
    );
    this._lines.update([...notices.keys()], (line, text) => {
      const { time, severity } = notices.get(text)!;
      line.className = `tfd-${tone(severity)}`;
      line.style.left = `${plot.valToPos(Math.min(time, to), 'x')}px`;
      setAttribute(line, 'title', text);
    });
  }

  private _toggle(name: string): void {
    const shown = this._hidden.delete(name);
    if (!shown) {
      this._hidden.add(name);
    }
    this._plot?.setSeries(this._names.indexOf(name) + 1, { show: shown });
    this._updateLegend();
  }

  private _updateLegend(): void {
    const theme = colors(this._host);
    const now = (name: string) => this._series.get(name)!.at(-1) ?? null;
    const index = this._plot?.cursor.idx ?? null;
    const time = index === null ? undefined : this._data[0][index];
    setText(this._time, time === undefined ? '' : ` at ${clock(time)}`);
    this._items.update(this._names.slice(0, MAX_NAMED), (item, name) => {
      const number = this._names.indexOf(name);
      (item.children[0] as HTMLElement).style.background =
        theme.series[number % theme.series.length];
      const value = time === undefined ? now(name) : this._data[number + 1][index!];
      setText(item.children[2], ` ${this._valueText(value)}`);
      setAttribute(item, 'aria-pressed', String(!this._hidden.has(name)));
    });
    const rest = this._names.length - MAX_NAMED;
    setText(this._rest, rest > 0 ? `and ${rest} more` : '');
    const descriptions = this._names.slice(0, MAX_NAMED).map(name => {
      const top = this._series
        .get(name)!
        .reduce<number>((high, value) => Math.max(high, value ?? 0), 0);
      return `${name}: ${this._valueText(now(name))} now, maximum ${this._format(top)}`;
    });
    const label = descriptions.join('; ') || this._empty;
    if (label !== this._label) {
      this._label = label;
      this._host.setAttribute('aria-label', label);
    }
  }

  private _valueText(value: number | null | undefined): string {
    return typeof value === 'number' ? this._format(value) : '–';
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
