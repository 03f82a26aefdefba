import { afterEach, beforeEach, expect, test } from 'vitest';

import { ClusterView } from '../../src/shared/clusterView';
import { ClusterPart } from '../../src/sidebar/clusterPart';
import { clusterOf, FakeKernel } from './kernel';

const MARKUP = '<img src=x onerror="alert(1)">';
const TRACE = `worker:1: the function raised ValueError: no such column
Traceback (most recent call last):
  File "train.py", line 3, in train
ValueError: no such column`;

let kernel: FakeKernel;
let view: ClusterView;

beforeEach(() => {
  kernel = new FakeKernel();
  kernel.link.hello();
  kernel.greet();
  view = new ClusterView(kernel.link, 'spark', {
    readOnly: false,
    confirm: () => Promise.resolve(true),
    insert: () => undefined
  });
  document.body.append(view.node);
});

afterEach(() => {
  view.dispose();
  document.body.replaceChildren();
});

const settle = () => new Promise(resolve => setTimeout(resolve, 40));

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
  const named = nodes.map(one => [`${one.role as string}:${one.index as number}`, one]);
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

function tell(state: string, row: Record<string, unknown>, whole = true): void {
  const cluster = { ...clusterOf('spark', { state, spark: row }), tasks: {}, order: [] };
  kernel.state(
    { clusters: { spark: { ...cluster, launcher: 'spark', planned: {}, observed: {} } } },
    whole
  );
}

const words = (selector: string) =>
  [...view.node.querySelectorAll(selector)].map(one => one.textContent.trim());
const cells = (row = 0) =>
  [...view.node.querySelectorAll('.tfd-onspark tbody')][row]
    .querySelector('tr')!
    .querySelectorAll('td');
const hidden = (selector: string) => view.node.querySelector<HTMLElement>(selector)!.hidden;

test('reservations are seen as they arrive, before there is any node', async () => {
  tell('starting', spark('reserving', [], { reserved: 0, needed: 3 }));
  await settle();
  expect(view.node.querySelector('progress')!.getAttribute('value')).toBe('0');
  expect(words('.tfd-onspark .tfd-row .tfd-quiet')).toEqual(['0 of 3 nodes reported']);
  expect(view.node.textContent).toContain('no node has reported yet');
  expect(words('[aria-current=step]')[0]).toMatch(/^◌ reserving, 1[23] s$/);
  tell('starting', spark('reserving', [node(0, { state: 'reserved' })], { needed: 3 }));
  await settle();
  expect(view.node.querySelector('progress')!.getAttribute('value')).toBe('1');
  expect(hidden('progress')).toBe(false);
  tell('ready', spark('running', [node(0), node(1), node(2)]));
  await settle();
  expect(hidden('progress')).toBe(true);
  expect(words('.tfd-phases li').map(one => one[0])).toEqual(['✓', '✓', '►', '○', '○']);
  expect(words('.tfd-head')[0]).toContain('3 of 3 nodes running');
});

test('a node that is fed shows rate, queue and the age of its last batch', async () => {
  tell('ready', spark('feeding', [node(0), node(1, { queue_depth: 8 })]));
  await settle();
  expect([...cells()].slice(0, 6).map(one => one.textContent)).toEqual([
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
  // Of all tools only that which fits is there.
  const shown = [...view.node.querySelectorAll<HTMLElement>('.tfd-tools button')]
    .filter(one => !one.hidden && !one.closest('[hidden]'))
    .map(one => one.textContent);
  expect(shown).toEqual(['Stop']);
});

test('a row opens to what else is known, and the log follows', async () => {
  tell('ready', spark('running', [node(0, { address: 'node-a:4711', gpu: '0,1' })]));
  await settle();
  const toggle = view.node.querySelector<HTMLButtonElement>('.tfd-onspark .tfd-toggle')!;
  toggle.click();
  expect(toggle.getAttribute('aria-expanded')).toBe('true');
  const more = view.node.querySelector('.tfd-more')!;
  expect(more.textContent).toContain('node-a:4711');
  expect(more.textContent).toContain('4000');
  expect(words('.tfd-more .tfd-log div')).toEqual(['step 1', 'step 2']);
  tell('ready', spark('running', [node(0, { log: ['step 2', 'step 3'] })]));
  await settle();
  expect(words('.tfd-more .tfd-log div')).toEqual(['step 2', 'step 3']);
  toggle.click();
  expect(view.node.querySelector('.tfd-more')!.closest('tr')!.hidden).toBe(true);
});

test('the error is shown with its traceback, and the node that failed says what', async () => {
  const nodes = [node(0, { state: 'stopped' }), node(1, { state: 'failed', error: TRACE })];
  tell('failed', spark('failed', nodes, { error: TRACE, reason: 'worker:1 failed' }));
  await settle();
  expect(words('.tfd-onspark > .tfd-error')[0]).toContain('File "train.py", line 3');
  expect(words('.tfd-phases li')).toEqual(['✗ failed']);
  expect(hidden('.tfd-onspark > .tfd-quiet')).toBe(false);
  tell('failed', spark('failed', nodes, { error: TRACE, reason: TRACE.split('\n')[0] }));
  await settle();
  expect(hidden('.tfd-onspark > .tfd-quiet')).toBe(true);
  expect(cells(1)[9].textContent).toBe('worker:1: the function raised ValueError: no such column');
  expect(cells(1)[3].textContent).toBe('');
  tell('ready', spark('running', [node(0)]));
  await settle();
  expect(hidden('.tfd-onspark > .tfd-error')).toBe(true);
});

test('what comes from outside stays text, and only a page becomes a link', async () => {
  const hostile = node(0, { host: MARKUP, error: MARKUP, log: [MARKUP], state: 'failed' });
  tell('failed', spark('failed', [hostile], { error: MARKUP, tensorboard: 'javascript:alert(1)' }));
  await settle();
  view.node.querySelector<HTMLButtonElement>('.tfd-onspark .tfd-toggle')!.click();
  expect(view.node.querySelector('img')).toBeNull();
  expect(view.node.querySelector('a')).toBeNull();
  tell('ready', spark('running', [node(0)], { tensorboard: 'http://node-a:6006' }));
  await settle();
  expect(view.node.querySelector('a')!.getAttribute('href')).toBe('http://node-a:6006');
});

test('of many nodes those are shown that need a look', async () => {
  const many = Array.from({ length: 120 }, (_, i) => node(i, i === 119 ? { state: 'lost' } : {}));
  tell('degraded', spark('running', many));
  await settle();
  expect(view.node.querySelectorAll('.tfd-onspark tbody').length).toBe(20);
  expect(words('.tfd-onspark .tfd-toggle')).toContain('worker:119');
  const all = [...view.node.querySelectorAll('button')].find(
    one => one.textContent === 'All 120 nodes'
  )!;
  all.click();
  expect(view.node.querySelectorAll('.tfd-onspark tbody').length).toBe(120);
  expect(words('.tfd-onspark .tfd-toggle')[119]).toBe('worker:119');
});

test('stopping asks the kernel', async () => {
  tell('ready', spark('running', [node(0)]));
  await settle();
  [...view.node.querySelectorAll('button')].find(one => one.textContent === 'Stop')!.click();
  await settle();
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'stop', name: 'spark' });
});

test('a cluster without Spark has no such part, and keeps its tasks', async () => {
  kernel.state({ clusters: { spark: clusterOf('spark') } });
  await settle();
  expect(hidden('.tfd-onspark')).toBe(true);
});

test('the panel counts the nodes that run', () => {
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
