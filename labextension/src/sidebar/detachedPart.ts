// Detached clusters in the panel, with buttons to attach, renew and stop.

import { type IQuestion, stopQuestion } from '../shared/confirm';
import { StatusLine } from '../shared/statusLine';
import {
  button,
  h,
  KeyedList,
  labeled,
  setAttribute,
  setTruncatedText,
  setText,
  show
} from '../shared/dom';
import { duration, plural, signed, tone } from '../shared/figures';
import type { Detached, IDetached } from './detached';

const HOURS = 8;
const MAX_HOURS = 24 * 365;

export interface IDetachedActions {
  confirm(question: IQuestion): Promise<boolean>;
  /** Attach the active notebook to a cluster. */
  attach(cluster: IDetached): void;
}

export class DetachedPart {
  readonly node: HTMLElement;

  private readonly _list = h('div');
  private readonly _rows = new Map<HTMLElement, Row>();
  private readonly _keyed: KeyedList<HTMLElement>;

  constructor(
    private readonly _detached: Detached,
    actions: IDetachedActions
  ) {
    this._keyed = new KeyedList(
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
      h('span', { class: 'tfd-lab-spec tfd-quiet' }, 'clusters without an attached kernel')
    );
    this.node = h(
      'section',
      { class: 'tfd-lab-kernel tfd-lab-detached', 'aria-label': 'Detached clusters', hidden: true },
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
  private readonly _attach: HTMLButtonElement;
  private readonly _hours: HTMLInputElement;
  private readonly _status = new StatusLine();
  private _shown: IDetached | null = null;

  constructor(
    private readonly _detached: Detached,
    actions: IDetachedActions
  ) {
    this._hours = h('input', {
      type: 'number',
      min: 1,
      max: MAX_HOURS,
      step: 'any',
      required: true
    });
    const renew = button('Renew', 'Keep the cluster for this number of hours from now', button => {
      if (this._hours.reportValidity()) {
        void this._renew(Number(this._hours.value), button);
      }
    });
    const stop = button('Stop', 'Stop all tasks of this cluster', button => {
      void this._stop(actions, button);
    });
    stop.classList.add('tfd-danger');
    this._attach = button('Attach', '', () => actions.attach(this._shown!));
    this._tools = h(
      'div',
      { class: 'tfd-row tfd-tools' },
      this._attach,
      h('span', { class: 'tfd-row' }, labeled('hours', this._hours), renew),
      stop
    );
    this.node = h(
      'div',
      { class: 'tfd-lab-cluster', role: 'group' },
      h('div', { class: 'tfd-lab-line' }, this._name, this._state),
      this._facts,
      this._tools,
      this._status.node
    );
  }

  show(cluster: IDetached, readOnly: boolean): void {
    const label = this._detached.label(cluster);
    setTruncatedText(this._name, label);
    setAttribute(this.node, 'aria-label', `cluster ${label}`);
    const code = `cluster = ${this._detached.code(cluster)}`;
    setAttribute(this._attach, 'title', `Run ${code} in a new cell of the active notebook`);
    setText(this._state, signed(cluster.state));
    setAttribute(this._state, 'class', `tfd-lab-state tfd-${tone(cluster.state)}`);
    const left = Math.max(0, cluster.lease - Date.now() / 1000);
    setText(
      this._facts,
      `${cluster.observed ?? '?'} of ${plural(cluster.planned, 'task')} ready, ${cluster.launcher}, ` +
        `lease ends in ${duration(left)}`
    );
    setAttribute(this._facts, 'title', `Until ${new Date(cluster.lease * 1000).toLocaleString()}`);
    if (cluster.lease !== this._shown?.lease) {
      // The suggested value must not shorten the lease.
      this._hours.value = String(Math.max(HOURS, Math.ceil(left / 3600)));
    }
    this._shown = cluster;
    show(this._tools, !readOnly);
  }

  dispose(): void {
    this._status.dispose();
  }

  private async _renew(hours: number, button: HTMLButtonElement): Promise<void> {
    await this._status.attempt(
      'Renew',
      () => this._detached.renew(this._shown!, hours),
      [button],
      () => `Kept for ${duration(hours * 3600)} from now`
    );
  }

  private async _stop(actions: IDetachedActions, button: HTMLButtonElement): Promise<void> {
    const cluster = this._shown!;
    if (await actions.confirm(stopQuestion(this._detached.label(cluster)))) {
      await this._status.attempt(
        'Stop',
        () => this._detached.stop(cluster),
        [button],
        () => 'Stopped'
      );
    }
  }
}
