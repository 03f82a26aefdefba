// The dashboard: all views of one cluster in the main area.

import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import { ClusterView } from '../shared/clusterView';
import { ensureStyle } from '../shared/css';
import { h, setText, show } from '../shared/dom';
import { KpiRow } from '../shared/kpiRow';
import type { Link } from '../shared/link';
import { LogsView } from '../shared/logsView';
import type { ICluster } from '../shared/protocol';
import { hasTimeline } from '../shared/ranks';
import { StepperView } from '../shared/stepperView';
import { ThroughputView } from '../shared/throughputView';
import { TimelineView } from '../shared/timelineView';
import { ValuesView } from '../shared/valuesView';
import { type IActions, type IView, lastKnown, linkProblem } from '../shared/view';
import type { IKernel } from './kernels';
import type { IClusters } from './tokens';

/** The cluster of a dashboard, saved for layout restoration. */
export interface IDashboardTarget {
  kernel: string;
  path: string;
  cluster: string;
}

type Kind = new (link: Link, cluster: string, actions: IActions) => IView;

export class Dashboard extends Widget {
  private readonly _missing = h('div', { class: 'tfd-lab-missing' });
  private readonly _top = h('div', { class: 'tfd-lab-top' });
  private readonly _left = h('div', { class: 'tfd-lab-column' });
  private readonly _right = h('div', { class: 'tfd-lab-column' });
  private readonly _bottom = h('div', { class: 'tfd-lab-bottom' });
  private readonly _views: IView[] = [];
  private _kernel: IKernel | undefined;
  private _hasCoordinator = false;
  private _hasTimeline = false;
  private _tasks: TaskLogs | null = null;
  private _readOnly = false;

  constructor(
    private readonly _clusters: IClusters,
    readonly target: IDashboardTarget
  ) {
    super();
    ensureStyle();
    this.addClass('tfd-lab');
    this.node.append(
      h(
        'div',
        { class: 'tfd-live tfd-lab-dashboard', tabindex: -1 },
        this._missing,
        this._top,
        h('div', { class: 'tfd-lab-columns' }, this._left, this._right),
        this._bottom
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
    const { kernel: id, path, cluster } = this.target;
    const kernel = kernels.find(id, path);
    if (kernel && (kernel !== this._kernel || settings.readOnly !== this._readOnly)) {
      this._clear();
      this._kernel = kernel;
      this._readOnly = settings.readOnly;
      this._show(kernel);
    }
    const snapshot = kernel?.client.link.cluster(cluster);
    if (snapshot) {
      this._fill(snapshot);
    }
    const text = this._problem(kernel);
    setText(this._missing, text);
    show(this._missing, text !== '');
  }

  /** Return the problem that prevents the views from showing the cluster. */
  private _problem(kernel: IKernel | undefined): string {
    const { cluster, path } = this.target;
    if (!kernel) {
      if (!this._clusters.kernels.ready) {
        return 'Waiting for the kernel …';
      }
      const where = path ? ` of ${path}` : '';
      return this._kernel
        ? `The kernel${where} has ended.${lastKnown(this._kernel.client.link.lastMessage)}` +
            ' Next: restart it and start the cluster; this tab then shows it.'
        : `The kernel${where} of cluster ${cluster} is not running. Next: open the notebook and start the cluster, or close this tab.`;
    }
    const { link, state } = kernel.client;
    switch (state) {
      case 'unloaded':
        return (
          (link.lastMessage
            ? `The kernel was restarted, and its clusters have ended.${lastKnown(link.lastMessage)}`
            : 'The kernel has not loaded tfd_notebook.') +
          ' Next: run %load_ext tfd_notebook and start the cluster.'
        );
      case 'unsupported':
        return 'This kernel is no longer a Python kernel.';
      default:
        return linkProblem(link);
    }
  }

  private _show(kernel: IKernel): void {
    this._top.append(this._create(KpiRow).node);
    this._add(this._left, '', ClusterView);
    this._add(this._right, 'Throughput', ThroughputView);
    this._tasks = new TaskLogs(
      kernel.client.link,
      this.target.cluster,
      this._clusters.actions(kernel, 'tab')
    );
    this._bottom.append(this._tasks.node);
  }

  private _fill(snapshot: ICluster): void {
    this._tasks?.update(snapshot.order);
    if (hasTimeline(snapshot) && !this._hasTimeline) {
      this._hasTimeline = true;
      this._add(this._right, 'Timeline', TimelineView);
    }
    if (snapshot.coordinator && !this._hasCoordinator) {
      this._hasCoordinator = true;
      this._add(this._left, 'Steps', StepperView);
      this._add(this._right, 'Values', ValuesView);
    }
  }

  private _add(column: HTMLElement, title: string, View: Kind): void {
    column.append(card(title, this._create(View).node));
  }

  private _create(View: Kind): IView {
    const kernel = this._kernel!;
    const view = new View(
      kernel.client.link,
      this.target.cluster,
      this._clusters.actions(kernel, 'tab')
    );
    this._views.push(view);
    return view;
  }

  private _clear(): void {
    this._views.splice(0).forEach(view => view.dispose());
    this._tasks?.dispose();
    this._tasks = null;
    this._hasCoordinator = this._hasTimeline = false;
    this._left.replaceChildren();
    this._right.replaceChildren();
  }
}

/** The log of the selected task. */
class TaskLogs {
  readonly node: HTMLElement;

  private readonly _select = h('select', { 'aria-label': 'Task whose log is shown' });
  private readonly _container = h('div');
  private _names = '';
  private _view: LogsView | null = null;

  constructor(
    private readonly _link: Link,
    private readonly _cluster: string,
    private readonly _actions: IActions
  ) {
    this._select.addEventListener('change', () => this._showLog());
    this.node = card('Log', h('div', { class: 'tfd-row' }, this._select), this._container);
  }

  update(tasks: readonly string[]): void {
    const names = tasks.join('\n');
    if (names !== this._names) {
      this._names = names;
      const selected = this._select.value;
      this._select.replaceChildren(
        h('option', { value: '' }, 'Select a task …'),
        ...tasks.map(task => h('option', { value: task }, task))
      );
      this._select.value = tasks.includes(selected) ? selected : '';
      if (this._select.value !== selected) {
        this._showLog();
      }
    }
  }

  dispose(): void {
    this._view?.dispose();
    this.node.remove();
  }

  private _showLog(): void {
    this._view?.dispose();
    this._view = null;
    const task = this._select.value;
    if (task) {
      this._view = new LogsView(this._link, this._cluster, task, this._actions);
      this._container.append(this._view.node);
    }
  }
}

function card(title: string, ...children: Node[]): HTMLElement {
  const head = title ? h('h3', {}, title) : null;
  return h('div', { class: 'tfd-lab-card' }, head, ...children);
}
