// The message of an empty panel: cause and next step.

import type { KernelState } from './kernelClient';

export interface IEmptyMessage {
  what: string;
  next: string;
}

export interface IKernelSummary {
  state: KernelState;
  clusters: number;
}

/** Return the message of the panel without clusters, null if there is a cluster. */
export function emptyMessage(
  ready: boolean,
  kernels: readonly IKernelSummary[],
  readOnly: boolean
): IEmptyMessage | null {
  if (kernels.some(kernel => kernel.clusters > 0)) {
    return null;
  }
  if (!ready) {
    return { what: 'Loading kernels …', next: '' };
  }
  const running = kernels.filter(kernel => kernel.state !== 'ended');
  const python = running.filter(kernel => kernel.state !== 'unsupported');
  if (running.length === 0) {
    return {
      what: 'No kernel is running.',
      next: 'Open a notebook with a Python kernel that has tfd-notebook installed.'
    };
  }
  if (python.length === 0) {
    return {
      what: `${counted(running.length, 'kernel is', 'kernels are')} running, but no Python kernel.`,
      next: 'Open a notebook with a Python kernel that has tfd-notebook installed.'
    };
  }
  if (python.some(kernel => kernel.state === 'loaded')) {
    return {
      what: 'No cluster is running.',
      next: readOnly
        ? 'Run %tfd_cluster start in a cell.'
        : 'Press Start cluster, or run %tfd_cluster start in a cell.'
    };
  }
  if (python.every(kernel => kernel.state === 'connecting')) {
    return { what: `Connecting to ${counted(python.length, 'kernel', 'kernels')} …`, next: '' };
  }
  return {
    what:
      python.length === 1
        ? 'One kernel is running. It has not loaded tfd_notebook.'
        : `${python.length} kernels are running. None has loaded tfd_notebook.`,
    next: readOnly
      ? 'Run %load_ext tfd_notebook in a cell.'
      : 'Press Load, or run %load_ext tfd_notebook in a cell.'
  };
}

function counted(count: number, singular: string, plural: string): string {
  return `${count} ${count === 1 ? singular : plural}`;
}
