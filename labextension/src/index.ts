// The plugins: the panel with its commands and dashboards, and the list of running clusters.

import {
  ILayoutRestorer,
  type JupyterFrontEnd,
  type JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ICommandPalette, Notification } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IRunningSessionManagers } from '@jupyterlab/running';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStateDB } from '@jupyterlab/statedb';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { Clusters } from './sidebar/clusters';
import { addCommands, CommandIDs, confirm } from './sidebar/commands';
import { Dashboards } from './sidebar/dashboards';
import { detachedApi, Detached } from './sidebar/detached';
import { clusterIcon } from './sidebar/icon';
import { Kernels } from './sidebar/kernels';
import { ClustersPanel } from './sidebar/panel';
import { RunningClusters } from './sidebar/running';
import { restoreSavedViews } from './sidebar/savedViews';
import { DEFAULTS, IClusters, type ISettings } from './sidebar/tokens';
import { VERSION } from './sidebar/version';

const DOMAIN = 'tfd_notebook';
const PLUGIN = 'tfd-notebook-lab:plugin';
const FOLDS = 'tfd-notebook-lab:folds';
const PANEL = 'tfd-notebook-panel';
const RANK = 550;

const plugin: JupyterFrontEndPlugin<IClusters> = {
  id: PLUGIN,
  description: 'A panel and dashboards for distributed TensorFlow clusters.',
  autoStart: true,
  provides: IClusters,
  optional: [
    ICommandPalette,
    ILayoutRestorer,
    INotebookTracker,
    ISettingRegistry,
    IStateDB,
    ITranslator
  ],
  activate: (
    app: JupyterFrontEnd,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null,
    notebooks: INotebookTracker | null,
    registry: ISettingRegistry | null,
    states: IStateDB | null,
    translator: ITranslator | null
  ): IClusters => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const kernels = new Kernels(app.serviceManager, VERSION);
    const clusters = new Clusters({
      kernels,
      detached: new Detached(detachedApi(app.serviceManager.serverSettings)),
      notebooks,
      confirm,
      open: (kernel, cluster) => dashboards.open({ kernel: kernel.id, path: kernel.path, cluster }),
      show: id => app.shell.activateById(id),
      showPanel: () => app.shell.activateById(PANEL),
      warn: text => Notification.warning(text, { autoClose: 8000 })
    });
    const dashboards = new Dashboards(app.shell, clusters, trans);

    const panel = new ClustersPanel(clusters);
    panel.id = PANEL;
    panel.title.icon = clusterIcon;
    panel.title.caption = trans.__('TFD clusters');
    panel.node.setAttribute('role', 'region');
    panel.node.setAttribute('aria-label', trans.__('TFD clusters'));
    let side = DEFAULTS.side;
    app.shell.add(panel, side, { rank: RANK });
    restorer?.add(panel, panel.id);

    addCommands(app.commands, {
      clusters,
      dashboards,
      panel,
      trans,
      showPanel: () => app.shell.activateById(panel.id),
      currentDashboard: () => {
        const dashboard = dashboards.tracker.currentWidget;
        return dashboard && dashboard === app.shell.currentWidget
          ? dashboard.content.target
          : undefined;
      },
      currentChanged: app.shell.currentChanged
    });
    for (const command of Object.values(CommandIDs)) {
      palette?.addItem({ command, category: trans.__('TFD Clusters') });
    }
    void restorer?.restore(dashboards.tracker, {
      command: CommandIDs.open,
      args: ({ content }) => ({ ...content.target }),
      name: ({ content }) => `${content.target.kernel}:${content.target.cluster}`
    });

    if (registry) {
      void watchSettings(registry, settings => {
        clusters.change(settings);
        // The restored layout moves the panel, so apply the setting afterwards.
        void app.restored.then(() => {
          if (settings.side !== side) {
            side = settings.side;
            app.shell.add(panel, side, { rank: RANK });
          }
        });
      });
    }
    if (states) {
      void persistFolds(states, panel);
    }
    window.addEventListener('pagehide', () => kernels.sendBye());
    return clusters;
  }
};

const running: JupyterFrontEndPlugin<void> = {
  id: 'tfd-notebook-lab:running',
  description: 'Lists clusters among the running sessions.',
  autoStart: true,
  requires: [IClusters],
  optional: [IRunningSessionManagers, ITranslator],
  activate: (
    _app: JupyterFrontEnd,
    clusters: IClusters,
    managers: IRunningSessionManagers | null,
    translator: ITranslator | null
  ): void => {
    managers?.add(new RunningClusters(clusters, (translator ?? nullTranslator).load(DOMAIN)));
  }
};

const savedViews: JupyterFrontEndPlugin<void> = {
  id: 'tfd-notebook-lab:saved-views',
  description: 'Shows the saved view of a widget whose model no longer exists.',
  autoStart: true,
  requires: [INotebookTracker],
  activate: (_app: JupyterFrontEnd, notebooks: INotebookTracker): void => {
    restoreSavedViews(notebooks);
  }
};

async function watchSettings(
  registry: ISettingRegistry,
  apply: (settings: ISettings) => void
): Promise<void> {
  try {
    const loaded = await registry.load(PLUGIN);
    const read = () => apply({ ...DEFAULTS, ...(loaded.composite as Partial<ISettings>) });
    loaded.changed.connect(read);
    read();
  } catch (error) {
    console.warn(`${PLUGIN}: loading the settings failed`, error);
  }
}

async function persistFolds(states: IStateDB, panel: ClustersPanel): Promise<void> {
  const folds = Object.entries((await states.fetch(FOLDS)) ?? {});
  panel.folds = Object.fromEntries(
    folds.filter((fold): fold is [string, boolean] => typeof fold[1] === 'boolean')
  );
  panel.foldsChanged.connect(() => void states.save(FOLDS, panel.folds));
}

export { IClusters };
export type { IQuestion } from './shared/confirm';
export type { IActions } from './shared/view';
export type { IDetached } from './sidebar/detached';
export type { IKernel } from './sidebar/kernels';
export type { ISettings } from './sidebar/tokens';

export default [plugin, running, savedViews];
