// Details of one closure, with its full error.

import { CommandStatus, problemText } from './statusLine';
import { button, enable, h, setText, show } from './dom';
import { Facts } from './facts';
import { brief, clock, errorSummary } from './figures';
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
  readonly node = h('div', {
    class: 'tfd-details',
    role: 'group',
    tabindex: -1,
    hidden: true
  });
  private readonly _head = h('div', { class: 'tfd-row' });
  private readonly _title = h('b');
  private readonly _facts = new Facts();
  private readonly _message = h('div', { class: 'tfd-bad tfd-wrap' });
  private readonly _error = h('pre', { class: 'tfd-error', tabindex: 0, 'aria-label': 'error' });
  private readonly _cancel: HTMLButtonElement;
  private readonly _status: CommandStatus;
  private _id: number | null = null;
  private _state = '';
  private _loading = false;
  private _outdated = false;

  constructor(
    private readonly _link: Link,
    private readonly _cluster: string,
    readOnly: boolean,
    onClose: () => void
  ) {
    this.node.addEventListener('keydown', event => {
      if (event.key === 'Escape') {
        event.preventDefault();
        event.stopPropagation();
        onClose();
      }
    });
    this._status = new CommandStatus(_link, _cluster);
    this._cancel = button('Cancel', 'Cancel this closure', button => void this._doCancel(button));
    show(this._cancel, !readOnly);
    this._head.append(this._title, this._cancel, button('Close', 'Close the details', onClose));
    this.node.append(this._head, this._status.node, this._message, this._facts.node, this._error);
  }

  /** Show the closure `id`, which is in `state`; the details are requested from the kernel. */
  show(id: number | null, state: string): void {
    enable(this._cancel, this._link.usable && !ENDED.includes(state));
    if (id === this._id && state === this._state) {
      return;
    }
    const changed = id !== this._id;
    this._id = id;
    this._state = state;
    show(this.node, id !== null);
    if (id === null) {
      return;
    }
    setText(this._title, `closure ${id}`);
    this.node.setAttribute('aria-label', `closure ${id}`);
    if (changed) {
      this._facts.show([]);
      setText(this._message, '');
      show(this._error, false);
      show(this._status.node, false);
    }
    this._outdated = true;
    if (!this._loading) {
      void this._load();
    }
  }

  dispose(): void {
    this._status.dispose();
  }

  /** Request the shown closure, and again if another one is shown before the reply. */
  private async _load(): Promise<void> {
    this._loading = true;
    while (this._outdated && this._id !== null) {
      const id = this._id;
      this._outdated = false;
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
    this._loading = false;
  }

  private _fill(record: IRecord): void {
    const at = (seconds: number | null) => (seconds === null ? '' : clock(seconds, 3));
    const took = (ms: number | null) => (ms === null ? '' : brief(ms / 1e3));
    this._facts.show([
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
    ]);
    const message = errorSummary(record.error);
    setText(this._message, message);
    setText(this._error, record.error);
    show(this._error, record.error !== message);
  }

  private async _doCancel(button: HTMLButtonElement): Promise<void> {
    const id = this._id;
    await this._status.run('Cancel', 'cancel', { id }, [button], value =>
      value === false ? `Closure ${id} has already ended` : `Closure ${id} cancelled`
    );
    enable(button, !ENDED.includes(this._state));
  }
}
