import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import type { ISighting } from '../../src/shared/foundTasks';
import { type ILook, ResolveView } from '../../src/shared/resolveView';
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

function taskOf(task: number, more: Partial<ISighting> = {}): ISighting {
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

function lookOf(tasks: ISighting[], more: Partial<ILook> = {}): { value: ILook } {
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
      number: 1,
      since: null,
      trouble: '',
      found: true,
      ...more
    }
  };
}

const settle = () => vi.advanceTimersByTimeAsync(40);
const asked = () => kernel.of('command').map(({ command, again }) => [command, again]);
const press = (words: string) => {
  const found = [...view.node.querySelectorAll('button')].find(one => one.textContent === words);
  found!.click();
};
const rows = () => view.node.querySelectorAll('tbody tr');

beforeEach(async () => {
  vi.useFakeTimers();
  kernel = new FakeKernel();
  kernel.link.hello();
  kernel.greet();
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

test('it looks at once, and shows states, reasons and rules as text', async () => {
  expect(kernel.of('command').at(-1)).toMatchObject({
    command: 'resolve',
    resolver: 'auto',
    options: {},
    again: false
  });
  const reason = `worker:5 answers there ${MARKUP}`;
  kernel.reply(lookOf([taskOf(0), taskOf(1, { state: 'mismatch', identity: 'worker:5', reason })]));
  await settle();
  expect(view.node.querySelector('img')).toBeNull();
  const words = view.node.textContent;
  expect(words).toContain('TF_CONFIG, 2 tasks: 1 alive, 1 mismatch; seen in 10 ms');
  expect(words).toContain('rule tf_config: TF_CONFIG has a cluster');
  expect(words).toContain('cluster = tfd.resolve().attach()');
  expect([...rows()].map(row => row.children[1].textContent)).toEqual(['● alive', '≠ mismatch']);
  expect(rows()[1].children[6].textContent).toBe(reason);
  expect(rows()[1].children[3].className).toContain('tfd-bad');
});

test('what is chosen is asked for, and what is no JSON is not', async () => {
  kernel.reply(lookOf([]));
  await settle();
  view.node.querySelector('select')!.value = 'slurm';
  const options = view.node.querySelector<HTMLInputElement>('input[type=text]')!;
  const submit = () => view.node.querySelector('form')!.dispatchEvent(new Event('submit'));
  for (const wrong of ['{"job": ', '[1]', 'null', '3']) {
    options.value = wrong;
    submit();
    expect(view.node.textContent).toContain('These arguments are no JSON object');
  }
  expect(asked()).toHaveLength(2);
  options.value = '{"job": 7}';
  submit();
  expect(kernel.of('command').at(-1)).toMatchObject({ resolver: 'slurm', options: { job: 7 } });
  kernel.reply({ error: { what: 'it is over', fix: 'see squeue' } });
  await settle();
  expect(view.node.textContent).toContain('it is over. Next: see squeue');
  // Nothing stays of what was asked before.
  const shown = [...view.node.querySelectorAll<HTMLElement>('details, .tfd-cell')];
  expect(shown.every(one => one.closest('[hidden]'))).toBe(true);
  expect(view.node.textContent).not.toContain('TF_CONFIG, no tasks');
});

test('watching asks again while it is wished, one question at a time', async () => {
  kernel.reply(lookOf([taskOf(0)]));
  await settle();
  const before = asked().length;
  await vi.advanceTimersByTimeAsync(5000);
  expect(asked()).toHaveLength(before);
  const watch = view.node.querySelector<HTMLInputElement>('input[type=checkbox]')!;
  watch.checked = true;
  watch.dispatchEvent(new Event('change'));
  await vi.advanceTimersByTimeAsync(5000);
  expect(asked().slice(before)).toEqual([['resolve', true]]);
  const change = { time: 1, task: 'worker:0', before: 'alive', after: 'refused', reason: 'gone' };
  kernel.reply(lookOf([taskOf(0, { state: 'refused', reason: 'gone' })], { changes: [change] }));
  await settle();
  expect(view.node.textContent).toContain('1 change, the latest first');
  expect(view.node.textContent).toContain('worker:0: ● alive → ✗ refused (gone)');
  await vi.advanceTimersByTimeAsync(1100);
  expect(asked().slice(before)).toHaveLength(2);
  kernel.reply(lookOf([taskOf(0)]));
  await settle();
  view.dispose();
  await vi.advanceTimersByTimeAsync(5000);
  expect(asked().slice(before)).toHaveLength(2);
});

test('watching is told what changed, and keeps the rest', async () => {
  kernel.reply(lookOf([taskOf(0), taskOf(1), taskOf(2)], { number: 7 }));
  await settle();
  const watch = view.node.querySelector<HTMLInputElement>('input[type=checkbox]')!;
  watch.checked = true;
  watch.dispatchEvent(new Event('change'));
  const seen = () => [...rows()].map(row => row.children[1].textContent);
  const since = () => kernel.of('command').at(-1)!.since;
  await vi.advanceTimersByTimeAsync(1100);
  expect(since()).toBe(7);
  const counts = { alive: 2, refused: 1 };
  kernel.reply(lookOf([taskOf(1, { state: 'refused' })], { number: 8, since: 7, counts }));
  await settle();
  expect(seen()).toEqual(['● alive', '✗ refused', '● alive']);
  expect(view.node.textContent).toContain('3 tasks: 2 alive, 1 refused');
  await vi.advanceTimersByTimeAsync(1100);
  expect(since()).toBe(8);
  kernel.reply(lookOf([], { number: 8, since: 8, counts }));
  await settle();
  expect(seen()).toEqual(['● alive', '✗ refused', '● alive']);
  await vi.advanceTimersByTimeAsync(1100);
  kernel.reply(lookOf([taskOf(0)], { number: 9 }));
  await settle();
  expect(seen()).toEqual(['● alive']);
});

test('where nobody says anything addresses have the room', async () => {
  const { classList } = view.node.querySelector('.tfd-found')!;
  kernel.reply(lookOf([taskOf(0)]));
  await settle();
  expect(classList.contains('tfd-no-reason')).toBe(true);
  press('Look');
  view.node.querySelector('form')!.dispatchEvent(new Event('submit'));
  kernel.reply(lookOf([taskOf(0, { state: 'hung', reason: 'silent' })]));
  await settle();
  expect(classList.contains('tfd-no-reason')).toBe(false);
  expect(rows()[0].children[0].getAttribute('title')).toBe('worker:0 at h:1');
});

test('an offer has a cell and no tasks to use', async () => {
  const cell = 'cluster = tfd.Cluster(workers=2, ps=1)';
  kernel.reply(lookOf([], { found: false, place: '', cell }));
  await settle();
  expect(view.node.textContent).toContain('no cluster yet');
  const use = [...view.node.querySelectorAll('button')].find(
    one => one.textContent === 'Use as cluster'
  )!;
  expect(use.hidden).toBe(true);
  press('Insert cell');
  expect(insert).toHaveBeenCalledWith(cell);
});

test('what was found is used as a cluster', async () => {
  kernel.reply(lookOf([taskOf(0)]));
  await settle();
  press('Use as cluster');
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'attach', resolver: 'auto' });
  const said = "cluster 'found' is used; it is in the variable 'cluster'";
  kernel.reply({ value: { cluster: 'found', variable: 'cluster', said } });
  await settle();
  expect(attached).toHaveBeenCalledWith('found', said);
});

test('of a thousand tasks those that need a look are shown first, or all', async () => {
  const tasks = Array.from({ length: 1000 }, (_, task) =>
    taskOf(task, task === 990 ? { state: 'hung', reason: 'silent' } : {})
  );
  kernel.reply(lookOf(tasks));
  await settle();
  expect(rows()).toHaveLength(50);
  expect(view.node.textContent).toContain('worker:990');
  press('All 1,000 tasks');
  expect(rows()).toHaveLength(1000);
  press('Fewer');
  expect(rows()).toHaveLength(50);
});
