import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { CommandError } from '../../src/shared/link';
import { Detached, type IDetached } from '../../src/sidebar/detached';
import { DetachedPart } from '../../src/sidebar/detachedPart';

const MARKUP = '<img src=x onerror="alert(1)">';

let clusters: IDetached[] | null;
let requests: unknown[][];
let answer: (name?: string) => Promise<IDetached[] | null>;
let detached: Detached;
let part: DetachedPart;
let confirmed: boolean;
const attach = vi.fn();

const settle = () => vi.advanceTimersByTimeAsync(0);
const polls = () => requests.filter(([name]) => name === undefined).length;

beforeEach(() => {
  vi.useFakeTimers();
  clusters = [clusterOf('left', 3)];
  requests = [];
  answer = () => Promise.resolve(clusters);
  confirmed = true;
  detached = new Detached((name, body) => {
    requests.push([name, body]);
    return answer(name);
  });
  part = new DetachedPart(detached, { confirm: () => Promise.resolve(confirmed), attach });
  detached.changed.connect(() => part.update(false));
  document.body.append(part.node);
});

afterEach(() => {
  detached.dispose();
  part.dispose();
  attach.mockClear();
  vi.useRealTimers();
});

function clusterOf(name: string, hours: number, agent = 11): IDetached {
  const lease = Date.now() / 1000 + hours * 3600;
  return { name, state: 'ready', launcher: 'local', planned: 2, observed: 2, lease, agent };
}

function press(label: string): HTMLButtonElement {
  const match = [...part.node.querySelectorAll('button')].find(
    button => button.textContent === label
  )!;
  match.click();
  return match;
}

test('polls with increasing intervals while it is visible', async () => {
  await vi.advanceTimersByTimeAsync(10_000);
  expect(requests).toEqual([]);
  detached.watch(true);
  await vi.advanceTimersByTimeAsync(1_500);
  expect(polls()).toBe(2);
  await vi.advanceTimersByTimeAsync(10 * 60_000);
  expect(polls()).toBeLessThan(20);
  const before = polls();
  detached.refresh();
  await vi.advanceTimersByTimeAsync(1_500);
  expect(polls()).toBe(before + 2);
  detached.watch(false);
  await vi.advanceTimersByTimeAsync(10 * 60_000);
  expect(polls()).toBe(before + 2);
});

test('without the server extension the section is hidden and polling stops', async () => {
  clusters = null;
  detached.watch(true);
  await vi.advanceTimersByTimeAsync(10 * 60_000);
  detached.refresh();
  expect(polls()).toBe(1);
  expect(part.node.hidden).toBe(true);
});

test('after a failed request the list is kept and polling continues', async () => {
  detached.watch(true);
  await settle();
  answer = () => Promise.reject(new CommandError({ what: 'busy' }));
  await vi.advanceTimersByTimeAsync(5_000);
  expect(part.node.textContent).toContain('left');
  answer = () => Promise.resolve([]);
  await vi.advanceTimersByTimeAsync(60_000);
  expect(part.node.hidden).toBe(true);
});

test('a cluster shows its state, its tasks and its lease', async () => {
  clusters = [clusterOf(MARKUP, 3), { ...clusterOf('other', 30), state: 'degraded', observed: 1 }];
  detached.watch(true);
  await settle();
  expect(part.node.hidden).toBe(false);
  expect(part.node.textContent).toContain(MARKUP);
  expect(part.node.querySelector('img')).toBeNull();
  expect(part.node.textContent).toContain('2 of 2 tasks ready, local, lease ends in 3.0 h');
  expect(part.node.textContent).toContain('1 of 2 tasks ready');
  expect(part.node.textContent).toContain('degraded');
  // The suggested value never shortens a lease.
  const hours = [...part.node.querySelectorAll('input')].map(input => input.value);
  expect(hours).toEqual(['8', '30']);
});

test('a cluster can be attached, renewed and stopped', async () => {
  detached.watch(true);
  await settle();
  press('Attach');
  expect(attach).toHaveBeenCalledWith(expect.objectContaining({ name: 'left', agent: 11 }));
  clusters = [clusterOf('left', 12)];
  part.node.querySelector('input')!.value = '12';
  const renew = press('Renew');
  expect(renew.disabled).toBe(true);
  await settle();
  expect(requests).toContainEqual(['left', { action: 'renew', hours: 12, agent: 11 }]);
  expect(part.node.textContent).toContain('Kept for 12.0 h from now');
  confirmed = false;
  press('Stop');
  await settle();
  expect(requests).not.toContainEqual(['left', { action: 'stop', agent: 11 }]);
  confirmed = true;
  clusters = [];
  press('Stop');
  await settle();
  expect(requests).toContainEqual(['left', { action: 'stop', agent: 11 }]);
  expect(part.node.hidden).toBe(true);
});

test('clusters of one name are labeled with their agents', async () => {
  clusters = [clusterOf('same', 3, 11), clusterOf('same', 4, 12), clusterOf('left', 5, 12)];
  detached.watch(true);
  await settle();
  const labels = [...part.node.querySelectorAll('[role=group]')].map(row =>
    row.getAttribute('aria-label')
  );
  expect(labels).toEqual(['cluster same (agent 11)', 'cluster same (agent 12)', 'cluster left']);
  expect(clusters.map(cluster => detached.code(cluster))).toEqual([
    'tfd.attach("same", agent=11)',
    'tfd.attach("same", agent=12)',
    'tfd.attach("left")'
  ]);
  const second = part.node.querySelectorAll('[role=group]')[1];
  const stop = [...second.querySelectorAll('button')].find(button => button.textContent === 'Stop');
  clusters = clusters.filter(({ lease }) => lease !== clusters![1].lease);
  stop!.click();
  await settle();
  expect(requests).toContainEqual(['same', { action: 'stop', agent: 12 }]);
  expect(part.node.textContent).not.toContain('(agent');
});

test('a hidden list can be refreshed once', async () => {
  detached.refreshOnce();
  await vi.advanceTimersByTimeAsync(60_000);
  expect(polls()).toBe(1);
  expect(detached.clusters.map(({ name }) => name)).toEqual(['left']);
});

test('an error is shown with its next step', async () => {
  detached.watch(true);
  await settle();
  answer = name =>
    name === undefined
      ? Promise.resolve(clusters)
      : Promise.reject(new CommandError({ what: `no ${MARKUP}`, fix: 'retry' }));
  press('Stop');
  await settle();
  expect(part.node.textContent).toContain(`Stop failed: no ${MARKUP}. Next: retry`);
});

test('a superseded reply is ignored', async () => {
  const waiting: ((clusters: IDetached[]) => void)[] = [];
  answer = () => new Promise(resolve => waiting.push(resolve));
  detached.watch(true);
  detached.refresh();
  waiting[1]([clusterOf('new', 1)]);
  await settle();
  waiting[0]([clusterOf('old', 1)]);
  await settle();
  expect(detached.clusters.map(({ name }) => name)).toEqual(['new']);
});

test('a read-only panel has no buttons', async () => {
  detached.watch(true);
  await settle();
  part.update(true);
  const shown = [...part.node.querySelectorAll('button')].filter(
    button => !button.closest('[hidden]')
  );
  expect(shown).toEqual([]);
  expect(part.node.textContent).toContain('left');
});
