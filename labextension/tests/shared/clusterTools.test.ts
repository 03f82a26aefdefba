import { afterEach, beforeEach, expect, test } from 'vitest';

import { ClusterView } from '../../src/shared/clusterView';
import { clusterOf, FakeKernel } from './kernel';
import { attach, clearPage, press, settle } from './page';

let kernel: FakeKernel;
let view: ClusterView;

beforeEach(() => {
  kernel = FakeKernel.connected();
  kernel.state({ clusters: { c: clusterOf('c') } });
  view = attach(new ClusterView(kernel.link, 'c', { readOnly: false }));
});

afterEach(clearPage);

const input = () => view.node.querySelector<HTMLInputElement>('.tfd-tools input')!;

async function plan(count: number): Promise<void> {
  const counts = { dispatcher: 1, data_worker: count };
  kernel.state({ clusters: { c: { planned: counts, requested: counts } } }, false);
  await settle();
}

test('Enter in the number of data workers scales the cluster', () => {
  input().value = '3';
  // A browser submits a form of two inputs on Enter only if it has a submit button.
  expect(view.node.querySelector('form')!.querySelector('[type=submit]')).not.toBeNull();
  input().form!.requestSubmit();
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'scale', data_workers: 3 });
});

test('a click on Scale sends one command', () => {
  input().value = '3';
  press(view, 'Scale');
  expect(kernel.of('command')).toHaveLength(1);
});

test('a number that is being typed is kept while the plan changes', async () => {
  await plan(3);
  expect(input().value).toBe('3');
  input().value = '0';
  await plan(4);
  expect(input().value).toBe('0');
  press(view, 'Scale');
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'scale', data_workers: 0 });
  await plan(0);
  await plan(2);
  expect(input().value).toBe('2');
});

test('the buttons next to a number change it, and Scale applies it', () => {
  const named = (name: string) => view.node.querySelector<HTMLElement>(`[aria-label="${name}"]`)!;
  const scale = [...view.node.querySelectorAll('button')].find(
    button => button.textContent === 'Scale'
  )!;
  expect(scale.className).toBe('tfd-button');
  named('More data workers').click();
  expect(input().value).toBe('3');
  expect(scale.className).toContain('tfd-main');
  named('Fewer data workers').click();
  expect(scale.className).toBe('tfd-button');
  named('Fewer data workers').click();
  named('Fewer data workers').click();
  named('Fewer data workers').click();
  expect(input().value).toBe('0');
  expect(kernel.of('command')).toEqual([]);
  scale.click();
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'scale', data_workers: 0 });
  expect(view.node.querySelector('label')!.htmlFor).toBe(input().id);
});

test('Stop is apart from the other buttons', () => {
  const buttons = [...view.node.querySelectorAll('.tfd-tools > button')];
  expect(buttons.at(-1)!.textContent).toBe('Stop');
  expect(buttons.map(button => button.classList.contains('tfd-danger'))).toEqual([
    false,
    false,
    false,
    true
  ]);
});

test.each([
  ['plan', { planned: { dispatcher: 1, data_worker: 3 } }],
  ['state', { state: 'degraded' }]
])('findings disappear after a change of the %s', async (_, change) => {
  press(view, 'Doctor');
  const finding = { code: 'TFD812', severity: 'warning', where: '', what: '', why: '', fix: '' };
  kernel.reply({ value: [finding] });
  await settle();
  const findings = view.node.querySelector<HTMLElement>('.tfd-findings')!;
  kernel.state({ clusters: { c: { launcher: 'other' } } }, false);
  await settle();
  expect(findings.hidden).toBe(false);
  kernel.state({ clusters: { c: change } }, false);
  await settle();
  expect(findings.hidden).toBe(true);
});

test('Stacks lists the threads, with all frames in their details', async () => {
  press(view, 'Stacks');
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'stacks', name: 'c' });
  const decode = { function: '<b>decode', file: '/data/train.py', line: 12, seconds: 8.2 };
  const wait = { function: 'wait', file: '/usr/lib/threading.py', line: 9, seconds: null };
  const row = { task: 'data_worker:0', thread: 'tf.data', note: '', ...decode };
  const idle = { function: '', file: '', line: null, seconds: null, thread: '', stack: [] };
  kernel.reply({
    value: [
      { ...row, stack: [decode, wait] },
      { ...idle, task: 'data_worker:1', note: 'no reply within 2 s' }
    ]
  });
  await settle();
  const section = view.node.querySelector<HTMLElement>('[aria-label="stacks"]')!;
  expect(section.querySelector('h4')!.textContent).toBe('1 Python thread');
  expect(section.querySelector('summary')!.textContent).toBe(
    'data_worker:0: <b>decode (train.py:12), 8.2 s'
  );
  expect([...section.querySelectorAll('details div div')].map(node => node.textContent)).toEqual([
    '<b>decode (/data/train.py:12), 8.2 s',
    'wait (/usr/lib/threading.py:9)'
  ]);
  expect(section.querySelectorAll('li')[1].textContent).toBe('data_worker:1: no reply within 2 s');
  press({ node: section }, 'Close');
  expect(section.hidden).toBe(true);
});

test('the stacks of a cluster without Python code have a row for each task', async () => {
  press(view, 'Stacks');
  kernel.reply({
    value: [
      {
        ...{ task: 'ps:0', thread: '', function: '', file: '', line: null, seconds: null },
        ...{ note: 'no Python code runs', stack: [] }
      }
    ]
  });
  await settle();
  const section = view.node.querySelector<HTMLElement>('[aria-label="stacks"]')!;
  expect(section.querySelector('h4')!.textContent).toBe('No Python code runs');
  expect(section.querySelector('li')!.textContent).toBe('ps:0: no Python code runs');
});
