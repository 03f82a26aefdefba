import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { alertsOf } from '../../src/shared/alertStrip';
import { ClusterView } from '../../src/shared/clusterView';
import type { ICluster } from '../../src/shared/protocol';
import { ClusterPart } from '../../src/sidebar/clusterPart';
import { clusterOf, FakeKernel } from './kernel';
import { attach, clearPage, coordinated, press } from './page';

const MARKUP = '<img src=x onerror="alert(1)">';
const FAILURE = 'closure 12 (step) failed on worker:0';
const NOW = 1_000_000;

let kernel: FakeKernel;

beforeEach(() => {
  vi.useFakeTimers({ now: NOW * 1000 });
  kernel = FakeKernel.connected();
});

afterEach(() => {
  clearPage();
  vi.useRealTimers();
});

const settle = () => vi.advanceTimersByTimeAsync(40);

function open(more: Record<string, unknown>, readOnly = false): ClusterView {
  kernel.state({ clusters: { c: clusterOf('c', more) } });
  return attach(new ClusterView(kernel.link, 'c', { readOnly }));
}

function texts(more: Record<string, unknown>): string[] {
  const cluster = clusterOf('c', more) as unknown as ICluster;
  return alertsOf(cluster, NOW).map(({ severity, text }) => `${severity} ${text}`);
}

function stream(name: string, state: string, error?: string): Record<string, unknown> {
  const rates = { elements: 0, bytes: 0, elements_per_s: 0, bytes_per_s: 0, history: [] };
  return { [name]: { name, kind: 'stream', state, error, ...rates } };
}

function tasks(...states: [state: string, reason?: string][]): Record<string, unknown> {
  const rows = states.map(([state, reason], index) => {
    const task = `data_worker:${index}`;
    return [task, { task, role: 'data_worker', index, state, reason, restarts: 0 }];
  });
  return { tasks: Object.fromEntries(rows), order: rows.map(([task]) => task) };
}

function notice(severity: string, age: number, what = 'slow'): Record<string, unknown> {
  return { time: NOW - age, severity, what };
}

test('a cluster without problems has no alerts', () => {
  expect(texts(coordinated('running'))).toEqual([]);
  expect(texts({ state: 'stopped', ...tasks(['stopped', 'requested']) })).toEqual([]);
  expect(texts({ state: 'left', ...tasks(['ready']) })).toEqual([]);
  expect(texts({ state: 'starting', ...tasks(['starting']) })).toEqual([]);
  expect(texts({ notices: [notice('info', 1), notice('warning', 301)] })).toEqual([]);
  const { node } = open({});
  expect(node.querySelector('.tfd-alert')).toBeNull();
});

test('the most severe problem comes first', () => {
  expect(
    texts({
      ...coordinated('paused', { reason: 'from the panel' }),
      ...tasks(['restarting', 'killed by signal 9'], ['hung', 'silent'], ['failed', 'no\nmemory']),
      streams: stream('images', 'failed', 'Graph execution error:\nfile not found'),
      notices: [notice('error', 9, 'old'), notice('warning', 8), notice('info', 1)]
    })
  ).toEqual([
    'error Stream images failed: file not found',
    'error data_worker:2 is failed: no memory (and 2 more)',
    'warning Paused from the panel',
    'warning slow'
  ]);
});

test.each([
  ['paused', FAILURE, `error Paused: ${FAILURE}`],
  ['paused', 'before closure 3 of step', 'warning Paused before closure 3 of step'],
  ['paused', '', 'warning Paused']
])('a coordinator that is %s: %s', (state, reason, text) => {
  expect(texts(coordinated(state, { reason }))).toEqual([text]);
});

test('a cluster that has failed or was lost shows only that', () => {
  const failed = tasks(['ready'], ['failed', 'port in use']);
  const more = { ...failed, streams: stream('s', 'failed'), notices: [notice('error', 1)] };
  expect(texts({ state: 'failed', ...more })).toEqual(['error Cluster failed: port in use']);
  const notices = [notice('error', 900, 'agent lost')];
  expect(texts({ state: 'lost', notices })).toEqual(['error Cluster lost: agent lost']);
});

test('a later stream replaces a failed one', () => {
  const failed = stream('stream-1', 'failed');
  expect(texts({ streams: { ...failed, ...stream('stream-2', 'running') } })).toEqual([]);
  expect(texts({ streams: { ...failed, ...stream('stream-2', 'stopped') } })).toHaveLength(1);
});

test('a task and its notice are one alert', () => {
  const named = { ...notice('warning', 1), task: 'data_worker:0' };
  expect(texts({ ...tasks(['hung', 'silent']), notices: [named] })).toHaveLength(1);
  expect(texts({ ...tasks(['ready']), notices: [named] })).toEqual(['warning data_worker:0: slow']);
});

test('errors are alerts and warnings are status messages, both as text', () => {
  const { node } = open({
    ...coordinated('paused', { reason: MARKUP }),
    streams: stream('s', 'failed', MARKUP)
  });
  expect(node.querySelector('[role=alert]')!.textContent).toContain(MARKUP);
  expect(node.querySelector('[role=status]')!.textContent).toContain(MARKUP);
  expect(node.querySelector('img')).toBeNull();
});

test('a paused coordinator can be resumed and stepped', async () => {
  const view = open(coordinated('paused', { reason: FAILURE }));
  const strip = view.node.querySelector<HTMLElement>('.tfd-alerts')!;
  press({ node: strip }, 'Step');
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'step', name: 'c' });
  kernel.reply({ value: { ended: 1 } });
  await settle();
  const resume = press({ node: strip }, 'Resume');
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'resume', name: 'c' });
  kernel.reply({ value: null });
  await settle();
  resume.focus();
  kernel.state({ clusters: { c: { coordinator: { state: 'running' } } } }, false);
  await settle();
  expect(strip.querySelector('.tfd-alert')).toBeNull();
  expect(document.activeElement).toBe(strip);
});

test('a read-only strip has no buttons', () => {
  const { node } = open(coordinated('paused'), true);
  expect(node.querySelector('.tfd-alert')!.textContent).toContain('Paused from a terminal');
  expect(node.querySelector('.tfd-alert button')).toBeNull();
});

test('a notice disappears after five minutes without a message', async () => {
  const { node } = open({ notices: [notice('warning', 290)] });
  expect(node.querySelector('.tfd-alert')).not.toBeNull();
  await vi.advanceTimersByTimeAsync(11_000);
  expect(node.querySelector('.tfd-alert')).toBeNull();
});

test('a folded cluster has the color of its most severe problem', () => {
  const part = new ClusterPart(
    { path: 'p', client: { link: kernel.link } } as never,
    'c',
    { readOnly: false },
    new Map([['p:c', true]])
  );
  const state = part.node.querySelector('.tfd-lab-state')!;
  part.update(clusterOf('c'));
  expect([state.className, state.textContent]).toEqual(['tfd-lab-state tfd-good', '● ready 3/3']);
  part.update(clusterOf('c', coordinated('paused', { reason: FAILURE })));
  expect([state.className, state.textContent]).toEqual(['tfd-lab-state tfd-bad', '✗ ready 3/3']);
  expect(part.node.querySelector('button')!.title).toBe(`Paused: ${FAILURE}`);
  part.dispose();
});
