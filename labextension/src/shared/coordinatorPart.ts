// Figures of a coordinator, and a table of its workers.

import type { SortColumn } from './closureIndex';
import { h, KeyedList, setAttribute, setTruncatedText, setText, show } from './dom';
import { Facts } from './facts';
import {
  brief,
  count,
  counted,
  duration,
  sign,
  signed,
  size,
  tone,
  formatInteger
} from './figures';
import type { ICoordinatedWorker, ICoordinator } from './protocol';

const MAX_WORKERS = 50;
const MAX_NAMED = 5;
const COLUMNS: readonly [string, string][] = [
  ['worker', ''],
  ['state', ''],
  ['closure', 'tfd-number tfd-w3'],
  ['function', 'tfd-w1'],
  ['for', 'tfd-number tfd-w2'],
  ['done', 'tfd-number'],
  ['failed', 'tfd-number'],
  ['lost', 'tfd-number tfd-w2'],
  ['datasets', 'tfd-number tfd-w3']
];

const PERCENTILES = ['p50', 'p90', 'p99'];

export class CoordinatorPart {
  readonly node = h('div');
  private readonly _state = h('span', { class: 'tfd-wrap' });
  private readonly _facts = new Facts();
  private readonly _latency = h('table', {
    class: 'tfd-latency',
    'aria-label': 'Latency of the latest closures'
  });
  private readonly _latencyRows: KeyedList<HTMLElement>;
  private readonly _scroll = h('div', { class: 'tfd-scroll' });
  private readonly _more = h('div', { class: 'tfd-quiet' });
  private readonly _reduced = h(
    'div',
    { class: 'tfd-quiet tfd-wrap' },
    'This version of TensorFlow is not supported: only scheduled closures and their results are ' +
      'shown, and closures cannot be paused.'
  );
  private readonly _rows: KeyedList<HTMLElement>;

  constructor() {
    const heads = COLUMNS.map(([text, name]) => h('th', { class: name, scope: 'col' }, text));
    const body = h('tbody');
    this._scroll.append(
      h(
        'table',
        { 'aria-label': 'Workers of the coordinator' },
        h('thead', {}, h('tr', {}, ...heads)),
        body
      )
    );
    this._rows = new KeyedList<HTMLElement>(body, () =>
      h('tr', {}, ...COLUMNS.map(([, name]) => h('td', { class: name })))
    );
    const percentiles = PERCENTILES.map(name =>
      h('th', { class: 'tfd-number', scope: 'col' }, name)
    );
    const spans = h('tbody');
    this._latency.append(
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'latency'), ...percentiles)),
      spans
    );
    this._latencyRows = new KeyedList<HTMLElement>(spans, name =>
      h(
        'tr',
        {},
        h('th', { scope: 'row' }, name),
        ...PERCENTILES.map(() => h('td', { class: 'tfd-number' }))
      )
    );
    this.node.append(
      h('h4', {}, 'Coordinator'),
      this._state,
      this._facts.node,
      h('div', { class: 'tfd-scroll' }, this._latency),
      this._scroll,
      this._more,
      this._reduced
    );
  }

  show(row: ICoordinator | undefined): void {
    show(this.node, row !== undefined);
    if (!row) {
      return;
    }
    setText(this._state, signed(row.state) + (row.reason ? ` (${row.reason})` : ''));
    this._state.className = `tfd-wrap tfd-${tone(row.state)}`;
    this._facts.show(factsOf(row));
    const spans = spansOf(row);
    this._latencyRows.update([...spans.keys()], (element, name) =>
      spans.get(name)!.forEach((ms, i) => setText(element.children[i + 1], brief(ms / 1e3)))
    );
    show(this._latency, spans.size > 0);
    const workers = Object.keys(row.workers).sort((a, b) => Number(a) - Number(b));
    this._rows.update(workers.slice(0, MAX_WORKERS), (element, index) =>
      fill(element, row.workers[index])
    );
    show(this._scroll, workers.length > 0);
    const rest = workers.length - MAX_WORKERS;
    setText(this._more, rest > 0 ? `… and ${rest} more` : '');
    show(this._reduced, row.reduced);
  }
}

function fill(element: HTMLElement, row: ICoordinatedWorker): void {
  const texts = [
    `worker:${row.index}`,
    null,
    row.id === undefined ? '' : String(row.id),
    row.function ?? '',
    row.seconds === undefined ? '' : brief(row.seconds),
    formatInteger(row.done),
    row.failed ? formatInteger(row.failed) : '',
    row.lost ? formatInteger(row.lost) : '',
    row.unbuilt ? `${row.built}, ${row.unbuilt} failed` : row.built ? formatInteger(row.built) : ''
  ];
  texts.forEach((text, i) => {
    if (text !== null) {
      setTruncatedText(element.children[i], text);
    }
  });
  const state = element.children[1];
  if (!state.firstChild) {
    // A narrow panel shows only the symbol.
    state.append(h('span'), h('span', { class: 'tfd-word' }));
  }
  setText(state.children[0], sign(row.state));
  setText(state.children[1], ` ${row.state}`);
  setAttribute(state, 'title', row.state);
  state.className = `tfd-${tone(row.state)}`;
  setAttribute(element.children[6], 'class', `${COLUMNS[6][1]} tfd-bad`);
}

/** Return the percentiles of the closures' times, named like the columns of the grid. */
function spansOf({ queue_ms, run_ms }: ICoordinator): Map<string, number[]> {
  const spans: Partial<Record<SortColumn, number[]>> = { waited: queue_ms, ran: run_ms };
  return new Map(Object.entries(spans).filter(([, ms]) => ms?.length === PERCENTILES.length));
}

function factsOf(row: ICoordinator): [string, string][] {
  const facts: [string, string][] = [['closures', counted(row.counts) || 'none']];
  if (row.closures_per_s) {
    facts.push(['rate', `${count(row.closures_per_s)} closures/s`]);
  }
  if (row.left_s?.length === 3) {
    const [middle, low, high] = row.left_s;
    const half = (high - low) / 2;
    const margin = half < 1 ? brief(half) : duration(half);
    facts.push(['ETA', brief(middle) + (brief(low) === brief(high) ? '' : ` ± ${margin}`)]);
  }
  const some = (named: Record<string, string>) => {
    const items = Object.entries(named).map(([name, text]) => `${name} ${text}`);
    const rest = items.length - MAX_NAMED;
    return items.slice(0, MAX_NAMED).join(', ') + (rest > 0 ? ` and ${rest} more` : '');
  };
  const each = (numbers: Record<string, number>, format: (number: number) => string) =>
    some(Object.fromEntries(Object.entries(numbers).map(([name, n]) => [name, format(n)])));
  if (Object.keys(row.ps_bytes).length) {
    facts.push(['variables', each(row.ps_bytes, size)]);
  }
  if (Object.keys(row.traces).length) {
    facts.push(['retracing', each(row.traces, String)]);
  }
  if (row.break_on_failure) {
    facts.push(['break', 'on failure']);
  }
  return facts;
}
