// All kernels of the server that run for somebody, each with its reader.

import type { Kernel, KernelSpec, Session } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { type ISignal, Signal } from '@lumino/signaling';

import { type ICluster, hasEnded } from '../shared/protocol';
import { type Connection, KernelReader } from './reader';

/** What is needed of JupyterLab's service manager. */
export interface IServices {
  kernels: { connectTo(options: Kernel.IKernelConnection.IOptions): Connection };
  kernelspecs: { specs: KernelSpec.ISpecModels | null };
  sessions: {
    ready: Promise<void>;
    running(): IterableIterator<Session.IModel>;
    runningChanged: ISignal<unknown, Session.IModel[]>;
  };
}

/** A kernel, called after what it runs for. */
export interface IKernel {
  id: string;
  /** Of the notebook or console. */
  path: string;
  name: string;
  /** Of the kernel, as users chose it. */
  spec: string;
  reader: KernelReader;
}

export interface IFound {
  kernel: IKernel;
  cluster: ICluster;
}

export class Kernels implements IDisposable {
  /** Whether the server has said which kernels run. */
  ready = false;

  private _all = new Map<string, IKernel>();
  private _ends = new Map<string, () => void>();
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

  /** Kernels came, went, or are in another state. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Something of their clusters changed, at most once a frame. */
  get updated(): ISignal<this, void> {
    return this._updated;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  /** In the order of their names. */
  get all(): IKernel[] {
    return [...this._all.values()].sort(
      (a, b) => a.name.localeCompare(b.name) || a.id.localeCompare(b.id)
    );
  }

  /** The kernel of this id, or else the one that runs for this path. */
  find(id: string, path = ''): IKernel | undefined {
    return this._all.get(id) ?? this.all.find(kernel => path !== '' && kernel.path === path);
  }

  /** The clusters that live, of all kernels. */
  living(): IFound[] {
    return this.all.flatMap(kernel =>
      clustersOf(kernel)
        .filter(cluster => !hasEnded(cluster))
        .map(cluster => ({ kernel, cluster }))
    );
  }

  /** Say goodbye to all kernels: the page is left. */
  leave(): void {
    this._all.forEach(({ reader }) => reader.leave());
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
      // A console may share the kernel of a notebook, after which it is called then.
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
      changed = this._take(id, session) || changed;
    }
    if (changed || this._all.size === 0) {
      this._changed.emit();
    }
  }

  private _take(id: string, session: Session.IModel): boolean {
    const model = session.kernel!;
    const named = {
      path: session.path,
      name: session.name || session.path,
      spec: this._services.kernelspecs.specs?.kernelspecs[model.name]?.display_name ?? model.name
    };
    const known = this._all.get(id);
    if (known) {
      const same = known.name === named.name && known.path === named.path;
      Object.assign(known, named);
      return !same;
    }
    const connection = this._services.kernels.connectTo({
      model,
      // With it, every widget that the kernel opens would be closed here.
      handleComms: false
    });
    const reader = new KernelReader(connection, this._version);
    reader.changed.connect(() => this._changed.emit());
    this._ends.set(
      id,
      reader.link.onChange(() => this._updated.emit())
    );
    this._all.set(id, { id, ...named, reader });
    return true;
  }

  private _drop(id: string): void {
    const reader = this._all.get(id)!.reader;
    this._all.delete(id);
    this._ends.get(id)?.();
    this._ends.delete(id);
    reader.dispose();
  }
}

/** The clusters that a kernel has now; not those that it had before it ended. */
export function clustersOf(kernel: IKernel): ICluster[] {
  return kernel.reader.link.state === 'gone' ? [] : kernel.reader.link.clusters;
}
