import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { CommandError } from '../../src/shared/link';
import { Detached, type IDetached } from '../../src/sidebar/detached';
import { DetachedPart } from '../../src/sidebar/detachedPart';

const MARKUP = '<img src=x onerror="alert(1)">';

let there: IDetached[] | null;
let asked: unknown[][];
let answer: (name?: string) => Promise<IDetached[] | null>;
let detached: Detached;
let part: DetachedPart;
let yes: boolean;
const takeUp = vi.fn();

const settle = () => vi.advanceTimersByTimeAsync(0);
const looks = () => asked.filter(([name]) => name === undefined).length;

beforeEach(() => {
  vi.useFakeTimers();
  there = [one('left', 3)];
  asked = [];
  answer = () => Promise.resolve(there);
  yes = true;
  detached = new Detached((name, body) => {
    asked.push([name, body]);
    return answer(name);
  });
  part = new DetachedPart(detached, { confirm: () => Promise.resolve(yes), takeUp });
  detached.changed.connect(() => part.update(false));
  document.body.append(part.node);
});

afterEach(() => {
  detached.dispose();
  part.dispose();
  takeUp.mockClear();
  vi.useRealTimers();
});

function one(name: string, hours: number, agent = 11): IDetached {
  const lease = Date.now() / 1000 + hours * 3600;
  return { name, state: 'ready', launcher: 'local', planned: 2, observed: 2, lease, agent };
}

function press(words: string): HTMLButtonElement {
  const found = [...part.node.querySelectorAll('button')].find(each => each.textContent === words)!;
  found.click();
  return found;
}

test('it is asked while somebody looks, less and less often', async () => {
  await vi.advanceTimersByTimeAsync(10_000);
  expect(asked).toEqual([]);
  detached.watch(true);
  await vi.advanceTimersByTimeAsync(1_500);
  expect(looks()).toBe(2);
  await vi.advanceTimersByTimeAsync(10 * 60_000);
  expect(looks()).toBeLessThan(20);
  const before = looks();
  detached.look();
  await vi.advanceTimersByTimeAsync(1_500);
  expect(looks()).toBe(before + 2);
  detached.watch(false);
  await vi.advanceTimersByTimeAsync(10 * 60_000);
  expect(looks()).toBe(before + 2);
});

test('without the extension there is no section, and nobody asks again', async () => {
  there = null;
  detached.watch(true);
  await vi.advanceTimersByTimeAsync(10 * 60_000);
  detached.look();
  expect(looks()).toBe(1);
  expect(part.node.hidden).toBe(true);
});

test('a server that fails is asked again, and what was seen stays', async () => {
  detached.watch(true);
  await settle();
  answer = () => Promise.reject(new CommandError({ what: 'busy' }));
  await vi.advanceTimersByTimeAsync(5_000);
  expect(part.node.textContent).toContain('left');
  answer = () => Promise.resolve([]);
  await vi.advanceTimersByTimeAsync(60_000);
  expect(part.node.hidden).toBe(true);
});

test('a cluster shows its state, its tasks and how long it stays', async () => {
  there = [one(MARKUP, 3), { ...one('other', 30), state: 'degraded', observed: 1 }];
  detached.watch(true);
  await settle();
  expect(part.node.hidden).toBe(false);
  expect(part.node.textContent).toContain(MARKUP);
  expect(part.node.querySelector('img')).toBeNull();
  expect(part.node.textContent).toContain('2 of 2 tasks ready, local, stays for 3.0 h');
  expect(part.node.textContent).toContain('1 of 2 tasks ready');
  expect(part.node.textContent).toContain('degraded');
  // What is offered never makes a lease shorter.
  const hours = [...part.node.querySelectorAll('input')].map(input => input.value);
  expect(hours).toEqual(['8', '30']);
});

test('it is taken up, renewed and stopped', async () => {
  detached.watch(true);
  await settle();
  press('Take up');
  expect(takeUp).toHaveBeenCalledWith(expect.objectContaining({ name: 'left', agent: 11 }));
  there = [one('left', 12)];
  part.node.querySelector('input')!.value = '12';
  const renew = press('Renew');
  expect(renew.disabled).toBe(true);
  await settle();
  expect(asked).toContainEqual(['left', { do: 'renew', hours: 12, agent: 11 }]);
  expect(part.node.textContent).toContain('stays for 12.0 h from now');
  yes = false;
  press('Stop');
  await settle();
  expect(asked).not.toContainEqual(['left', { do: 'stop', agent: 11 }]);
  yes = true;
  there = [];
  press('Stop');
  await settle();
  expect(asked).toContainEqual(['left', { do: 'stop', agent: 11 }]);
  expect(part.node.hidden).toBe(true);
});

test('clusters of one name are told apart by their agents', async () => {
  there = [one('twin', 3, 11), one('twin', 4, 12), one('left', 5, 12)];
  detached.watch(true);
  await settle();
  const labels = [...part.node.querySelectorAll('[role=group]')].map(row =>
    row.getAttribute('aria-label')
  );
  expect(labels).toEqual(['cluster twin (agent 11)', 'cluster twin (agent 12)', 'cluster left']);
  expect(there.map(cluster => detached.code(cluster))).toEqual([
    'tfd.attach("twin", agent=11)',
    'tfd.attach("twin", agent=12)',
    'tfd.attach("left")'
  ]);
  const second = part.node.querySelectorAll('[role=group]')[1];
  const stop = [...second.querySelectorAll('button')].find(each => each.textContent === 'Stop');
  there = there.filter(({ lease }) => lease !== there![1].lease);
  stop!.click();
  await settle();
  expect(asked).toContainEqual(['twin', { do: 'stop', agent: 12 }]);
  expect(part.node.textContent).not.toContain('(agent');
});

test('what nobody sees can be looked at once', async () => {
  detached.lookOnce();
  await vi.advanceTimersByTimeAsync(60_000);
  expect(looks()).toBe(1);
  expect(detached.clusters.map(({ name }) => name)).toEqual(['left']);
});

test('what goes wrong is told with the next step', async () => {
  detached.watch(true);
  await settle();
  answer = name =>
    name === undefined
      ? Promise.resolve(there)
      : Promise.reject(new CommandError({ what: `no ${MARKUP}`, fix: 'look again' }));
  press('Stop');
  await settle();
  expect(part.node.textContent).toContain(`stop: no ${MARKUP}. Next: look again`);
});

test('an answer that was overtaken is not shown', async () => {
  const waiting: ((clusters: IDetached[]) => void)[] = [];
  answer = () => new Promise(resolve => waiting.push(resolve));
  detached.watch(true);
  detached.look();
  waiting[1]([one('new', 1)]);
  await settle();
  waiting[0]([one('old', 1)]);
  await settle();
  expect(detached.clusters.map(({ name }) => name)).toEqual(['new']);
});

test('a read-only panel has no buttons', async () => {
  detached.watch(true);
  await settle();
  part.update(true);
  const shown = [...part.node.querySelectorAll('button')].filter(each => !each.closest('[hidden]'));
  expect(shown).toEqual([]);
  expect(part.node.textContent).toContain('left');
});
