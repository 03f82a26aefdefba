import '../shared/canvas';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { clock } from '../../src/shared/figures';
import { Dashboard } from '../../src/sidebar/dashboard';
import { Kernels } from '../../src/sidebar/kernels';
import { DEFAULTS, type IClusters } from '../../src/sidebar/tokens';
import { cluster, FakeConnection, FakeServices } from './fakes';

let services: FakeServices;
let kernels: Kernels;
let connection: FakeConnection;
let dashboard: Dashboard;

const settle = () => new Promise(resolve => setTimeout(resolve, 60));
const text = () => dashboard.node.textContent;

beforeEach(async () => {
  sessionStorage.clear();
  services = new FakeServices();
  kernels = new Kernels(services, '0.1.0');
  connection = new FakeConnection();
  connection.loaded = true;
  connection.clusters = { c: cluster('c') };
  services.connections.set('1', connection);
  services.run(['a.ipynb', '1']);
  await settle();
  const clusters = {
    kernels,
    settings: DEFAULTS,
    settingsChanged: new Signal<object, void>({}),
    actions: () => ({ readOnly: false, source: 'the panel' })
  };
  const target = { kernel: '1', path: 'a.ipynb', cluster: 'c' };
  dashboard = new Dashboard(clusters as unknown as IClusters, target);
  Widget.attach(dashboard, document.body);
  await settle();
});

afterEach(() => {
  dashboard.dispose();
  kernels.dispose();
  document.body.replaceChildren();
  vi.restoreAllMocks();
});

test('a dashboard shows the time of its state after the kernel has restarted or ended', async () => {
  const { lastMessage } = kernels.all[0].client.link;
  const missing = dashboard.node.querySelector<HTMLElement>('.tfd-lab-missing')!;
  expect(missing.hidden).toBe(true);
  connection.restart();
  await settle();
  expect(missing.textContent).toBe(
    'The kernel was restarted, and its clusters have ended. ' +
      `Last known state of ${clock(lastMessage)}. ` +
      'Next: run %load_ext tfd_notebook and start the cluster.'
  );
  services.run();
  await settle();
  expect(missing.textContent).toContain(
    `The kernel of a.ipynb has ended. Last known state of ${clock(lastMessage)}. Next:`
  );
});

test('a dashboard shows an interrupted connection once', async () => {
  connection.connectionStatus = 'connecting';
  connection.connectionStatusChanged.emit('connecting');
  await settle();
  expect(text()).toContain('The connection to the kernel is interrupted. Last known state of');
  connection.connectionStatus = 'connected';
  connection.connectionStatusChanged.emit('connected');
  await settle();
  expect(text()).not.toContain('interrupted');
});

test('the key figures are above the columns, and the log is below them', () => {
  const parts = [...dashboard.node.querySelectorAll('.tfd-kpis, .tfd-lab-columns, select')];
  expect(parts.map(({ className, ariaLabel }) => ariaLabel ?? className)).toEqual([
    'key figures of c',
    'tfd-lab-columns',
    'Task whose log is shown'
  ]);
});
