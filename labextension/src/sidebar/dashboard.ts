// One cluster in the main area: all views of it, side by side where there is room.

import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import { ClusterView } from '../shared/clusterView';
import { ensureStyle } from '../shared/css';
import { h, setText, show } from '../shared/dom';
import type { Link } from '../shared/link';
import { LogsView } from '../shared/logsView';
import type { ICluster } from '../shared/protocol';
import { StepperView } from '../shared/stepperView';
import { ThroughputView } from '../shared/throughputView';
import { TimelineView } from '../shared/timelineView';
import { ValuesView } from '../shared/valuesView';
import type { IActions, IView } from '../shared/view';
import type { IKernel } from './kernels';
import type { IClusters } from './tokens';

/** What a dashboard is restored from. */
export interface IPlace {
  kernel: string;
  path: string;
  cluster: string;
}

type Kind = new (link: Link, cluster: string, actions: IActions) => IView;

export class Dashboard extends Widget {
  private readonly _missing = h('div', { class: 'tfd-lab-missing' });
  private readonly _left = h('div', { class: 'tfd-lab-column' });
  private readonly _right = h('div', { class: 'tfd-lab-column' });
  private readonly _views: IView[] = [];
  private _kernel: IKernel | undefined;
  private _coordinated = false;
  private _tasks: TaskLogs | null = null;
  private _readOnly = false;

  constructor(
    private readonly _clusters: IClusters,
    readonly place: IPlace
  ) {
    super();
    ensureStyle();
    this.addClass('tfd-lab');
    this.node.append(
      h(
        'div',
        { class: 'tfd-live tfd-lab-dashboard', tabindex: -1 },
        this._missing,
        h('div', { class: 'tfd-lab-columns' }, this._left, this._right)
      )
    );
    _clusters.kernels.changed.connect(this.update, this);
    _clusters.kernels.updated.connect(this.update, this);
    _clusters.settingsChanged.connect(this.update, this);
    this.update();
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this._clear();
      Signal.clearData(this);
    }
    super.dispose();
  }

  protected override onUpdateRequest(): void {
    const { kernels, settings } = this._clusters;
    const { kernel: id, path, cluster } = this.place;
    const kernel = kernels.find(id, path);
    if (kernel && (kernel !== this._kernel || settings.readOnly !== this._readOnly)) {
      this._clear();
      this._kernel = kernel;
      this._readOnly = settings.readOnly;
      this._show(kernel);
    }
    const seen = kernel?.reader.link.cluster(cluster);
    if (seen) {
      this._fill(seen);
    }
    const words = this._trouble(kernel);
    setText(this._missing, words);
    show(this._missing, words !== '');
  }

  /** What the views themselves cannot say. */
  private _trouble(kernel: IKernel | undefined): string {
    const { cluster, path } = this.place;
    if (!kernel) {
      if (!this._clusters.kernels.ready) {
        return 'Looking for the kernel …';
      }
      const where = path ? ` of ${path}` : '';
      return this._kernel
        ? `The kernel${where} has ended. Next: start one, and the cluster in it; it is shown here then.`
        : `The kernel${where}, in which the cluster ${cluster} was, does not run. Next: open the notebook and start the cluster, or close this tab.`;
    }
    switch (kernel.reader.state) {
      case 'unloaded':
        return 'The kernel has not loaded tfd_notebook. Next: run %load_ext tfd_notebook in it, and start the cluster.';
      case 'foreign':
        return 'This kernel is no Python kernel any more.';
      default:
        return '';
    }
  }

  private _show(kernel: IKernel): void {
    this._add(this._left, '', ClusterView);
    this._add(this._right, 'Throughput', ThroughputView);
    this._tasks = new TaskLogs(
      kernel.reader.link,
      this.place.cluster,
      this._clusters.actions(kernel, 'tab')
    );
    this._left.append(this._tasks.node);
  }

  private _fill(seen: ICluster): void {
    this._tasks?.update(seen.order);
    if (seen.coordinator && !this._coordinated) {
      this._coordinated = true;
      this._add(this._left, 'Steps', StepperView, this._tasks?.node);
      this._add(this._right, 'Worker timeline', TimelineView);
      this._add(this._right, 'Values', ValuesView);
    }
  }

  private _add(column: HTMLElement, title: string, View: Kind, before?: HTMLElement): void {
    const kernel = this._kernel!;
    const view = new View(
      kernel.reader.link,
      this.place.cluster,
      this._clusters.actions(kernel, 'tab')
    );
    this._views.push(view);
    column.insertBefore(card(title, view.node), before ?? null);
  }

  private _clear(): void {
    this._views.splice(0).forEach(view => view.dispose());
    this._tasks?.dispose();
    this._tasks = null;
    this._coordinated = false;
    this._left.replaceChildren();
    this._right.replaceChildren();
  }
}

/** The log of one task, which is followed from when it is chosen. */
class TaskLogs {
  readonly node: HTMLElement;

  private readonly _select = h('select', { 'aria-label': 'task whose log is shown' });
  private readonly _place = h('div');
  private _known = '';
  private _view: LogsView | null = null;

  constructor(
    private readonly _link: Link,
    private readonly _cluster: string,
    private readonly _actions: IActions
  ) {
    this._select.addEventListener('change', () => this._choose());
    this.node = card('Log', h('div', { class: 'tfd-row' }, this._select), this._place);
  }

  update(tasks: readonly string[]): void {
    const known = tasks.join('\n');
    if (known !== this._known) {
      this._known = known;
      const chosen = this._select.value;
      this._select.replaceChildren(
        h('option', { value: '' }, 'choose a task …'),
        ...tasks.map(task => h('option', { value: task }, task))
      );
      this._select.value = tasks.includes(chosen) ? chosen : '';
      if (this._select.value !== chosen) {
        this._choose();
      }
    }
  }

  dispose(): void {
    this._view?.dispose();
    this.node.remove();
  }

  private _choose(): void {
    this._view?.dispose();
    this._view = null;
    const task = this._select.value;
    if (task) {
      this._view = new LogsView(this._link, this._cluster, task, this._actions);
      this._place.append(this._view.node);
    }
  }
}

function card(title: string, ...children: Node[]): HTMLElement {
  const head = title ? h('h3', {}, title) : null;
  return h('div', { class: 'tfd-lab-card' }, head, ...children);
}
