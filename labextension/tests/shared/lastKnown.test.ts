import { afterEach, beforeEach, expect, test } from 'vitest';

import { ClusterView } from '../../src/shared/clusterView';
import { clock } from '../../src/shared/figures';
import { clusterOf, FakeKernel } from './kernel';
import { attach, clearPage, settle } from './page';

let kernel: FakeKernel;
let view: ClusterView;
let before: string;

beforeEach(() => {
  kernel = FakeKernel.connected();
  kernel.state({ clusters: { c: clusterOf('c') } });
  before = clock(kernel.link.lastMessage);
  view = attach(new ClusterView(kernel.link, 'c', { readOnly: false, insert: () => undefined }));
});

afterEach(clearPage);

const banner = () => view.node.querySelector('.tfd-banner')!.textContent;
const state = () => view.node.querySelector('.tfd-head > .tfd-good')!;
const insert = () =>
  [...view.node.querySelectorAll('button')].find(
    ({ textContent }) => textContent === 'Insert code'
  )!;

test('a view without its kernel shows the time of its state in quiet colors', async () => {
  const good = getComputedStyle(state()).color;
  expect(insert().disabled).toBe(false);
  kernel.link.disconnect();
  await settle();
  expect(banner()).toBe(`The kernel has ended or does not respond. Last known state of ${before}.`);
  const { color } = getComputedStyle(view.node.querySelector('.tfd-quiet')!);
  expect(getComputedStyle(state()).color).toBe(color);
  expect(color).not.toBe(good);
  expect(insert().disabled).toBe(true);
});

test('a view shows an interrupted connection until it is back', async () => {
  kernel.link.setConnected(false);
  await settle();
  expect(banner()).toBe(
    `The connection to the kernel is interrupted. Last known state of ${before}.`
  );
  expect(insert().disabled).toBe(true);
  kernel.link.setConnected(true);
  await settle();
  expect(banner()).toBe('');
  expect(insert().disabled).toBe(false);
});

test('a cluster that no longer exists has the time of its last state', async () => {
  kernel.state({ clusters: {} });
  await settle();
  expect(banner()).toBe(`Cluster c no longer exists. Last known state of ${before}.`);
});

test('code of a cluster that has ended cannot be inserted', async () => {
  kernel.state({ clusters: { c: { state: 'stopped' } } }, false);
  await settle();
  expect(insert().disabled).toBe(true);
});
