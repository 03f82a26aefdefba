// Steering a coordinator: pause, resume, steps, and which workers get closures.

import { announce } from './announce';
import { Asker } from './asker';
import { button, enable, h, Keyed, labelled, setAttribute, setText, show } from './dom';
import { counted, plural, signed, tone } from './figures';
import type { Link } from './link';
import { CLOSURE_STATES, type ICluster, type ICoordinator } from './protocol';
import { colors, type IColors, onTheme } from './theme';
import { type IActions, linkTrouble, View } from './view';

const MOST_WORKERS = 64;
/** Which colour of the theme a state has in the bar; others have one of the series. */
const STATE_COLORS: Record<string, (seen: IColors) => string> = {
  queued: seen => seen.quiet,
  dispatched: seen => seen.series[5],
  running: seen => seen.series[0],
  fetching: seen => seen.series[3],
  ready: seen => seen.good,
  failed: seen => seen.bad,
  cancelled: seen => seen.line,
  retrying: seen => seen.warn
};

export class StepperView extends View {
  private readonly _state = h('div', { class: 'tfd-state' });
  private readonly _bar = h('div', { class: 'tfd-counts', role: 'img' });
  private readonly _segments: Keyed<HTMLElement>;
  private readonly _words = h('div', { class: 'tfd-quiet tfd-wrap' });
  private readonly _controls = h('div');
  private readonly _pause: HTMLButtonElement;
  private readonly _resume: HTMLButtonElement;
  private readonly _step: HTMLButtonElement;
  private readonly _steps: HTMLButtonElement;
  private readonly _count: HTMLInputElement;
  private readonly _break = h('input', { type: 'checkbox' });
  private readonly _holds = h('div', { class: 'tfd-holds' });
  private readonly _workers: Keyed<HTMLButtonElement>;
  private readonly _asker: Asker;
  private _said = '';
  /** What was seen last of the coordinator, also after it is gone. */
  private _row: ICoordinator | undefined;

  constructor(link: Link, cluster: string, actions: IActions) {
    super(link, cluster, actions, 'tfd-stepper');
    this.node.setAttribute('aria-label', `steps of ${cluster}`);
    this._asker = new Asker(link, cluster);
    const who = actions.who ?? 'the panel';
    this._pause = button('Pause', 'give no closure to any worker', one => {
      void this._asker.run('pause', 'pause', { who }, [one], () => 'paused');
    });
    this._resume = button('Resume', 'let a paused coordinator go on', one => {
      void this._asker.run('resume', 'resume', {}, [one], () => 'resumed');
    });
    this._step = button('Step', 'let one closure run while paused', one => this._doStep(1, one));
    this._count = h('input', { type: 'number', min: 1, max: 2 ** 31 - 1, value: 10, step: 1 });
    this._steps = button('Step n', 'let so many closures run while paused', one => {
      if (this._count.reportValidity()) {
        this._doStep(Number(this._count.value), one);
      }
    });
    this._break.addEventListener('change', () => void this._doBreak());
    this._segments = new Keyed<HTMLElement>(this._bar, () => h('span'));
    this._workers = new Keyed(this._holds, index => this._holdButton(Number(index)));
    this._controls.append(
      h(
        'div',
        { class: 'tfd-row tfd-tools' },
        this._pause,
        this._resume,
        this._step,
        labelled('n', this._count),
        this._steps,
        h(
          'label',
          { class: 'tfd-labelled', title: 'pause when a closure fails' },
          this._break,
          h('span', {}, 'Break on failure')
        )
      ),
      this._holds
    );
    this.body.append(this._state, this._bar, this._words, this._controls, this._asker.node);
    this.onDispose(() => this._asker.dispose());
    this.onDispose(onTheme(this.node, () => this.refresh()));
    this.begin();
  }

  protected draw(seen: ICluster | undefined): void {
    const present = seen?.coordinator;
    const row = (this._row = present ?? this._row);
    const steered = present !== undefined && !present.reduced && present.state !== 'stopped';
    show(this._bar, row !== undefined);
    show(this._controls, steered && !this.actions.readOnly);
    setText(this._state, this._stateWords(seen));
    this._state.className = `tfd-state tfd-${present ? tone(present.state) : 'quiet'}`;
    if (!row) {
      return;
    }
    this._countStates(row);
    const paused = row.state === 'paused';
    enable(this._pause, this.alive && !paused);
    for (const one of [this._resume, this._step, this._steps, this._count]) {
      enable(one, this.alive && paused);
    }
    enable(this._break, this.alive);
    if (this._break.dataset.busy === undefined) {
      this._break.checked = row.break_on_failure;
    }
    const workers = Object.keys(row.workers).sort((a, b) => Number(a) - Number(b));
    this._workers.update(workers.slice(0, MOST_WORKERS), (one, index) => {
      this._mark(one, Number(index), row);
    });
    show(this._holds, workers.length > 1);
    const words = `coordinator ${present?.state ?? 'ended'}`;
    if (this._said && this._said !== words) {
      announce(this._stateWords(seen));
    }
    this._said = words;
  }

  private _stateWords(seen: ICluster | undefined): string {
    if (seen?.coordinator) {
      return stateWords(seen.coordinator);
    }
    if (this._row) {
      return `${signed('stopped')}; this is what was seen last`;
    }
    // Otherwise it is said above what is the matter.
    return seen && !linkTrouble(this.link) ? 'There is no coordinator in this cluster.' : '';
  }

  private _countStates(row: ICoordinator): void {
    const seen = colors(this.node);
    const total = Object.values(row.counts).reduce((sum, number) => sum + number, 0);
    const states = CLOSURE_STATES.filter(state => row.counts[state]);
    this._segments.update(states, (segment, state) => {
      segment.style.width = `${(100 * row.counts[state]) / total}%`;
      segment.style.background = STATE_COLORS[state](seen);
      setAttribute(segment, 'title', `${row.counts[state]} ${state}`);
    });
    const words = counted(row.counts) || 'nothing was scheduled yet';
    setText(this._words, words);
    setAttribute(this._bar, 'aria-label', words);
  }

  private _holdButton(index: number): HTMLButtonElement {
    return button(`worker ${index}`, '', one => void this._doHold(index, one));
  }

  private _mark(one: HTMLButtonElement, index: number, row: ICoordinator): void {
    const held = row.held.includes(index);
    setText(one, `${held ? '‖ ' : ''}worker ${index}`);
    setAttribute(one, 'aria-pressed', String(held));
    setAttribute(one, 'title', held ? 'give it closures again' : 'give no closure to this worker');
    enable(one, this.alive);
  }

  private _doStep(count: number, one: HTMLButtonElement): void {
    void this._asker.run<{ ended: number }>('step', 'step', { count }, [one], () =>
      count === 1 ? 'one closure may run' : `${plural(count, 'closure')} may run`
    );
  }

  private async _doBreak(): Promise<void> {
    const failure = this._break.checked;
    await this._asker.run('break on failure', 'break_on', { failure }, [this._break], () =>
      failure ? 'a failure pauses' : 'failures do not pause'
    );
    this.refresh();
  }

  private async _doHold(worker: number, one: HTMLButtonElement): Promise<void> {
    const held = one.getAttribute('aria-pressed') !== 'true';
    await this._asker.run(
      `worker ${worker}`,
      'hold',
      { worker, held },
      [one],
      () => `worker ${worker} gets ${held ? 'no closures' : 'closures again'}`
    );
    this.refresh();
  }
}

function stateWords(row: ICoordinator): string {
  const words = signed(row.state);
  if (row.reduced) {
    return `${words}; it cannot be steered with this version of TensorFlow`;
  }
  return row.reason ? `${words} (${row.reason})` : words;
}
