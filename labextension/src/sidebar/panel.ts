// The panel: Python kernels with their clusters, or a message without clusters.

import type { Message } from '@lumino/messaging';
import { type ISignal, Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import { ensureStyle } from '../shared/css';
import { h, KeyedList, setText, show } from '../shared/dom';
import type { IFoldState } from './clusterPart';
import { DetachedPart } from './detachedPart';
import { emptyMessage } from './empty';
import { KernelPart } from './kernelPart';
import type { IKernel } from './kernels';
import type { IClusters } from './tokens';

export class ClustersPanel extends Widget {
  private readonly _body = h('div', { class: 'tfd-live tfd-lab-panel', tabindex: -1 });
  private readonly _what = h('p');
  private readonly _next = h('p', { class: 'tfd-quiet' });
  private readonly _empty = h('div', { class: 'tfd-lab-empty' }, this._what, this._next);
  private readonly _list = h('div');
  private readonly _detached: DetachedPart;
  private readonly _parts = new Map<HTMLElement, KernelPart>();
  private readonly _keyed: KeyedList<HTMLElement>;
  private readonly _folds = new Map<string, boolean>();
  private readonly _foldsChanged = new Signal<this, void>(this);
  private _readOnly: boolean;
  /** The kernel of the latest active notebook that has a Python kernel. */
  private _active: IKernel | undefined;
  /** The attached clusters at the last request for detached ones. */
  private _attached = '';

  constructor(private readonly _clusters: IClusters) {
    super();
    ensureStyle();
    this.addClass('tfd-lab');
    this.addClass('tfd-lab-side');
    this._detached = new DetachedPart(_clusters.detached, _clusters);
    this._body.append(this._empty, this._detached.node, this._list);
    this.node.append(this._body);
    this._readOnly = _clusters.settings.readOnly;
    this._keyed = new KeyedList(
      this._list,
      id => this._createPart(id),
      node => {
        this._parts.get(node)?.dispose();
        this._parts.delete(node);
      }
    );
    _clusters.kernels.changed.connect(this.update, this);
    _clusters.kernels.updated.connect(this._onUpdated, this);
    _clusters.settingsChanged.connect(this._onSettings, this);
    _clusters.detached.changed.connect(this.update, this);
    _clusters.activeChanged.connect(this.update, this);
    this.update();
  }

  /** Emitted when the user collapses or expands a part. */
  get foldsChanged(): ISignal<this, void> {
    return this._foldsChanged;
  }

  /** The parts that the user has collapsed (true) or expanded (false). */
  get folds(): Record<string, boolean> {
    return Object.fromEntries(this._folds);
  }

  set folds(folds: Record<string, boolean>) {
    this._folds.clear();
    Object.entries(folds).forEach(([key, folded]) => this._folds.set(key, folded));
    this.update();
  }

  /** Show the form for a new cluster in the kernel with this id. */
  start(id: string): void {
    for (const part of this._parts.values()) {
      if (part.kernel.id === id) {
        part.start();
      }
    }
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this._keyed.update([], () => undefined);
      this._detached.dispose();
      Signal.clearData(this);
    }
    super.dispose();
  }

  protected override onActivateRequest(_message: Message): void {
    if (!this._body.contains(document.activeElement)) {
      const first = this._body.querySelector<HTMLElement>('button:not([hidden]):not(:disabled)');
      (first ?? this._body).focus();
    }
  }

  protected override onBeforeShow(_message: Message): void {
    this.update();
  }

  protected override onAfterShow(_message: Message): void {
    this._clusters.detached.watch(this.isVisible);
  }

  protected override onAfterAttach(_message: Message): void {
    this._clusters.detached.watch(this.isVisible);
  }

  protected override onAfterHide(_message: Message): void {
    this._clusters.detached.watch(false);
  }

  protected override onBeforeDetach(_message: Message): void {
    this._clusters.detached.watch(false);
  }

  protected override onUpdateRequest(_message: Message): void {
    const { detached, kernels, settings } = this._clusters;
    const all = kernels.all;
    const attached = JSON.stringify(
      kernels
        .runningClusters()
        .map(({ kernel, cluster }) => [kernel.id, cluster.name, cluster.lease])
    );
    if (attached !== this._attached) {
      this._attached = attached;
      detached.refresh();
    }
    this._detached.update(settings.readOnly);
    const shown = all.filter(({ client }) => client.state !== 'unsupported');
    this._activate(shown);
    const isFirst = (kernel: IKernel) => Number(kernel === this._active);
    this._keyed.update(
      shown.sort((a, b) => isFirst(b) - isFirst(a)).map(kernel => kernel.id),
      (node, id) =>
        this._parts.get(node)!.update(this._active === undefined || id === this._active.id)
    );
    const counts = new Map([...this._parts.values()].map(part => [part.kernel, part.clusterCount]));
    const message = emptyMessage(
      kernels.ready,
      all.map(kernel => ({ state: kernel.client.state, clusters: counts.get(kernel) ?? 0 })),
      settings.readOnly
    );
    show(this._empty, message !== null);
    if (message) {
      setText(this._what, message.what);
      setText(this._next, message.next);
      // The next step is the form while it is open.
      show(this._next, ![...this._parts.values()].some(part => part.isStarting));
    }
  }

  /** Follow the active notebook; another document in front changes nothing. */
  private _activate(shown: readonly IKernel[]): void {
    const active = [this._clusters.activeKernel, this._active].find(
      kernel => kernel && shown.includes(kernel)
    );
    if (active !== this._active) {
      this._active = active;
      this.node.scrollTop = 0;
    }
  }

  private _onUpdated(): void {
    if (this.isVisible) {
      this.update();
    }
  }

  private _onSettings(): void {
    const { readOnly } = this._clusters.settings;
    if (readOnly !== this._readOnly) {
      this._readOnly = readOnly;
      this._keyed.update([], () => undefined);
    }
    this.update();
  }

  private _createPart(id: string): HTMLElement {
    const folds: IFoldState = {
      get: key => this._folds.get(key),
      set: (key, folded) => {
        if (folded === undefined) {
          this._folds.delete(key);
        } else {
          this._folds.set(key, folded);
        }
        this._foldsChanged.emit();
      }
    };
    const part = new KernelPart(this._clusters.kernels.find(id)!, this._clusters, folds, () =>
      this.update()
    );
    this._parts.set(part.node, part);
    return part.node;
  }
}
