// Detached clusters that no kernel has attached, as reported by the Jupyter Server extension.

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
  /** Number of tasks. */
  planned: number;
  /** Number of ready tasks; null for clusters on other hosts, which are not probed. */
  observed: number | null;
  /** End of the lease in seconds since the Unix epoch. */
  lease: number;
  /** Process id of the agent, which distinguishes clusters of one name; null on other hosts. */
  agent: number | null;
}

/** Execute `body` on a cluster, and return all clusters; null without the server extension. */
export type DetachedApi = (
  name?: string,
  body?: Record<string, unknown>
) => Promise<IDetached[] | null>;

export class Detached implements IDisposable {
  private _clusters: readonly IDetached[] = [];
  private _changed = new Signal<this, void>(this);
  private _timer: ReturnType<typeof setTimeout> | undefined;
  private _pause = FIRST_MS;
  private _watched = false;
  private _missing = false;
  /** Number of the latest request; replies to earlier requests are ignored. */
  private _latest = 0;
  private _isDisposed = false;

  constructor(private readonly _request: DetachedApi) {}

  get clusters(): readonly IDetached[] {
    return this._clusters;
  }

  /** Emitted after each reply of the server. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  /** Start or stop polling, when the list becomes visible or hidden. */
  watch(watched: boolean): void {
    if (watched !== this._watched) {
      this._watched = watched;
      clearTimeout(this._timer);
      if (watched) {
        this._missing = false; // the server may have been restarted with the extension
        this.refresh();
      }
    }
  }

  /** Request the list now, then with increasing intervals. */
  refresh(): void {
    this._pause = FIRST_MS;
    if (this._watched && !this._missing) {
      void this._poll();
    }
  }

  /** Request the list once, even if it is hidden. */
  refreshOnce(): void {
    if (this._watched) {
      this.refresh();
    } else if (!this._missing) {
      void this._poll();
    }
  }

  async stop(cluster: IDetached): Promise<void> {
    await this._act(cluster, { action: 'stop' });
  }

  /** Extend the lease to `hours` from now. */
  async renew(cluster: IDetached, hours: number): Promise<void> {
    await this._act(cluster, { action: 'renew', hours });
  }

  /** Return the name, with the agent if the name is not unique. */
  label({ name, agent }: IDetached): string {
    const where = agent === null ? 'on other hosts' : `agent ${agent}`;
    return this._isUnique(name) ? name : `${name} (${where})`;
  }

  /** Return the code that attaches to a cluster. */
  code({ name, agent }: IDetached): string {
    const which = this._isUnique(name) || agent === null ? '' : `, agent=${agent}`;
    return `tfd.attach(${JSON.stringify(name)}${which})`;
  }

  dispose(): void {
    this._isDisposed = true;
    this.watch(false);
    Signal.clearData(this);
  }

  private _isUnique(name: string): boolean {
    return this._clusters.filter(cluster => cluster.name === name).length < 2;
  }

  private async _act(cluster: IDetached, body: Record<string, unknown>): Promise<void> {
    try {
      this._latest += 1;
      const { name, agent } = cluster;
      this._update(this._latest, await this._request(name, { ...body, agent }));
    } finally {
      this.refresh();
    }
  }

  private async _poll(): Promise<void> {
    const request = (this._latest += 1);
    clearTimeout(this._timer);
    try {
      this._update(request, await this._request());
    } catch {
      // The server is unreachable or busy: keep the last list until the next reply.
    }
    if (request === this._latest && this._watched && !this._missing) {
      const poll = () => {
        if (document.hidden) {
          this._timer = setTimeout(poll, LONGEST_MS);
        } else {
          void this._poll();
        }
      };
      this._timer = setTimeout(poll, this._pause);
      this._pause = Math.min(2 * this._pause, LONGEST_MS);
    }
  }

  private _update(request: number, clusters: IDetached[] | null): void {
    if (request === this._latest && !this._isDisposed) {
      this._missing = clusters === null;
      this._clusters = clusters ?? [];
      this._changed.emit();
    }
  }
}

/** Return the API of the server extension. */
export function detachedApi(settings: ServerConnection.ISettings): DetachedApi {
  return async (name, body) => {
    const address = `${settings.baseUrl}tfd-notebook/clusters`;
    const response = await (body
      ? ServerConnection.makeRequest(
          `${address}/${encodeURIComponent(name!)}`,
          { method: 'POST', body: JSON.stringify(body) },
          settings
        )
      : // Polling must not count as activity: it would prevent the shutdown of an idle server.
        ServerConnection.makeRequest(`${address}?no_track_activity=1`, {}, settings));
    const reply = (await response.json().catch(() => null)) as
      ({ clusters?: IDetached[]; message?: string } & Partial<IProblem>) | null;
    if (response.ok && Array.isArray(reply?.clusters)) {
      return reply.clusters;
    }
    if (!body && response.status === 404) {
      return null;
    }
    const what =
      reply?.what ?? reply?.message ?? `the server replied with status ${response.status}`;
    throw new CommandError({ what, fix: reply?.fix });
  };
}
