import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { fakeSizes } from './canvas';
import { ClosureTable } from '../../src/shared/closures';
import { errorSummary } from '../../src/shared/figures';
import { cellText, columnWidths, GRID_COLUMNS } from '../../src/shared/valuesGrid';
import { TimelineView } from '../../src/shared/timelineView';
import { ValuesView } from '../../src/shared/valuesView';
import { clusterOf, FakeKernel, type IRow, packed } from './kernel';
import { attach, clearPage, coordinated, settle } from './page';

const FAILED = 5;
let kernel: FakeKernel;
let view: ValuesView;

beforeEach(() => {
  fakeSizes();
  kernel = FakeKernel.connected();
});

afterEach(() => {
  clearPage();
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
});

async function open(
  rows: readonly IRow[],
  counts: Record<string, number> = { ready: rows.length }
): Promise<HTMLElement> {
  kernel.state({ clusters: { c: clusterOf('c', coordinated('running', { counts })) } });
  view = attach(new ValuesView(kernel.link, 'c', { readOnly: false }));
  kernel.values('c', rows, true);
  await settle();
  const viewport = view.node.querySelector<HTMLElement>('.lm-DataGrid-viewport')!;
  viewport.focus();
  return viewport;
}

/** Press a key; return true if its default action is kept. */
function press(target: Element, key: string): boolean {
  const keyCode = { Tab: 9, ArrowUp: 38, ArrowDown: 40 }[key]; // Lumino reads it
  const more = { keyCode, bubbles: true, cancelable: true };
  return target.dispatchEvent(new KeyboardEvent('keydown', { key, ...more }));
}

const announced = () => document.querySelector('[aria-live=polite]')?.textContent;

test('the keyboard selects a row, opens its details and returns', async () => {
  const viewport = await open([
    { id: 0, state: 4, worker: 1 },
    { id: 1, state: FAILED, worker: 0, error: 'bad <b>batch</b>' }
  ]);
  expect(document.activeElement).toBe(viewport);
  expect(viewport.tabIndex).toBe(0);
  expect(viewport.getAttribute('aria-label')).toContain('grid of closures; 2: 2 ready.');
  press(viewport, 'ArrowDown');
  expect(announced()).toBe('closure 1 train: failed on worker 0: bad <b>batch</b>');
  press(viewport, 'ArrowDown');
  expect(announced()).toBe('closure 0 train: ready on worker 1');
  press(viewport, 'ArrowUp');
  const details = view.node.querySelector<HTMLElement>('.tfd-details')!;
  expect(details.hidden).toBe(true);
  expect(kernel.of('command')).toEqual([]);
  press(viewport, 'Enter');
  expect(document.activeElement).toBe(details);
  expect(details.getAttribute('aria-label')).toBe('closure 1');
  expect(kernel.of('command')).toMatchObject([{ command: 'value', id: 1 }]);
  const [cancel] = details.querySelectorAll('button');
  expect([cancel.textContent, cancel.disabled]).toEqual(['Cancel', true]);
  press(cancel, 'Escape');
  expect(document.activeElement).toBe(viewport);
  expect(details.hidden).toBe(true);
  press(viewport, 'ArrowDown');
  expect(announced()).toContain('closure 0');
});

test('Tab leaves the grid', async () => {
  const viewport = await open([{ id: 0 }]);
  press(viewport, 'ArrowDown');
  expect(press(viewport, 'Tab')).toBe(true);
  expect(press(viewport, 'ArrowDown')).toBe(false);
});

test('details follow the selected row with one request at a time', async () => {
  const viewport = await open([{ id: 0 }, { id: 1 }, { id: 2 }, { id: 3 }]);
  press(viewport, 'ArrowDown');
  press(viewport, 'Enter');
  for (let i = 0; i < 3; i++) {
    press(viewport, 'ArrowDown');
  }
  expect(kernel.of('command').map(({ id }) => id)).toEqual([3]);
  kernel.reply({ value: { id: 3 } });
  await settle();
  expect(kernel.of('command').map(({ id }) => id)).toEqual([3, 0]);
});

test('details show the message of an error before its stack trace', async () => {
  const viewport = await open([{ id: 0, state: FAILED, worker: 0 }]);
  press(viewport, 'ArrowDown');
  press(viewport, 'Enter');
  const details = view.node.querySelector('.tfd-details')!;
  const error = 'Graph execution error:\n\n  File "a.py", line 1\n\nno <i>batch</i>';
  kernel.reply({ value: { id: 0, state: 'failed', run_ms: 1500, error } });
  await settle();
  expect(details.textContent).toMatch(/Close.*no <i>batch<\/i>.*ran1.5 s.*Graph execution error/);
  expect(details.querySelector('i')).toBeNull();
});

test('a closure cannot be cancelled while the kernel cannot be reached', async () => {
  const viewport = await open([{ id: 0, state: 2, worker: 0 }]);
  press(viewport, 'ArrowDown');
  press(viewport, 'Enter');
  const cancel = view.node.querySelector<HTMLButtonElement>('.tfd-details button')!;
  expect([cancel.textContent, cancel.disabled]).toEqual(['Cancel', false]);
  kernel.link.setConnected(false);
  await settle();
  expect(cancel.disabled).toBe(true);
});

test('a failed closure without a result has run', () => {
  const table = new ClosureTable();
  const { message, buffers } = packed(
    [{ id: 0, state: FAILED, dispatched: 10, finished: 12 }],
    true
  );
  new Float64Array(buffers[8]).fill(NaN);
  table.apply(message, buffers);
  expect(cellText(table, 0, 'ran')).toBe('2.0 s');
  expect(cellText(table, 0, 'fetched')).toBe('');
});

test('the next step of an error begins a sentence', () => {
  expect(errorSummary('took it\nNext: try again')).toBe('took it. Next: try again');
  expect(errorSummary('took it.\nNext: try again')).toBe('took it. Next: try again');
  expect(errorSummary('{{function_node __inference_<lambda>_1}} failed')).toBe('failed');
});

test('the grid and the timeline share the selected closure', async () => {
  const viewport = await open([
    { id: 0, state: 4, worker: 0, dispatched: 98, finished: 99 },
    { id: 1, state: 4, worker: 0, dispatched: 50, finished: 60 }
  ]);
  const timeline = new TimelineView(kernel.link, 'c', { readOnly: false });
  document.body.append(timeline.node);
  press(viewport, 'ArrowDown');
  press(viewport, 'Enter');
  await settle();
  expect(timeline.node.querySelector('.tfd-tip')!.textContent).toContain('closure 1');
  const follow = [...timeline.node.querySelectorAll('button')].at(-1)!;
  expect(follow.getAttribute('aria-pressed')).toBe('false'); // its bar was out of view
  const canvas = timeline.node.querySelector('canvas')!;
  press(canvas, 'ArrowRight');
  await settle();
  expect(view.node.querySelector('.tfd-details')!.getAttribute('aria-label')).toBe('closure 0');
  viewport.focus();
  press(viewport, 'ArrowUp');
  expect(announced()).toContain('closure 1');
  press(canvas, 'Escape');
  await settle();
  expect(view.node.querySelector<HTMLElement>('.tfd-details')!.hidden).toBe(true);
  timeline.dispose();
});

test('the button of failed closures sets the filter', async () => {
  await open(
    [
      { id: 0, state: 4 },
      { id: 1, state: FAILED }
    ],
    { ready: 1, failed: 1 }
  );
  const chip = [...view.node.querySelectorAll('button')].find(
    button => button.textContent === '1 failed'
  )!;
  const state = view.node.querySelector('select')!;
  chip.click();
  expect([state.value, chip.getAttribute('aria-pressed')]).toEqual(['failed', 'true']);
  expect(view.node.textContent).toContain('1 of 2 shown');
  chip.click();
  expect([state.value, chip.getAttribute('aria-pressed')]).toEqual(['', 'false']);
});

test('only changed rows in view are drawn again', async () => {
  await open(Array.from({ length: 100 }, (_, id) => ({ id, worker: 0 })));
  kernel.values('c', [{ id: 5, worker: 6 }], false);
  await settle();
  const drawn = fakeSizes();
  const texts = () =>
    drawn.filter(({ operation }) => operation === 'fillText').map(({ args }) => args[0]);
  kernel.values('c', [{ id: 5, worker: 7 }], false);
  await settle();
  expect(texts()).toEqual([]);
  kernel.values('c', [{ id: 98, worker: 7 }], false);
  await settle();
  expect(texts()).toContain('7');
  expect(texts()).not.toContain('99');
});

test('the error column follows the state and has the rest of the width', () => {
  const names = GRID_COLUMNS.map(({ name }) => name);
  expect(names.indexOf('error')).toBe(names.indexOf('state') + 1);
  const error = (total: number) => columnWidths(total)[names.indexOf('error')];
  expect([error(250), error(1200) > 300]).toEqual([120, true]);
  expect(columnWidths(1200).reduce((sum, width) => sum + width)).toBe(1186);
});
