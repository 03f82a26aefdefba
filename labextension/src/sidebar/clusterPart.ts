// A cluster in the panel: a collapsible row with all views.

import { AlertWatch, type IAlert } from '../shared/alertStrip';
import { ClusterView } from '../shared/clusterView';
import { button, h, setAttribute, setTruncatedText, setText, show } from '../shared/dom';
import { sign, tone, total } from '../shared/figures';
import { hasEnded, type ICluster } from '../shared/protocol';
import type { IActions } from '../shared/view';
import type { IKernel } from './kernels';

/** The parts that the user has collapsed or expanded, by key. */
export interface IFoldState {
  get(key: string): boolean | undefined;
  set(key: string, folded: boolean | undefined): void;
}

export class ClusterPart {
  readonly node = h('div', { class: 'tfd-lab-cluster' });

  private readonly _name = h('span', { class: 'tfd-lab-name tfd-cut' });
  private readonly _state = h('span', { class: 'tfd-lab-state' });
  private readonly _toggle: HTMLButtonElement;
  private readonly _dismiss: HTMLButtonElement;
  private readonly _alerts = new AlertWatch((alerts, cluster) => this._draw(cluster, alerts[0]));
  private _view: ClusterView | null = null;
  private _isFolded = false;
  private _isExpandedByDefault = true;

  constructor(
    private readonly _kernel: IKernel,
    private readonly _cluster: string,
    private readonly _actions: IActions,
    private readonly _folds: IFoldState,
    onDismiss: () => void = () => undefined
  ) {
    this._toggle = h(
      'button',
      { type: 'button', class: 'tfd-lab-fold', onclick: () => this._onClick() },
      this._name,
      this._state
    );
    setTruncatedText(this._name, _cluster);
    this._dismiss = button('Dismiss', 'Remove this ended cluster from the panel', onDismiss);
    this._dismiss.className = 'tfd-link';
    this.node.append(h('div', { class: 'tfd-lab-line' }, this._toggle, this._dismiss));
  }

  update(cluster: ICluster, isExpandedByDefault = true): void {
    this._isExpandedByDefault = isExpandedByDefault;
    this._fold(this._folds.get(this._key) ?? !isExpandedByDefault);
    show(this._dismiss, hasEnded(cluster));
    this._alerts.show(cluster);
  }

  dispose(): void {
    this._alerts.dispose();
    this._view?.dispose();
    this.node.remove();
  }

  /** Show the state with the symbol, the color and the text of the most severe problem. */
  private _draw(cluster: ICluster, alert: IAlert | undefined): void {
    const nodes = Object.values(cluster.spark?.nodes ?? {});
    const running = nodes.filter(node => node.state === 'running').length;
    const ready = total(cluster.observed) + running;
    const planned = total(cluster.planned) + (cluster.spark?.needed ?? 0);
    const severity = alert?.severity ?? cluster.state;
    setText(this._state, `${sign(severity)} ${cluster.state} ${ready}/${planned}`);
    setAttribute(this._state, 'class', `tfd-lab-state tfd-${tone(severity)}`);
    setAttribute(this._toggle, 'title', alert?.text);
  }

  private get _key(): string {
    return `${this._kernel.path}:${this._cluster}`;
  }

  private _onClick(): void {
    const folded = !this._isFolded;
    this._folds.set(this._key, folded === this._isExpandedByDefault ? folded : undefined);
    this._fold(folded);
  }

  private _fold(folded: boolean): void {
    this._isFolded = folded;
    setAttribute(this._toggle, 'aria-expanded', folded ? 'false' : 'true');
    show(this._state, folded);
    if (!folded && !this._view) {
      this._view = new ClusterView(this._kernel.client.link, this._cluster, this._actions, {
        compact: true
      });
      this.node.append(this._view.node);
    }
    if (this._view) {
      show(this._view.node, !folded);
    }
  }
}
