import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { ClusterView } from '../../src/shared/clusterView';
import { History } from '../../src/shared/history';
import { LogLines, withoutTimestamp } from '../../src/shared/logLines';
import type { ICluster } from '../../src/shared/protocol';
import { StartForm } from '../../src/shared/startForm';
import { StepperView } from '../../src/shared/stepperView';
import type { IView } from '../../src/shared/view';
import { clusterOf, FakeKernel } from './kernel';

const MARKUP = '<img src=x onerror="alert(1)">';
const ACTIONS = { readOnly: false };

let kernel: FakeKernel;
const open: IView[] = [];

beforeEach(() => {
  kernel = new FakeKernel();
  kernel.link.hello();
  kernel.sendHello();
});

afterEach(() => {
  open.splice(0).forEach(view => view.dispose());
  document.body.replaceChildren();
});

function attach<V extends IView>(view: V): V {
  open.push(view);
  document.body.append(view.node);
  return view;
}

function press(view: IView, label: string): HTMLButtonElement {
  const match = [...view.node.querySelectorAll('button')].find(
    button => button.textContent.trim() === label
  );
  match!.click();
  return match!;
}

const settle = () => new Promise(resolve => setTimeout(resolve, 40));

function coordinated(state: string): Record<string, unknown> {
  return {
    coordinator: {
      state,
      reason: state === 'paused' ? 'from a terminal' : undefined,
      counts: { queued: 3, ready: 1 },
      closures_per_s: 0,
      workers: {
        '0': { index: 0, state: 'idle', done: 1, failed: 0, lost: 0, built: 0, unbuilt: 0 },
        '1': { index: 1, state: 'idle', done: 1, failed: 0, lost: 0, built: 0, unbuilt: 0 }
      },
      traces: {},
      ps_bytes: {},
      held: [],
      break_on_failure: false,
      reduced: false
    }
  };
}

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

test('a history is filled from the stream, and has gaps', () => {
  const history = new History();
  const stream = {
    name: 's',
    kind: 'stream',
    state: 'running',
    elements: 1,
    bytes: 0,
    elements_per_s: 3,
    bytes_per_s: 0,
    history: [1, 2, 3]
  };
  const cluster = clusterOf('c', { streams: { s: stream } }) as unknown as ICluster;
  history.sample(cluster, 1000);
  expect(history.streams.get('s')!.slice(-3)).toEqual([1, 2, 3]);
  history.sample({ ...cluster, streams: {} }, 1002);
  expect(history.streams.get('s')!.slice(-3)).toEqual([3, null, null]);
  for (let second = 1003; second < 1700; second++) {
    history.sample(cluster, second);
  }
  expect(history.length).toBe(600);
  expect(history.start + history.length).toBe(1700);
});

test('a second that a delayed timer skipped is filled', () => {
  const history = new History();
  const task = { task: 'worker:0', role: 'worker', index: 0, state: 'ready', restarts: 0 };
  const sample = (second: number, rate?: number) =>
    history.sample(clusterOf('c', { tasks: { t: { ...task, bytes_per_s: rate } } }), second);
  sample(1000, 5);
  sample(1002, 7);
  sample(1010, 9);
  expect(history.tasks.get('worker:0')!.slice(-11, -8)).toEqual([5, 7, 7]);
  expect(history.tasks.get('worker:0')!.slice(-3)).toEqual([null, null, 9]);
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
  press(view, 'No');
  await settle();
  expect(kernel.of('command')).toEqual([]);
});

test('a read-only view has no controls', () => {
  kernel.state({ clusters: { c: clusterOf('c', coordinated('paused')) } });
  const view = attach(new ClusterView(kernel.link, 'c', { readOnly: true }));
  const steps = attach(new StepperView(kernel.link, 'c', { readOnly: true }));
  const texts = [...view.node.querySelectorAll('button'), ...steps.node.querySelectorAll('button')]
    .filter(button => !button.closest('[hidden]'))
    .map(button => button.textContent);
  expect(texts).toEqual(['data_worker:0']);
});

test('shows the last known state after the kernel has ended', async () => {
  kernel.state({ clusters: { c: clusterOf('c') } });
  const view = attach(new ClusterView(kernel.link, 'c', ACTIONS));
  kernel.link.receive({ kind: 'bye' }, []);
  await settle();
  expect(view.node.textContent).toContain('showing the last known state');
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
  expect(view.node.textContent).toContain('3 queued, 1 ready');
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
  const [launcher, count, flag, name] =
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
