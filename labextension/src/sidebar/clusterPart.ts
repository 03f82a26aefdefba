// A cluster in the panel: a collapsible row with all views.

import { ClusterView } from '../shared/clusterView';
import { h, setAttribute, setTruncatedText, setText, show } from '../shared/dom';
import { signed, tone } from '../shared/figures';
import type { ICluster } from '../shared/protocol';
import type { IActions } from '../shared/view';
import type { IKernel } from './kernels';

/** The collapsed parts by key. */
export interface IFoldState {
  has(key: string): boolean;
  set(key: string, folded: boolean): void;
}

export class ClusterPart {
  readonly node = h('div', { class: 'tfd-lab-cluster' });

  private readonly _name = h('span', { class: 'tfd-lab-name tfd-cut' });
  private readonly _state = h('span', { class: 'tfd-lab-state' });
  private readonly _toggle: HTMLButtonElement;
  private _view: ClusterView | null = null;

  constructor(
    private readonly _kernel: IKernel,
    private readonly _cluster: string,
    private readonly _actions: IActions,
    private readonly _folds: IFoldState
  ) {
    this._toggle = h(
      'button',
      { type: 'button', class: 'tfd-lab-fold', onclick: () => this._fold(this._view !== null) },
      this._name,
      this._state
    );
    setTruncatedText(this._name, _cluster);
    this.node.append(this._toggle);
    this._fold(_folds.has(this._key));
  }

  update(cluster: ICluster): void {
    const total = (counts: Record<string, number>) =>
      Object.values(counts).reduce((sum, count) => sum + count, 0);
    const nodes = Object.values(cluster.spark?.nodes ?? {});
    const running = nodes.filter(node => node.state === 'running').length;
    const ready = total(cluster.observed) + running;
    const planned = total(cluster.planned) + (cluster.spark?.needed ?? 0);
    setText(this._state, `${signed(cluster.state)} ${ready}/${planned}`);
    setAttribute(this._state, 'class', `tfd-lab-state tfd-${tone(cluster.state)}`);
  }

  dispose(): void {
    this._view?.dispose();
    this.node.remove();
  }

  private get _key(): string {
    return `${this._kernel.path}:${this._cluster}`;
  }

  private _fold(folded: boolean): void {
    this._folds.set(this._key, folded);
    setAttribute(this._toggle, 'aria-expanded', folded ? 'false' : 'true');
    show(this._state, folded);
    if (folded) {
      this._view?.dispose();
      this._view = null;
    } else if (!this._view) {
      this._view = new ClusterView(this._kernel.client.link, this._cluster, this._actions, {
        compact: true
      });
      this.node.append(this._view.node);
    }
  }
}
