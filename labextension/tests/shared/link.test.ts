import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';

import { CommandError } from '../../src/shared/link';
import { clusterOf, FakeKernel } from './kernel';

let kernel: FakeKernel;

beforeEach(() => {
  vi.useFakeTimers();
  kernel = new FakeKernel();
  kernel.link.hello();
  kernel.greet();
});

afterEach(() => vi.useRealTimers());

test('the tree follows patches', () => {
  kernel.state({ clusters: { a: clusterOf('a') } });
  kernel.state({ clusters: { a: { state: 'stopped', expires: null } } }, false);
  expect(kernel.link.cluster('a')?.state).toBe('stopped');
  expect(kernel.link.cluster('a')?.launcher).toBe('local');
  kernel.state({ clusters: { a: null } }, false);
  expect(kernel.link.clusters).toEqual([]);
});

test('after a gap everything is asked for once, and nothing is believed until it comes', () => {
  kernel.state({ clusters: { a: clusterOf('a') } });
  kernel.seq += 1;
  kernel.state({ clusters: { a: { state: 'failed' } } }, false);
  kernel.state({ clusters: { a: { state: 'lost' } } }, false);
  expect(kernel.of('resync')).toHaveLength(1);
  expect(kernel.link.cluster('a')?.state).toBe('ready');
  expect(kernel.link.synced).toBe(false);
  kernel.state({ clusters: { a: clusterOf('a', { state: 'stopped' }) } });
  expect(kernel.link.cluster('a')?.state).toBe('stopped');
});

test('it tells what it has seen, where that arrives in time', () => {
  for (let i = 0; i < 45; i++) {
    kernel.state({ clusters: {} }, i === 0);
  }
  expect(kernel.of('seen').map(message => message.seq)).toEqual([20, 40]);
});

test('an open page pings while the kernel sends to it, and no longer than that', () => {
  kernel.beside = false;
  vi.advanceTimersByTime(600_000);
  expect(kernel.of('seen')).toEqual([]);
  kernel.state({ clusters: {} });
  vi.advanceTimersByTime(600_000);
  expect(kernel.of('seen').map(message => message.seq)).toEqual([1]);
  const end = kernel.link.want('a');
  vi.advanceTimersByTime(120_000);
  expect(kernel.of('seen')).toHaveLength(3);
  end();
  kernel.state({ clusters: {} });
  kernel.link.dispose();
  vi.advanceTimersByTime(600_000);
  expect(kernel.of('seen')).toHaveLength(3);
});

test('a restarted kernel is greeted again; what was asked of the old one fails', async () => {
  kernel.state({ clusters: { a: clusterOf('a') } });
  const asked = kernel.link.command('stop', { name: 'a' });
  const failed = expect(asked).rejects.toThrow('restarted');
  kernel.greet({ pid: 8, known: undefined });
  await failed;
  expect(kernel.link.clusters).toEqual([]);
  expect(kernel.of('hello')).toHaveLength(2);
});

test('what a kernel says on its way out does not count', () => {
  const pid = kernel.link.pid;
  kernel.state({ clusters: { a: clusterOf('a') } });
  kernel.link.restarts();
  kernel.greet({ pid });
  expect(kernel.link.state).toBe('gone');
  kernel.greet({ pid: pid + 1, known: undefined });
  expect(kernel.link.state).toBe('ready');
  expect(kernel.link.clusters).toEqual([]);
});

test('a kernel of another version is told apart', async () => {
  kernel.greet({ protocol: 2, version: '9.0' });
  kernel.state({ clusters: { a: clusterOf('a') } });
  expect(kernel.link.state).toBe('mismatch');
  expect(kernel.link.kernelVersion).toBe('9.0');
  expect(kernel.link.clusters).toEqual([]);
  await expect(kernel.link.command('stop')).rejects.toThrow(CommandError);
});

test('who is not known says hello again', () => {
  kernel.greet({ known: undefined, unknown: kernel.link.client });
  expect(kernel.of('hello')).toHaveLength(2);
  kernel.greet({ known: undefined, unknown: 'another tab' });
  expect(kernel.of('hello')).toHaveLength(2);
});

describe('commands', () => {
  test('are answered, each client by its own replies', async () => {
    const asked = kernel.link.command('value', { id: 3 });
    const [message] = kernel.of('command');
    expect(message).toMatchObject({ command: 'value', id: 3 });
    kernel.link.receive(
      { kind: 'reply', client: 'other', ask: message.ask as string, value: 'not mine' },
      []
    );
    kernel.reply({ value: 'mine' });
    await expect(asked).resolves.toBe('mine');
  });

  test('reject with what the kernel says', async () => {
    const asked = kernel.link.command('stop');
    kernel.reply({ error: { code: 'TFD101', what: 'no', fix: 'see tfd list' } });
    await expect(asked).rejects.toMatchObject({ problem: { what: 'no', fix: 'see tfd list' } });
  });

  test('are given up after a time', async () => {
    const asked = expect(kernel.link.command('pause')).rejects.toThrow('no answer to "pause"');
    vi.advanceTimersByTime(20_001);
    await asked;
  });

  test('wait as long as it takes where they wait for the running cell', async () => {
    kernel.beside = false;
    const asked = kernel.link.command('pause');
    vi.advanceTimersByTime(1_000_000);
    kernel.reply({ value: 1 });
    await expect(asked).resolves.toBe(1);
  });
});

test('what is wanted is sent once for all views, and again to a kernel that forgot', () => {
  const [one, two] = [kernel.link.want('a'), kernel.link.want('a')];
  one();
  one();
  expect(kernel.of('want').at(-1)?.values).toEqual(['a']);
  kernel.greet();
  expect(kernel.of('want').at(-1)?.values).toEqual(['a']);
  two();
  expect(kernel.of('want').at(-1)?.values).toEqual([]);
});

test('listeners hear of several changes once', () => {
  const heard = vi.fn();
  const end = kernel.link.onChange(heard);
  vi.advanceTimersByTime(1000);
  heard.mockClear();
  kernel.state({ clusters: {} });
  kernel.state({ clusters: {} }, false);
  vi.advanceTimersByTime(1000);
  expect(heard).toHaveBeenCalledTimes(1);
  end();
  kernel.state({ clusters: {} }, false);
  vi.advanceTimersByTime(1000);
  expect(heard).toHaveBeenCalledTimes(1);
});

test('the end of a kernel leaves what was seen', async () => {
  kernel.state({ clusters: { a: clusterOf('a') } });
  const asked = expect(kernel.link.command('stop')).rejects.toThrow('ended');
  kernel.link.receive({ kind: 'bye' }, []);
  await asked;
  expect(kernel.link.state).toBe('gone');
  expect(kernel.link.cluster('a')).toBeDefined();
});
