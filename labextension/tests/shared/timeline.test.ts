import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { fakeSizes, type IDrawn } from './canvas';
import { colors } from '../../src/shared/theme';
import { tickStep } from '../../src/shared/timelineDraw';
import { TimelineView } from '../../src/shared/timelineView';
import { clusterOf, FakeKernel, type IRow, packed } from './kernel';
import { attach, clearPage, settle } from './page';

const [READY, FAILED] = [4, 5];
let kernel: FakeKernel;
let view: TimelineView;
let drawn: IDrawn[];

beforeEach(() => {
  drawn = fakeSizes();
  kernel = FakeKernel.connected();
  kernel.state({ clusters: { c: clusterOf('c') } });
  view = attach(new TimelineView(kernel.link, 'c', { readOnly: false }));
});

afterEach(() => {
  clearPage();
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
});

/** Show closures; the kernel's time is 100 s. */
async function show(rows: readonly IRow[]): Promise<void> {
  kernel.values('c', rows, true);
  await settle();
}

const bar = (id: number, state: number, dispatched: number, finished: number): IRow => ({
  id,
  state,
  worker: 0,
  dispatched,
  finished
});

test('the current time is at the right edge also when nothing is in flight', async () => {
  await show([bar(0, READY, 40, 45)]);
  expect(view.node.textContent).toContain('busy 0 % of the shown time; the last bar ended at');
  await show([bar(0, READY, 40, 45), bar(1, READY, 85, 100)]);
  // 15 of the last 30 seconds, although the first bar in view begins 15 seconds ago
  expect(view.node.textContent).toMatch(/busy (49|50) % of the shown time/);
  expect(view.node.textContent).not.toContain('the last bar');
});

test('failed bars are red as a whole', async () => {
  await show([bar(0, FAILED, 90, 95)]);
  const { bad } = colors(view.node);
  const filled = drawn.filter(({ operation, fillStyle }) => {
    return operation === 'fillRect' && fillStyle === bad;
  });
  expect(filled.length).toBeGreaterThan(0);
  expect(filled.map(({ args }) => args[3])).toEqual(filled.map(() => 18));
});

test.each([
  [0.002, 0.002],
  [0.3, 0.5],
  [0.7, 1],
  [6, 10],
  [11, 15],
  [16, 30],
  [31, 60],
  [61, 120],
  [700, 900],
  [3000, 3600],
  [4000, 7200]
])('ticks of at least %s s are %s s apart', (shortest, step) => {
  expect(tickStep(5 * shortest, 5)).toBeCloseTo(step, 9);
});

test('presets set the time span and follow the current time', async () => {
  await show([bar(0, READY, 40, 45)]);
  const buttons = ['30 s', '2 min', '10 min'].map(label =>
    [...view.node.querySelectorAll('button')].find(each => each.textContent === label)!
  );
  const pressed = () => buttons.map(each => each.getAttribute('aria-pressed'));
  expect(pressed()).toEqual(['true', 'false', 'false']);
  buttons[1].click();
  expect(pressed()).toEqual(['false', 'true', 'false']);
  expect(view.node.textContent).toContain('busy 4 % of the shown time');
});

test('the tooltip is at the mouse', async () => {
  await show([bar(0, READY, 90, 100)]);
  const canvas = view.node.querySelector('canvas')!;
  const tip = view.node.querySelector<HTMLElement>('.tfd-tip')!;
  const move = (x: number, y: number) =>
    canvas.dispatchEvent(new MouseEvent('pointermove', { clientX: x, clientY: y }));
  expect(tip.hidden).toBe(true);
  move(500, 30);
  expect(tip.hidden).toBe(false);
  expect(tip.textContent).toContain('closure 0 train: ready on worker 0, from');
  expect([tip.style.left, tip.style.top]).toEqual(['0px', '44px']); // as wide as the canvas
  move(120, 30);
  expect(tip.hidden).toBe(true);
  move(500, 30);
  canvas.dispatchEvent(new MouseEvent('pointerleave'));
  expect(tip.hidden).toBe(true);
});

test('the selected bar is described and announced with the keyboard', async () => {
  await show([bar(0, READY, 90, 100)]);
  const canvas = view.node.querySelector('canvas')!;
  canvas.focus();
  canvas.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }));
  const tip = view.node.querySelector<HTMLElement>('.tfd-tip')!;
  expect(tip.hidden).toBe(false);
  expect(document.querySelector('[aria-live]')!.textContent).toBe(tip.textContent);
  canvas.blur();
  await settle();
  expect(tip.hidden).toBe(true);
});

test('the parts of a bar before and after the closure runs are lighter', async () => {
  const { message, buffers } = packed([bar(0, READY, 80, 100)], true);
  new Float64Array(buffers[7])[0] = 85; // started
  new Float64Array(buffers[8])[0] = 95; // fetching
  kernel.seq += 1;
  kernel.link.receive({ ...message, seq: kernel.seq }, buffers);
  await settle();
  const color = colors(view.node).series[0];
  const bars = drawn.filter(
    ({ operation, fillStyle }) => operation === 'fillRect' && fillStyle === color
  );
  const [light, full] = bars.slice(-2);
  expect([light.globalAlpha, full.globalAlpha]).toEqual([0.45, 1]);
  const [whole, part] = [light, full].map(({ args }) => args[2] as number);
  expect((part / whole).toFixed(1)).toBe('0.5');
});
