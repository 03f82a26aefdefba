// Commands for the palette, menus and shortcuts.

import {
  Dialog,
  InputDialog,
  Notification,
  showDialog,
  showErrorMessage
} from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';
import type { ISignal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import { codeOf } from '../shared/clusterTools';
import { type IQuestion, stopQuestion } from '../shared/confirm';
import { h } from '../shared/dom';
import { findingCount, findingItems, type IFinding } from '../shared/findings';
import { canPause } from '../shared/protocol';
import { problemText } from '../shared/statusLine';
import { pendingText } from '../shared/view';
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
  pause: 'tfd-notebook:pause-coordinator',
  resume: 'tfd-notebook:resume-coordinator',
  step: 'tfd-notebook:step-coordinator',
  interrupt: 'tfd-notebook:interrupt-cluster',
  doctor: 'tfd-notebook:run-doctor',
  insert: 'tfd-notebook:insert-code',
  stop: 'tfd-notebook:stop-cluster'
} as const;

/** Arguments of commands for a cluster; without them, the active one or a dialog selects it. */
const TARGET = {
  type: 'object',
  properties: {
    kernel: { type: 'string', description: 'Id of the kernel' },
    path: { type: 'string', description: 'Path of its notebook' },
    cluster: { type: 'string', description: 'Name of the cluster' }
  }
};
const CLOSE_MS = 5000;

export interface ICommandContext {
  clusters: IClusters;
  dashboards: Dashboards;
  panel: ClustersPanel;
  trans: TranslationBundle;
  /** Activate the panel. */
  showPanel(): void;
  /** The cluster of the dashboard in front. */
  currentDashboard(): IDashboardTarget | undefined;
  /** Emitted when another tab comes to the front. */
  currentChanged?: ISignal<unknown, unknown>;
}

interface IClusterCommand {
  label: string;
  caption: string;
  /** Return true if the command can act on a running cluster. */
  accepts(running: IRunningCluster): boolean;
  execute(running: IRunningCluster): Promise<void> | void;
  /** Whether it is available in a page that must not change clusters. */
  worksReadOnly?: boolean;
}

export function addCommands(commands: CommandRegistry, context: ICommandContext): void {
  const { clusters, trans } = context;
  const { kernels } = clusters;
  const canModify = () => !clusters.settings.readOnly;
  const availableKernels = () =>
    kernels.all.filter(({ client }) => client.state === 'loaded' && client.link.usable);

  commands.addCommand(CommandIDs.show, {
    label: trans.__('TFD: Show Clusters Panel'),
    caption: trans.__('Show the TensorFlow clusters of all notebooks'),
    icon: clusterIcon,
    execute: () => context.showPanel()
  });

  commands.addCommand(CommandIDs.start, {
    label: trans.__('TFD: Start Cluster…'),
    caption: trans.__('Show the form that starts a cluster in a kernel'),
    isVisible: canModify,
    isEnabled: () => canModify() && availableKernels().length > 0,
    execute: async () => {
      context.showPanel();
      const candidates = availableKernels();
      const kernel =
        candidates.find(candidate => candidate === clusters.activeKernel) ??
        (await choose(candidates, kernelName, trans.__('Select a kernel for the cluster')));
      if (kernel) {
        context.panel.start(kernel.id);
      }
    }
  });

  commands.addCommand(CommandIDs.open, {
    label: trans.__('TFD: Open Dashboard…'),
    caption: trans.__('Open the dashboard of a cluster'),
    describedBy: { args: TARGET },
    isEnabled: args => targetOf(args) !== null || kernels.runningClusters().length > 0,
    execute: async args => {
      const target = targetOf(args);
      if (target) {
        context.dashboards.open(target);
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

  const request = (label: string, command: string, done: string, args = {}) => {
    return async (running: IRunningCluster) => {
      if ((await send(running, label, command, trans, args)) !== FAILED) {
        Notification.success(`${clusterName(running)}: ${done}`, { autoClose: CLOSE_MS });
      }
    };
  };
  const isControlled = ({ cluster }: IRunningCluster) => canPause(cluster.coordinator);
  const isPaused = (running: IRunningCluster) =>
    isControlled(running) && running.cluster.coordinator?.state === 'paused';
  // A TFCluster on Spark supports only `stop`.
  const isComplete = ({ cluster }: IRunningCluster) => cluster.spark === undefined;

  /** Return the clusters that a command can act on, those in front of the user if possible. */
  const candidates = (args: ReadonlyPartialJSONObject, { accepts }: IClusterCommand) => {
    const running = kernels.runningClusters().filter(({ kernel }) => kernel.client.link.usable);
    const target = targetOf(args) ?? context.currentDashboard();
    if (target) {
      const kernel = kernels.find(target.kernel, target.path);
      return running.filter(
        each => each.kernel === kernel && each.cluster.name === target.cluster && accepts(each)
      );
    }
    const active = running.filter(({ kernel }) => kernel === clusters.activeKernel);
    return (active.length ? active : running).filter(accepts);
  };

  const add = (id: string, command: IClusterCommand) => {
    const isVisible = () => command.worksReadOnly === true || canModify();
    commands.addCommand(id, {
      label: command.label,
      caption: command.caption,
      describedBy: { args: TARGET },
      isVisible,
      isEnabled: args => isVisible() && candidates(args, command).length > 0,
      execute: async args => {
        const running = await choose(
          candidates(args, command),
          clusterName,
          trans.__('Select a cluster')
        );
        if (running) {
          await command.execute(running);
        }
      }
    });
  };

  add(CommandIDs.pause, {
    label: trans.__('TFD: Pause Coordinator'),
    caption: trans.__('Stop dispatching closures to workers'),
    accepts: running => isControlled(running) && !isPaused(running),
    execute: request(trans.__('Pause'), 'pause', trans.__('paused'), { source: 'JupyterLab' })
  });

  add(CommandIDs.resume, {
    label: trans.__('TFD: Resume Coordinator'),
    caption: trans.__('Dispatch closures to workers again'),
    accepts: isPaused,
    execute: request(trans.__('Resume'), 'resume', trans.__('resumed'))
  });

  add(CommandIDs.step, {
    label: trans.__('TFD: Step Coordinator'),
    caption: trans.__('Run one closure while paused'),
    accepts: isPaused,
    execute: request(trans.__('Step'), 'step', trans.__('released 1 closure'))
  });

  add(CommandIDs.interrupt, {
    label: trans.__('TFD: Interrupt Cluster'),
    caption: trans.__('Interrupt running reads and computations; the tasks keep running'),
    accepts: isComplete,
    execute: request(trans.__('Interrupt'), 'interrupt', trans.__('interrupted'))
  });

  add(CommandIDs.doctor, {
    label: trans.__('TFD: Run Doctor'),
    caption: trans.__('Diagnose problems of a cluster'),
    accepts: isComplete,
    execute: async running => {
      const findings = await send(running, trans.__('Doctor'), 'doctor', trans);
      if (findings !== FAILED) {
        await showFindings(findings as IFinding[], clusterName(running));
      }
    }
  });

  add(CommandIDs.insert, {
    label: trans.__('TFD: Insert Cluster Code'),
    caption: trans.__('Insert code that uses a cluster into its notebook'),
    worksReadOnly: true,
    accepts: running =>
      isComplete(running) && clusters.actions(running.kernel, 'panel').insert !== undefined,
    execute: ({ kernel, cluster }) =>
      clusters.actions(kernel, 'panel').insert?.(codeOf(cluster.name))
  });

  add(CommandIDs.stop, {
    label: trans.__('TFD: Stop Cluster…'),
    caption: trans.__('Stop all tasks of a cluster'),
    accepts: () => true,
    execute: async running => {
      if (await clusters.confirm(stopQuestion(clusterName(running)))) {
        await stop(running, trans);
      }
    }
  });

  notifyChanges(commands, [
    kernels.changed,
    kernels.updated,
    clusters.settingsChanged,
    clusters.activeChanged,
    context.currentChanged
  ]);
}

/** Notify menus and the palette of commands that are enabled or shown differently. */
function notifyChanges(
  commands: CommandRegistry,
  signals: readonly (ISignal<unknown, unknown> | undefined)[]
): void {
  const ids = Object.values(CommandIDs);
  const state = (id: string) => `${commands.isEnabled(id)} ${commands.isVisible(id)}`;
  const states = new Map(ids.map(id => [id, state(id)]));
  const check = () => {
    for (const id of ids) {
      const now = state(id);
      if (now !== states.get(id)) {
        states.set(id, now);
        commands.notifyCommandChanged(id);
      }
    }
  };
  signals.forEach(signal => signal?.connect(check));
}

function targetOf(args: ReadonlyPartialJSONObject): IDashboardTarget | null {
  const { kernel, path, cluster } = args as Partial<IDashboardTarget>;
  return kernel && cluster ? { kernel, path: path ?? '', cluster } : null;
}

/** Show a confirmation dialog of JupyterLab. */
export async function confirm({ title, body, verb }: IQuestion): Promise<boolean> {
  const buttons = [Dialog.cancelButton(), Dialog.warnButton({ label: verb })];
  const answer = await showDialog({ title, body, buttons });
  return answer.button.accept;
}

export async function stop(running: IRunningCluster, trans: TranslationBundle): Promise<void> {
  await send(running, trans.__('Stop'), 'stop', trans);
}

const FAILED = Symbol('failed');

/** Send a command to a cluster; after an error, show it and return `FAILED`. */
async function send(
  { kernel, cluster }: IRunningCluster,
  label: string,
  command: string,
  trans: TranslationBundle,
  args: Record<string, unknown> = {}
): Promise<unknown> {
  const { link } = kernel.client;
  if (!link.transport.concurrent) {
    Notification.info(`${label}: ${pendingText(link, '')}`, { autoClose: CLOSE_MS });
  }
  try {
    return await link.command(command, { name: cluster.name, ...args });
  } catch (error) {
    const title = trans.__('%1 failed: %2', label, clusterName({ kernel, cluster }));
    await showErrorMessage(title, problemText(error));
    return FAILED;
  }
}

async function showFindings(findings: readonly IFinding[], name: string): Promise<void> {
  const list = h('ul', { class: 'tfd-notices' }, ...findingItems(findings));
  await showDialog({
    title: `${name}: ${findingCount(findings)}`,
    body: new Widget({ node: h('div', { class: 'tfd-live tfd-findings' }, list) }),
    buttons: [Dialog.okButton()]
  });
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
