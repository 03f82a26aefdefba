import { expect, test, vi } from 'vitest';

import { History, useHistory } from '../../src/shared/history';
import type { ICluster } from '../../src/shared/protocol';
import { clusterOf, FakeKernel } from './kernel';

function reading(state: string, rate: number): ICluster {
  const stream = {
    name: 's',
    kind: 'stream',
    state,
    elements: 1,
    bytes: 0,
    elements_per_s: rate,
    bytes_per_s: 0,
    history: [rate]
  };
  return clusterOf('c', { streams: { s: stream } });
}

const last = (history: History, count: number) => history.streams.get('s')?.slice(-count);

test('a stream has rates only while it runs', () => {
  const history = new History();
  history.sample(reading('running', 3), 1000);
  history.sample(reading('paused', 3), 1001);
  history.sample(reading('running', 4), 1002);
  history.sample(reading('failed', 4), 1003);
  expect(last(history, 4)).toEqual([3, null, 4, null]);
});

test('a stream that ended before the first sample is not drawn', () => {
  const history = new History();
  history.sample(reading('finished', 3), 1000);
  expect(history.streams.size).toBe(0);
});

test('a second sample of the same second replaces the first', () => {
  const history = new History();
  history.sample(reading('running', 1), 1000);
  history.sample(reading('running', 5), 1000);
  expect(last(history, 2)).toEqual([5]);
});

test('seconds without a sample are those that the kernel has recorded', () => {
  const history = new History();
  history.sample(reading('running', 1), 1000);
  history.sample(reading('running', 9), 1004);
  expect(last(history, 5)).toEqual([1, null, null, null, 9]);
  const streams = { s: [7, 1, 2, null, 4], old: [3, null, null, null, null] };
  history.fill({ until: 5004, streams, tasks: { 'worker:0': [1, 1, 1, 1, 1] } }, 1004);
  expect([history.start, history.length]).toEqual([999, 6]);
  expect(last(history, 6)).toEqual([7, 1, 2, null, 4, 9]);
  expect(history.streams.get('old')).toEqual([3, null, null, null, null, null]);
  expect(history.tasks.get('worker:0')).toEqual([1, 1, 1, 1, 1, null]);
});

test('only the latest ten minutes are kept', () => {
  const history = new History();
  for (let second = 1000; second < 1700; second++) {
    history.sample(reading('running', second), second);
  }
  expect([history.start, history.length]).toEqual([1100, 600]);
  history.fill({ until: 1700, streams: { s: [1, 1] }, tasks: {} }, 1700);
  expect(last(history, 3)).toEqual([1697, 1, 1]);
  history.sample(reading('running', 5), 9000);
  expect([history.start, history.length]).toEqual([9000, 1]);
});

test('the rates of a kernel are requested at first and after a gap', async () => {
  vi.useFakeTimers({ now: 1_000_000_500 });
  const kernel = new FakeKernel();
  kernel.sendHello();
  kernel.state({ clusters: { c: reading('running', 1) } });
  const { history, end } = useHistory(kernel.link, 'c');
  const requests = kernel.rates;
  expect(requests).toMatchObject([{ name: 'c', since: 0 }]);
  kernel.reply({ value: { until: 1_000_010, streams: { s: [4, 5] }, tasks: {} } }, requests[0]);
  await vi.advanceTimersByTimeAsync(2000);
  expect(last(history, 5)).toEqual([4, 5, 1, 1, 1]);
  expect(requests.length).toBe(1);
  vi.setSystemTime(1_000_030_500);
  await vi.advanceTimersByTimeAsync(1000);
  // An idle kernel gets no requests.
  expect(requests.length).toBe(1);
  kernel.state({ clusters: { c: reading('running', 2) } });
  vi.setSystemTime(1_000_050_500);
  await vi.advanceTimersByTimeAsync(1000);
  expect(requests[1]).toMatchObject({ name: 'c', since: 1_000_042 });
  // One request at a time, and none without a connection.
  vi.setSystemTime(1_000_060_500);
  kernel.state({ clusters: { c: reading('running', 3) } });
  await vi.advanceTimersByTimeAsync(1000);
  expect(requests.length).toBe(2);
  kernel.link.setConnected(false);
  await vi.advanceTimersByTimeAsync(3000);
  expect(history.end).toBe(1_000_062);
  end();
  vi.useRealTimers();
});
