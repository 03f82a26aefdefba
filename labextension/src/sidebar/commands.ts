// What users call from the command palette.

import { Dialog, InputDialog, showDialog, showErrorMessage } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';

import { problemText } from '../shared/asker';
import type { IPlace } from './dashboard';
import type { Dashboards } from './dashboards';
import { clusterIcon } from './icon';
import type { IFound, IKernel } from './kernels';
import type { ClustersPanel } from './panel';
import type { IClusters } from './tokens';

export const CommandIDs = {
  show: 'tfd-notebook:show-panel',
  start: 'tfd-notebook:start-cluster',
  open: 'tfd-notebook:open-dashboard',
  stop: 'tfd-notebook:stop-cluster'
} as const;

/** What the dashboard is opened for; asked where it is not said. */
const PLACE = {
  type: 'object',
  properties: {
    kernel: { type: 'string', description: 'the id of the kernel' },
    path: { type: 'string', description: 'the path of its notebook' },
    cluster: { type: 'string', description: 'the name of the cluster' }
  }
};

export interface ISurroundings {
  clusters: IClusters;
  dashboards: Dashboards;
  panel: ClustersPanel;
  trans: TranslationBundle;
  /** Bring the panel to the front. */
  showPanel(): void;
  /** The kernel of the notebook that is in front. */
  current(): string | undefined;
}

export function addCommands(commands: CommandRegistry, around: ISurroundings): void {
  const { clusters, trans } = around;
  const { kernels } = clusters;
  const mayChange = () => !clusters.settings.readOnly;
  const startable = () =>
    kernels.all.filter(({ reader }) => reader.state === 'loaded' && reader.link.state === 'ready');

  commands.addCommand(CommandIDs.show, {
    label: trans.__('Show the Clusters Panel'),
    caption: trans.__('Distributed TensorFlow clusters of all notebooks'),
    icon: clusterIcon,
    execute: () => around.showPanel()
  });

  commands.addCommand(CommandIDs.start, {
    label: trans.__('Start a Cluster…'),
    isVisible: mayChange,
    isEnabled: mayChange,
    execute: async () => {
      around.showPanel();
      const current = around.current();
      const all = startable();
      const kernel =
        all.find(({ id }) => id === current) ??
        (await choose(all, kernelName, trans.__('Start a cluster in which kernel?')));
      if (kernel) {
        around.panel.start(kernel.id);
      }
    }
  });

  commands.addCommand(CommandIDs.open, {
    label: trans.__('Open the Dashboard of a Cluster…'),
    describedBy: { args: PLACE },
    execute: async args => {
      const { kernel, path, cluster } = args as Partial<IPlace>;
      if (kernel && cluster) {
        around.dashboards.open({ kernel, path: path ?? '', cluster });
        return;
      }
      const found = await choose(kernels.living(), clusterName, trans.__('Open which cluster?'));
      if (found) {
        clusters.open(found.kernel, found.cluster.name);
      }
    }
  });

  commands.addCommand(CommandIDs.stop, {
    label: trans.__('Stop a Cluster…'),
    isVisible: mayChange,
    isEnabled: () => mayChange() && kernels.living().length > 0,
    execute: async () => {
      const found = await choose(kernels.living(), clusterName, trans.__('Stop which cluster?'));
      if (found && (await confirmStop([found], trans))) {
        await stop(found, trans);
      }
    }
  });
}

/** Ask whether these shall be stopped. */
export async function confirmStop(
  found: readonly IFound[],
  trans: TranslationBundle
): Promise<boolean> {
  const names = found.map(clusterName).join(', ');
  return confirm(trans.__('Stop %1 and all tasks?', names), trans.__('Stop'), trans);
}

/** Ask in a dialog of JupyterLab's. */
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

export async function stop(found: IFound, trans: TranslationBundle): Promise<void> {
  try {
    await found.kernel.reader.link.command('stop', { name: found.cluster.name });
  } catch (error) {
    await showErrorMessage(trans.__('%1 was not stopped', clusterName(found)), problemText(error));
  }
}

function kernelName({ name, spec }: IKernel): string {
  return `${name} (${spec})`;
}

export function clusterName({ kernel, cluster }: IFound): string {
  return `${cluster.name} (${kernel.name})`;
}

/** Let the user choose, where there is a choice. */
async function choose<T>(
  things: readonly T[],
  name: (thing: T) => string,
  title: string
): Promise<T | undefined> {
  if (things.length < 2) {
    return things[0];
  }
  const items = things.map((thing, i) => `${i + 1}. ${name(thing)}`);
  const { button, value } = await InputDialog.getItem({ title, items });
  return button.accept && value !== null ? things[items.indexOf(value)] : undefined;
}
