// Views of one cluster in tabs; each is created when its tab is first opened.

import { ClusterView } from '../shared/clusterView';
import { ensureStyle } from '../shared/css';
import { h, KeyedList, show, uniqueId } from '../shared/dom';
import type { Link } from '../shared/link';
import type { ICluster } from '../shared/protocol';
import { hasTimeline } from '../shared/ranks';
import { StepperView } from '../shared/stepperView';
import { ThroughputView } from '../shared/throughputView';
import { TimelineView } from '../shared/timelineView';
import { ValuesView } from '../shared/valuesView';
import type { IActions, IView } from '../shared/view';

type Kind = new (link: Link, cluster: string, actions: IActions) => IView;

export const KINDS: Record<string, Kind> = {
  cluster: ClusterView,
  throughput: ThroughputView,
  values: ValuesView,
  timeline: TimelineView,
  stepper: StepperView
};

const hasCoordinator = ({ coordinator }: ICluster) => coordinator !== undefined;

/** The tabs, each with what a cluster needs for it. A tab stays once it is shown. */
const TABS: readonly { kind: string; title: string; needs?: (cluster: ICluster) => boolean }[] = [
  { kind: 'cluster', title: 'Cluster' },
  { kind: 'throughput', title: 'Throughput' },
  { kind: 'values', title: 'Values', needs: hasCoordinator },
  { kind: 'timeline', title: 'Timeline', needs: hasTimeline },
  { kind: 'stepper', title: 'Steps', needs: hasCoordinator }
];

interface ITab {
  button: HTMLButtonElement;
  panel: HTMLElement;
  view: IView | null;
}

export class Tabs implements IView {
  readonly node = h('div', { class: 'tfd-live tfd-tabbed' });
  private readonly _list = h('div', { class: 'tfd-tabs', role: 'tablist' });
  private readonly _tabs = new Map<string, ITab>();
  private readonly _buttons: KeyedList<HTMLButtonElement>;
  private readonly _end: () => void;
  private _selected = 'cluster';
  private _shown: string[] = [];

  constructor(
    private readonly _link: Link,
    private readonly _cluster: string,
    private readonly _actions: IActions
  ) {
    ensureStyle();
    this._list.setAttribute('aria-label', `views of ${_cluster}`);
    this._buttons = new KeyedList(this._list, kind => this._createTab(kind).button);
    this._list.addEventListener('keydown', event => this._onKey(event));
    this.node.append(this._list);
    this._end = _link.onChange(() => this._update());
    this._update();
  }

  dispose(): void {
    this._end();
    for (const { view } of this._tabs.values()) {
      view?.dispose();
    }
    this.node.remove();
  }

  private _update(): void {
    const snapshot = this._link.cluster(this._cluster);
    this._shown = TABS.filter(
      ({ kind, needs }) => !needs || this._shown.includes(kind) || (snapshot && needs(snapshot))
    ).map(({ kind }) => kind);
    this._buttons.update(this._shown, (button, kind) => {
      const selected = kind === this._selected;
      button.setAttribute('aria-selected', String(selected));
      button.tabIndex = selected ? 0 : -1;
    });
    for (const [kind, tab] of this._tabs) {
      show(tab.panel, kind === this._selected);
      if (kind === this._selected && !tab.view) {
        tab.view = new KINDS[kind](this._link, this._cluster, this._actions);
        tab.panel.append(tab.view.node);
      }
    }
  }

  private _createTab(kind: string): ITab {
    const [id, panelId] = [uniqueId(), uniqueId()];
    const title = TABS.find(tab => tab.kind === kind)!.title;
    const button = h(
      'button',
      {
        type: 'button',
        role: 'tab',
        id,
        'aria-controls': panelId,
        onclick: () => this._select(kind)
      },
      title
    );
    const panel = h('div', { role: 'tabpanel', id: panelId, 'aria-labelledby': id, hidden: true });
    const tab = { button, panel, view: null };
    this._tabs.set(kind, tab);
    this.node.append(panel);
    return tab;
  }

  private _select(kind: string): void {
    this._selected = kind;
    this._update();
  }

  private _onKey(event: KeyboardEvent): void {
    const kinds = this._shown;
    const position = kinds.indexOf(this._selected);
    const next: Record<string, number> = {
      ArrowRight: (position + 1) % kinds.length,
      ArrowLeft: (position + kinds.length - 1) % kinds.length,
      Home: 0,
      End: kinds.length - 1
    };
    if (event.key in next) {
      event.preventDefault();
      event.stopPropagation();
      this._select(kinds[next[event.key]]);
      this._tabs.get(this._selected)?.button.focus();
    }
  }
}
