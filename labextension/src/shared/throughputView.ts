// Throughput of the last minutes: elements/s per stream and bytes/s per data worker.

import { Chart } from './chart';
import { button, h } from './dom';
import { count, rate } from './figures';
import { type History, MAX_SECONDS, useHistory } from './history';
import type { Link } from './link';
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
  private _seconds = SPANS[1][1];
  private _drawn = -1;

  constructor(link: Link, cluster: string, actions: IActions) {
    super(link, cluster, actions, 'tfd-throughput');
    this.node.setAttribute('aria-label', `throughput of ${cluster}`);
    const { history, end } = useHistory(link, cluster);
    this._history = history;
    this._charts = [
      new Chart('elements per second', 'No stream has read any elements.', value =>
        count(Math.round(value * 10) / 10)
      ),
      new Chart('bytes sent per second', 'No data worker has sent any data.', rate)
    ];
    this._buttons = SPANS.map(([label, seconds]) =>
      button(label, `Show the last ${label}`, () => this._setSpan(seconds))
    );
    this.body.append(
      h('div', { class: 'tfd-row', role: 'group', 'aria-label': 'Time span' }, ...this._buttons),
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

  protected draw(): void {
    const { streams, tasks, start, length, version } = this._history;
    if (version !== this._drawn) {
      this._drawn = version;
      this._charts[0].show(streams, start, length, this._seconds);
      this._charts[1].show(tasks, start, length, this._seconds);
    }
  }

  private _setSpan(seconds: number): void {
    this._seconds = seconds;
    this._drawn = -1;
    this._updateButtons();
    this.refresh();
  }

  private _updateButtons(): void {
    SPANS.forEach(([, seconds], i) =>
      this._buttons[i].setAttribute('aria-pressed', String(seconds === this._seconds))
    );
  }
}
