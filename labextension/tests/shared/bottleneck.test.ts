import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { ClusterView } from '../../src/shared/clusterView';
import { clusterOf, FakeKernel } from './kernel';
import { attach, clearPage, coordinated, press } from './page';

const BUSY = 'Bottleneck: computation on the workers (busy 99 % of the time). Try: add workers.';
const INPUT = 'Bottleneck: input, the workers wait for data inside the closures.';
const UNKNOWN = 'Not known yet: too few closures have ended.';

let kernel: FakeKernel;
let view: ClusterView;

beforeEach(() => {
  vi.useFakeTimers();
  kernel = FakeKernel.connected();
  view = attach(new ClusterView(kernel.link, 'c', { readOnly: false }));
});

afterEach(() => {
  clearPage();
  vi.useRealTimers();
});

async function coordinate(state: string, limit: string, more = {}): Promise<void> {
  kernel.state({ clusters: { c: clusterOf('c', { ...coordinated(state, { limit }), ...more }) } });
  await vi.advanceTimersByTimeAsync(40);
}

function texts(): string[] {
  return [...view.node.querySelectorAll('.tfd-limit > span')].map(row => row.textContent);
}

test('one line is shown until it is expanded', async () => {
  await coordinate('running', BUSY);
  expect(texts()).toEqual([BUSY]);
  const text = view.node.querySelector('.tfd-limit > span')!;
  expect(text.className).toBe('tfd-cut');
  const more = press(view, 'More');
  expect(more.getAttribute('aria-expanded')).toBe('true');
  expect(text.className).toBe('tfd-wrap');
  press(view, 'Less');
  expect(more.getAttribute('aria-expanded')).toBe('false');
});

test.each(['paused', 'idle', 'stopped'])(
  'a coordinator that is %s has no bottleneck',
  async state => {
    await coordinate(state, BUSY);
    expect(texts()).toEqual([]);
  }
);

test('the bottleneck of a stream is shown while it is read', async () => {
  const stream = { name: 's', kind: 'stream', state: 'running', elements: 1, history: [] };
  const rates = { bytes: 0, elements_per_s: 3, bytes_per_s: 0, limit: INPUT };
  await coordinate('idle', '', { streams: { s: { ...stream, ...rates } } });
  expect(texts()).toEqual([`s: ${INPUT}`]);
  await coordinate('idle', '', { streams: { s: { ...stream, ...rates, state: 'finished' } } });
  expect(texts()).toEqual([]);
});

test('a text stays for 10 seconds, then the latest one is shown', async () => {
  await coordinate('running', UNKNOWN);
  expect(texts()).toEqual([]);
  await coordinate('running', BUSY);
  await coordinate('running', INPUT);
  await coordinate('running', UNKNOWN);
  await coordinate('idle', INPUT);
  await vi.advanceTimersByTimeAsync(9_000);
  await coordinate('running', INPUT);
  expect(texts()).toEqual([BUSY]);
  await vi.advanceTimersByTimeAsync(1_000);
  expect(texts()).toEqual([INPUT]);
  await coordinate('running', UNKNOWN);
  await vi.advanceTimersByTimeAsync(10_000);
  expect(texts()).toEqual([]);
});

test('a pause removes the text at once', async () => {
  await coordinate('running', BUSY);
  await coordinate('paused', BUSY);
  expect(texts()).toEqual([]);
});
