import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { fakeSizes, resize } from './canvas';
import { LogsView } from '../../src/shared/logsView';
import { clusterOf, FakeKernel } from './kernel';
import { attach, clearPage, settle } from './page';

let kernel: FakeKernel;
let view: LogsView;
let log: HTMLElement;
/** Height of all lines, which jsdom does not compute. */
let height: number;

beforeEach(async () => {
  fakeSizes();
  height = 1000;
  vi.spyOn(Element.prototype, 'scrollHeight', 'get').mockImplementation(() => height);
  kernel = FakeKernel.connected();
  kernel.state({ clusters: { c: clusterOf('c') } });
  view = attach(new LogsView(kernel.link, 'c', 'worker:0', { readOnly: false }));
  log = view.node.querySelector('.tfd-log')!;
  await settle();
  kernel.reply({ value: { text: 'one\ntwo', offset: 7 } });
  await settle();
});

afterEach(() => {
  clearPage();
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
});

/** Reply to the next poll. */
async function append(text: string): Promise<void> {
  const before = kernel.of('command').length;
  await vi.waitUntil(() => kernel.of('command').length > before, { timeout: 20_000 });
  kernel.reply({ value: { text, offset: 20 } });
  await settle();
}

test('the log follows its last line also when lines wrap differently', async () => {
  expect(log.scrollTop).toBe(1000);
  height = 3000;
  resize();
  expect(log.scrollTop).toBe(3000);
  height = 4000;
  await append('three');
  expect(log.childElementCount).toBe(3);
  expect(log.scrollTop).toBe(4000);
});

test('the log does not follow after the user has scrolled up', async () => {
  log.scrollTop = 200;
  log.dispatchEvent(new Event('scroll'));
  height = 1100;
  await append('three');
  resize();
  expect(log.scrollTop).toBe(200);
});
