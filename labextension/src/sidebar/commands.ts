// Commands for the command palette.

import { Dialog, InputDialog, showDialog, showErrorMessage } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';

import { problemText } from '../shared/statusLine';
import type { IDashboardTarget } from './dashboard';
import type { Dashboards } from './dashboards';
import { clusterIcon } from './icon';
import type { IRunningCluster, IKernel } from './kernels';
import type { ClustersPanel } from './panel';
import type { IClusters } from './tokens';

export const CommandIDs = {
  show: 'tfd-notebook:show-panel',
  start: 'tfd-notebook:start-cluster',
  open: 'tfd-notebook:open-dashboard',
  stop: 'tfd-notebook:stop-cluster'
} as const;

/** Arguments of the command `open`; without them a dialog lists the clusters. */
const TARGET = {
  type: 'object',
  properties: {
    kernel: { type: 'string', description: 'Id of the kernel' },
    path: { type: 'string', description: 'Path of its notebook' },
    cluster: { type: 'string', description: 'Name of the cluster' }
  }
};

export interface ICommandContext {
  clusters: IClusters;
  dashboards: Dashboards;
  panel: ClustersPanel;
  trans: TranslationBundle;
  /** Activate the panel. */
  showPanel(): void;
  /** Id of the kernel of the active notebook. */
  currentKernel(): string | undefined;
}

export function addCommands(commands: CommandRegistry, context: ICommandContext): void {
  const { clusters, trans } = context;
  const { kernels } = clusters;
  const canModify = () => !clusters.settings.readOnly;
  const availableKernels = () =>
    kernels.all.filter(({ client }) => client.state === 'loaded' && client.link.state === 'ready');

  commands.addCommand(CommandIDs.show, {
    label: trans.__('Show the Clusters Panel'),
    caption: trans.__('Show the TensorFlow clusters of all notebooks'),
    icon: clusterIcon,
    execute: () => context.showPanel()
  });

  commands.addCommand(CommandIDs.start, {
    label: trans.__('Start a Cluster…'),
    isVisible: canModify,
    isEnabled: canModify,
    execute: async () => {
      context.showPanel();
      const current = context.currentKernel();
      const candidates = availableKernels();
      const kernel =
        candidates.find(({ id }) => id === current) ??
        (await choose(candidates, kernelName, trans.__('Select a kernel for the cluster')));
      if (kernel) {
        context.panel.start(kernel.id);
      }
    }
  });

  commands.addCommand(CommandIDs.open, {
    label: trans.__('Open the Dashboard of a Cluster…'),
    describedBy: { args: TARGET },
    execute: async args => {
      const { kernel, path, cluster } = args as Partial<IDashboardTarget>;
      if (kernel && cluster) {
        context.dashboards.open({ kernel, path: path ?? '', cluster });
        return;
      }
      const selected = await choose(
        kernels.runningClusters(),
        clusterName,
        trans.__('Select a cluster to open')
      );
      if (selected) {
        clusters.open(selected.kernel, selected.cluster.name);
      }
    }
  });

  commands.addCommand(CommandIDs.stop, {
    label: trans.__('Stop a Cluster…'),
    isVisible: canModify,
    isEnabled: () => canModify() && kernels.runningClusters().length > 0,
    execute: async () => {
      const selected = await choose(
        kernels.runningClusters(),
        clusterName,
        trans.__('Select a cluster to stop')
      );
      if (selected && (await confirmStop([selected], trans))) {
        await stop(selected, trans);
      }
    }
  });
}

/** Confirm stopping these clusters. */
export async function confirmStop(
  clusters: readonly IRunningCluster[],
  trans: TranslationBundle
): Promise<boolean> {
  const names = clusters.map(clusterName).join(', ');
  return confirm(trans.__('Stop %1 and all tasks?', names), trans.__('Stop'), trans);
}

/** Show a confirmation dialog of JupyterLab. */
export async function confirm(
  question: string,
  yes: string,
  trans: TranslationBundle
): Promise<boolean> {
  const answer = await showDialog({
    title: trans.__('TFD clusters'),
    body: question,
    buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: yes })]
  });
  return answer.button.accept;
}

export async function stop(running: IRunningCluster, trans: TranslationBundle): Promise<void> {
  try {
    await running.kernel.client.link.command('stop', { name: running.cluster.name });
  } catch (error) {
    await showErrorMessage(
      trans.__('Stopping %1 failed', clusterName(running)),
      problemText(error)
    );
  }
}

function kernelName({ name, spec }: IKernel): string {
  return `${name} (${spec})`;
}

export function clusterName({ kernel, cluster }: IRunningCluster): string {
  return `${cluster.name} (${kernel.name})`;
}

/** Show a selection dialog if there is more than one item. */
async function choose<T>(
  options: readonly T[],
  name: (option: T) => string,
  title: string
): Promise<T | undefined> {
  if (options.length < 2) {
    return options[0];
  }
  const items = options.map((option, i) => `${i + 1}. ${name(option)}`);
  const { button, value } = await InputDialog.getItem({ title, items });
  return button.accept && value !== null ? options[items.indexOf(value)] : undefined;
}
