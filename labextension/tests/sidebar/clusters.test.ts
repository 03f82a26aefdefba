import { expect, test, vi } from 'vitest';

import { Clusters, type IOptions } from '../../src/sidebar/clusters';
import type { IKernel } from '../../src/sidebar/kernels';

// It requires a browser.
vi.mock('../../src/sidebar/insert', () => ({}));

const clusters = new Clusters({ notebooks: null } as unknown as IOptions);
const kernel = { path: 'a.ipynb' } as IKernel;

test('commands have the name of the place that sends them', () => {
  expect(clusters.actions(kernel, 'panel').source).toBe('the panel');
  expect(clusters.actions(kernel, 'tab').source).toBe('the dashboard');
});
