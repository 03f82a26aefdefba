// What can be done with a cluster as a whole.

import { Asker } from './asker';
import { button, enable, h, labelled, show } from './dom';
import { counted, Findings, type IFinding } from './findings';
import type { Link } from './link';
import { hasEnded, type ICluster } from './protocol';
import type { IActions } from './view';

export type Confirm = (question: string, near: HTMLElement) => Promise<boolean>;

interface ICount {
  role: string;
  field: string;
  input: HTMLInputElement;
  label: HTMLElement;
  /** What is planned, as it was shown last; the input follows it unless somebody typed. */
  seen: number;
}

export class ClusterTools {
  readonly node = h('div');
  private readonly _asker: Asker;
  private readonly _counts: ICount[];
  private readonly _scale: HTMLButtonElement;
  private readonly _stop: HTMLButtonElement;
  private readonly _interrupt: HTMLButtonElement;
  private readonly _doctor: HTMLButtonElement;
  private readonly _insert: HTMLButtonElement | null = null;
  private readonly _findings = new Findings();
  private readonly _scaling: HTMLElement;

  constructor(
    link: Link,
    private readonly _cluster: string,
    private readonly _actions: IActions,
    private readonly _confirm: Confirm
  ) {
    this._asker = new Asker(link, _cluster);
    this._counts = [
      this._count('data_worker', 'data_workers', 'data workers'),
      this._count('worker', 'workers', 'workers')
    ];
    this._scale = button('Scale', 'have as many tasks as said here', () => void this._doScale());
    this._stop = button('Stop', 'stop all tasks of this cluster', () => void this._doStop());
    this._interrupt = button(
      'Interrupt',
      'end what is being read or computed now; the tasks stay',
      one => void this._asker.run('interrupt', 'interrupt', {}, [one], () => 'interrupted')
    );
    this._doctor = button(
      'Doctor',
      'look for what is wrong with this cluster, or will be',
      () => void this._doDoctor()
    );
    this._scaling = h(
      'form',
      {
        class: 'tfd-row',
        onsubmit: (event: Event) => {
          event.preventDefault();
          void this._doScale();
        }
      },
      ...this._counts.map(count => count.label),
      this._scale
    );
    const row = h(
      'div',
      { class: 'tfd-row tfd-tools' },
      this._scaling,
      this._stop,
      this._interrupt,
      this._doctor
    );
    const { insert, open } = _actions;
    if (insert) {
      this._insert = button(
        'Insert code',
        'put code that uses this cluster into the notebook',
        () =>
          insert(
            `import tfd_notebook as tfd\n\ncluster = tfd.clusters()[${JSON.stringify(_cluster)}]`
          )
      );
      row.append(this._insert);
    }
    if (open) {
      row.append(button('Open', 'open this cluster in a tab of its own', () => open(_cluster)));
    }
    this.node.append(row, this._asker.node, this._findings.node);
  }

  show(seen: ICluster, alive: boolean): void {
    const usable = !this._actions.readOnly && !hasEnded(seen);
    for (const one of [this._stop, this._interrupt, this._doctor, this._scaling]) {
      show(one, usable);
    }
    if (seen.spark) {
      // What it may be asked is to come to its end.
      show(this._interrupt, false);
      show(this._doctor, false);
      if (this._insert) {
        show(this._insert, false);
      }
    }
    let scalable = false;
    for (const count of this._counts) {
      const planned = seen.planned[count.role] ?? 0;
      const fits =
        planned > 0 || (count.role === 'data_worker' && (seen.planned.dispatcher ?? 0) > 0);
      show(count.label, fits);
      scalable ||= fits;
      if (planned !== count.seen) {
        count.seen = planned;
        count.input.value = String(planned);
      }
      enable(count.input, alive);
    }
    show(this._scaling, usable && scalable);
    for (const one of [this._stop, this._interrupt, this._doctor, this._scale]) {
      enable(one, alive && seen.state !== 'stopping');
    }
  }

  dispose(): void {
    this._asker.dispose();
  }

  private _count(role: string, field: string, label: string): ICount {
    const input = h('input', { type: 'number', min: 0, max: 1024, step: 1, required: true });
    return { role, field, input, label: labelled(label, input), seen: -1 };
  }

  private async _doScale(): Promise<void> {
    const wishes: Record<string, number> = {};
    for (const { label, input, field, seen } of this._counts) {
      if (!label.hidden) {
        if (!input.reportValidity()) {
          return;
        }
        const wish = Number(input.value);
        if (wish !== seen) {
          wishes[field] = wish;
        }
      }
    }
    if (!Object.keys(wishes).length) {
      this._asker.say('scale: that is what there is already', 'quiet');
      return;
    }
    await this._asker.run<Record<string, number>>(
      'scale',
      'scale',
      wishes,
      [this._scale],
      observed =>
        `scaled: ${Object.entries(observed)
          .map(([role, number]) => `${number} ${role}`)
          .join(', ')}`
    );
  }

  private async _doDoctor(): Promise<void> {
    const found = await this._asker.run<IFinding[]>(
      'doctor',
      'doctor',
      {},
      [this._doctor],
      counted
    );
    if (found) {
      this._findings.show(found);
      // They are counted above them.
      this._asker.node.hidden ||= found.length > 0;
    }
  }

  private async _doStop(): Promise<void> {
    if (await this._confirm(`Stop the cluster ${this._cluster} and all its tasks?`, this._stop)) {
      await this._asker.run('stop', 'stop', {}, [this._stop], () => 'stopped');
    }
  }
}
