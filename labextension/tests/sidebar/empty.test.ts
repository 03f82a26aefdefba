import { expect, test } from 'vitest';

import { emptyMessage } from '../../src/sidebar/empty';
import type { KernelState } from '../../src/sidebar/kernelClient';

const messageOf = (...states: KernelState[]) =>
  emptyMessage(
    true,
    states.map(state => ({ state, clusters: 0 })),
    false
  );

test('with a cluster there is no message', () => {
  expect(emptyMessage(true, [{ state: 'loaded', clusters: 1 }], false)).toBeNull();
});

test.each([
  [[], 'No kernel is running.'],
  [['ended'], 'No kernel is running.'],
  [['unsupported'], '1 kernel is running, but no Python kernel.'],
  [['unsupported', 'unsupported'], '2 kernels are running, but no Python kernel.'],
  [['connecting'], 'Connecting to 1 kernel …'],
  [['unloaded'], 'One kernel is running. It has not loaded tfd_notebook.'],
  [
    ['unloaded', 'connecting', 'unsupported'],
    '2 kernels are running. None has loaded tfd_notebook.'
  ],
  [['unloaded', 'loaded'], 'No cluster is running.']
] as [KernelState[], string][])('%j: %s', (states, what) => {
  expect(messageOf(...states)?.what).toBe(what);
});

test('the next step respects read-only mode', () => {
  const kernels = [{ state: 'unloaded' as const, clusters: 0 }];
  expect(emptyMessage(true, kernels, false)?.next).toContain('Press Load');
  expect(emptyMessage(true, kernels, true)?.next).not.toContain('Press');
  expect(emptyMessage(false, [], false)?.what).toBe('Loading kernels …');
});
