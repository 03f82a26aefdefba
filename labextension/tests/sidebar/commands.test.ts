import './lumino';

import { Dialog, showDialog } from '@jupyterlab/apputils';
import { CommandRegistry } from '@lumino/commands';
import { Signal } from '@lumino/signaling';
import { nullTranslator } from '@jupyterlab/translation';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import schema from '../../schema/plugin.json';
import type { IDashboardTarget } from '../../src/sidebar/dashboard';
import { addCommands, CommandIDs, confirm, type ICommandContext } from '../../src/sidebar/commands';
import { type IKernel, Kernels } from '../../src/sidebar/kernels';
import { DEFAULTS } from '../../src/sidebar/tokens';
import { coordinated } from '../shared/page';
import { cluster, FakeConnection, FakeServices } from './fakes';

vi.mock('@jupyterlab/apputils', () => ({
  Dialog: { cancelButton: vi.fn(), okButton: vi.fn(), warnButton: vi.fn() },
  InputDialog: { getItem: vi.fn() },
  Notification: { info: vi.fn(), success: vi.fn() },
  showDialog: vi.fn(() => Promise.resolve({ button: { accept: true } })),
  showErrorMessage: vi.fn()
}));
vi.mock('../../src/sidebar/icon', () => ({ clusterIcon: undefined }));

let services: FakeServices;
let kernels: Kernels;
let commands: CommandRegistry;
let settings = DEFAULTS;
let activeKernel: IKernel | undefined;
let dashboard: IDashboardTarget | undefined;
const open = vi.fn();
const start = vi.fn();
const insert = vi.fn();
const currentChanged = new Signal<any, void>({});

const settle = () => vi.advanceTimersByTimeAsync(300);

beforeEach(async () => {
  sessionStorage.clear();
  vi.useFakeTimers();
  vi.clearAllMocks();
  services = new FakeServices();
  kernels = new Kernels(services, '0.1.0');
  commands = new CommandRegistry();
  settings = DEFAULTS;
  activeKernel = dashboard = undefined;
  addCommands(commands, {
    clusters: {
      kernels,
      get settings() {
        return settings;
      },
      get activeKernel() {
        return activeKernel;
      },
      actions: () => ({ readOnly: false, insert }),
      confirm,
      open
    },
    dashboards: { open },
    panel: { start },
    trans: nullTranslator.load(''),
    showPanel: () => undefined,
    currentDashboard: () => dashboard,
    currentChanged
  } as unknown as ICommandContext);
  await settle();
});

afterEach(() => {
  kernels.dispose();
  vi.useRealTimers();
});

/** Run a kernel whose cluster has the same name, with or without a paused coordinator. */
async function run(...states: [name: string, coordinator?: string][]): Promise<void> {
  for (const [name, state] of states) {
    const connection = new FakeConnection();
    connection.loaded = true;
    const more = state ? coordinated(state) : {};
    connection.clusters = { [name]: { ...cluster(name), ...more } };
    services.connections.set(name, connection);
  }
  services.run(...states.map(([name]): [string, string] => [`${name}.ipynb`, name]));
  await settle();
}

/** Return the ids of the enabled commands without their prefix. */
const enabled = () =>
  Object.values(CommandIDs)
    .filter(id => commands.isEnabled(id))
    .map(id => id.replace('tfd-notebook:', ''));

const sent = (name: string) =>
  services.connections.get(name)!.received.filter(({ kind }) => kind === 'command');

test('without a kernel only the panel can be shown', () => {
  expect(enabled()).toEqual(['show-panel']);
  const target = { kernel: 'a', path: 'a.ipynb', cluster: 'a' };
  expect(commands.isEnabled(CommandIDs.open, target)).toBe(true);
});

test('commands are enabled for the state of the cluster', async () => {
  const changed = vi.fn();
  commands.commandChanged.connect((_, { id }) => void changed(id));
  await run(['a', 'running']);
  const common = ['interrupt-cluster', 'run-doctor', 'insert-code', 'stop-cluster'];
  const first = ['show-panel', 'start-cluster', 'open-dashboard'];
  expect(enabled()).toEqual([...first, 'pause-coordinator', ...common]);
  expect(changed).toHaveBeenCalledWith(CommandIDs.start);
  changed.mockClear();
  services.connections.get('a')!.publish({ kind: 'state', full: true, state: { clusters: {} } });
  await settle();
  expect(enabled()).toEqual(['show-panel', 'start-cluster']);
  expect(changed).toHaveBeenCalledWith(CommandIDs.pause);
  expect(changed).not.toHaveBeenCalledWith(CommandIDs.start);
});

test('a paused coordinator can be resumed and stepped', async () => {
  await run(['a', 'paused']);
  expect(enabled()).toContain('resume-coordinator');
  expect(enabled()).not.toContain('pause-coordinator');
  void commands.execute(CommandIDs.step);
  await settle();
  expect(sent('a').at(-1)).toMatchObject({ command: 'step', name: 'a' });
});

test('a cluster without a coordinator cannot be paused', async () => {
  await run(['a']);
  expect(enabled()).not.toContain('pause-coordinator');
});

test('a command acts on the dashboard in front, then on the active notebook', async () => {
  await run(['a', 'running'], ['b', 'running'], ['c', 'paused']);
  activeKernel = kernels.find('b');
  void commands.execute(CommandIDs.pause);
  await settle();
  expect(sent('b').at(-1)).toMatchObject({ command: 'pause', source: 'JupyterLab' });
  dashboard = { kernel: 'a', path: 'a.ipynb', cluster: 'a' };
  void commands.execute(CommandIDs.pause);
  await settle();
  expect(sent('a')).toHaveLength(1);
  // It never acts on another cluster instead.
  expect(commands.isEnabled(CommandIDs.resume)).toBe(false);
  expect(commands.isEnabled(CommandIDs.resume, { kernel: 'c', cluster: 'c' })).toBe(true);
});

test('another tab in front changes what is enabled', async () => {
  await run(['a', 'running'], ['b', 'paused']);
  dashboard = { kernel: 'a', path: 'a.ipynb', cluster: 'a' };
  currentChanged.emit();
  const changed = vi.fn();
  commands.commandChanged.connect((_, { id }) => void changed(id));
  dashboard = { kernel: 'b', path: 'b.ipynb', cluster: 'b' };
  currentChanged.emit();
  expect(changed.mock.calls.flat()).toEqual([CommandIDs.pause, CommandIDs.resume, CommandIDs.step]);
});

test('a read-only page offers no command that changes a cluster', async () => {
  settings = { ...DEFAULTS, readOnly: true };
  await run(['a', 'paused']);
  expect(enabled()).toEqual(['show-panel', 'open-dashboard', 'insert-code']);
});

test('the findings of the doctor are shown in a dialog', async () => {
  await run(['a']);
  void commands.execute(CommandIDs.doctor);
  await settle();
  const finding = { code: 'TFD811', severity: 'error', where: 'a', what: '<b>', why: '', fix: '' };
  const { client, request_id } = sent('a').at(-1)!;
  services.connections.get('a')!.post({ kind: 'reply', client, request_id, value: [finding] });
  await settle();
  const { title, body } = vi.mocked(showDialog).mock.calls[0][0]!;
  expect(title).toBe('a (a.ipynb): 1 finding');
  expect((body as unknown as { node: HTMLElement }).node.textContent).toContain('<b>');
});

test('a cluster is stopped after a question with the verb', async () => {
  await run(['a']);
  void commands.execute(CommandIDs.stop);
  await settle();
  expect(showDialog).toHaveBeenCalledWith(
    expect.objectContaining({
      title: 'Stop a (a.ipynb)?',
      body: expect.stringContaining('All its tasks are stopped.')
    })
  );
  expect(Dialog.warnButton).toHaveBeenCalledWith({ label: 'Stop' });
  expect(sent('a').at(-1)).toMatchObject({ command: 'stop', name: 'a' });
});

test('code is inserted, and the form is opened, for the active notebook', async () => {
  await run(['a'], ['b']);
  activeKernel = kernels.find('b');
  await commands.execute(CommandIDs.insert);
  expect(insert).toHaveBeenCalledWith(
    'import tfd_notebook as tfd\n\ncluster = tfd.clusters()["b"]'
  );
  await commands.execute(CommandIDs.start);
  expect(start).toHaveBeenCalledWith('b');
});

test('labels start with the name of the product, and menus have known commands', () => {
  const labels = Object.values(CommandIDs).map(id => commands.label(id));
  expect(labels.filter(label => !label.startsWith('TFD: '))).toEqual([]);
  const items = schema['jupyter.lab.menus'].main.flatMap(({ items }) => items);
  const ids = items.flatMap(({ command }) => command ?? []);
  expect(ids).toHaveLength(4);
  expect(ids.filter(id => !commands.hasCommand(id))).toEqual([]);
});
