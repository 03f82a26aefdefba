// Views of one cluster under tabs; each is made when it is looked at first.

import { ClusterView } from '../shared/clusterView';
import { ensureStyle } from '../shared/css';
import { h, Keyed, show, uniqueId } from '../shared/dom';
import type { Link } from '../shared/link';
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

const TABS: readonly { kind: string; title: string; coordinator: boolean }[] = [
  { kind: 'cluster', title: 'Cluster', coordinator: false },
  { kind: 'throughput', title: 'Throughput', coordinator: false },
  { kind: 'values', title: 'Values', coordinator: true },
  { kind: 'timeline', title: 'Timeline', coordinator: true },
  { kind: 'stepper', title: 'Steps', coordinator: true }
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
  private readonly _buttons: Keyed<HTMLButtonElement>;
  private readonly _end: () => void;
  private _chosen = 'cluster';
  /** Once there was a coordinator, its views stay. */
  private _coordinated = false;

  constructor(
    private readonly _link: Link,
    private readonly _cluster: string,
    private readonly _actions: IActions
  ) {
    ensureStyle();
    this._list.setAttribute('aria-label', `views of ${_cluster}`);
    this._buttons = new Keyed(this._list, kind => this._make(kind).button);
    this._list.addEventListener('keydown', event => this._key(event));
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

  private get _shown(): string[] {
    return TABS.filter(tab => this._coordinated || !tab.coordinator).map(tab => tab.kind);
  }

  private _update(): void {
    this._coordinated ||= this._link.cluster(this._cluster)?.coordinator !== undefined;
    this._buttons.update(this._shown, (button, kind) => {
      const chosen = kind === this._chosen;
      button.setAttribute('aria-selected', String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    });
    for (const [kind, tab] of this._tabs) {
      show(tab.panel, kind === this._chosen);
      if (kind === this._chosen && !tab.view) {
        tab.view = new KINDS[kind](this._link, this._cluster, this._actions);
        tab.panel.append(tab.view.node);
      }
    }
  }

  private _make(kind: string): ITab {
    const [id, panelId] = [uniqueId(), uniqueId()];
    const title = TABS.find(tab => tab.kind === kind)!.title;
    const button = h(
      'button',
      { type: 'button', role: 'tab', id, 'aria-controls': panelId, onclick: () => this._go(kind) },
      title
    );
    const panel = h('div', { role: 'tabpanel', id: panelId, 'aria-labelledby': id, hidden: true });
    const tab = { button, panel, view: null };
    this._tabs.set(kind, tab);
    this.node.append(panel);
    return tab;
  }

  private _go(kind: string): void {
    this._chosen = kind;
    this._update();
  }

  private _key(event: KeyboardEvent): void {
    const kinds = this._shown;
    const place = kinds.indexOf(this._chosen);
    const next: Record<string, number> = {
      ArrowRight: (place + 1) % kinds.length,
      ArrowLeft: (place + kinds.length - 1) % kinds.length,
      Home: 0,
      End: kinds.length - 1
    };
    if (event.key in next) {
      event.preventDefault();
      event.stopPropagation();
      this._go(kinds[next[event.key]]);
      this._tabs.get(this._chosen)?.button.focus();
    }
  }
}
