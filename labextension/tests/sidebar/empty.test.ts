import { expect, test } from 'vitest';

import { emptyWords } from '../../src/sidebar/empty';
import type { KernelState } from '../../src/sidebar/reader';

const words = (...states: KernelState[]) =>
  emptyWords(
    true,
    states.map(state => ({ state, clusters: 0 })),
    false
  );

test('where there is a cluster nothing needs to be said', () => {
  expect(emptyWords(true, [{ state: 'loaded', clusters: 1 }], false)).toBeNull();
});

test.each([
  [[], 'No kernel runs.'],
  [['ended'], 'No kernel runs.'],
  [['foreign'], '1 kernel runs, none of them Python.'],
  [['foreign', 'foreign'], '2 kernels run, none of them Python.'],
  [['connecting'], 'Asking 1 kernel …'],
  [['unloaded'], 'One kernel runs; it has not loaded tfd_notebook.'],
  [['unloaded', 'connecting', 'foreign'], '2 kernels run; none has loaded tfd_notebook.'],
  [['unloaded', 'loaded'], 'No cluster runs.']
] as [KernelState[], string][])('%j: %s', (states, what) => {
  expect(words(...states)?.what).toBe(what);
});

test('the next step is one that the reader may take', () => {
  const seen = [{ state: 'unloaded' as const, clusters: 0 }];
  expect(emptyWords(true, seen, false)?.next).toContain('Press Load');
  expect(emptyWords(true, seen, true)?.next).not.toContain('Press');
  expect(emptyWords(false, [], false)?.what).toBe('Looking for kernels …');
});
