import { afterEach, beforeEach, expect, test } from 'vitest';

import { StepperView } from '../../src/shared/stepperView';
import { clusterOf, FakeKernel } from './kernel';
import { attach, clearPage, coordinated, settle } from './page';

let kernel: FakeKernel;
let view: StepperView;

beforeEach(() => {
  kernel = FakeKernel.connected();
});

afterEach(clearPage);

function open(counts: Record<string, number>): HTMLElement {
  kernel.state({ clusters: { c: clusterOf('c', coordinated('paused', { counts })) } });
  view = attach(new StepperView(kernel.link, 'c', { readOnly: false }));
  return view.node;
}

test('the legend has the color of each state in the bar', () => {
  const node = open({ paused: 20_000, ready: 9_999, failed: 1, cancelled: 0 });
  const segments = [...node.querySelectorAll<HTMLElement>('.tfd-counts > span')];
  const items = [...node.querySelectorAll<HTMLElement>('.tfd-legend > span')];
  expect(items.map(item => item.textContent)).toEqual(['20,000 paused', '9,999 ready', '1 failed']);
  const colors = items.map(item => item.querySelector('i')!.style.background);
  expect(segments.map(segment => segment.style.background)).toEqual(colors);
  expect(new Set(colors).size).toBe(3);
  expect(segments.map(segment => segment.style.minWidth)).toEqual(['', '', '3px']);
});

test('the buttons of workers have a label', () => {
  const holds = open({}).querySelector('.tfd-holds')!;
  expect([...holds.children].map(child => child.textContent)).toEqual([
    'Hold:',
    'worker 0',
    'worker 1'
  ]);
  expect(view.node.textContent).toContain('no closures scheduled yet');
});

test('the focus moves to the other button when a pause begins or ends', async () => {
  const node = open({ paused: 2 });
  const named = (name: string) =>
    [...node.querySelectorAll('button')].find(({ textContent }) => textContent === name)!;
  named('Resume').focus();
  kernel.state({ clusters: { c: clusterOf('c', coordinated('running')) } });
  await settle();
  expect(document.activeElement).toBe(named('Pause'));
  kernel.state({ clusters: { c: clusterOf('c', coordinated('paused')) } });
  await settle();
  expect(document.activeElement).toBe(named('Resume'));
});
