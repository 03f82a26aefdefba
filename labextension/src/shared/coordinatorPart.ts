// The coordinator in figures, and its workers.

import { h, Keyed, setAttribute, setCut, setText, show } from './dom';
import { brief, count, counted, sign, signed, size, tone, whole } from './figures';
import type { ICoordinatedWorker, ICoordinator } from './protocol';

const MOST_WORKERS = 50;
const MOST_NAMED = 5;
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

export class CoordinatorPart {
  readonly node = h('div');
  private readonly _state = h('span', { class: 'tfd-wrap' });
  private readonly _facts = h('dl', { class: 'tfd-facts' });
  private readonly _scroll = h('div', { class: 'tfd-scroll' });
  private readonly _more = h('div', { class: 'tfd-quiet' });
  private readonly _reduced = h(
    'div',
    { class: 'tfd-quiet tfd-wrap' },
    'This version of TensorFlow is not known: only what is scheduled and what comes of it is seen, ' +
      'and nothing can be paused.'
  );
  private readonly _rows: Keyed<HTMLElement>;

  constructor() {
    const heads = COLUMNS.map(([text, name]) => h('th', { class: name, scope: 'col' }, text));
    const body = h('tbody');
    this._scroll.append(
      h(
        'table',
        { 'aria-label': 'workers of the coordinator' },
        h('thead', {}, h('tr', {}, ...heads)),
        body
      )
    );
    this._rows = new Keyed<HTMLElement>(body, () =>
      h('tr', {}, ...COLUMNS.map(([, name]) => h('td', { class: name })))
    );
    this.node.append(
      h('h4', {}, 'coordinator'),
      this._state,
      this._facts,
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
    const facts = factsOf(row);
    while (this._facts.children.length > 2 * facts.length) {
      this._facts.lastChild!.remove();
    }
    while (this._facts.children.length < 2 * facts.length) {
      this._facts.append(h('dt'), h('dd'));
    }
    facts.forEach(([name, words], i) => {
      setText(this._facts.children[2 * i], name);
      setText(this._facts.children[2 * i + 1], words);
    });
    const workers = Object.keys(row.workers).sort((a, b) => Number(a) - Number(b));
    this._rows.update(workers.slice(0, MOST_WORKERS), (element, index) =>
      fill(element, row.workers[index])
    );
    show(this._scroll, workers.length > 0);
    const rest = workers.length - MOST_WORKERS;
    setText(this._more, rest > 0 ? `… and ${rest} more` : '');
    show(this._reduced, row.reduced);
  }
}

function fill(element: HTMLElement, row: ICoordinatedWorker): void {
  const words = [
    `worker:${row.index}`,
    null,
    row.id === undefined ? '' : String(row.id),
    row.function ?? '',
    row.seconds === undefined ? '' : brief(row.seconds),
    whole(row.done),
    row.failed ? whole(row.failed) : '',
    row.lost ? whole(row.lost) : '',
    row.unbuilt ? `${row.built}, ${row.unbuilt} failed` : row.built ? whole(row.built) : ''
  ];
  words.forEach((text, i) => {
    if (text !== null) {
      setCut(element.children[i], text);
    }
  });
  const state = element.children[1];
  if (!state.firstChild) {
    // Of which a narrow place shows the sign alone.
    state.append(h('span'), h('span', { class: 'tfd-word' }));
  }
  setText(state.children[0], sign(row.state));
  setText(state.children[1], ` ${row.state}`);
  setAttribute(state, 'title', row.state);
  state.className = `tfd-${tone(row.state)}`;
  setAttribute(element.children[6], 'class', `${COLUMNS[6][1]} tfd-bad`);
}

function factsOf(row: ICoordinator): [string, string][] {
  const facts: [string, string][] = [['closures', counted(row.counts) || 'none yet']];
  if (row.closures_per_s) {
    facts.push(['rate', `${count(row.closures_per_s)} closures/s`]);
  }
  if (row.left_s?.length === 3) {
    const [middle, low, high] = row.left_s.map(brief);
    facts.push(['left', `about ${middle}${low === high ? '' : ` (${low} to ${high})`}`]);
  }
  for (const [word, spans] of [
    ['waited', row.queue_ms],
    ['ran', row.run_ms]
  ] as const) {
    if (spans?.length === 3) {
      const [half, most, nearlyAll] = spans.map(ms => brief(ms / 1e3));
      facts.push([word, `half ${half}, 90 % ${most}, 99 % ${nearlyAll}`]);
    }
  }
  const some = (named: Record<string, string>) => {
    const said = Object.entries(named).map(([name, words]) => `${name} ${words}`);
    const rest = said.length - MOST_NAMED;
    return said.slice(0, MOST_NAMED).join(', ') + (rest > 0 ? ` and ${rest} more` : '');
  };
  const each = (numbers: Record<string, number>, say: (number: number) => string) =>
    some(Object.fromEntries(Object.entries(numbers).map(([name, n]) => [name, say(n)])));
  if (Object.keys(row.ps_bytes).length) {
    facts.push(['variables', each(row.ps_bytes, size)]);
  }
  if (Object.keys(row.traces).length) {
    facts.push(['traces', each(row.traces, String)]);
  }
  if (row.break_on_failure) {
    facts.push(['breaks', 'on failure']);
  }
  return facts;
}
