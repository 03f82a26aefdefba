// Controls of a coordinator: pause, resume, step, break on failure, hold workers.

import { announce } from './announce';
import { CommandStatus } from './statusLine';
import { button, enable, h, KeyedList, labeled, setAttribute, setText, show } from './dom';
import { counted, formatInteger, plural, signed, tone, total } from './figures';
import type { Link } from './link';
import { canPause, type ICluster, type ICoordinator } from './protocol';
import { colors, type IColors, onTheme } from './theme';
import { type IActions, linkProblem, View } from './view';

const MAX_WORKERS = 64;
/** Color of each state in the bar. */
const STATE_COLORS: Record<string, (theme: IColors) => string> = {
  paused: theme => theme.quiet,
  queued: theme => theme.quiet,
  dispatched: theme => theme.series[5],
  running: theme => theme.series[0],
  fetching: theme => theme.series[3],
  ready: theme => theme.good,
  failed: theme => theme.bad,
  cancelled: theme => theme.line,
  retrying: theme => theme.warn
};

export class StepperView extends View {
  private readonly _state = h('div', { class: 'tfd-state' });
  private readonly _bar = h('div', { class: 'tfd-counts', role: 'img' });
  private readonly _segments: KeyedList<HTMLElement>;
  private readonly _legend = h('div', { class: 'tfd-legend tfd-quiet' });
  private readonly _items: KeyedList<HTMLElement>;
  private readonly _empty = h('div', { class: 'tfd-quiet' }, 'no closures scheduled yet');
  private readonly _controls = h('div');
  private readonly _pause: HTMLButtonElement;
  private readonly _resume: HTMLButtonElement;
  private readonly _step: HTMLButtonElement;
  private readonly _steps: HTMLButtonElement;
  private readonly _count: HTMLInputElement;
  private readonly _break = h('input', { type: 'checkbox' });
  private readonly _holds = h('div', { class: 'tfd-holds', role: 'group', 'aria-label': 'Hold' });
  private readonly _workers: KeyedList<HTMLButtonElement>;
  private readonly _status: CommandStatus;
  private _announced = '';
  /** The last known coordinator; kept after it has ended. */
  private _row: ICoordinator | undefined;

  constructor(link: Link, cluster: string, actions: IActions) {
    super(link, cluster, actions, 'tfd-stepper');
    this.node.setAttribute('aria-label', `steps of ${cluster}`);
    this._status = new CommandStatus(link, cluster);
    const source = actions.source ?? 'the panel';
    this._pause = button('Pause', 'Stop dispatching closures to workers', button => {
      void this._status.run('Pause', 'pause', { source }, [button], () => 'Paused');
    });
    this._resume = button('Resume', 'Resume a paused coordinator', button => {
      void this._status.run('Resume', 'resume', {}, [button], () => 'Resumed');
    });
    this._step = button('Step', 'Run one closure while paused', button => this._doStep(1, button));
    this._count = h('input', { type: 'number', min: 1, max: 2 ** 31 - 1, value: 10, step: 1 });
    this._steps = button('Step n', 'Run n closures while paused', button => {
      if (this._count.reportValidity()) {
        this._doStep(Number(this._count.value), button);
      }
    });
    this._break.addEventListener('change', () => void this._doBreak());
    this._segments = new KeyedList<HTMLElement>(this._bar, () => h('span'));
    this._items = new KeyedList<HTMLElement>(this._legend, () => h('span', {}, h('i'), h('span')));
    const label = h('span', { class: 'tfd-quiet' }, 'Hold:');
    this._holds.append(label);
    this._workers = new KeyedList(
      this._holds,
      index => this._holdButton(Number(index)),
      () => undefined,
      label
    );
    this._controls.append(
      h(
        'div',
        { class: 'tfd-row tfd-tools' },
        this._pause,
        this._resume,
        this._step,
        labeled('n', this._count),
        this._steps,
        h(
          'label',
          { class: 'tfd-labeled', title: 'Pause when a closure fails' },
          this._break,
          h('span', {}, 'Break on failure')
        )
      ),
      this._holds
    );
    this.body.append(
      this._state,
      this._bar,
      this._legend,
      this._empty,
      this._controls,
      this._status.node
    );
    this.onDispose(() => this._status.dispose());
    this.onDispose(onTheme(this.node, () => this.refresh()));
    this.begin();
  }

  protected draw(snapshot: ICluster | undefined): void {
    const present = snapshot?.coordinator;
    const row = (this._row = present ?? this._row);
    for (const part of [this._bar, this._legend, this._empty]) {
      show(part, row !== undefined);
    }
    show(this._controls, canPause(present) && !this.actions.readOnly);
    setText(this._state, this._stateText(snapshot));
    this._state.className = `tfd-state tfd-${present ? tone(present.state) : 'quiet'}`;
    if (!row) {
      return;
    }
    this._countStates(row);
    const paused = row.state === 'paused';
    const focused = document.activeElement;
    enable(this._pause, this.connected && !paused);
    for (const control of [this._resume, this._step, this._steps, this._count]) {
      enable(control, this.connected && paused);
    }
    if (focused === this._pause && paused) {
      this._resume.focus();
    } else if (focused === this._resume && !paused) {
      this._pause.focus();
    }
    enable(this._break, this.connected);
    if (this._break.dataset.busy === undefined) {
      this._break.checked = row.break_on_failure;
    }
    const workers = Object.keys(row.workers).sort((a, b) => Number(a) - Number(b));
    this._workers.update(workers.slice(0, MAX_WORKERS), (element, index) => {
      this._updateHold(element, Number(index), row);
    });
    show(this._holds, workers.length > 1);
    const text = `coordinator ${present?.state ?? 'ended'}`;
    if (this._announced && this._announced !== text) {
      announce(this._stateText(snapshot));
    }
    this._announced = text;
  }

  private _stateText(snapshot: ICluster | undefined): string {
    if (snapshot?.coordinator) {
      return stateText(snapshot.coordinator);
    }
    if (this._row) {
      return signed('stopped');
    }
    // If the link has a problem, the banner shows it.
    return snapshot && !linkProblem(this.link) ? 'This cluster has no coordinator.' : '';
  }

  private _countStates(row: ICoordinator): void {
    const theme = colors(this.node);
    const states = Object.keys(STATE_COLORS).filter(state => row.counts[state]);
    this._segments.update(states, (segment, state) => {
      segment.style.width = `${(100 * row.counts[state]) / total(row.counts)}%`;
      segment.style.minWidth = state === 'failed' ? '3px' : '';
      segment.style.background = STATE_COLORS[state](theme);
      setAttribute(segment, 'title', `${row.counts[state]} ${state}`);
    });
    this._items.update(states, (item, state) => {
      (item.children[0] as HTMLElement).style.background = STATE_COLORS[state](theme);
      setText(item.children[1], `${formatInteger(row.counts[state])} ${state}`);
    });
    show(this._empty, states.length === 0);
    setAttribute(this._bar, 'aria-label', counted(row.counts) || 'no closures');
  }

  private _holdButton(index: number): HTMLButtonElement {
    return button(`worker ${index}`, '', button => void this._doHold(index, button));
  }

  private _updateHold(button: HTMLButtonElement, index: number, row: ICoordinator): void {
    const held = row.held.includes(index);
    setText(button, `${held ? '‖ ' : ''}worker ${index}`);
    setAttribute(button, 'aria-pressed', String(held));
    setAttribute(
      button,
      'title',
      held
        ? 'Release: dispatch closures to this worker again'
        : 'Hold: dispatch no closures to this worker'
    );
    enable(button, this.connected);
  }

  private _doStep(count: number, button: HTMLButtonElement): void {
    void this._status.run<{ ended: number }>(
      'Step',
      'step',
      { count },
      [button],
      () => `Released ${plural(count, 'closure')}`
    );
  }

  private async _doBreak(): Promise<void> {
    const failure = this._break.checked;
    await this._status.run('Break on failure', 'break_on', { failure }, [this._break], () =>
      failure ? 'Break on failure enabled' : 'Break on failure disabled'
    );
    this.refresh();
  }

  private async _doHold(worker: number, button: HTMLButtonElement): Promise<void> {
    const held = button.getAttribute('aria-pressed') !== 'true';
    await this._status.run(
      `${held ? 'Hold' : 'Release'} worker ${worker}`,
      'hold',
      { worker, held },
      [button],
      () => `Worker ${worker} ${held ? 'on hold' : 'released'}`
    );
    this.refresh();
  }
}

function stateText(row: ICoordinator): string {
  const text = signed(row.state);
  if (row.reduced) {
    return `${text}; it cannot be controlled with this version of TensorFlow`;
  }
  return row.reason ? `${text} (${row.reason})` : text;
}
