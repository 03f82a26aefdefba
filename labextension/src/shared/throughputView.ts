// Throughput of the last minutes: elements/s per stream and bytes/s per data worker.

import { Chart, type TimeRange } from './chart';
import { button, h, setText, uniqueId } from './dom';
import { clock, count, rate } from './figures';
import { type History, MAX_SECONDS, useHistory } from './history';
import type { Link } from './link';
import type { ICluster, INotice } from './protocol';
import { onTheme } from './theme';
import { type IActions, View } from './view';

const SPANS: readonly [string, number][] = [
  ['1 min', 60],
  ['3 min', 180],
  [`${MAX_SECONDS / 60} min`, MAX_SECONDS]
];

export class ThroughputView extends View {
  private readonly _history: History;
  private readonly _charts: [Chart, Chart];
  private readonly _buttons: HTMLButtonElement[];
  private readonly _rangeText = h('span', { class: 'tfd-quiet' });
  private _seconds = SPANS[1][1];
  /** The range that the user has selected; null while the latest values are shown. */
  private _range: TimeRange | null = null;
  private _drawn = -1;
  private _notices: readonly INotice[] | undefined;

  constructor(link: Link, cluster: string, actions: IActions) {
    super(link, cluster, actions, 'tfd-throughput');
    this.node.setAttribute('aria-label', `throughput of ${cluster}`);
    const { history, end } = useHistory(link, cluster);
    this._history = history;
    const [key, onSelect] = [uniqueId(), (range: TimeRange | null) => this._setRange(range)];
    this._charts = [
      new Chart(
        'elements per second',
        'No stream has read any elements.',
        value => count(Math.round(value * 10) / 10),
        key,
        onSelect
      ),
      new Chart('bytes sent per second', 'No data worker has sent any data.', rate, key, onSelect)
    ];
    this._buttons = SPANS.map(([label, seconds]) =>
      button(label, `Show the last ${label}`, () => this._setSpan(seconds))
    );
    this.body.append(
      h(
        'div',
        { class: 'tfd-row', role: 'group', 'aria-label': 'Time span' },
        ...this._buttons,
        this._rangeText
      ),
      ...this._charts.map(chart => chart.node)
    );
    const timer = setInterval(() => {
      if (history.version !== this._drawn) {
        this.refresh();
      }
    }, 1000);
    this.onDispose(end);
    this.onDispose(() => clearInterval(timer));
    this.onDispose(() => this._charts.forEach(chart => chart.dispose()));
    this.onDispose(onTheme(this.node, () => this._charts.forEach(chart => chart.paint())));
    this._updateButtons();
    this.begin();
  }

  protected draw(cluster: ICluster | undefined): void {
    const { streams, tasks, start, length, version } = this._history;
    if (version === this._drawn && cluster?.notices === this._notices) {
      return;
    }
    this._drawn = version;
    this._notices = cluster?.notices;
    if (this._range && this._range[1] <= start) {
      this._setRange(null); // the history has no more values of it
      return;
    }
    const last = start + length - 1;
    const [from, to] = this._range ?? [last + 1 - this._seconds, last];
    // Other tasks send only some messages.
    const workers = new Map([...tasks].filter(([name]) => name.startsWith('data_worker:')));
    [streams, workers].forEach((series, i) =>
      this._charts[i].show(
        series,
        start,
        [Math.max(from, start), Math.min(to, last)],
        cluster?.notices ?? []
      )
    );
  }

  private _setSpan(seconds: number): void {
    this._seconds = seconds;
    this._setRange(null);
  }

  private _setRange(range: TimeRange | null): void {
    this._range = range;
    this._drawn = -1;
    this._updateButtons();
    this.refresh();
  }

  private _updateButtons(): void {
    setText(this._rangeText, this._range?.map(second => clock(second)).join(' to ') ?? '');
    SPANS.forEach(([, seconds], i) =>
      this._buttons[i].setAttribute(
        'aria-pressed',
        String(!this._range && seconds === this._seconds)
      )
    );
  }
}
