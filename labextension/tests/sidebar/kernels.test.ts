import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { Kernels, clustersOf } from '../../src/sidebar/kernels';
import { VERSION } from '../../src/sidebar/version';
import * as manifest from '../../package.json';
import { cluster, FakeConnection, FakeServices } from './fakes';

let services: FakeServices;
let kernels: Kernels;

const settle = () => vi.advanceTimersByTimeAsync(20);

beforeEach(() => {
  sessionStorage.clear();
  vi.useFakeTimers();
  services = new FakeServices();
  kernels = new Kernels(services, '0.1.0');
});

afterEach(() => {
  kernels.dispose();
  vi.useRealTimers();
});

/** Start a kernel for a notebook. */
async function running(change: (connection: FakeConnection) => void): Promise<FakeConnection> {
  const connection = new FakeConnection();
  change(connection);
  services.connections.set('1', connection);
  services.run(['a.ipynb', '1']);
  await settle();
  return connection;
}

function withCluster(connection: FakeConnection): void {
  connection.loaded = true;
  connection.clusters = { c: cluster('c') };
}

test('the version equals that of the package', () => {
  expect(VERSION).toBe(manifest.version);
});

test('kernels follow their sessions', async () => {
  await settle();
  services.run(['b.ipynb', '2'], ['a.ipynb', '1']);
  await settle();
  expect(kernels.all.map(kernel => kernel.name)).toEqual(['a.ipynb', 'b.ipynb']);
  expect(services.connectOptions.every(options => options.handleComms === false)).toBe(true);
  services.run(['a.ipynb', '1']);
  expect(kernels.all.map(kernel => kernel.id)).toEqual(['1']);
  expect(services.connections.get('2')!.isDisposed).toBe(true);
});

test('a console that shares the kernel of a notebook does not name it', async () => {
  services.run(['console', '1', 'console'], ['a.ipynb', '1'], ['other', '1', 'console']);
  await settle();
  expect(kernels.all.map(kernel => kernel.path)).toEqual(['a.ipynb']);
  expect(services.connectOptions).toHaveLength(1);
});

test('a kernel with the package is connected over a subshell of the panel', async () => {
  const connection = await running(withCluster);
  const [kernel] = kernels.all;
  expect(kernel.client.state).toBe('loaded');
  expect(kernel.client.concurrent).toBe(true);
  expect(connection.lastSubshell).toBe('shell of 1');
  expect(connection.received[0]).toMatchObject({ kind: 'hello', acks: true });
  expect(kernels.runningClusters().map(running => running.cluster.name)).toEqual(['c']);
});

test('a kernel without subshells is connected on its main shell', async () => {
  const connection = await running(fake => {
    fake.loaded = true;
    fake.subshells = null;
  });
  expect(kernels.all[0].client.state).toBe('loaded');
  expect(kernels.all[0].client.concurrent).toBe(false);
  expect(connection.received[0]).toMatchObject({ kind: 'hello', acks: false });
  expect(connection.lastSubshell).toBe(null);
});

test('a package that is loaded later is detected', async () => {
  services.run(['a.ipynb', '1']);
  await settle();
  const [kernel] = kernels.all;
  expect(kernel.client.state).toBe('unloaded');
  const connection = services.connections.get('1')!;
  connection.clusters = { c: cluster('c') };
  connection.load();
  await settle();
  expect(kernel.client.state).toBe('loaded');
  expect(clustersOf(kernel)).toHaveLength(1);
  connection.post({ kind: 'bye' });
  await settle();
  expect(kernel.client.state).toBe('unloaded');
  expect(clustersOf(kernel)).toHaveLength(0);
});

test('the panel loads the package, and shows errors', async () => {
  const connection = await running(fake => {
    fake.loadError = { ename: 'ModuleNotFoundError', evalue: 'No module named <b>' };
  });
  const { client } = kernels.all[0];
  await client.load();
  expect(client.problem).toMatch(/No module named <b>.*pip install tfd-notebook/);
  expect(client.loading).toBe(false);
  connection.loadError = null;
  const loading = client.load();
  await settle();
  await loading;
  expect(client.state).toBe('loaded');
  expect(client.problem).toBe('');
});

// The first status message may be lost.
test.each(['starting', 'busy'])(
  'a restart removes the clusters and connects to the new kernel: %s',
  async status => {
    const connection = await running(withCluster);
    const [kernel] = kernels.all;
    connection.emit('status', { execution_state: 'idle' });
    connection.emit('status', { execution_state: 'busy' });
    expect(clustersOf(kernel)).toHaveLength(1);
    connection.restart(status);
    expect(clustersOf(kernel)).toEqual([]);
    await settle();
    expect(kernel.client.state).toBe('unloaded');
    connection.clusters = { d: cluster('d') };
    connection.load();
    await settle();
    expect(clustersOf(kernel).map(cluster => cluster.name)).toEqual(['d']);
    expect(connection.lastSubshell).toBe('shell of 2');
  }
);

test('a reconnect reuses the subshell', async () => {
  const connection = await running(fake => (fake.loaded = true));
  connection.connectionStatusChanged.emit('connecting');
  connection.connectionStatusChanged.emit('connected');
  await settle();
  expect(connection.subshells).toEqual(['shell of 1']);
  expect(connection.received.filter(data => data.kind === 'hello')).toHaveLength(2);
});

test('a request without a reply is sent again', async () => {
  const connection = await running(fake => {
    fake.loaded = true;
    fake.replies = false;
  });
  expect(kernels.all[0].client.state).toBe('connecting');
  connection.replies = true;
  await vi.advanceTimersByTimeAsync(5000);
  expect(kernels.all[0].client.state).toBe('loaded');
});

test('a dead kernel has the state ended', async () => {
  const connection = await running(fake => (fake.loaded = true));
  connection.end();
  await settle();
  expect(kernels.all[0].client.state).toBe('ended');
  expect(kernels.all[0].client.link.state).toBe('ended');
});

test('kernels of other languages are ignored', async () => {
  const connection = await running(fake => (fake.language = 'R'));
  expect(kernels.all[0].client.state).toBe('unsupported');
  expect(connection.received).toEqual([]);
  expect(connection.controlled).toEqual(['kernel_info_request']);
});

test('sendBye sends bye and deletes the subshell', async () => {
  const connection = await running(fake => (fake.loaded = true));
  kernels.sendBye();
  expect(connection.isDisposed).toBe(false);
  expect(connection.received.at(-1)).toMatchObject({ kind: 'bye' });
  expect(connection.subshells).toEqual([]);
  kernels.dispose();
  expect(connection.isDisposed).toBe(true);
});

test('the next page reuses a subshell that was not deleted', async () => {
  const connection = await running(fake => (fake.loaded = true));
  kernels.sendBye();
  connection.subshells = ['another', 'shell of 1'];
  kernels.dispose();
  connection.isDisposed = false;
  kernels = new Kernels(services, '0.1.0');
  services.run(['a.ipynb', '1']);
  await settle();
  expect(connection.subshells).toEqual(['another', 'shell of 1']);
  expect(connection.lastSubshell).toBe('shell of 1');
});

test('a kernel is found by its notebook after a restart of the server', async () => {
  services.run(['a.ipynb', '1']);
  await settle();
  expect(kernels.find('old', 'a.ipynb')?.id).toBe('1');
  expect(kernels.find('old', '')).toBeUndefined();
});
