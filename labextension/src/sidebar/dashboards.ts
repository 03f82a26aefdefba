// The dashboards that are open, one for each cluster.

import { MainAreaWidget, WidgetTracker } from '@jupyterlab/apputils';
import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { TranslationBundle } from '@jupyterlab/translation';

import { Dashboard, type IPlace } from './dashboard';
import { clusterIcon } from './icon';
import type { IClusters } from './tokens';

export class Dashboards {
  readonly tracker = new WidgetTracker<MainAreaWidget<Dashboard>>({ namespace: 'tfd-notebook' });

  constructor(
    private readonly _shell: JupyterFrontEnd.IShell,
    private readonly _clusters: IClusters,
    private readonly _trans: TranslationBundle
  ) {}

  /** Open a dashboard, or bring the one that is open to the front. */
  open(place: IPlace): void {
    const widget = this.tracker.find(({ content }) => isSame(content.place, place));
    if (widget) {
      this._shell.activateById(widget.id);
      return;
    }
    const made = new MainAreaWidget({ content: new Dashboard(this._clusters, place) });
    made.id = `tfd-notebook-${place.kernel}-${place.cluster}`;
    made.title.label = place.cluster;
    made.title.caption = this._trans.__('Cluster %1 of %2', place.cluster, place.path);
    made.title.icon = clusterIcon;
    made.title.closable = true;
    made.toolbar.hide();
    void this.tracker.add(made);
    this._shell.add(made, 'main');
    this._shell.activateById(made.id);
  }
}

function isSame(a: IPlace, b: IPlace): boolean {
  return a.kernel === b.kernel && a.cluster === b.cluster;
}
