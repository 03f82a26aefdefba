// A cluster on Spark: phases, nodes, feeding rates and its error.

import {
  h,
  KeyedList,
  KeyedParts,
  MoreButton,
  rowWithToggle,
  setAttribute,
  setTruncatedText,
  setText,
  show
} from './dom';
import { type Fact, Facts } from './facts';
import {
  brief,
  clean,
  count,
  duration,
  errorSummary,
  plural,
  sign,
  signed,
  tone,
  formatInteger
} from './figures';
import type { INode, ISpark } from './protocol';

/** Phases of a cluster in their order; it can stop or fail in each of them. */
const PHASES = ['reserving', 'starting', 'running', 'feeding', 'draining'] as const;
const ENDS = ['stopped', 'failed'];
const ENDED = ['finished', 'failed', 'lost', 'stopped'];
const URGENT = ['failed', 'lost', 'starting', 'reserved'];
const MAX_ROWS = 20;
const MAX_ERROR = 50_000;

/** Title and class of each column; narrow views hide `tfd-c…` columns, c5 first. */
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
  private readonly _steps: KeyedList<HTMLElement>;
  private readonly _bar = h('progress', { class: 'tfd-reserved' });
  private readonly _reserved = h('span', { class: 'tfd-quiet' });
  private readonly _reason = h('div', { class: 'tfd-quiet tfd-wrap' });
  private readonly _facts: Facts;
  private readonly _error = h('pre', {
    class: 'tfd-error',
    tabindex: 0,
    role: 'group',
    'aria-label': 'Error with traceback'
  });
  private readonly _scroll = h('div', { class: 'tfd-scroll tfd-tasks' });
  private readonly _none = h('div', { class: 'tfd-quiet' }, 'no node has reported yet');
  private readonly _rows: KeyedParts<NodePart>;
  private readonly _more = new MoreButton('nodes', MAX_ROWS, () => this.show(this._current));
  private _current: ISpark | undefined;

  constructor() {
    this._steps = new KeyedList<HTMLElement>(this._phases, () => h('li', {}, h('span'), h('span')));
    this._facts = new Facts();
    const heads = COLUMNS.map(([text, name]) => h('th', { class: name, scope: 'col' }, text));
    const table = h('table', { 'aria-label': 'nodes on Spark' });
    const head = h('thead', {}, h('tr', {}, ...heads));
    table.append(head);
    this._rows = new KeyedParts<NodePart>(table, () => new NodePart(), head);
    this._scroll.append(table);
    this.node.append(
      h('h4', {}, 'Spark'),
      this._phases,
      h('div', { class: 'tfd-row' }, this._bar, this._reserved),
      this._reason,
      this._error,
      this._facts.node,
      this._scroll,
      this._more.node,
      this._none
    );
  }

  show(row: ISpark | undefined): void {
    this._current = row;
    show(this.node, row !== undefined);
    if (!row) {
      return;
    }
    this._showPhases(row);
    setAttribute(this._bar, 'max', Math.max(row.needed, 1));
    setAttribute(this._bar, 'value', Math.min(row.reserved, row.needed));
    const reserved = `${formatInteger(row.reserved)} of ${plural(row.needed, 'node')} reported`;
    setAttribute(this._bar, 'aria-label', reserved);
    show(this._bar, row.phase === 'reserving');
    setText(this._reserved, reserved);
    setText(this._reason, clean(row.reason ?? ''));
    const error = tail(row.error ?? '');
    // The error below may already contain the reason.
    show(this._reason, !error.includes(row.reason ?? ''));
    setText(this._error, error);
    show(this._error, Boolean(row.error));
    this._facts.show(factsOf(row));
    this._showNodes(row);
  }

  private _showPhases(row: ISpark): void {
    const stopped = ENDS.includes(row.phase);
    const at = (PHASES as readonly string[]).indexOf(row.phase);
    const steps = stopped ? [row.phase] : [...PHASES];
    const lasted = duration(Math.max(0, Date.now() / 1000 - row.since));
    this._steps.update(steps, (step, phase) => {
      const current = phase === row.phase;
      const position = (PHASES as readonly string[]).indexOf(phase);
      setText(
        step.children[0],
        current ? sign(phase) : position < at ? sign('finished') : sign('new')
      );
      setText(step.children[1], current && !stopped ? ` ${phase}, ${lasted}` : ` ${phase}`);
      step.className = current ? `tfd-here tfd-${tone(phase)}` : 'tfd-quiet';
      setAttribute(step, 'aria-current', current ? 'step' : null);
    });
  }

  private _showNodes(row: ISpark): void {
    const names = this._more.select(
      row.order.filter(name => name in row.nodes),
      name => URGENT.includes(row.nodes[name].state)
    );
    this._rows.update(names, (part, name) => part.show(name, row.nodes[name]));
    show(this._scroll, names.length > 0);
    show(this._none, names.length === 0 && !ENDS.includes(row.phase));
  }
}

/** A node: a table row, and a second row with details and the end of its log. */
class NodePart {
  /** Both rows. */
  readonly node = h('tbody');
  private readonly _name = h('span', { class: 'tfd-cut' });
  private readonly _symbol = h('span');
  private readonly _stateText = h('span', { class: 'tfd-word' });
  private readonly _state = h('td', {}, this._symbol, this._stateText);
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
        class: 'tfd-toggle',
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
      rowWithToggle(this._toggle, h('td', {}, this._toggle), this._state, ...this._cells),
      this._below
    );
  }

  show(name: string, row: INode): void {
    this._shown = [name, row];
    setTruncatedText(this._name, name);
    setText(this._symbol, sign(row.state));
    this._symbol.className = `tfd-${tone(row.state)}`;
    setText(this._stateText, ` ${row.state}`);
    setAttribute(this._state, 'title', row.state);
    const ended = ENDED.includes(row.state);
    const texts = [
      ended || !row.rows ? '' : count(row.rows_per_s),
      ended ? '' : queueOf(row),
      ended ? '' : ageOf(row),
      row.rows ? count(row.rows) : '',
      row.executor ?? '',
      row.host ?? '',
      row.gpu ?? '',
      errorSummary(firstOf(row.error ?? ''))
    ];
    texts.forEach((text, i) => setTruncatedText(this._cells[i], text));
    setAttribute(
      this._cells[1],
      'class',
      `${COLUMNS[3][1]}${isFull(row) && !ended ? ' tfd-warn' : ''}`
    );
    if (!this._below.hidden) {
      this._fill(name, row);
    }
  }

  private _fill(name: string, row: INode): void {
    const ended = ENDED.includes(row.state);
    this._facts.show([
      ['state', row.state],
      ['executor', row.executor ?? ''],
      ['host', row.host ?? ''],
      ['address', row.address ?? ''],
      ['pid', row.pid === undefined ? '' : String(row.pid)],
      ['GPU', row.gpu ?? ''],
      ['rows', row.rows ? formatInteger(row.rows) : ''],
      ['rows/s', row.rows && !ended ? count(row.rows_per_s) : ''],
      ['results', row.results ? formatInteger(row.results) : ''],
      ['queue', ended ? '' : queueOf(row)],
      ['last batch', ended ? '' : ageOf(row)]
    ]);
    setText(this._error, tail(row.error ?? ''));
    setAttribute(this._error, 'aria-label', `Error of ${name}`);
    show(this._error, Boolean(row.error));
    setAttribute(this._log, 'aria-label', `End of the log of ${name}`);
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

function factsOf(row: ISpark): Fact[] {
  const nodes = Object.values(row.nodes);
  const rate = nodes.reduce((sum, node) => sum + node.rows_per_s, 0);
  const rows = nodes.reduce((sum, node) => sum + node.rows, 0);
  return [
    ['rate', rate && !ENDS.includes(row.phase) ? `${count(rate)} rows/s` : ''],
    ['rows fed', rows ? formatInteger(rows) : ''],
    ['input mode', row.input_mode ?? ''],
    ['application', row.application ?? ''],
    ['TensorBoard', boardOf(row.tensorboard ?? '')]
  ];
}

/** Return a link for http and https addresses only, because `javascript:` would be executed. */
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

/** Return the message of an error, before or after its traceback. */
function firstOf(error: string): string {
  const lines = error
    .slice(0, MAX_ERROR)
    .split('\n')
    .filter(line => line.trim());
  return (lines[0]?.includes('Traceback') ? lines.at(-1) : lines[0]) ?? '';
}

function tail(error: string): string {
  return error.length > MAX_ERROR ? `… ${error.slice(-MAX_ERROR)}` : error;
}

/** Return phase and number of running nodes. */
export function sparkSummary(row: ISpark): string {
  const running = Object.values(row.nodes).filter(node => node.state === 'running').length;
  return ENDS.includes(row.phase)
    ? ''
    : `${signed(row.phase)}, ${formatInteger(running)} of ${plural(row.needed, 'node')} running`;
}
