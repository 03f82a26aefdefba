// Details of one closure, with its full error.

import { CommandStatus, problemText } from './statusLine';
import { button, enable, h, show } from './dom';
import { brief, clock } from './figures';
import type { Link } from './link';

interface IRecord {
  id: number;
  function: string;
  state: string;
  worker: number;
  attempts: number;
  queued: number | null;
  dispatched: number | null;
  started: number | null;
  finished: number | null;
  queue_ms: number | null;
  run_ms: number | null;
  fetch_ms: number | null;
  error: string;
}

const ENDED = ['ready', 'failed', 'cancelled'];

export class ValueDetails {
  readonly node = h('div', { class: 'tfd-details', hidden: true });
  private readonly _head = h('div', { class: 'tfd-row' });
  private readonly _title = h('b');
  private readonly _facts = h('dl', { class: 'tfd-facts' });
  private readonly _error = h('pre', { class: 'tfd-error', tabindex: 0, 'aria-label': 'error' });
  private readonly _cancel: HTMLButtonElement;
  private readonly _status: CommandStatus;
  private _id: number | null = null;
  private _state = '';

  constructor(
    private readonly _link: Link,
    private readonly _cluster: string,
    readOnly: boolean,
    onClose: () => void
  ) {
    this._status = new CommandStatus(_link, _cluster);
    this._cancel = button('Cancel', 'Cancel this closure', button => void this._doCancel(button));
    show(this._cancel, !readOnly);
    this._head.append(this._title, this._cancel, button('Close', 'Close the details', onClose));
    this.node.append(this._head, this._status.node, this._facts, this._error);
  }

  /** Show the closure `id`, which is in `state`; the details are requested from the kernel. */
  show(id: number | null, state: string): void {
    if (id === this._id && state === this._state) {
      return;
    }
    const changed = id !== this._id;
    this._id = id;
    this._state = state;
    show(this.node, id !== null);
    enable(this._cancel, !ENDED.includes(state));
    if (id === null) {
      return;
    }
    this._title.textContent = `closure ${id}`;
    if (changed) {
      this._facts.replaceChildren();
      show(this._error, false);
      show(this._status.node, false);
    }
    void this._load(id);
  }

  dispose(): void {
    this._status.dispose();
  }

  private async _load(id: number): Promise<void> {
    try {
      const record = (await this._link.command('value', { name: this._cluster, id })) as IRecord;
      if (id === this._id) {
        this._fill(record);
      }
    } catch (error) {
      if (id === this._id) {
        this._status.report(problemText(error), 'bad');
      }
    }
  }

  private _fill(record: IRecord): void {
    const at = (seconds: number | null) => (seconds === null ? '' : clock(seconds, 3));
    const took = (ms: number | null) => (ms === null ? '' : brief(ms / 1e3));
    const facts: [string, string][] = [
      ['function', record.function],
      ['state', record.state],
      ['worker', record.worker < 0 ? '' : String(record.worker)],
      ['attempts', String(record.attempts)],
      ['queued', at(record.queued)],
      ['dispatched', at(record.dispatched)],
      ['started', at(record.started)],
      ['finished', at(record.finished)],
      ['waited', took(record.queue_ms)],
      ['ran', took(record.run_ms)],
      ['fetched', took(record.fetch_ms)]
    ];
    this._facts.replaceChildren(
      ...facts
        .filter(([, value]) => value)
        .flatMap(([name, value]) => [h('dt', {}, name), h('dd', {}, value)])
    );
    this._error.textContent = record.error;
    show(this._error, Boolean(record.error));
  }

  private async _doCancel(button: HTMLButtonElement): Promise<void> {
    const id = this._id;
    await this._status.run('Cancel', 'cancel', { id }, [button], value =>
      value === false ? `Closure ${id} has already ended` : `Closure ${id} cancelled`
    );
    enable(button, !ENDED.includes(this._state));
  }
}
