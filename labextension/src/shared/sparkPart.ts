// A cluster on Spark: its phases, its nodes and what is fed to them, and the error that ended it.

import { button, h, Keyed, Parts, setAttribute, setCut, setText, show } from './dom';
import { brief, clean, count, duration, gist, plural, sign, signed, tone, whole } from './figures';
import type { INode, ISpark } from './protocol';

/** The way of a cluster; it may stop or fail in any of these. */
const PHASES = ['reserving', 'starting', 'running', 'feeding', 'draining'] as const;
const ENDS = ['stopped', 'failed'];
const OVER = ['finished', 'failed', 'lost', 'stopped'];
const URGENT = ['failed', 'lost', 'starting', 'reserved'];
const MOST_ROWS = 20;
const MOST_ERROR = 50_000;

/** Title and class of each column; the classes `tfd-c…` give way in this order, c5 first. */
const COLUMNS: readonly [string, string][] = [
  ['node', ''],
  ['state', ''],
  ['rows/s', 'tfd-number'],
  ['queue', 'tfd-number tfd-c3'],
  ['last batch', 'tfd-number tfd-c2'],
  ['rows', 'tfd-number tfd-c4'],
  ['executor', 'tfd-number tfd-c5'],
  ['host', 'tfd-c5'],
  ['GPU', 'tfd-c5'],
  ['error', 'tfd-wide tfd-c4']
];

export class SparkPart {
  readonly node = h('div', { class: 'tfd-onspark' });
  private readonly _phases = h('ol', { class: 'tfd-phases', 'aria-label': 'phases' });
  private readonly _steps: Keyed<HTMLElement>;
  private readonly _bar = h('progress', { class: 'tfd-reserved' });
  private readonly _reserved = h('span', { class: 'tfd-quiet' });
  private readonly _reason = h('div', { class: 'tfd-quiet tfd-wrap' });
  private readonly _facts: Facts;
  private readonly _error = h('pre', {
    class: 'tfd-error',
    tabindex: 0,
    role: 'group',
    'aria-label': 'the error, with its traceback'
  });
  private readonly _scroll = h('div', { class: 'tfd-scroll tfd-tasks' });
  private readonly _none = h('div', { class: 'tfd-quiet' }, 'no node has reported yet');
  private readonly _rows: Parts<NodePart>;
  private readonly _more: HTMLButtonElement;
  private _all = false;
  private _seen: ISpark | undefined;

  constructor() {
    this._steps = new Keyed<HTMLElement>(this._phases, () => h('li', {}, h('span'), h('span')));
    this._facts = new Facts();
    const heads = COLUMNS.map(([text, name]) => h('th', { class: name, scope: 'col' }, text));
    const table = h('table', { 'aria-label': 'nodes on Spark' });
    const head = h('thead', {}, h('tr', {}, ...heads));
    table.append(head);
    this._rows = new Parts<NodePart>(table, () => new NodePart(), head);
    this._more = button('', 'show all nodes, or only those that need a look', () => {
      this._all = !this._all;
      this.show(this._seen);
    });
    this._scroll.append(table);
    this.node.append(
      h('h4', {}, 'Spark'),
      this._phases,
      h('div', { class: 'tfd-row' }, this._bar, this._reserved),
      this._reason,
      this._error,
      this._facts.node,
      this._scroll,
      this._more,
      this._none
    );
  }

  show(row: ISpark | undefined): void {
    this._seen = row;
    show(this.node, row !== undefined);
    if (!row) {
      return;
    }
    this._showPhases(row);
    setAttribute(this._bar, 'max', Math.max(row.needed, 1));
    setAttribute(this._bar, 'value', Math.min(row.reserved, row.needed));
    const reserved = `${whole(row.reserved)} of ${plural(row.needed, 'node')} reported`;
    setAttribute(this._bar, 'aria-label', reserved);
    show(this._bar, row.phase === 'reserving');
    setText(this._reserved, reserved);
    setText(this._reason, clean(row.reason ?? ''));
    const error = tail(row.error ?? '');
    // Said once, where it stands in the error below.
    show(this._reason, !error.includes(row.reason ?? ''));
    setText(this._error, error);
    show(this._error, Boolean(row.error));
    this._facts.show(factsOf(row));
    this._showNodes(row);
  }

  private _showPhases(row: ISpark): void {
    const ended = ENDS.includes(row.phase);
    const at = (PHASES as readonly string[]).indexOf(row.phase);
    const steps = ended ? [row.phase] : [...PHASES];
    const lasted = duration(Math.max(0, Date.now() / 1000 - row.since));
    this._steps.update(steps, (step, phase) => {
      const here = phase === row.phase;
      const place = (PHASES as readonly string[]).indexOf(phase);
      setText(step.children[0], here ? sign(phase) : place < at ? sign('finished') : sign('new'));
      setText(step.children[1], here && !ended ? ` ${phase}, ${lasted}` : ` ${phase}`);
      step.className = here ? `tfd-here tfd-${tone(phase)}` : 'tfd-quiet';
      setAttribute(step, 'aria-current', here ? 'step' : null);
    });
  }

  private _showNodes(row: ISpark): void {
    let names = row.order.filter(name => name in row.nodes);
    show(this._more, names.length > MOST_ROWS);
    if (names.length > MOST_ROWS) {
      setText(this._more, this._all ? 'Fewer' : `All ${plural(names.length, 'node')}`);
      if (!this._all) {
        const urgent = names.filter(name => URGENT.includes(row.nodes[name].state));
        const chosen = new Set([...urgent, ...names].slice(0, MOST_ROWS));
        names = names.filter(name => chosen.has(name));
      }
    }
    this._rows.update(names, (part, name) => part.show(name, row.nodes[name]));
    show(this._scroll, names.length > 0);
    show(this._none, names.length === 0 && !ENDS.includes(row.phase));
  }
}

/** A node: a row, and below it what else is known, with the end of its log. */
class NodePart {
  /** Both rows. */
  readonly node = h('tbody');
  private readonly _name = h('span', { class: 'tfd-cut' });
  private readonly _sign = h('span');
  private readonly _word = h('span', { class: 'tfd-word' });
  private readonly _state = h('td', {}, this._sign, this._word);
  private readonly _cells = COLUMNS.slice(2).map(([, name]) => h('td', { class: name }));
  private readonly _facts = new Facts();
  private readonly _error = h('pre', { class: 'tfd-error', tabindex: 0, role: 'group' });
  private readonly _log = h('div', {
    class: 'tfd-log',
    role: 'log',
    'aria-live': 'off',
    tabindex: 0
  });
  private readonly _below = h(
    'tr',
    { hidden: true },
    h(
      'td',
      { class: 'tfd-more', colspan: COLUMNS.length },
      this._facts.node,
      this._error,
      this._log
    )
  );
  private readonly _toggle: HTMLButtonElement;
  private _lines = '';
  private _shown: [string, INode] | null = null;

  constructor() {
    this._toggle = h(
      'button',
      {
        type: 'button',
        class: 'tfd-link tfd-toggle',
        'aria-expanded': 'false',
        onclick: () => {
          show(this._below, this._below.hidden);
          setAttribute(this._toggle, 'aria-expanded', String(!this._below.hidden));
          if (this._shown) {
            this.show(...this._shown);
          }
        }
      },
      this._name
    );
    this.node.append(
      h('tr', {}, h('td', {}, this._toggle), this._state, ...this._cells),
      this._below
    );
  }

  show(name: string, row: INode): void {
    this._shown = [name, row];
    setCut(this._name, name);
    setText(this._sign, sign(row.state));
    this._sign.className = `tfd-${tone(row.state)}`;
    setText(this._word, ` ${row.state}`);
    setAttribute(this._state, 'title', row.state);
    const over = OVER.includes(row.state);
    const words = [
      over || !row.rows ? '' : count(row.rows_per_s),
      over ? '' : queueOf(row),
      over ? '' : ageOf(row),
      row.rows ? count(row.rows) : '',
      row.executor ?? '',
      row.host ?? '',
      row.gpu ?? '',
      gist(firstOf(row.error ?? ''))
    ];
    words.forEach((text, i) => setCut(this._cells[i], text));
    setAttribute(
      this._cells[1],
      'class',
      `${COLUMNS[3][1]}${isFull(row) && !over ? ' tfd-warn' : ''}`
    );
    if (!this._below.hidden) {
      this._fill(name, row);
    }
  }

  private _fill(name: string, row: INode): void {
    const over = OVER.includes(row.state);
    this._facts.show([
      ['state', row.state],
      ['executor', row.executor ?? ''],
      ['host', row.host ?? ''],
      ['address', row.address ?? ''],
      ['pid', row.pid === undefined ? '' : String(row.pid)],
      ['GPU', row.gpu ?? ''],
      ['rows', row.rows ? whole(row.rows) : ''],
      ['rows/s', row.rows && !over ? count(row.rows_per_s) : ''],
      ['results', row.results ? whole(row.results) : ''],
      ['queue', over ? '' : queueOf(row)],
      ['last batch', over ? '' : ageOf(row)]
    ]);
    setText(this._error, tail(row.error ?? ''));
    setAttribute(this._error, 'aria-label', `the error of ${name}`);
    show(this._error, Boolean(row.error));
    setAttribute(this._log, 'aria-label', `the end of the log of ${name}`);
    const lines = row.log.join('\n');
    if (lines !== this._lines) {
      this._lines = lines;
      const atEnd = this._log.scrollHeight - this._log.scrollTop - this._log.clientHeight < 30;
      this._log.replaceChildren(...row.log.map(line => h('div', {}, line || ' ')));
      if (atEnd) {
        this._log.scrollTop = this._log.scrollHeight;
      }
    }
  }
}

/** Names and words; what has no words is left out. */
class Facts {
  readonly node = h('dl', { class: 'tfd-facts' });

  show(facts: readonly [string, string | HTMLElement][]): void {
    const said = facts.filter(([, words]) => words);
    while (this.node.children.length > 2 * said.length) {
      this.node.lastChild!.remove();
    }
    while (this.node.children.length < 2 * said.length) {
      this.node.append(h('dt'), h('dd'));
    }
    said.forEach(([name, words], i) => {
      setText(this.node.children[2 * i], name);
      const place = this.node.children[2 * i + 1];
      if (typeof words === 'string') {
        setText(place, words);
      } else if (place.textContent !== words.textContent || !place.firstElementChild) {
        place.replaceChildren(words);
      }
    });
  }
}

function factsOf(row: ISpark): [string, string | HTMLElement][] {
  const nodes = Object.values(row.nodes);
  const rate = nodes.reduce((sum, node) => sum + node.rows_per_s, 0);
  const rows = nodes.reduce((sum, node) => sum + node.rows, 0);
  return [
    ['rate', rate && !ENDS.includes(row.phase) ? `${count(rate)} rows/s` : ''],
    ['rows fed', rows ? whole(rows) : ''],
    ['input mode', row.input_mode ?? ''],
    ['application', row.application ?? ''],
    ['TensorBoard', boardOf(row.tensorboard ?? '')]
  ];
}

/** A link, but only to what is a page. */
function boardOf(address: string): string | HTMLElement {
  return /^https?:\/\//.test(address)
    ? h('a', { href: address, target: '_blank', rel: 'noopener noreferrer' }, address)
    : address;
}

function queueOf(row: INode): string {
  if (row.queue_depth === undefined) {
    return '';
  }
  return row.queue_capacity === undefined
    ? String(row.queue_depth)
    : `${row.queue_depth} of ${row.queue_capacity}`;
}

function isFull(row: INode): boolean {
  return row.queue_capacity !== undefined && (row.queue_depth ?? 0) >= row.queue_capacity;
}

function ageOf(row: INode): string {
  return row.batch_age_s === undefined ? '' : `${brief(row.batch_age_s)} ago`;
}

/** What an error says before its traceback, or after it. */
function firstOf(error: string): string {
  const lines = error
    .slice(0, MOST_ERROR)
    .split('\n')
    .filter(line => line.trim());
  return (lines[0]?.includes('Traceback') ? lines.at(-1) : lines[0]) ?? '';
}

function tail(error: string): string {
  return error.length > MOST_ERROR ? `… ${error.slice(-MOST_ERROR)}` : error;
}

/** How a cluster on Spark is, in a few words. */
export function sparkWords(row: ISpark): string {
  const running = Object.values(row.nodes).filter(node => node.state === 'running').length;
  return ENDS.includes(row.phase)
    ? ''
    : `${signed(row.phase)}, ${whole(running)} of ${plural(row.needed, 'node')} running`;
}
