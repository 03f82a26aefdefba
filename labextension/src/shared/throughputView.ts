// How fast data flows: elements of each stream and bytes of each data worker, over the last minutes.

import { Chart } from './chart';
import { button, h } from './dom';
import { count, rate } from './figures';
import { type History, MOST_SECONDS, useHistory } from './history';
import type { Link } from './link';
import { onTheme } from './theme';
import { type IActions, View } from './view';

const SPANS: readonly [string, number][] = [
  ['1 min', 60],
  ['3 min', 180],
  [`${MOST_SECONDS / 60} min`, MOST_SECONDS]
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
      new Chart('elements per second', 'No stream has read anything yet.', value =>
        count(Math.round(value * 10) / 10)
      ),
      new Chart('bytes per second sent', 'No data worker has sent anything yet.', rate)
    ];
    this._buttons = SPANS.map(([words, seconds]) =>
      button(words, `show the last ${words}`, () => this._span(seconds))
    );
    this.body.append(
      h('div', { class: 'tfd-row', role: 'group', 'aria-label': 'span' }, ...this._buttons),
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
    this._mark();
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

  private _span(seconds: number): void {
    this._seconds = seconds;
    this._drawn = -1;
    this._mark();
    this.refresh();
  }

  private _mark(): void {
    SPANS.forEach(([, seconds], i) =>
      this._buttons[i].setAttribute('aria-pressed', String(seconds === this._seconds))
    );
  }
}
