import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { ClusterView } from '../../src/shared/clusterView';
import { PARTS } from '../../src/shared/cssParts';
import { clusterOf, FakeKernel } from './kernel';

let kernel: FakeKernel;
let view: ClusterView | undefined;

beforeEach(() => {
  kernel = FakeKernel.connected();
});

afterEach(() => view?.dispose());

/** Show a cluster and return its view. */
function open(more: Record<string, unknown> = {}): HTMLElement {
  kernel.state({ clusters: { c: clusterOf('c', more) } });
  view = new ClusterView(kernel.link, 'c', { readOnly: false });
  document.body.append(view.node);
  return view.node;
}

function buttons(node: HTMLElement, label: string): HTMLButtonElement[] {
  return [...node.querySelectorAll<HTMLButtonElement>('.tfd-tasks button')].filter(
    button => button.textContent === label
  );
}

test.each(['stopped', 'failed', 'lost', 'left'])('no task of a %s cluster has controls', state => {
  const node = open({ state });
  for (const button of [...buttons(node, 'Restart'), ...buttons(node, 'Kill')]) {
    expect(button.hidden && button.disabled).toBe(true);
  }
  const [logs] = buttons(node, 'Logs');
  expect(logs.disabled).toBe(true);
  expect(logs.title).toBe('The logs of an ended cluster cannot be read');
});

test('an open log stays after the end of its cluster until it is closed', async () => {
  const node = open();
  const [logs] = buttons(node, 'Logs');
  logs.click();
  kernel.state({ clusters: { c: { state: 'stopped' } } }, false);
  await new Promise(resolve => setTimeout(resolve, 40));
  expect(node.querySelector('.tfd-log')).not.toBeNull();
  logs.click();
  expect(node.querySelector('.tfd-log')).toBeNull();
  expect(logs.disabled).toBe(true);
  expect(kernel.of('command')).toEqual([]);
});

test('a click on a row opens the task, except for clicks on its button', () => {
  const node = open();
  const [row, below] = node.querySelectorAll<HTMLElement>('.tfd-tasks tbody tr');
  const toggle = row.querySelector<HTMLButtonElement>('.tfd-toggle')!;
  const press = (element: HTMLElement) => {
    element.click();
    return [toggle.getAttribute('aria-expanded'), below.hidden];
  };
  expect(press(row.querySelectorAll('td')[2])).toEqual(['true', false]);
  expect(press(toggle.querySelector('span')!)).toEqual(['false', true]);
  expect(press(toggle)).toEqual(['true', false]);
  getSelection()!.selectAllChildren(row);
  expect(press(row.querySelectorAll('td')[1])).toEqual(['true', false]);
  getSelection()!.removeAllRanges();
  expect(press(below)).toEqual(['true', false]);
  expect(toggle.classList.contains('tfd-link')).toBe(false);
});

test('the tasks of a running cluster have controls', () => {
  const node = open();
  const controls = ['Restart', 'Kill', 'Logs'].flatMap(label => buttons(node, label));
  expect(controls.map(button => button.disabled || button.hidden)).toEqual([false, false, false]);
  expect(controls[2].title).toBe('Follow the log of data_worker:0');
});

test('the sparklines of a cluster have one scale, with the rate in the next cell', () => {
  const task = { role: 'data_worker', state: 'ready', restarts: 0 };
  const node = open({
    tasks: {
      'data_worker:0': { ...task, task: 'data_worker:0', index: 0, bytes_per_s: 40e6 },
      'data_worker:1': { ...task, task: 'data_worker:1', index: 1, bytes_per_s: 120 }
    },
    order: ['data_worker:0', 'data_worker:1']
  });
  const trends = [...node.querySelectorAll('.tfd-trend')].slice(1);
  const lines = trends.map(cell => cell.querySelector('path:not(.tfd-baseline)')!);
  expect(lines.map(line => line.getAttribute('d'))).toEqual(['M60.0 1.0', 'M60.0 15.0']);
  expect(trends[1].querySelector('svg')!.getAttribute('aria-label')).toBe(
    'bytes sent in the last minute, now 120 B/s, scale to 40.0 MB/s'
  );
  const rate = trends[1].previousElementSibling!;
  expect([rate.textContent, rate.className]).toEqual(['120 B/s', 'tfd-number']);
});

test('idle tasks have low sparklines', () => {
  const task = { task: 'ps:0', role: 'ps', index: 0, state: 'ready', restarts: 0 };
  const node = open({ tasks: { 'ps:0': { ...task, bytes_per_s: 120 } }, order: ['ps:0'] });
  const line = node.querySelector('td .tfd-spark path:not(.tfd-baseline)')!;
  expect(line.getAttribute('d')).toBe('M60.0 15.0');
});

/** Return a number of tasks with the CPU of their index. */
function dataWorkers(count: number, change: Record<string, object> = {}) {
  const order = Array.from({ length: count }, (_, i) => `data_worker:${i}`);
  const fields = { role: 'data_worker', state: 'ready', restarts: 0, bytes_per_s: 5e5 };
  const tasks = Object.fromEntries(
    order.map((task, index) => [
      task,
      { ...fields, task, index, cpu_percent: index, ...change[task] }
    ])
  );
  return { tasks, order };
}

/** Return the texts of the first cells of all rows. */
function rows(node: HTMLElement): string[] {
  const cells = node.querySelectorAll('.tfd-tasks tbody > tr:first-child > td:first-child');
  return [...cells].map(cell => cell.textContent);
}

function press(node: HTMLElement, selector: string, text: string): HTMLElement {
  const button = [...node.querySelectorAll<HTMLElement>(selector)].find(
    element => element.textContent === text
  )!;
  button.click();
  return button;
}

const settle = () => new Promise(resolve => setTimeout(resolve, 40));

test('empty columns are hidden', async () => {
  const node = open(dataWorkers(2));
  const table = node.querySelector('table[aria-label="tasks"]')!.parentElement!;
  const hidden = () => [...table.classList].filter(name => name.startsWith('tfd-no-'));
  expect(hidden()).toEqual(['tfd-no-gpu', 'tfd-no-restarts', 'tfd-no-reason']);
  const change = { 'data_worker:1': { restarts: 1, reason: 'killed' } };
  kernel.state({ clusters: { c: clusterOf('c', dataWorkers(2, change)) } });
  await settle();
  expect(hidden()).toEqual(['tfd-no-gpu']);
});

test.each([80, 1000])('a role with %i tasks is one row until it is opened', count => {
  const change = {
    'data_worker:7': { state: 'restarting', cpu_percent: undefined, bytes_per_s: undefined },
    'data_worker:9': { state: 'failed', cpu_percent: undefined, bytes_per_s: undefined }
  };
  const node = open(dataWorkers(count, change));
  const role = node.querySelector<HTMLElement>('.tfd-role')!;
  expect(rows(node).slice(1)).toEqual(['data_worker:7', 'data_worker:9']);
  expect(role.textContent).toMatch(
    new RegExp(`^data_worker ${count - 2}/${count} ready · CPU (40|500) % · (39.0|499) MB/s$`)
  );
  const toggle = role.querySelector('button')!;
  expect(toggle.getAttribute('aria-expanded')).toBe('false');
  role.click();
  expect(toggle.getAttribute('aria-expanded')).toBe('true');
  expect(rows(node).length).toBeLessThanOrEqual(51);
  press(node, 'button', `All ${count.toLocaleString('en')} tasks`);
  expect(rows(node)).toHaveLength(count + 1);
  toggle.click();
  expect(rows(node)).toHaveLength(3);
});

test('a role with few tasks is not folded', () => {
  const node = open(dataWorkers(8));
  expect(rows(node)).toHaveLength(8);
  expect(node.querySelector('.tfd-role')).toBeNull();
});

test('an open task keeps its row in a folded role', async () => {
  const node = open(dataWorkers(9, { 'data_worker:3': { state: 'hung' } }));
  press(node, '.tfd-toggle', 'data_worker:3');
  kernel.state({ clusters: { c: { tasks: { 'data_worker:3': { state: 'ready' } } } } }, false);
  await settle();
  expect(rows(node).slice(1)).toEqual(['data_worker:3']);
  press(node, '.tfd-toggle', 'data_worker:3');
  kernel.state({ clusters: { c: { tasks: { 'data_worker:3': { restarts: 1 } } } } }, false);
  await settle();
  expect(rows(node)).toHaveLength(1);
});

test('the stopped tasks of an ended cluster are folded', () => {
  const change = { 'data_worker:4': { state: 'failed' } };
  const { tasks, order } = dataWorkers(80, change);
  const ended = Object.values(tasks).map(({ cpu_percent, bytes_per_s, ...task }) => [
    task.task,
    task.state === 'ready' ? { ...task, state: 'stopped' } : task
  ]);
  const node = open({ state: 'stopped', tasks: Object.fromEntries(ended), order });
  expect(rows(node)).toEqual(['data_worker 79 stopped, 1 failed', 'data_worker:4']);
});

test('a click on a header sorts the tasks, and the next click restores their order', () => {
  const node = open(dataWorkers(3, { 'data_worker:1': { cpu_percent: undefined } }));
  const names = ['data_worker:0', 'data_worker:1', 'data_worker:2'];
  const cpu = press(node, '.tfd-sort', 'CPU').parentElement!;
  expect(rows(node)).toEqual(['data_worker:2', 'data_worker:0', 'data_worker:1']);
  expect(cpu.getAttribute('aria-sort')).toBe('descending');
  press(node, '.tfd-sort', 'CPU');
  expect(rows(node)).toEqual(names);
  expect(cpu.hasAttribute('aria-sort')).toBe(false);
  press(node, '.tfd-sort', 'state');
  expect(rows(node)).toEqual(names);
});

test('sorted rows do not move under the mouse', async () => {
  // jsdom has no mouse, and reports all elements as hovered.
  const matches = vi.spyOn(HTMLElement.prototype, 'matches').mockReturnValue(true);
  const node = open(dataWorkers(2));
  press(node, '.tfd-sort', 'CPU');
  const sorted = ['data_worker:1', 'data_worker:0'];
  const change = async (cpu_percent: number) => {
    kernel.state({ clusters: { c: { tasks: { 'data_worker:0': { cpu_percent } } } } }, false);
    await settle();
  };
  await change(50);
  expect(rows(node)).toEqual(sorted);
  matches.mockReturnValue(false);
  await change(51);
  matches.mockRestore();
  expect(rows(node)).toEqual([...sorted].reverse());
});

test('a narrow view hides the state only visually', () => {
  const node = open();
  const word = node.querySelector('.tfd-tasks .tfd-word')!;
  expect(word.textContent).toBe(' ready');
  const rules = PARTS.match(/\.tfd-word \{[^}]*\}/g)!;
  expect(rules.join()).toContain('clip-path');
  expect(rules.join()).not.toContain('display: none');
});
