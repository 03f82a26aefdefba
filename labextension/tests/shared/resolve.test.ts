import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import type { ITaskStatus } from '../../src/shared/resolvedTasks';
import { type IResolution, ResolveView } from '../../src/shared/resolveView';
import { FakeKernel } from './kernel';

const MARKUP = '<img src=x onerror="alert(1)">';
const CHOICES = {
  choices: [
    { name: 'auto', summary: 'rules' },
    { name: 'slurm', summary: MARKUP }
  ]
};

let kernel: FakeKernel;
let view: ResolveView;
const attached = vi.fn();
const insert = vi.fn();

function taskOf(task: number, more: Partial<ITaskStatus> = {}): ITaskStatus {
  return {
    job: 'worker',
    task,
    address: `h:${task + 1}`,
    state: 'alive',
    identity: `worker:${task}`,
    accelerators: '',
    latency_ms: 3,
    reason: '',
    ...more
  };
}

function resolutionOf(
  tasks: ITaskStatus[],
  more: Partial<IResolution> = {}
): { value: IResolution } {
  const counts: Record<string, number> = {};
  for (const { state } of tasks) {
    counts[state] = (counts[state] ?? 0) + 1;
  }
  return {
    value: {
      rule: 'tf_config',
      place: 'TF_CONFIG',
      tasks,
      counts,
      considered: [{ rule: 'tf_config', outcome: 'fired', why: 'TF_CONFIG has a cluster' }],
      cell: 'cluster = tfd.resolve().attach()',
      seconds: 0.01,
      changes: [],
      changed: more.changes?.length ?? 0,
      trouble: '',
      resolved: true,
      ...more
    }
  };
}

const settle = () => vi.advanceTimersByTimeAsync(40);
const commands = () => kernel.of('command').map(({ command, probe }) => [command, probe]);
const press = (label: string) => {
  const match = [...view.node.querySelectorAll('button')].find(
    button => button.textContent === label
  );
  match!.click();
};
const rows = () => view.node.querySelectorAll('tbody tr');

beforeEach(async () => {
  vi.useFakeTimers();
  kernel = FakeKernel.connected();
  kernel.state({ clusters: {} });
  view = new ResolveView(kernel.link, { readOnly: false, insert }, attached);
  document.body.append(view.node);
  await settle();
  kernel.reply({ value: CHOICES });
  await settle();
});

afterEach(() => {
  view.dispose();
  kernel.link.dispose();
  document.body.replaceChildren();
  vi.useRealTimers();
  vi.clearAllMocks();
});

test('resolves at once, and shows states, reasons and rules as text', async () => {
  expect(kernel.of('command').at(-1)).toMatchObject({
    command: 'resolve',
    resolver: 'auto',
    options: {},
    probe: false
  });
  const reason = `worker:5 answers there ${MARKUP}`;
  kernel.reply(
    resolutionOf([taskOf(0), taskOf(1, { state: 'mismatch', identity: 'worker:5', reason })])
  );
  await settle();
  expect(view.node.querySelector('img')).toBeNull();
  const text = view.node.textContent;
  expect(text).toContain('TF_CONFIG, 2 tasks: 1 alive, 1 mismatch; resolved in 10 ms');
  expect(text).toContain('rule tf_config: TF_CONFIG has a cluster');
  expect(text).toContain('cluster = tfd.resolve().attach()');
  expect([...rows()].map(row => row.children[1].textContent)).toEqual(['● alive', '≠ mismatch']);
  expect(rows()[1].children[6].textContent).toBe(reason);
  expect(rows()[1].children[3].className).toContain('tfd-bad');
});

test('sends the selected resolver, and rejects invalid JSON', async () => {
  kernel.reply(resolutionOf([]));
  await settle();
  view.node.querySelector('select')!.value = 'slurm';
  const options = view.node.querySelector<HTMLInputElement>('input[type=text]')!;
  const submit = () => view.node.querySelector('form')!.dispatchEvent(new Event('submit'));
  for (const wrong of ['{"job": ', '[1]', 'null', '3']) {
    options.value = wrong;
    submit();
    expect(view.node.textContent).toContain('Invalid arguments: expected a JSON object');
  }
  expect(commands()).toHaveLength(2);
  options.value = '{"job": 7}';
  submit();
  expect(kernel.of('command').at(-1)).toMatchObject({ resolver: 'slurm', options: { job: 7 } });
  kernel.reply({ error: { what: 'the job has ended', fix: 'see squeue' } });
  await settle();
  expect(view.node.textContent).toContain('the job has ended. Next: see squeue');
  // The previous result is cleared.
  const shown = [...view.node.querySelectorAll<HTMLElement>('details, .tfd-cell')];
  expect(shown.every(element => element.closest('[hidden]'))).toBe(true);
  expect(view.node.textContent).not.toContain('TF_CONFIG, no tasks');
});

test('watching sends one request at a time until the view is disposed of', async () => {
  kernel.reply(resolutionOf([taskOf(0)]));
  await settle();
  const before = commands().length;
  await vi.advanceTimersByTimeAsync(5000);
  expect(commands()).toHaveLength(before);
  const watch = view.node.querySelector<HTMLInputElement>('input[type=checkbox]')!;
  watch.checked = true;
  watch.dispatchEvent(new Event('change'));
  await vi.advanceTimersByTimeAsync(5000);
  expect(commands().slice(before)).toEqual([['resolve', true]]);
  const change = { time: 1, task: 'worker:0', before: 'alive', after: 'refused', reason: 'gone' };
  kernel.reply(
    resolutionOf([taskOf(0, { state: 'refused', reason: 'gone' })], { changes: [change] })
  );
  await settle();
  expect(view.node.textContent).toContain('1 change, newest first');
  expect(view.node.textContent).toContain('worker:0: ● alive → ✗ refused (gone)');
  await vi.advanceTimersByTimeAsync(1100);
  expect(commands().slice(before)).toHaveLength(2);
  kernel.reply(resolutionOf([taskOf(0)]));
  await settle();
  view.dispose();
  await vi.advanceTimersByTimeAsync(5000);
  expect(commands().slice(before)).toHaveLength(2);
});

test('watching shows changed and removed tasks', async () => {
  kernel.reply(resolutionOf([taskOf(0), taskOf(1), taskOf(2)]));
  await settle();
  const watch = view.node.querySelector<HTMLInputElement>('input[type=checkbox]')!;
  watch.checked = true;
  watch.dispatchEvent(new Event('change'));
  const states = () => [...rows()].map(row => row.children[1].textContent);
  await vi.advanceTimersByTimeAsync(1100);
  kernel.reply(resolutionOf([taskOf(0), taskOf(1, { state: 'refused' }), taskOf(2)]));
  await settle();
  expect(states()).toEqual(['● alive', '✗ refused', '● alive']);
  expect(view.node.textContent).toContain('3 tasks: 2 alive, 1 refused');
  await vi.advanceTimersByTimeAsync(1100);
  kernel.reply(resolutionOf([taskOf(0)]));
  await settle();
  expect(states()).toEqual(['● alive']);
});

test('empty columns are hidden', async () => {
  const { classList } = view.node.querySelector('.tfd-found')!;
  kernel.reply(resolutionOf([taskOf(0)]));
  await settle();
  expect(classList.contains('tfd-no-reason')).toBe(true);
  press('Resolve');
  view.node.querySelector('form')!.dispatchEvent(new Event('submit'));
  kernel.reply(resolutionOf([taskOf(0, { state: 'hung', reason: 'silent' })]));
  await settle();
  expect(classList.contains('tfd-no-reason')).toBe(false);
  expect(rows()[0].children[0].getAttribute('title')).toBe('worker:0 at h:1');
});

test('a suggestion has a cell and no Use button', async () => {
  const cell = 'cluster = tfd.Cluster(workers=2, ps=1)';
  kernel.reply(resolutionOf([], { resolved: false, place: '', cell }));
  await settle();
  expect(view.node.textContent).toContain('no cluster yet');
  const use = [...view.node.querySelectorAll('button')].find(
    button => button.textContent === 'Use as cluster'
  )!;
  expect(use.hidden).toBe(true);
  press('Insert cell');
  expect(insert).toHaveBeenCalledWith(cell);
});

test('attaches to the resolved cluster', async () => {
  kernel.reply(resolutionOf([taskOf(0)]));
  await settle();
  press('Use as cluster');
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'attach', resolver: 'auto' });
  const message = "attached to cluster 'found'";
  kernel.reply({ value: { cluster: 'found', variable: 'cluster', message } });
  await settle();
  expect(attached).toHaveBeenCalledWith('found', message);
});

test('a long table shows problems first, or all tasks', async () => {
  const tasks = Array.from({ length: 1000 }, (_, task) =>
    taskOf(task, task === 990 ? { state: 'hung', reason: 'silent' } : {})
  );
  kernel.reply(resolutionOf(tasks));
  await settle();
  expect(rows()).toHaveLength(50);
  expect(view.node.textContent).toContain('worker:990');
  press('All 1,000 tasks');
  expect(rows()).toHaveLength(1000);
  press('Fewer');
  expect(rows()).toHaveLength(50);
});
