import { afterEach, beforeEach, expect, test } from 'vitest';

import { ClusterView } from '../../src/shared/clusterView';
import { ClusterPart } from '../../src/sidebar/clusterPart';
import { clusterOf, FakeKernel } from './kernel';
import { attach, clearPage, settle } from './page';

const MARKUP = '<img src=x onerror="alert(1)">';
const TRACE = `worker:1: the function raised ValueError: no such column
Traceback (most recent call last):
  File "train.py", line 3, in train
ValueError: no such column`;

let kernel: FakeKernel;
let view: ClusterView;

beforeEach(() => {
  kernel = FakeKernel.connected();
  view = attach(
    new ClusterView(kernel.link, 'spark', {
      readOnly: false,
      confirm: () => Promise.resolve(true),
      insert: () => undefined
    })
  );
});

afterEach(clearPage);

function node(index: number, more: Record<string, unknown> = {}): Record<string, unknown> {
  return {
    role: 'worker',
    index,
    executor: String(index),
    host: 'node-a',
    pid: 4000 + index,
    state: 'running',
    rows: 12000,
    results: 0,
    rows_per_s: 1500,
    queue_depth: 3,
    queue_capacity: 8,
    batch_age_s: 0.25,
    log: ['step 1', 'step 2'],
    ...more
  };
}

function spark(
  phase: string,
  nodes: Record<string, unknown>[],
  more: Record<string, unknown> = {}
): Record<string, unknown> {
  const named = nodes.map(row => [`${row.role as string}:${row.index as number}`, row]);
  return {
    phase,
    since: Date.now() / 1000 - 12,
    reserved: nodes.length,
    needed: nodes.length,
    input_mode: 'SPARK',
    nodes: Object.fromEntries(named),
    order: named.map(([name]) => name),
    ...more
  };
}

function update(state: string, row: Record<string, unknown>, full = true): void {
  const cluster = { ...clusterOf('spark', { state, spark: row }), tasks: {}, order: [] };
  kernel.state(
    { clusters: { spark: { ...cluster, launcher: 'spark', planned: {}, observed: {} } } },
    full
  );
}

const texts = (selector: string) =>
  [...view.node.querySelectorAll(selector)].map(element => element.textContent.trim());
const cells = (row = 0) =>
  [...view.node.querySelectorAll('.tfd-onspark tbody')][row]
    .querySelector('tr')!
    .querySelectorAll('td');
const hidden = (selector: string) => view.node.querySelector<HTMLElement>(selector)!.hidden;

test('shows reservations before the first node', async () => {
  update('starting', spark('reserving', [], { reserved: 0, needed: 3 }));
  await settle();
  expect(view.node.querySelector('progress')!.getAttribute('value')).toBe('0');
  expect(texts('.tfd-onspark .tfd-row .tfd-quiet')).toEqual(['0 of 3 nodes reported']);
  expect(view.node.textContent).toContain('no node has reported yet');
  expect(texts('[aria-current=step]')[0]).toMatch(/^◌ reserving, 1[23] s$/);
  update('starting', spark('reserving', [node(0, { state: 'reserved' })], { needed: 3 }));
  await settle();
  expect(view.node.querySelector('progress')!.getAttribute('value')).toBe('1');
  expect(hidden('progress')).toBe(false);
  update('ready', spark('running', [node(0), node(1), node(2)]));
  await settle();
  expect(hidden('progress')).toBe(true);
  expect(texts('.tfd-phases li').map(text => text[0])).toEqual(['✓', '✓', '►', '○', '○']);
  expect(texts('.tfd-head')[0]).toContain('3 of 3 nodes running');
});

test('a fed node shows rate, queue and age of its last batch', async () => {
  update('ready', spark('feeding', [node(0), node(1, { queue_depth: 8 })]));
  await settle();
  expect([...cells()].slice(0, 6).map(element => element.textContent)).toEqual([
    'worker:0',
    '► running',
    '1,500',
    '3 of 8',
    '250 ms ago',
    '12,000'
  ]);
  expect(cells(1)[3].className).toContain('tfd-warn');
  expect(cells(0)[3].className).not.toContain('tfd-warn');
  expect(view.node.textContent).toContain('3,000 rows/s');
  // A TFCluster supports only Stop.
  const shown = [...view.node.querySelectorAll<HTMLElement>('.tfd-tools button')]
    .filter(element => !element.hidden && !element.closest('[hidden]'))
    .map(element => element.textContent);
  expect(shown).toEqual(['Stop']);
});

test('a row expands to details, and the log is updated', async () => {
  update('ready', spark('running', [node(0, { address: 'node-a:4711', gpu: '0,1' })]));
  await settle();
  const toggle = view.node.querySelector<HTMLButtonElement>('.tfd-onspark .tfd-toggle')!;
  toggle.click();
  expect(toggle.getAttribute('aria-expanded')).toBe('true');
  const more = view.node.querySelector('.tfd-more')!;
  expect(more.textContent).toContain('node-a:4711');
  expect(more.textContent).toContain('4000');
  expect(texts('.tfd-more .tfd-log div')).toEqual(['step 1', 'step 2']);
  update('ready', spark('running', [node(0, { log: ['step 2', 'step 3'] })]));
  await settle();
  expect(texts('.tfd-more .tfd-log div')).toEqual(['step 2', 'step 3']);
  toggle.click();
  expect(view.node.querySelector('.tfd-more')!.closest('tr')!.hidden).toBe(true);
});

test('shows the traceback, and the message of the failed node', async () => {
  const nodes = [node(0, { state: 'stopped' }), node(1, { state: 'failed', error: TRACE })];
  update('failed', spark('failed', nodes, { error: TRACE, reason: 'worker:1 failed' }));
  await settle();
  expect(texts('.tfd-onspark > .tfd-error')[0]).toContain('File "train.py", line 3');
  expect(texts('.tfd-phases li')).toEqual(['✗ failed']);
  expect(hidden('.tfd-onspark > .tfd-quiet')).toBe(false);
  update('failed', spark('failed', nodes, { error: TRACE, reason: TRACE.split('\n')[0] }));
  await settle();
  expect(hidden('.tfd-onspark > .tfd-quiet')).toBe(true);
  expect(cells(1)[9].textContent).toBe('worker:1: the function raised ValueError: no such column');
  expect(cells(1)[3].textContent).toBe('');
  update('ready', spark('running', [node(0)]));
  await settle();
  expect(hidden('.tfd-onspark > .tfd-error')).toBe(true);
});

test('external text is escaped, and only http addresses become links', async () => {
  const hostile = node(0, { host: MARKUP, error: MARKUP, log: [MARKUP], state: 'failed' });
  update(
    'failed',
    spark('failed', [hostile], { error: MARKUP, tensorboard: 'javascript:alert(1)' })
  );
  await settle();
  view.node.querySelector<HTMLButtonElement>('.tfd-onspark .tfd-toggle')!.click();
  expect(view.node.querySelector('img')).toBeNull();
  expect(view.node.querySelector('a')).toBeNull();
  update('ready', spark('running', [node(0)], { tensorboard: 'http://node-a:6006' }));
  await settle();
  expect(view.node.querySelector('a')!.getAttribute('href')).toBe('http://node-a:6006');
});

test('a long table shows problems first', async () => {
  const many = Array.from({ length: 120 }, (_, i) => node(i, i === 119 ? { state: 'lost' } : {}));
  update('degraded', spark('running', many));
  await settle();
  expect(view.node.querySelectorAll('.tfd-onspark tbody').length).toBe(20);
  expect(texts('.tfd-onspark .tfd-toggle')).toContain('worker:119');
  const all = [...view.node.querySelectorAll('button')].find(
    element => element.textContent === 'All 120 nodes'
  )!;
  all.click();
  expect(view.node.querySelectorAll('.tfd-onspark tbody').length).toBe(120);
  expect(texts('.tfd-onspark .tfd-toggle')[119]).toBe('worker:119');
});

test('Stop sends a command', async () => {
  update('ready', spark('running', [node(0)]));
  await settle();
  [...view.node.querySelectorAll('button')]
    .find(element => element.textContent === 'Stop')!
    .click();
  await settle();
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'stop', name: 'spark' });
});

test('a cluster without Spark has no Spark section', async () => {
  kernel.state({ clusters: { spark: clusterOf('spark') } });
  await settle();
  expect(hidden('.tfd-onspark')).toBe(true);
});

test('the panel counts the running nodes', () => {
  const part = new ClusterPart(
    { path: 'p', link: kernel.link } as never,
    'spark',
    { readOnly: false },
    new Map([['p:spark', true]])
  );
  part.update({
    ...(clusterOf('spark') as object),
    planned: {},
    observed: {},
    state: 'ready',
    spark: spark('running', [node(0), node(1, { state: 'starting' })])
  } as never);
  expect(part.node.textContent).toContain('● ready 1/2');
});
