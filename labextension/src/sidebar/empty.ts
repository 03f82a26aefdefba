// Why there is nothing to see, and what to do about it.

import type { KernelState } from './reader';

export interface IEmpty {
  what: string;
  next: string;
}

export interface ISeen {
  state: KernelState;
  clusters: number;
}

/** Return what is to be said where no cluster is shown, null where there is one. */
export function emptyWords(
  ready: boolean,
  kernels: readonly ISeen[],
  readOnly: boolean
): IEmpty | null {
  if (kernels.some(kernel => kernel.clusters > 0)) {
    return null;
  }
  if (!ready) {
    return { what: 'Looking for kernels …', next: '' };
  }
  const living = kernels.filter(kernel => kernel.state !== 'ended');
  const python = living.filter(kernel => kernel.state !== 'foreign');
  if (living.length === 0) {
    return {
      what: 'No kernel runs.',
      next: 'Open a notebook with a Python kernel that has tfd-notebook installed.'
    };
  }
  if (python.length === 0) {
    return {
      what: `${counted(living.length, 'kernel runs', 'kernels run')}, none of them Python.`,
      next: 'Open a notebook with a Python kernel that has tfd-notebook installed.'
    };
  }
  if (python.some(kernel => kernel.state === 'loaded')) {
    return {
      what: 'No cluster runs.',
      next: readOnly
        ? 'Run %tfd_cluster start in a cell.'
        : 'Press Start cluster, or run %tfd_cluster start in a cell.'
    };
  }
  if (python.every(kernel => kernel.state === 'connecting')) {
    return { what: `Asking ${counted(python.length, 'kernel', 'kernels')} …`, next: '' };
  }
  return {
    what:
      python.length === 1
        ? 'One kernel runs; it has not loaded tfd_notebook.'
        : `${python.length} kernels run; none has loaded tfd_notebook.`,
    next: readOnly
      ? 'Run %load_ext tfd_notebook in a cell.'
      : 'Press Load, or run %load_ext tfd_notebook in a cell.'
  };
}

function counted(count: number, one: string, several: string): string {
  return `${count} ${count === 1 ? one : several}`;
}
