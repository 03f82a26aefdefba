// A task: a table row, and a second row with details and buttons.

import { CommandStatus } from './statusLine';
import type { Confirm } from './clusterTools';
import { button, enable, h, setTruncatedText, setText, show, uniqueId } from './dom';
import { clean, percent, rate, sign, size, tone, formatInteger } from './figures';
import type { Link } from './link';
import { LogsView } from './logsView';
import { type ITask } from './protocol';
import { Sparkline } from './sparkline';
import type { IActions } from './view';

/** Title and class of each column; narrow views hide `tfd-c…` columns, c5 first. */
export const COLUMNS: readonly [string, string][] = [
  ['task', ''],
  ['state', ''],
  ['CPU', 'tfd-number tfd-c3'],
  ['memory', 'tfd-number tfd-c4'],
  ['sent/s', 'tfd-number tfd-c2'],
  ['', ''],
  ['GPU', 'tfd-c5'],
  ['restarts', 'tfd-number tfd-c4'],
  ['address', 'tfd-c5'],
  ['reason', 'tfd-wide tfd-c4']
];

export class TaskRow {
  /** Both rows. */
  readonly node = h('tbody');

  private readonly _toggle: HTMLButtonElement;
  private readonly _name = h('span', { class: 'tfd-cut' });
  private readonly _symbol = h('span');
  private readonly _stateText = h('span', { class: 'tfd-word' });
  private readonly _state = h('td', {}, this._symbol, this._stateText);
  private readonly _cells = COLUMNS.slice(2).map(([, name]) => h('td', { class: name }));
  private readonly _spark = new Sparkline();
  private readonly _more = h('td', { class: 'tfd-more', colspan: COLUMNS.length });
  private readonly _below = h('tr', { id: uniqueId(), hidden: true }, this._more);
  private readonly _facts = h('dl', { class: 'tfd-facts' });
  private readonly _tools = h('div', { class: 'tfd-row' });
  private readonly _logsButton: HTMLButtonElement;
  private readonly _status: CommandStatus;
  private _logs: LogsView | null = null;
  private _shown: ITask | null = null;
  private _buttons: HTMLButtonElement[] = [];

  constructor(
    private readonly _link: Link,
    private readonly _cluster: string,
    readonly task: string,
    private readonly _actions: IActions,
    private readonly _confirm: Confirm
  ) {
    this._status = new CommandStatus(_link, _cluster);
    this._toggle = h(
      'button',
      {
        type: 'button',
        class: 'tfd-link tfd-toggle',
        'aria-expanded': 'false',
        'aria-controls': this._below.id,
        onclick: () => this._open(this._below.hidden)
      },
      this._name
    );
    this._logsButton = button('Logs', `Follow the log of ${task}`, () => this._toggleLogs());
    this._logsButton.setAttribute('aria-pressed', 'false');
    if (!_actions.readOnly) {
      this._buttons = [
        button(
          'Restart',
          `Stop ${task} and start it again`,
          button => void this._perform(button, 'restart')
        ),
        button(
          'Kill',
          `Kill ${task} to simulate a crash`,
          button => void this._perform(button, 'kill')
        )
      ];
    }
    this._tools.append(...this._buttons, this._logsButton);
    this._more.append(this._facts, this._tools, this._status.node);
    this._cells[3].append(this._spark.node);
    this.node.append(
      h('tr', {}, h('td', {}, this._toggle), this._state, ...this._cells),
      this._below
    );
  }

  show(task: ITask, history: readonly (number | null)[], connected: boolean): void {
    setTruncatedText(this._name, task.task);
    setText(this._symbol, sign(task.state));
    this._symbol.className = `tfd-${tone(task.state)}`;
    setText(this._stateText, ` ${task.state}`);
    this._state.title = task.reason ? `${task.state}: ${task.reason}` : task.state;
    const memory = task.pss_mb ?? task.rss_mb;
    const serves = task.role !== 'dispatcher';
    const texts = [
      percent(task.cpu_percent),
      memory === undefined ? '' : size(memory * 1e6),
      serves ? rate(task.bytes_per_s) : '',
      null,
      task.gpu ?? '',
      task.restarts ? formatInteger(task.restarts) : '',
      task.address ?? '',
      clean(task.reason ?? '')
    ];
    texts.forEach((text, i) => {
      if (text !== null) {
        setTruncatedText(this._cells[i], text);
      }
    });
    const drawn = serves && history.some(value => value);
    this._spark.node.style.visibility = drawn ? '' : 'hidden';
    if (drawn) {
      this._spark.show(history, `bytes sent in the last minute, now ${rate(task.bytes_per_s)}`);
    }
    for (const button of this._buttons) {
      enable(button, connected && task.state !== 'planned');
    }
    enable(this._logsButton, connected);
    if (!this._below.hidden) {
      this._fill(task);
    }
    this._shown = task;
  }

  dispose(): void {
    this._status.dispose();
    this._logs?.dispose();
  }

  private _open(opened: boolean): void {
    this._toggle.setAttribute('aria-expanded', String(opened));
    show(this._below, opened);
    if (opened && this._shown) {
      this._fill(this._shown);
    } else if (!opened && this._logs) {
      this._toggleLogs();
    }
  }

  private _fill(task: ITask): void {
    const memory = task.pss_mb ?? task.rss_mb;
    const facts: [string, string][] = [
      ['state', task.state],
      ['reason', task.reason ?? ''],
      ['address', task.address ?? ''],
      ['host', task.host ?? ''],
      ['pid', task.pid === undefined ? '' : String(task.pid)],
      ['CPU', percent(task.cpu_percent)],
      ['memory', memory === undefined ? '' : size(memory * 1e6)],
      ['sent', size(task.bytes_sent)],
      ['GPU', task.gpu ?? ''],
      ['open to', task.open_to ?? ''],
      ['restarts', task.restarts ? formatInteger(task.restarts) : '']
    ];
    const known = facts.filter(([, text]) => text);
    const elements = [...this._facts.children];
    if (elements.length === known.length * 2) {
      known.forEach(([name, text], i) => {
        setText(elements[2 * i], name);
        setText(elements[2 * i + 1], text);
      });
    } else {
      this._facts.replaceChildren(
        ...known.flatMap(([name, text]) => [h('dt', {}, name), h('dd', {}, text)])
      );
    }
  }

  private _toggleLogs(): void {
    if (this._logs) {
      this._logs.dispose();
      this._logs = null;
    } else {
      this._logs = new LogsView(this._link, this._cluster, this.task, this._actions);
      this._more.append(this._logs.node);
    }
    this._logsButton.setAttribute('aria-pressed', String(this._logs !== null));
  }

  private async _perform(button: HTMLButtonElement, command: 'restart' | 'kill'): Promise<void> {
    const verb = command === 'kill' ? 'Kill' : 'Restart';
    if (await this._confirm(`${verb} ${this.task}?`, this._tools)) {
      const done = command === 'kill' ? 'killed' : 'restarted';
      await this._status.run(
        `${verb} ${this.task}`,
        command,
        { task: this.task },
        [button],
        () => `${this.task} ${done}`
      );
    }
  }
}
