import { afterEach, beforeEach, expect, test } from 'vitest';

import { ClusterView } from '../../src/shared/clusterView';
import { GpuStrip } from '../../src/shared/gpuStrip';
import type { IGpu } from '../../src/shared/protocol';
import { clusterOf, FakeKernel } from './kernel';

const MARKUP = '<img src=x onerror="alert(1)">';

function gpu(host: string, index: number, more: Partial<IGpu> = {}): IGpu {
  return { host, index, memory_mb: 80_000, ...more };
}

function labels(strip: GpuStrip): (string | null)[] {
  return [...strip.node.querySelectorAll('[role=img]')].map(element =>
    element.getAttribute('aria-label')
  );
}

let kernel: FakeKernel;

beforeEach(() => {
  kernel = FakeKernel.connected();
});

afterEach(() => document.body.replaceChildren());

test('each GPU shows its host, task and figures', () => {
  const strip = new GpuStrip();
  strip.show([
    gpu('one', 0, { task: 'worker:0', use_percent: 35, used_mb: 2100, name: 'H' }),
    gpu('one', 1),
    gpu('two', 0, { task: 'worker:1', use_percent: 100, used_mb: 80_000 })
  ]);
  expect(labels(strip)).toEqual([
    'GPU 0 of one (H), seen by worker:0: 35 % busy, 2.1 of 80 GB used',
    'GPU 1 of one, seen by no task: utilization unknown',
    'GPU 0 of two, seen by worker:1: 100 % busy, 80.0 of 80 GB used'
  ]);
  expect(strip.node.textContent).toContain(
    '3 on 2 hosts, 1 not assigned, 68 % busy, 82.1 of 160 GB used'
  );
  const groups = [...strip.node.querySelectorAll('.tfd-gputask')];
  expect(groups.map(element => element.firstChild!.textContent)).toEqual([
    'worker:0',
    'not assigned',
    'worker:1'
  ]);
  expect(groups.map(element => element.classList.contains('tfd-free'))).toEqual([
    false,
    true,
    false
  ]);
  const [use, memory] = strip.node.querySelectorAll<HTMLElement>('.tfd-gpu > i');
  expect([use.style.width, memory.style.width]).toEqual(['35%', '3%']);
});

test('the color of a bar depends on the load', () => {
  const strip = new GpuStrip();
  strip.show([
    gpu('one', 0, { use_percent: 5, used_mb: 1000 }),
    gpu('one', 1, { use_percent: 35, used_mb: 1000 }),
    gpu('one', 2, { use_percent: 99, used_mb: 76_000 })
  ]);
  const bars = [...strip.node.querySelectorAll('.tfd-gpu > i')].map(bar => bar.className);
  expect(bars.filter((_, i) => i % 2 === 0)).toEqual(['tfd-idle', '', 'tfd-busy']);
  expect(bars.filter((_, i) => i % 2)).toEqual(['tfd-memory', 'tfd-memory', 'tfd-memory tfd-full']);
});

test('updates modify the existing tiles', () => {
  const strip = new GpuStrip();
  strip.show([gpu('one', 0, { task: 'worker:0', use_percent: 1 }), gpu('one', 1)]);
  const [tile] = strip.node.querySelectorAll('[role=img]');
  strip.show([gpu('one', 0, { task: 'worker:0', use_percent: 99 }), gpu('one', 1)]);
  expect(strip.node.querySelector('[role=img]')).toBe(tile);
  expect(tile.textContent).toContain('99 %');
  strip.show([gpu('one', 0), gpu('one', 1)]);
  expect(strip.node.querySelectorAll('.tfd-gputask').length).toBe(1);
  strip.show([]);
  expect(strip.node.hidden).toBe(true);
  expect(labels(strip)).toEqual([]);
});

test('only the first 256 GPUs are drawn', () => {
  const strip = new GpuStrip();
  const many = (count: number) =>
    Array.from({ length: count }, (_, i) => gpu(`host${Math.floor(i / 8)}`, i % 8));
  strip.show(many(64));
  expect(labels(strip).length).toBe(64);
  expect(strip.node.querySelectorAll('.tfd-gpuhost').length).toBe(8);
  strip.show(many(1000));
  expect(labels(strip).length).toBe(256);
  expect(strip.node.textContent).toContain('1000 on 125 hosts');
  expect(strip.node.textContent).toContain('… and 744 more');
});

test('a cluster view shows GPUs, escapes names, and hides an empty strip', async () => {
  kernel.state({
    clusters: {
      c: clusterOf('c', { gpus: { a: gpu(MARKUP, 0, { task: MARKUP, name: MARKUP }) } }),
      none: clusterOf('none')
    }
  });
  const view = new ClusterView(kernel.link, 'c', { readOnly: false });
  const none = new ClusterView(kernel.link, 'none', { readOnly: false });
  document.body.append(view.node, none.node);
  expect(view.node.querySelector('img')).toBeNull();
  expect(view.node.querySelector('.tfd-gpus')!.textContent).toContain(MARKUP);
  expect(none.node.querySelector<HTMLElement>('.tfd-gpus')!.hidden).toBe(true);
  kernel.state({ clusters: { c: { gpus: { a: { use_percent: 12 } } } } }, false);
  await new Promise(resolve => setTimeout(resolve, 40));
  expect(view.node.querySelector('.tfd-gpu')!.textContent).toContain('12 %');
  view.dispose();
  none.dispose();
});
