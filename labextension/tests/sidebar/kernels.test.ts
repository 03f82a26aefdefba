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

/** Have a kernel run for a notebook. */
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

test('the version is that of the package', () => {
  expect(VERSION).toBe(manifest.version);
});

test('kernels come and go with their sessions', async () => {
  await settle();
  services.run(['b.ipynb', '2'], ['a.ipynb', '1']);
  await settle();
  expect(kernels.all.map(kernel => kernel.name)).toEqual(['a.ipynb', 'b.ipynb']);
  expect(services.made.every(options => options.handleComms === false)).toBe(true);
  services.run(['a.ipynb', '1']);
  expect(kernels.all.map(kernel => kernel.id)).toEqual(['1']);
  expect(services.connections.get('2')!.isDisposed).toBe(true);
});

test('a console that shares the kernel of a notebook does not name it', async () => {
  services.run(['console', '1', 'console'], ['a.ipynb', '1'], ['other', '1', 'console']);
  await settle();
  expect(kernels.all.map(kernel => kernel.path)).toEqual(['a.ipynb']);
  expect(services.made).toHaveLength(1);
});

test('a kernel that has the package is greeted over a subshell of the panel', async () => {
  const connection = await running(withCluster);
  const [kernel] = kernels.all;
  expect(kernel.reader.state).toBe('loaded');
  expect(kernel.reader.beside).toBe(true);
  expect(connection.lastSubshell).toBe('shell of 1');
  expect(connection.heard[0]).toMatchObject({ kind: 'hello', tells: true });
  expect(kernels.living().map(found => found.cluster.name)).toEqual(['c']);
});

test('without subshells it is greeted all the same', async () => {
  const connection = await running(one => {
    one.loaded = true;
    one.subshells = null;
  });
  expect(kernels.all[0].reader.state).toBe('loaded');
  expect(kernels.all[0].reader.beside).toBe(false);
  expect(connection.heard[0]).toMatchObject({ kind: 'hello', tells: false });
  expect(connection.lastSubshell).toBe(null);
});

test('the package is loaded after the panel was there', async () => {
  services.run(['a.ipynb', '1']);
  await settle();
  const [kernel] = kernels.all;
  expect(kernel.reader.state).toBe('unloaded');
  const connection = services.connections.get('1')!;
  connection.clusters = { c: cluster('c') };
  connection.load();
  await settle();
  expect(kernel.reader.state).toBe('loaded');
  expect(clustersOf(kernel)).toHaveLength(1);
  connection.post({ kind: 'bye' });
  await settle();
  expect(kernel.reader.state).toBe('unloaded');
  expect(clustersOf(kernel)).toHaveLength(0);
});

test('the panel loads it, and says what went wrong', async () => {
  const connection = await running(one => {
    one.loadError = { ename: 'ModuleNotFoundError', evalue: 'No module named <b>' };
  });
  const { reader } = kernels.all[0];
  await reader.load();
  expect(reader.problem).toMatch(/No module named <b>.*pip install tfd-notebook/);
  expect(reader.loading).toBe(false);
  connection.loadError = null;
  const loading = reader.load();
  await settle();
  await loading;
  expect(reader.state).toBe('loaded');
  expect(reader.problem).toBe('');
});

// Its very first word may be lost.
test.each(['starting', 'busy'])(
  'a restart is noticed, its clusters are gone, and the new kernel is greeted: %s',
  async says => {
    const connection = await running(withCluster);
    const [kernel] = kernels.all;
    connection.emit('status', { execution_state: 'idle' });
    connection.emit('status', { execution_state: 'busy' });
    expect(clustersOf(kernel)).toHaveLength(1);
    connection.restart(says);
    expect(clustersOf(kernel)).toEqual([]);
    await settle();
    expect(kernel.reader.state).toBe('unloaded');
    connection.clusters = { d: cluster('d') };
    connection.load();
    await settle();
    expect(clustersOf(kernel).map(seen => seen.name)).toEqual(['d']);
    expect(connection.lastSubshell).toBe('shell of 2');
  }
);

test('a connection that was lost finds its subshell again', async () => {
  const connection = await running(one => (one.loaded = true));
  connection.connectionStatusChanged.emit('connecting');
  connection.connectionStatusChanged.emit('connected');
  await settle();
  expect(connection.subshells).toEqual(['shell of 1']);
  expect(connection.heard.filter(data => data.kind === 'hello')).toHaveLength(2);
});

test('a kernel that does not answer at once is asked again', async () => {
  const connection = await running(one => {
    one.loaded = true;
    one.answers = false;
  });
  expect(kernels.all[0].reader.state).toBe('connecting');
  connection.answers = true;
  await vi.advanceTimersByTimeAsync(5000);
  expect(kernels.all[0].reader.state).toBe('loaded');
});

test('a kernel that dies is said to have ended', async () => {
  const connection = await running(one => (one.loaded = true));
  connection.end();
  await settle();
  expect(kernels.all[0].reader.state).toBe('ended');
  expect(kernels.all[0].reader.link.state).toBe('gone');
});

test('kernels of other languages are left alone', async () => {
  const connection = await running(one => (one.language = 'R'));
  expect(kernels.all[0].reader.state).toBe('foreign');
  expect(connection.heard).toEqual([]);
  expect(connection.controlled).toEqual(['kernel_info_request']);
});

test('it says goodbye and leaves no subshell behind', async () => {
  const connection = await running(one => (one.loaded = true));
  kernels.leave();
  expect(connection.isDisposed).toBe(false);
  expect(connection.heard.at(-1)).toMatchObject({ kind: 'bye' });
  expect(connection.subshells).toEqual([]);
  kernels.dispose();
  expect(connection.isDisposed).toBe(true);
});

test('the page that comes next takes over a subshell that was not deleted', async () => {
  const connection = await running(one => (one.loaded = true));
  kernels.leave();
  connection.subshells = ['another', 'shell of 1'];
  kernels.dispose();
  connection.isDisposed = false;
  kernels = new Kernels(services, '0.1.0');
  services.run(['a.ipynb', '1']);
  await settle();
  expect(connection.subshells).toEqual(['another', 'shell of 1']);
  expect(connection.lastSubshell).toBe('shell of 1');
});

test('a kernel is found by its notebook after the server was restarted', async () => {
  services.run(['a.ipynb', '1']);
  await settle();
  expect(kernels.find('old', 'a.ipynb')?.id).toBe('1');
  expect(kernels.find('old', '')).toBeUndefined();
});
