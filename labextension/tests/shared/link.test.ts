import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';

import { CommandError } from '../../src/shared/link';
import { PROTOCOL } from '../../src/shared/protocol';
import { clusterOf, FakeKernel } from './kernel';

let kernel: FakeKernel;

beforeEach(() => {
  vi.useFakeTimers();
  kernel = FakeKernel.connected();
});

afterEach(() => vi.useRealTimers());

test('patches update the tree', () => {
  kernel.state({ clusters: { a: clusterOf('a') } });
  kernel.state({ clusters: { a: { state: 'stopped', expires: null } } }, false);
  expect(kernel.link.cluster('a')?.state).toBe('stopped');
  expect(kernel.link.cluster('a')?.launcher).toBe('local');
  kernel.state({ clusters: { a: null } }, false);
  expect(kernel.link.clusters).toEqual([]);
});

test('after a gap one resync is sent, and patches are ignored until its reply', () => {
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

test('messages are acknowledged after every 20', () => {
  for (let i = 0; i < 45; i++) {
    kernel.state({ clusters: {} }, i === 0);
  }
  expect(kernel.of('ack').map(message => message.seq)).toEqual([20, 40]);
});

test('keep-alive messages are sent only while the kernel sends to the page', () => {
  kernel.concurrent = false;
  vi.advanceTimersByTime(600_000);
  expect(kernel.of('ack')).toEqual([]);
  kernel.state({ clusters: {} });
  vi.advanceTimersByTime(600_000);
  expect(kernel.of('ack').map(message => message.seq)).toEqual([1]);
  const end = kernel.link.subscribe('a');
  vi.advanceTimersByTime(120_000);
  expect(kernel.of('ack')).toHaveLength(3);
  end();
  kernel.state({ clusters: {} });
  kernel.link.dispose();
  vi.advanceTimersByTime(600_000);
  expect(kernel.of('ack')).toHaveLength(3);
});

test('a restart sends another hello and rejects pending commands', async () => {
  kernel.state({ clusters: { a: clusterOf('a') } });
  const result = kernel.link.command('stop', { name: 'a' });
  const failed = expect(result).rejects.toThrow('restarted');
  kernel.sendHello({ pid: 8, known: undefined });
  await failed;
  expect(kernel.link.clusters).toEqual([]);
  expect(kernel.of('hello')).toHaveLength(2);
});

test('a hello of the old process is ignored after a restart', () => {
  const pid = kernel.link.pid;
  kernel.state({ clusters: { a: clusterOf('a') } });
  kernel.link.expectRestart();
  kernel.sendHello({ pid });
  expect(kernel.link.state).toBe('ended');
  kernel.sendHello({ pid: pid + 1, known: undefined });
  expect(kernel.link.state).toBe('ready');
  expect(kernel.link.clusters).toEqual([]);
});

test('a kernel of another protocol version is a mismatch', async () => {
  kernel.sendHello({ protocol: PROTOCOL + 1, version: '9.0' });
  kernel.state({ clusters: { a: clusterOf('a') } });
  expect(kernel.link.state).toBe('mismatch');
  expect(kernel.link.kernelVersion).toBe('9.0');
  expect(kernel.link.clusters).toEqual([]);
  await expect(kernel.link.command('stop')).rejects.toThrow(CommandError);
});

test('an unknown client sends hello again', () => {
  kernel.sendHello({ known: undefined, unknown: kernel.link.client });
  expect(kernel.of('hello')).toHaveLength(2);
  kernel.sendHello({ known: undefined, unknown: 'another tab' });
  expect(kernel.of('hello')).toHaveLength(2);
});

describe('commands', () => {
  test('are resolved by replies to the same client', async () => {
    const result = kernel.link.command('value', { id: 3 });
    const [message] = kernel.of('command');
    expect(message).toMatchObject({ command: 'value', id: 3 });
    kernel.link.receive(
      { kind: 'reply', client: 'other', request_id: message.request_id as string, value: 'other' },
      []
    );
    kernel.reply({ value: 'value' });
    await expect(result).resolves.toBe('value');
  });

  test('reject with the error of the kernel', async () => {
    const result = kernel.link.command('stop');
    kernel.reply({ error: { code: 'TFD101', what: 'no', fix: 'see tfd list' } });
    await expect(result).rejects.toMatchObject({ problem: { what: 'no', fix: 'see tfd list' } });
  });

  test('time out', async () => {
    const result = expect(kernel.link.command('pause')).rejects.toThrow('"pause" timed out');
    vi.advanceTimersByTime(20_001);
    await result;
  });

  test('do not time out while they wait for the running cell', async () => {
    kernel.concurrent = false;
    const result = kernel.link.command('pause');
    vi.advanceTimersByTime(1_000_000);
    kernel.reply({ value: 1 });
    await expect(result).resolves.toBe(1);
  });
});

test('subscriptions are shared by views and sent again after a hello', () => {
  const [first, second] = [kernel.link.subscribe('a'), kernel.link.subscribe('a')];
  first();
  first();
  expect(kernel.of('subscribe').at(-1)?.clusters).toEqual(['a']);
  kernel.sendHello();
  expect(kernel.of('subscribe').at(-1)?.clusters).toEqual(['a']);
  second();
  expect(kernel.of('subscribe').at(-1)?.clusters).toEqual([]);
});

test('listeners are called once for several changes', () => {
  const listener = vi.fn();
  const end = kernel.link.onChange(listener);
  vi.advanceTimersByTime(1000);
  listener.mockClear();
  kernel.state({ clusters: {} });
  kernel.state({ clusters: {} }, false);
  vi.advanceTimersByTime(1000);
  expect(listener).toHaveBeenCalledTimes(1);
  end();
  kernel.state({ clusters: {} }, false);
  vi.advanceTimersByTime(1000);
  expect(listener).toHaveBeenCalledTimes(1);
});

test('the last state remains after the kernel has ended', async () => {
  kernel.state({ clusters: { a: clusterOf('a') } });
  const result = expect(kernel.link.command('stop')).rejects.toThrow('ended');
  kernel.link.receive({ kind: 'bye' }, []);
  await result;
  expect(kernel.link.state).toBe('ended');
  expect(kernel.link.cluster('a')).toBeDefined();
});
