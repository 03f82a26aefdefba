// The panel: every Python kernel, its clusters, or why there is nothing to see.

import type { Message } from '@lumino/messaging';
import { type ISignal, Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import { ensureStyle } from '../shared/css';
import { h, Keyed, setText, show } from '../shared/dom';
import type { IFolds } from './clusterPart';
import { DetachedPart } from './detachedPart';
import { emptyWords } from './empty';
import { KernelPart } from './kernelPart';
import { clustersOf, type IKernel } from './kernels';
import type { IClusters } from './tokens';

export class ClustersPanel extends Widget {
  private readonly _body = h('div', { class: 'tfd-live tfd-lab-panel', tabindex: -1 });
  private readonly _what = h('p');
  private readonly _next = h('p', { class: 'tfd-quiet' });
  private readonly _empty = h('div', { class: 'tfd-lab-empty' }, this._what, this._next);
  private readonly _list = h('div');
  private readonly _detached: DetachedPart;
  private readonly _parts = new Map<HTMLElement, KernelPart>();
  private readonly _keyed: Keyed<HTMLElement>;
  private readonly _folded = new Set<string>();
  private readonly _foldsChanged = new Signal<this, void>(this);
  private _readOnly: boolean;
  /** Which clusters the kernels had when it was looked for those that none has. */
  private _held = '';

  constructor(private readonly _clusters: IClusters) {
    super();
    ensureStyle();
    this.addClass('tfd-lab');
    this.addClass('tfd-lab-side');
    this._detached = new DetachedPart(_clusters.detached, _clusters);
    this._body.append(this._empty, this._detached.node, this._list);
    this.node.append(this._body);
    this._readOnly = _clusters.settings.readOnly;
    this._keyed = new Keyed(
      this._list,
      id => this._make(id),
      node => {
        this._parts.get(node)?.dispose();
        this._parts.delete(node);
      }
    );
    _clusters.kernels.changed.connect(this.update, this);
    _clusters.kernels.updated.connect(this._onUpdated, this);
    _clusters.settingsChanged.connect(this._onSettings, this);
    _clusters.detached.changed.connect(this.update, this);
    this.update();
  }

  /** The user folded or unfolded something. */
  get foldsChanged(): ISignal<this, void> {
    return this._foldsChanged;
  }

  get folded(): string[] {
    return [...this._folded];
  }

  /** Fold what was folded before, and nothing else. */
  restore(folded: readonly string[]): void {
    this._folded.clear();
    folded.forEach(key => this._folded.add(key));
    this._rebuild();
  }

  /** Show the form for a new cluster in the kernel of this id. */
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
    const first = this._body.querySelector<HTMLElement>('button:not([hidden]):not(:disabled)');
    (first ?? this._body).focus();
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
    const held = JSON.stringify(
      kernels.living().map(({ kernel, cluster }) => [kernel.id, cluster.name, cluster.lease])
    );
    if (held !== this._held) {
      this._held = held;
      detached.look();
    }
    this._detached.update(settings.readOnly);
    // Those that have nothing to show or to offer only count; those that have most come first.
    const rank = (kernel: IKernel) =>
      clustersOf(kernel).length > 0 ? 0 : kernel.reader.state === 'loaded' ? 1 : 2;
    const shown = all
      .filter(({ reader }) => reader.state !== 'foreign')
      .sort((a, b) => rank(a) - rank(b));
    this._keyed.update(
      shown.map(kernel => kernel.id),
      node => this._parts.get(node)!.update()
    );
    const words = emptyWords(
      kernels.ready,
      all.map(kernel => ({ state: kernel.reader.state, clusters: clustersOf(kernel).length })),
      settings.readOnly
    );
    show(this._empty, words !== null);
    if (words) {
      setText(this._what, words.what);
      setText(this._next, words.next);
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
      this._rebuild();
    }
    this.update();
  }

  private _rebuild(): void {
    this._keyed.update([], () => undefined);
    this.update();
  }

  private _make(id: string): HTMLElement {
    const folds: IFolds = {
      has: key => this._folded.has(key),
      set: (key, folded) => {
        if (folded !== this._folded.has(key)) {
          this._folded[folded ? 'add' : 'delete'](key);
          this._foldsChanged.emit();
        }
      }
    };
    const part = new KernelPart(this._clusters.kernels.find(id)!, this._clusters, folds);
    this._parts.set(part.node, part);
    return part.node;
  }
}
