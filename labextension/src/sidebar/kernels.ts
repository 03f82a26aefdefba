// All kernels with a session, each with its client.

import type { Kernel, KernelSpec, Session } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { type ISignal, Signal } from '@lumino/signaling';

import { type ICluster, hasEnded } from '../shared/protocol';
import { type Connection, KernelClient } from './kernelClient';

/** The part of JupyterLab's service manager that is used here. */
export interface IServices {
  kernels: { connectTo(options: Kernel.IKernelConnection.IOptions): Connection };
  kernelspecs: { specs: KernelSpec.ISpecModels | null };
  sessions: {
    ready: Promise<void>;
    running(): IterableIterator<Session.IModel>;
    runningChanged: ISignal<unknown, Session.IModel[]>;
  };
}

/** A kernel, named after its notebook or console. */
export interface IKernel {
  id: string;
  /** Path of the notebook or console. */
  path: string;
  name: string;
  /** Display name of the kernel spec. */
  spec: string;
  client: KernelClient;
}

export interface IRunningCluster {
  kernel: IKernel;
  cluster: ICluster;
}

export class Kernels implements IDisposable {
  /** Whether the server has sent its list of kernels. */
  ready = false;

  private _all = new Map<string, IKernel>();
  private _unsubscribe = new Map<string, () => void>();
  private _changed = new Signal<this, void>(this);
  private _updated = new Signal<this, void>(this);
  private _isDisposed = false;

  constructor(
    private readonly _services: IServices,
    private readonly _version: string
  ) {
    const { sessions } = _services;
    sessions.runningChanged.connect(this._update, this);
    void sessions.ready.then(() => {
      if (!this._isDisposed) {
        this.ready = true;
        this._update();
      }
    });
  }

  /** Emitted when kernels start, end or change their state. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Emitted when clusters change, at most once per frame. */
  get updated(): ISignal<this, void> {
    return this._updated;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  /** All kernels, sorted by name. */
  get all(): IKernel[] {
    return [...this._all.values()].sort(
      (a, b) => a.name.localeCompare(b.name) || a.id.localeCompare(b.id)
    );
  }

  /** Return the kernel with this id, otherwise the kernel of this path. */
  find(id: string, path = ''): IKernel | undefined {
    return this._all.get(id) ?? this.all.find(kernel => path !== '' && kernel.path === path);
  }

  /** Return the running clusters of all kernels. */
  runningClusters(): IRunningCluster[] {
    return this.all.flatMap(kernel =>
      clustersOf(kernel)
        .filter(cluster => !hasEnded(cluster))
        .map(cluster => ({ kernel, cluster }))
    );
  }

  /** Send bye messages to all kernels before the page is unloaded. */
  sendBye(): void {
    this._all.forEach(({ client }) => client.sendBye());
  }

  dispose(): void {
    if (this._isDisposed) {
      return;
    }
    this._isDisposed = true;
    this._services.sessions.runningChanged.disconnect(this._update, this);
    for (const id of [...this._all.keys()]) {
      this._drop(id);
    }
    Signal.clearData(this);
  }

  private _update(): void {
    const running = new Map<string, Session.IModel>();
    for (const session of this._services.sessions.running()) {
      const id = session.kernel?.id;
      // If a console shares the kernel of a notebook, the notebook names it.
      if (id && (!running.has(id) || session.type === 'notebook')) {
        running.set(id, session);
      }
    }
    let changed = false;
    for (const id of [...this._all.keys()]) {
      if (!running.has(id)) {
        this._drop(id);
        changed = true;
      }
    }
    for (const [id, session] of running) {
      changed = this._addOrUpdate(id, session) || changed;
    }
    if (changed || this._all.size === 0) {
      this._changed.emit();
    }
  }

  private _addOrUpdate(id: string, session: Session.IModel): boolean {
    const model = session.kernel!;
    const info = {
      path: session.path,
      name: session.name || session.path,
      spec: this._services.kernelspecs.specs?.kernelspecs[model.name]?.display_name ?? model.name
    };
    const known = this._all.get(id);
    if (known) {
      const same = known.name === info.name && known.path === info.path;
      Object.assign(known, info);
      return !same;
    }
    const connection = this._services.kernels.connectTo({
      model,
      // With comm handling, this connection would close every widget comm of the kernel.
      handleComms: false
    });
    const client = new KernelClient(connection, this._version);
    client.changed.connect(() => this._changed.emit());
    this._unsubscribe.set(
      id,
      client.link.onChange(() => this._updated.emit())
    );
    this._all.set(id, { id, ...info, client });
    return true;
  }

  private _drop(id: string): void {
    const client = this._all.get(id)!.client;
    this._all.delete(id);
    this._unsubscribe.get(id)?.();
    this._unsubscribe.delete(id);
    client.dispose();
  }
}

/** Return the clusters of a kernel; none after it has ended. */
export function clustersOf(kernel: IKernel): ICluster[] {
  return kernel.client.link.state === 'ended' ? [] : kernel.client.link.clusters;
}
