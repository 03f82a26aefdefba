// A task: a table row, and a second row with details and buttons.

import { CommandStatus } from './statusLine';
import type { Confirm } from './clusterTools';
import { taskQuestion } from './confirm';
import {
  button,
  enable,
  h,
  rowWithToggle,
  setAttribute,
  setText,
  setTruncatedText,
  show,
  uniqueId
} from './dom';
import { Facts } from './facts';
import { clean, percent, rate, sign, size, tone, formatInteger } from './figures';
import type { Link } from './link';
import { LogsView } from './logsView';
import { type ITask } from './protocol';
import { Sparkline } from './sparkline';
import type { IActions } from './view';

interface IColumn {
  title: string;
  /** Class; narrow views hide `tfd-c…` columns, c5 first. */
  name: string;
  /** Return the key by which the table is sorted. */
  key?: (task: ITask) => number | string;
}

export const COLUMNS: readonly IColumn[] = [
  { title: 'task', name: '', key: task => task.task },
  { title: 'state', name: '', key: task => task.state },
  { title: 'CPU', name: 'tfd-number tfd-c3', key: task => task.cpu_percent ?? -1 },
  { title: 'memory', name: 'tfd-number tfd-c4', key: task => memoryOf(task) ?? -1 },
  { title: 'sent/s', name: 'tfd-number', key: task => task.bytes_per_s ?? -1 },
  { title: '', name: 'tfd-trend' },
  { title: 'GPU', name: 'tfd-c5 tfd-gpu-column', key: task => task.gpu ?? '' },
  { title: 'restarts', name: 'tfd-number tfd-c4 tfd-restarts', key: task => task.restarts },
  { title: 'address', name: 'tfd-c5', key: task => task.address ?? '' },
  { title: 'reason', name: 'tfd-wide tfd-c4', key: task => task.reason ?? '' }
];

/** Values that all rows of a table share. */
export interface ITableState {
  connected: boolean;
  /** Whether the cluster has ended. */
  ended: boolean;
  /** The rate at the upper edge of the sparklines. */
  top: number;
}

export class TaskRow {
  /** Both rows. */
  readonly node = h('tbody');

  private readonly _toggle: HTMLButtonElement;
  private readonly _name = h('span', { class: 'tfd-cut' });
  private readonly _symbol = h('span');
  private readonly _stateText = h('span', { class: 'tfd-word' });
  private readonly _state = h('td', {}, this._symbol, this._stateText);
  private readonly _cells = COLUMNS.slice(2).map(({ name }) => h('td', { class: name }));
  private readonly _spark = new Sparkline();
  private readonly _more = h('td', { class: 'tfd-more', colspan: COLUMNS.length });
  private readonly _below = h('tr', { id: uniqueId(), hidden: true }, this._more);
  private readonly _facts = new Facts();
  private readonly _tools = h('div', { class: 'tfd-row' });
  private readonly _logsButton: HTMLButtonElement;
  private readonly _status: CommandStatus;
  private _logs: LogsView | null = null;
  private _shown: ITask | null = null;
  private _connected = false;
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
        class: 'tfd-toggle',
        'aria-expanded': 'false',
        'aria-controls': this._below.id,
        onclick: () => this._open(this._below.hidden)
      },
      this._name
    );
    this._logsButton = button('Logs', '', () => this._toggleLogs());
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
    this._more.append(this._facts.node, this._tools, this._status.node);
    this._cells[3].append(this._spark.node);
    this.node.append(
      rowWithToggle(this._toggle, h('td', {}, this._toggle), this._state, ...this._cells),
      this._below
    );
  }

  show(
    task: ITask,
    history: readonly (number | null)[],
    { connected, ended, top }: ITableState
  ): void {
    setTruncatedText(this._name, task.task);
    setText(this._symbol, sign(task.state));
    this._symbol.className = `tfd-${tone(task.state)}`;
    setText(this._stateText, ` ${task.state}`);
    this._state.title = task.reason ? `${task.state}: ${task.reason}` : task.state;
    const memory = memoryOf(task);
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
    const drawn = serves && task.bytes_per_s !== undefined;
    this._spark.node.style.visibility = drawn ? '' : 'hidden';
    if (drawn) {
      const now = rate(task.bytes_per_s);
      this._spark.show(
        history,
        top,
        `bytes sent in the last minute, now ${now}, scale to ${rate(top)}`
      );
    }
    for (const button of this._buttons) {
      show(button, !ended);
      enable(button, connected && task.state !== 'planned');
    }
    this._connected = connected;
    this._enableLogs();
    setAttribute(
      this._logsButton,
      'title',
      ended ? 'The logs of an ended cluster cannot be read' : `Follow the log of ${this.task}`
    );
    if (!this._below.hidden) {
      this._fill(task);
    }
    this._shown = task;
  }

  /** Whether the details are shown. */
  get opened(): boolean {
    return !this._below.hidden;
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
    const memory = memoryOf(task);
    this._facts.show([
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
    ]);
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
    this._enableLogs();
  }

  private _enableLogs(): void {
    // Lines that were loaded before the end stay until they are closed.
    enable(this._logsButton, this._connected || this._logs !== null);
  }

  private async _perform(button: HTMLButtonElement, command: 'restart' | 'kill'): Promise<void> {
    const verb = command === 'kill' ? 'Kill' : 'Restart';
    if (await this._confirm(taskQuestion(verb, this.task), this._tools)) {
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

function memoryOf(task: ITask): number | undefined {
  return task.pss_mb ?? task.rss_mb;
}
