// The buttons that act on a whole cluster.

import { type IQuestion, stopQuestion } from './confirm';
import { CommandStatus } from './statusLine';
import { button, enable, h, show, uniqueId } from './dom';
import { findingCount, Findings, type IFinding } from './findings';
import type { Link } from './link';
import { hasEnded, type ICluster } from './protocol';
import { type IStack, stackCount, Stacks } from './stacks';
import type { IActions } from './view';

export type Confirm = (question: IQuestion, near: HTMLElement) => Promise<boolean>;

/** Return code that binds a running cluster to a variable. */
export function codeOf(cluster: string): string {
  return `import tfd_notebook as tfd\n\ncluster = tfd.clusters()[${JSON.stringify(cluster)}]`;
}

interface ICount {
  role: string;
  field: string;
  input: HTMLInputElement;
  buttons: HTMLButtonElement[];
  node: HTMLElement;
  /** The planned number as last shown; the input follows it unless the user has changed it. */
  shown: number;
}

export class ClusterTools {
  readonly node = h('div');
  private readonly _status: CommandStatus;
  private readonly _counts: ICount[];
  private readonly _scale: HTMLButtonElement;
  private readonly _stop: HTMLButtonElement;
  private readonly _interrupt: HTMLButtonElement;
  private readonly _doctor: HTMLButtonElement;
  private readonly _inspect: HTMLButtonElement;
  private readonly _insert: HTMLButtonElement | null = null;
  private readonly _findings = new Findings();
  private readonly _stacks = new Stacks();
  private readonly _scaling: HTMLElement;
  /** State and plan of the cluster when it was last shown. */
  private _key = '';

  constructor(
    link: Link,
    private readonly _cluster: string,
    private readonly _actions: IActions,
    private readonly _confirm: Confirm
  ) {
    this._status = new CommandStatus(link, _cluster);
    this._counts = [
      this._count('data_worker', 'data_workers', 'data workers'),
      this._count('worker', 'workers', 'workers')
    ];
    this._scale = h(
      'button',
      {
        type: 'submit',
        class: 'tfd-button',
        title: 'Scale the cluster to these numbers of tasks'
      },
      'Scale'
    );
    this._stop = button('Stop', 'Stop all tasks of this cluster', () => void this._doStop());
    this._stop.classList.add('tfd-danger');
    this._interrupt = button(
      'Interrupt',
      'Interrupt running reads and computations; the tasks keep running',
      button => void this._status.run('Interrupt', 'interrupt', {}, [button], () => 'Interrupted')
    );
    this._doctor = button(
      'Doctor',
      'Diagnose problems of this cluster',
      () => void this._doDoctor()
    );
    this._inspect = button(
      'Stacks',
      'Show the Python stacks of the tasks',
      () => void this._doStacks()
    );
    this._scaling = h(
      'form',
      {
        class: 'tfd-row',
        novalidate: true,
        onsubmit: (event: Event) => {
          event.preventDefault();
          void this._doScale();
        }
      },
      ...this._counts.map(count => count.node),
      this._scale
    );
    const row = h(
      'div',
      { class: 'tfd-row tfd-tools' },
      this._scaling,
      this._interrupt,
      this._doctor,
      this._inspect
    );
    const { insert, open } = _actions;
    if (insert) {
      this._insert = button(
        'Insert code',
        'Insert code that uses this cluster into the notebook',
        () => insert(codeOf(_cluster))
      );
      row.append(this._insert);
    }
    if (open) {
      row.append(
        button('Open', 'Open the dashboard of this cluster in a tab', () => open(_cluster))
      );
    }
    row.append(this._stop);
    this.node.append(row, this._status.node, this._findings.node, this._stacks.node);
  }

  show(snapshot: ICluster, connected: boolean): void {
    const key = JSON.stringify([snapshot.state, snapshot.planned]);
    if (key !== this._key) {
      // The findings may no longer apply.
      this._key = key;
      this._findings.show([]);
      this._stacks.show([]);
    }
    const usable = !this._actions.readOnly && !hasEnded(snapshot);
    const requests = [this._stop, this._interrupt, this._doctor, this._inspect];
    for (const element of [...requests, this._scaling]) {
      show(element, usable);
    }
    if (snapshot.spark) {
      // A TFCluster supports only `stop`.
      show(this._interrupt, false);
      show(this._doctor, false);
      show(this._inspect, false);
      if (this._insert) {
        show(this._insert, false);
      }
    }
    if (this._insert) {
      enable(this._insert, connected);
    }
    let scalable = false;
    for (const count of this._counts) {
      const planned = snapshot.planned[count.role] ?? 0;
      const fits =
        planned > 0 || (count.role === 'data_worker' && (snapshot.planned.dispatcher ?? 0) > 0);
      show(count.node, fits);
      scalable ||= fits;
      if (count.input.value === String(count.shown)) {
        count.input.value = String(planned);
      }
      count.shown = planned;
      for (const control of [count.input, ...count.buttons]) {
        enable(control, connected);
      }
    }
    this._markChanges();
    show(this._scaling, usable && scalable);
    for (const control of [...requests, this._scale]) {
      enable(control, connected && snapshot.state !== 'stopping');
    }
  }

  dispose(): void {
    this._status.dispose();
  }

  private _count(role: string, field: string, label: string): ICount {
    const input = h('input', {
      type: 'number',
      min: 0,
      max: 1024,
      step: 1,
      required: true,
      value: 0,
      id: uniqueId(),
      oninput: () => this._markChanges()
    });
    const stepper = (text: string, title: string, step: () => void) => {
      const element = button(text, title, () => {
        step();
        this._markChanges();
      });
      element.setAttribute('aria-label', title);
      return element;
    };
    const fewer = stepper('−', `Fewer ${label}`, () => input.stepDown());
    const more = stepper('+', `More ${label}`, () => input.stepUp());
    const text = h('label', { for: input.id }, label);
    const node = h('span', { class: 'tfd-labeled tfd-count' }, text, fewer, input, more);
    return { role, field, input, buttons: [fewer, more], node, shown: 0 };
  }

  /** Highlight the button that applies changed numbers. */
  private _markChanges(): void {
    const isChanged = this._counts.some(
      ({ input, node, shown }) => !node.hidden && input.value !== String(shown)
    );
    this._scale.classList.toggle('tfd-main', isChanged);
  }

  private async _doScale(): Promise<void> {
    const changes: Record<string, number> = {};
    for (const { node, input, field, shown } of this._counts) {
      if (!node.hidden) {
        if (!input.reportValidity()) {
          return;
        }
        const requested = Number(input.value);
        if (requested !== shown) {
          changes[field] = requested;
        }
      }
    }
    if (!Object.keys(changes).length) {
      this._status.report('Scale: no change', 'quiet');
      return;
    }
    await this._status.run<Record<string, number>>(
      'Scale',
      'scale',
      changes,
      [this._scale],
      observed =>
        `Scaled: ${Object.entries(observed)
          .map(([role, number]) => `${number} ${role}`)
          .join(', ')}`
    );
  }

  private async _doDoctor(): Promise<void> {
    const findings = await this._status.run<IFinding[]>(
      'Doctor',
      'doctor',
      {},
      [this._doctor],
      findingCount
    );
    if (findings) {
      this._findings.show(findings);
      // The heading of the findings already has their number.
      this._status.node.hidden ||= findings.length > 0;
    }
  }

  private async _doStacks(): Promise<void> {
    const stacks = await this._status.run<IStack[]>(
      'Stacks',
      'stacks',
      {},
      [this._inspect],
      stackCount
    );
    if (stacks) {
      this._stacks.show(stacks);
      this._status.node.hidden ||= stacks.length > 0;
    }
  }

  private async _doStop(): Promise<void> {
    if (await this._confirm(stopQuestion(this._cluster), this._stop)) {
      await this._status.run('Stop', 'stop', {}, [this._stop], () => 'Stopped');
    }
  }
}
