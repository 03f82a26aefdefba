// The open dashboards, one per cluster.

import { MainAreaWidget, WidgetTracker } from '@jupyterlab/apputils';
import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { TranslationBundle } from '@jupyterlab/translation';

import { Dashboard, type IDashboardTarget } from './dashboard';
import { clusterIcon } from './icon';
import type { IClusters } from './tokens';

export class Dashboards {
  readonly tracker = new WidgetTracker<MainAreaWidget<Dashboard>>({ namespace: 'tfd-notebook' });

  constructor(
    private readonly _shell: JupyterFrontEnd.IShell,
    private readonly _clusters: IClusters,
    private readonly _trans: TranslationBundle
  ) {}

  /** Open the dashboard of a cluster, or activate it if it is already open. */
  open(target: IDashboardTarget): void {
    const widget = this.tracker.find(({ content }) => isSame(content.target, target));
    if (widget) {
      this._shell.activateById(widget.id);
      return;
    }
    const dashboard = new MainAreaWidget({ content: new Dashboard(this._clusters, target) });
    dashboard.id = `tfd-notebook-${target.kernel}-${target.cluster}`;
    dashboard.title.label = target.cluster;
    dashboard.title.caption = this._trans.__('Cluster %1 of %2', target.cluster, target.path);
    dashboard.title.icon = clusterIcon;
    dashboard.title.closable = true;
    dashboard.toolbar.hide();
    void this.tracker.add(dashboard);
    this._shell.add(dashboard, 'main');
    this._shell.activateById(dashboard.id);
  }
}

function isSame(a: IDashboardTarget, b: IDashboardTarget): boolean {
  return a.kernel === b.kernel && a.cluster === b.cluster;
}
