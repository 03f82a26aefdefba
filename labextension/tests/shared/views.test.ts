import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { ClusterView } from '../../src/shared/clusterView';
import { LogLines, withoutTimestamp } from '../../src/shared/logLines';
import { StartForm } from '../../src/shared/startForm';
import { StepperView } from '../../src/shared/stepperView';
import { TimelineView } from '../../src/shared/timelineView';
import { clusterOf, FakeKernel } from './kernel';
import { attach, clearPage, coordinated, press, settle } from './page';

const MARKUP = '<img src=x onerror="alert(1)">';
const ACTIONS = { readOnly: false };

let kernel: FakeKernel;

beforeEach(() => {
  kernel = FakeKernel.connected();
});

afterEach(clearPage);

test('repeated lines are merged regardless of their timestamps', () => {
  const log = new LogLines(3);
  log.add(['2026-10-05 12:00:00.123456: W same', '2026-10-05 12:00:01.5: W same', 'other']);
  expect(log.lines.map(line => line.count)).toEqual([2, 1]);
  expect(log.add(['other', 'more'])).toBe(1);
  expect(log.text()).toBe('2026-10-05 12:00:01.5: W same  × 2\nother  × 2\nmore');
  expect(log.add(['x', 'y'])).toBe(1);
  expect(log.lines.map(line => line.text)).toEqual(['more', 'x', 'y']);
  expect(log.dropped).toBe(2);
  expect(withoutTimestamp('I0000 12:00:00.1   33 what')).toBe('what');
  expect(withoutTimestamp('step 12 of 13')).toBe('step 12 of 13');
});

test('names and errors with markup are escaped', () => {
  const task = {
    task: MARKUP,
    role: 'worker',
    index: 0,
    state: 'failed',
    reason: MARKUP,
    restarts: 1
  };
  kernel.state({
    clusters: {
      [MARKUP]: clusterOf(MARKUP, {
        launcher: MARKUP,
        tasks: { [MARKUP]: task },
        order: [MARKUP],
        notices: [{ time: 1, severity: 'error', what: MARKUP, task: MARKUP, fix: MARKUP }],
        streams: {
          [MARKUP]: {
            name: MARKUP,
            kind: 'stream',
            state: 'failed',
            elements: 0,
            bytes: 0,
            elements_per_s: 0,
            bytes_per_s: 0,
            history: [],
            error: MARKUP,
            limit: MARKUP
          }
        }
      })
    }
  });
  const { node } = attach(new ClusterView(kernel.link, MARKUP, ACTIONS));
  expect(node.querySelector('img')).toBeNull();
  expect(node.textContent.split(MARKUP).length).toBeGreaterThan(5);
});

test('a click shows the pending command, then its error and next step', async () => {
  kernel.state({ clusters: { c: clusterOf('c') } });
  const view = attach(
    new ClusterView(kernel.link, 'c', { ...ACTIONS, confirm: () => Promise.resolve(true) })
  );
  const stop = press(view, 'Stop');
  await settle();
  expect(stop.disabled).toBe(true);
  expect(view.node.textContent).toContain('Stop: pending');
  expect(kernel.of('command')[0]).toMatchObject({ command: 'stop', name: 'c' });
  kernel.reply({ error: { what: 'the agent is busy', fix: 'tfd stop c' } });
  await settle();
  expect(view.node.textContent).toContain('Stop failed: the agent is busy. Next: tfd stop c');
  expect(stop.disabled).toBe(false);
});

test('the ranks of a run are shown with their errors as text', async () => {
  const view = attach(new ClusterView(kernel.link, 'c', ACTIONS));
  const rank = { function: 'train', attempt: 2, host: 'north' };
  const ranks = {
    'worker:1': { ...rank, task: 'worker:1', rank: 1, state: 'failed', reason: MARKUP },
    'worker:0': { ...rank, task: 'worker:0', rank: 0, state: 'stopped' }
  };
  kernel.state({ clusters: { c: clusterOf('c', { ranks }) } });
  await settle();
  expect(view.node.textContent).toContain('train on 2 ranks, attempt 2rank 0');
  expect(view.node.textContent).toContain('worker:1 on north');
  expect(view.node.textContent).toContain(MARKUP);
  expect(view.node.querySelector('img')).toBeNull();
});

test('the timeline shows ranks, also without a coordinator', async () => {
  const { node } = attach(new TimelineView(kernel.link, 'c', ACTIONS));
  kernel.state({ clusters: { c: clusterOf('c') } });
  await settle();
  expect(node.textContent).toContain('No closures or ranks have run.');
  const rank = { function: 'train', attempt: 2, host: 'north', started: 1_000 };
  const ranks = {
    'worker:1': {
      ...rank,
      task: 'worker:1',
      rank: 1,
      state: 'failed',
      ended: 1_003,
      reason: MARKUP
    },
    'worker:0': { ...rank, task: 'worker:0', rank: 0, state: 'stopped', ended: 1_003 }
  };
  kernel.state({ clusters: { c: clusterOf('c', { ranks }) } });
  await settle();
  expect(node.textContent).toContain('train on 2 ranks');
  const canvas = node.querySelector('canvas')!;
  canvas.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown' }));
  expect(node.querySelector('.tfd-tip')!.textContent).toMatch(
    /^rank 1 train: failed, worker:1 on north, from .*, 3(\.0+)? s, attempt 2: /
  );
  canvas.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowUp' }));
  expect(node.querySelector('.tfd-tip')!.textContent).toContain('rank 0 train: stopped');
  expect(node.querySelector('img')).toBeNull();
});

test('the range of adaptive data workers is shown while it is set', () => {
  const adaptation = { minimum: 1, maximum: 8 };
  kernel.state({ clusters: { c: clusterOf('c', { adaptation }), d: clusterOf('d') } });
  const [adaptive, fixed] = ['c', 'd'].map(name =>
    attach(new ClusterView(kernel.link, name, ACTIONS))
  );
  expect(adaptive.node.textContent).toContain('adapts 1 to 8 data workers');
  expect(fixed.node.textContent).not.toContain('adapts');
});

test('the findings of the doctor stay until they are closed', async () => {
  kernel.state({ clusters: { c: clusterOf('c') } });
  const view = attach(new ClusterView(kernel.link, 'c', ACTIONS));
  press(view, 'Doctor');
  expect(kernel.of('command')[0]).toMatchObject({ command: 'doctor', name: 'c' });
  const finding = {
    code: 'TFD811',
    severity: 'error',
    where: 'c',
    what: MARKUP,
    why: 'readers block',
    fix: 'cluster.scale(data_workers=2)'
  };
  kernel.reply({ value: [finding] });
  await settle();
  expect(view.node.querySelector('.tfd-findings h4')!.textContent).toBe('1 finding');
  expect(
    [...view.node.querySelectorAll('.tfd-findings li > div')].map(button => button.textContent)
  ).toEqual(['✗ error TFD811', MARKUP, 'readers block', 'Next: cluster.scale(data_workers=2)']);
  expect(view.node.querySelector('img')).toBeNull();
  const list = view.node.querySelector('.tfd-notices')!;
  press(view, 'Close');
  expect(list.closest('[hidden]')).not.toBeNull();
  press(view, 'Doctor');
  kernel.reply({ value: [] });
  await settle();
  expect(view.node.textContent).toContain('No problems found');
});

test('queued clicks show the equivalent terminal command', async () => {
  kernel.concurrent = false;
  Object.assign(kernel, { hint: 'tfd interrupt c' });
  kernel.state({ clusters: { c: clusterOf('c') } });
  const view = attach(new ClusterView(kernel.link, 'c', ACTIONS));
  press(view, 'Interrupt');
  expect(view.node.textContent).toContain('queued until the cell ends');
  expect(view.node.textContent).toContain('tfd interrupt c');
  kernel.reply({ value: null });
  await settle();
});

test('Stop requires confirmation', async () => {
  kernel.state({ clusters: { c: clusterOf('c') } });
  const view = attach(new ClusterView(kernel.link, 'c', ACTIONS));
  press(view, 'Stop');
  press(view, 'Cancel');
  await settle();
  expect(kernel.of('command')).toEqual([]);
});

test('a read-only view has no controls', () => {
  kernel.state({ clusters: { c: clusterOf('c', coordinated('paused')) } });
  const view = attach(new ClusterView(kernel.link, 'c', { readOnly: true }));
  const steps = attach(new StepperView(kernel.link, 'c', { readOnly: true }));
  const texts = [...view.node.querySelectorAll('button'), ...steps.node.querySelectorAll('button')]
    .filter(button => !button.closest('[hidden], th'))
    .map(button => button.textContent);
  expect(texts).toEqual(['data_worker:0']);
});

test('shows the last known state after the kernel has ended', async () => {
  kernel.state({ clusters: { c: clusterOf('c') } });
  const view = attach(new ClusterView(kernel.link, 'c', ACTIONS));
  kernel.link.receive({ kind: 'bye' }, []);
  await settle();
  expect(view.node.textContent).toContain('Last known state of');
  expect(view.node.textContent).toContain('data_worker:0');
  expect(view.node.querySelector('.tfd-dimmed')).not.toBeNull();
});

test('shows both versions after a mismatch', async () => {
  const view = attach(new ClusterView(kernel.link, 'c', ACTIONS));
  kernel.sendHello({ protocol: 0, version: '0.0.9' });
  await settle();
  expect(view.node.textContent).toContain('0.0.9');
  expect(view.node.textContent).toContain('0.1.0');
  expect(view.node.textContent).toContain('restart the kernel');
});

test('the stepper shows the reason of a pause, steps, and holds workers', async () => {
  kernel.state({ clusters: { c: clusterOf('c', coordinated('paused')) } });
  const view = attach(new StepperView(kernel.link, 'c', ACTIONS));
  expect(view.node.textContent).toContain('paused (from a terminal)');
  press(view, 'Step n');
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'step', count: 10, name: 'c' });
  kernel.reply({ value: { ended: 0 } });
  await settle();
  press(view, 'worker 1');
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'hold', worker: 1, held: true });
  kernel.reply({ value: [1] });
  await settle();
  const held = { ...(coordinated('paused').coordinator as object), held: [1] };
  kernel.state({ clusters: { c: clusterOf('c', { coordinator: held }) } });
  await settle();
  expect(press(view, '‖ worker 1').getAttribute('aria-pressed')).toBe('true');
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'hold', worker: 1, held: false });
  kernel.reply({ value: [] });
  await settle();
});

test('the stepper shows the last state of an ended coordinator', async () => {
  kernel.state({ clusters: { c: clusterOf('c', coordinated('paused')) } });
  const view = attach(new StepperView(kernel.link, 'c', ACTIONS));
  kernel.state({ clusters: { c: { coordinator: null } } }, false);
  kernel.link.receive({ kind: 'bye' }, []);
  await settle();
  expect(view.node.textContent).toContain('The kernel has ended');
  expect(view.node.querySelector('.tfd-counts')!.getAttribute('aria-label')).toBe(
    '3 queued, 1 ready'
  );
  const late = attach(new StepperView(kernel.link, 'c', ACTIONS));
  expect(late.node.textContent).toContain('The kernel has ended');
  expect(view.node.textContent + late.node.textContent).not.toContain('has no coordinator');
});

test('the form shows the fields of the kernel, the equivalent line and errors', async () => {
  const started = vi.fn();
  const form = attach(new StartForm(kernel.link, ACTIONS, started));
  kernel.reply({
    value: {
      launchers: [
        { name: 'local', summary: `here ${MARKUP}` },
        { name: 'else', summary: 'there' }
      ],
      fields: [
        {
          name: 'launcher',
          kind: 'choice',
          label: 'launcher',
          default: 'local',
          choices: ['local', 'else']
        },
        { name: 'data_workers', kind: 'count', label: 'data workers', default: 2 },
        { name: 'evaluator', kind: 'flag', label: 'evaluator', default: false },
        { name: 'name', kind: 'text', label: 'name' },
        { name: 'time_limit', kind: 'seconds', label: 'time limit', default: null }
      ],
      line: '%tfd_cluster start'
    }
  });
  await settle();
  const line = () => form.node.querySelector('code')!.textContent;
  expect(line()).toBe('%tfd_cluster start --data-workers 2');
  expect(form.node.textContent).toContain(`here ${MARKUP}`);
  // Fields under Advanced follow the others.
  const [count, name, launcher, flag] =
    form.node.querySelectorAll<HTMLInputElement>('input,select');
  launcher.value = 'else';
  launcher.dispatchEvent(new Event('change'));
  count.value = '4';
  flag.checked = true;
  name.value = "it's";
  form.node.querySelector('form')!.dispatchEvent(new Event('input'));
  expect(line()).toBe(
    `%tfd_cluster start --launcher else --data-workers 4 --evaluator --name 'it'"'"'s'`
  );
  expect(form.node.textContent).toContain('there');
  press(form, 'Start');
  expect(kernel.of('command').at(-1)).toMatchObject({
    command: 'start',
    options: { launcher: 'else', data_workers: 4, evaluator: true, name: "it's" }
  });
  kernel.reply({ error: { what: `no ${MARKUP}`, fix: 'another name' } });
  await settle();
  expect(form.node.textContent).toContain(`no ${MARKUP}. Next: another name`);
  press(form, 'Start');
  kernel.reply({
    value: { cluster: 'c', variable: 'cluster', line: '%tfd_cluster start', reused: true }
  });
  await settle();
  expect(started).toHaveBeenCalledWith('c', expect.stringContaining('Variable: cluster.'));
  expect(form.node.textContent).toContain('is already running');
});

test('only a running stream is marked for its wait', async () => {
  const view = attach(new ClusterView(kernel.link, 'c', ACTIONS));
  const rates = { elements: 9, bytes: 0, elements_per_s: 1, bytes_per_s: 0, history: [] };
  for (const [state, tone] of [
    ['running', 'tfd-warn'],
    ['failed', 'tfd-quiet']
  ]) {
    const stream = { name: 's', kind: 'stream', state, wait_fraction: 0.91, ...rates };
    kernel.state({ clusters: { c: clusterOf('c', { streams: { s: stream } }) } });
    await settle();
    const wait = [...view.node.querySelectorAll('.tfd-stream span')].find(
      ({ textContent }) => textContent === 'waits 91 %'
    )!;
    expect(wait.className).toBe(tone);
  }
});
