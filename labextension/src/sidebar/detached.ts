// The clusters that no kernel holds, as an extension of the server tells of them.

import { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { type ISignal, Signal } from '@lumino/signaling';

import { CommandError } from '../shared/link';
import type { IProblem } from '../shared/protocol';

const FIRST_MS = 1000;
const LONGEST_MS = 60_000;

export interface IDetached {
  name: string;
  state: string;
  launcher: string;
  /** How many tasks. */
  planned: number;
  /** How many of them are ready; null where it is on other hosts, which nobody has asked. */
  observed: number | null;
  /** Until when it stays; seconds since the epoch. */
  lease: number;
  /** The process that looks after it, which tells those of one name apart; null on other hosts. */
  agent: number | null;
}

/** What there is after `body` was done to the cluster of that name; null if nobody can say. */
export type Ask = (name?: string, body?: Record<string, unknown>) => Promise<IDetached[] | null>;

export class Detached implements IDisposable {
  private _clusters: readonly IDetached[] = [];
  private _changed = new Signal<this, void>(this);
  private _timer: ReturnType<typeof setTimeout> | undefined;
  private _pause = FIRST_MS;
  private _watched = false;
  private _missing = false;
  /** Answers to what was asked before the latest one are old. */
  private _turn = 0;
  private _isDisposed = false;

  constructor(private readonly _ask: Ask) {}

  get clusters(): readonly IDetached[] {
    return this._clusters;
  }

  /** The server has said what there is. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  /** Somebody sees what there is, or nobody any longer. */
  watch(watched: boolean): void {
    if (watched !== this._watched) {
      this._watched = watched;
      clearTimeout(this._timer);
      if (watched) {
        this._missing = false; // the server may be another one by now
        this.look();
      }
    }
  }

  /** Something may be different now: look soon, and less and less often afterwards. */
  look(): void {
    this._pause = FIRST_MS;
    if (this._watched && !this._missing) {
      void this._look();
    }
  }

  /** Look now, whether or not somebody sees it. */
  lookOnce(): void {
    if (this._watched) {
      this.look();
    } else if (!this._missing) {
      void this._look();
    }
  }

  async stop(cluster: IDetached): Promise<void> {
    await this._do(cluster, { do: 'stop' });
  }

  /** Have it stay for so many hours from now. */
  async renew(cluster: IDetached, hours: number): Promise<void> {
    await this._do(cluster, { do: 'renew', hours });
  }

  /** What a person calls it: by its name, and by its agent where another one has that, too. */
  label({ name, agent }: IDetached): string {
    const where = agent === null ? 'on other hosts' : `agent ${agent}`;
    return this._isAlone(name) ? name : `${name} (${where})`;
  }

  /** The code that takes it up. */
  code({ name, agent }: IDetached): string {
    const which = this._isAlone(name) || agent === null ? '' : `, agent=${agent}`;
    return `tfd.attach(${JSON.stringify(name)}${which})`;
  }

  dispose(): void {
    this._isDisposed = true;
    this.watch(false);
    Signal.clearData(this);
  }

  private _isAlone(name: string): boolean {
    return this._clusters.filter(one => one.name === name).length < 2;
  }

  private async _do(cluster: IDetached, body: Record<string, unknown>): Promise<void> {
    try {
      this._turn += 1;
      const { name, agent } = cluster;
      this._take(this._turn, await this._ask(name, { ...body, agent }));
    } finally {
      this.look();
    }
  }

  private async _look(): Promise<void> {
    const turn = (this._turn += 1);
    clearTimeout(this._timer);
    try {
      this._take(turn, await this._ask());
    } catch {
      // The server is away, or has too much to do: what was seen stays until it answers again.
    }
    if (turn === this._turn && this._watched && !this._missing) {
      const again = () => {
        if (document.hidden) {
          this._timer = setTimeout(again, LONGEST_MS);
        } else {
          void this._look();
        }
      };
      this._timer = setTimeout(again, this._pause);
      this._pause = Math.min(2 * this._pause, LONGEST_MS);
    }
  }

  private _take(turn: number, clusters: IDetached[] | null): void {
    if (turn === this._turn && !this._isDisposed) {
      this._missing = clusters === null;
      this._clusters = clusters ?? [];
      this._changed.emit();
    }
  }
}

/** Return what asks the server's extension. */
export function askServer(settings: ServerConnection.ISettings): Ask {
  return async (name, body) => {
    const address = `${settings.baseUrl}tfd-notebook/clusters`;
    const response = await (body
      ? ServerConnection.makeRequest(
          `${address}/${encodeURIComponent(name!)}`,
          { method: 'POST', body: JSON.stringify(body) },
          settings
        )
      : // Whoever looks does not work: servers end themselves where nobody does.
        ServerConnection.makeRequest(`${address}?no_track_activity=1`, {}, settings));
    const said = (await response.json().catch(() => null)) as
      ({ clusters?: IDetached[]; message?: string } & Partial<IProblem>) | null;
    if (response.ok && Array.isArray(said?.clusters)) {
      return said.clusters;
    }
    if (!body && response.status === 404) {
      return null;
    }
    const what = said?.what ?? said?.message ?? `the server answered ${response.status}`;
    throw new CommandError({ what, fix: said?.fix });
  };
}
