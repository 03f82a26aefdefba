import { afterEach, beforeEach, expect, test } from 'vitest';

import { KpiRow } from '../../src/shared/kpiRow';
import { clusterOf, FakeKernel } from './kernel';
import { attach, clearPage, settle } from './page';

let kernel: FakeKernel;
let view: KpiRow;

beforeEach(() => {
  kernel = FakeKernel.connected();
});

afterEach(clearPage);

function open(more: Record<string, unknown> = {}): void {
  kernel.state({ clusters: { c: clusterOf('c', more) } });
  view = attach(new KpiRow(kernel.link, 'c', { readOnly: false }));
}

const tiles = () =>
  Object.fromEntries(
    [...view.node.querySelectorAll('.tfd-tile')].map(tile => [
      tile.querySelector('dt')!.textContent,
      tile.querySelector('dd')!.textContent
    ])
  );

const stream = (name: string, state: string) => ({
  name,
  kind: 'stream',
  state,
  elements: 10,
  bytes: 10,
  elements_per_s: 1500,
  bytes_per_s: 10,
  wait_fraction: 0.25,
  history: []
});

test('only figures with a value have a tile', async () => {
  open();
  expect(tiles()).toEqual({ 'tasks ready': '3 of 3' });
  kernel.state({ clusters: { c: { state: 'stopped' } } }, false);
  await settle();
  expect(view.node.querySelector('dl')!.hidden).toBe(true);
  expect(view.node.hidden).toBe(false);
});

test('the tiles show rates, waiting time, closures and the time left', () => {
  const data_worker = { role: 'data_worker', index: 0, state: 'ready', restarts: 0 };
  open({
    observed: { dispatcher: 1, data_worker: 1 },
    streams: { a: stream('a', 'running'), b: stream('b', 'running'), c: stream('c', 'failed') },
    tasks: {
      'data_worker:0': { ...data_worker, task: 'data_worker:0', bytes_per_s: 2e6 },
      'data_worker:1': { ...data_worker, task: 'data_worker:1', bytes_per_s: 1e6 },
      'worker:0': { ...data_worker, role: 'worker', task: 'worker:0', bytes_per_s: 9e6 }
    },
    coordinator: {
      state: 'running',
      counts: { queued: 1200, retrying: 1, ready: 5, failed: 2 },
      closures_per_s: 140,
      left_s: [24, 22, 26],
      workers: {},
      traces: {},
      ps_bytes: {},
      held: [],
      break_on_failure: false,
      reduced: false
    }
  });
  expect(tiles()).toEqual({
    'tasks ready': '2 of 3',
    'elements/s': '3,000',
    'bytes/s': '3.0 MB/s',
    'consumer wait': '25 %',
    'closures/s': '140',
    queue: '1,201',
    failed: '2',
    ETA: '24 s'
  });
  const drawn = [...view.node.querySelectorAll<SVGElement>('svg')].filter(
    ({ style }) => style.display !== 'none'
  );
  expect(drawn.map(each => each.getAttribute('aria-label'))).toEqual([
    'elements/s in the last minute',
    'bytes/s in the last minute'
  ]);
  expect(view.node.classList.contains('tfd-cluster')).toBe(false);
});
