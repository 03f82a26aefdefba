// The clusters that no kernel holds, in the panel: to be taken up, kept longer or stopped.

import { Teller } from '../shared/asker';
import { button, h, Keyed, labelled, setAttribute, setCut, setText, show } from '../shared/dom';
import { duration, plural, signed, tone } from '../shared/figures';
import type { Detached, IDetached } from './detached';

const HOURS = 8;
const MOST_HOURS = 24 * 365;

export interface IDetachedActions {
  confirm(question: string): Promise<boolean>;
  /** Have the notebook in front take it up. */
  takeUp(cluster: IDetached): void;
}

export class DetachedPart {
  readonly node: HTMLElement;

  private readonly _list = h('div');
  private readonly _rows = new Map<HTMLElement, Row>();
  private readonly _keyed: Keyed<HTMLElement>;

  constructor(
    private readonly _detached: Detached,
    actions: IDetachedActions
  ) {
    this._keyed = new Keyed(
      this._list,
      () => {
        const row = new Row(_detached, actions);
        this._rows.set(row.node, row);
        return row.node;
      },
      node => {
        this._rows.get(node)?.dispose();
        this._rows.delete(node);
      }
    );
    const title = h(
      'div',
      { class: 'tfd-lab-title' },
      h('span', { class: 'tfd-lab-name' }, 'Detached'),
      h('span', { class: 'tfd-lab-spec tfd-quiet' }, 'clusters that no kernel holds')
    );
    this.node = h(
      'section',
      { class: 'tfd-lab-kernel tfd-lab-detached', 'aria-label': 'detached clusters', hidden: true },
      h('div', { class: 'tfd-lab-head' }, title),
      this._list
    );
  }

  update(readOnly: boolean): void {
    const known = new Map(
      this._detached.clusters.map(cluster => [`${cluster.name} ${cluster.agent}`, cluster])
    );
    this._keyed.update([...known.keys()], (node, key) =>
      this._rows.get(node)!.show(known.get(key)!, readOnly)
    );
    show(this.node, known.size > 0);
  }

  dispose(): void {
    this._keyed.update([], () => undefined);
    this.node.remove();
  }
}

class Row {
  readonly node: HTMLElement;

  private readonly _name = h('span', { class: 'tfd-lab-name tfd-cut' });
  private readonly _state = h('span', { class: 'tfd-lab-state' });
  private readonly _facts = h('div', { class: 'tfd-quiet tfd-wrap' });
  private readonly _tools: HTMLElement;
  private readonly _takeUp: HTMLButtonElement;
  private readonly _hours: HTMLInputElement;
  private readonly _teller = new Teller();
  private _shown: IDetached | null = null;

  constructor(
    private readonly _detached: Detached,
    actions: IDetachedActions
  ) {
    this._hours = h('input', {
      type: 'number',
      min: 1,
      max: MOST_HOURS,
      step: 'any',
      required: true
    });
    const renew = button('Renew', 'have it stay for so many hours from now', one => {
      if (this._hours.reportValidity()) {
        void this._renew(Number(this._hours.value), one);
      }
    });
    const stop = button('Stop', 'stop all tasks of this cluster', one => {
      void this._stop(actions, one);
    });
    this._takeUp = button('Take up', '', () => actions.takeUp(this._shown!));
    this._tools = h(
      'div',
      { class: 'tfd-row tfd-tools' },
      this._takeUp,
      stop,
      h('span', { class: 'tfd-row' }, labelled('hours', this._hours), renew)
    );
    this.node = h(
      'div',
      { class: 'tfd-lab-cluster', role: 'group' },
      h('div', { class: 'tfd-lab-line' }, this._name, this._state),
      this._facts,
      this._tools,
      this._teller.node
    );
  }

  show(cluster: IDetached, readOnly: boolean): void {
    const label = this._detached.label(cluster);
    setCut(this._name, label);
    setAttribute(this.node, 'aria-label', `cluster ${label}`);
    const code = `cluster = ${this._detached.code(cluster)}`;
    setAttribute(this._takeUp, 'title', `run ${code} in a new cell of the notebook in front`);
    setText(this._state, signed(cluster.state));
    setAttribute(this._state, 'class', `tfd-lab-state tfd-${tone(cluster.state)}`);
    const left = Math.max(0, cluster.lease - Date.now() / 1000);
    setText(
      this._facts,
      `${cluster.observed ?? '?'} of ${plural(cluster.planned, 'task')} ready, ${cluster.launcher}, ` +
        `stays for ${duration(left)}`
    );
    setAttribute(this._facts, 'title', `until ${new Date(cluster.lease * 1000).toLocaleString()}`);
    if (cluster.lease !== this._shown?.lease) {
      // A renewal that nobody thought about shall not make it shorter.
      this._hours.value = String(Math.max(HOURS, Math.ceil(left / 3600)));
    }
    this._shown = cluster;
    show(this._tools, !readOnly);
  }

  dispose(): void {
    this._teller.dispose();
  }

  private async _renew(hours: number, one: HTMLButtonElement): Promise<void> {
    await this._teller.attempt(
      'renew',
      () => this._detached.renew(this._shown!, hours),
      [one],
      () => `stays for ${duration(hours * 3600)} from now`
    );
  }

  private async _stop(actions: IDetachedActions, one: HTMLButtonElement): Promise<void> {
    const cluster = this._shown!;
    if (
      await actions.confirm(
        `Stop the detached cluster ${this._detached.label(cluster)} and all its tasks?`
      )
    ) {
      await this._teller.attempt(
        'stop',
        () => this._detached.stop(cluster),
        [one],
        () => 'stopped'
      );
    }
  }
}
