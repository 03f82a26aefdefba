import { expect, test } from 'vitest';

import { CoordinatorPart } from '../../src/shared/coordinatorPart';
import type { ICoordinator } from '../../src/shared/protocol';
import { coordinated } from './page';

function show(more: Partial<ICoordinator>): HTMLElement {
  const part = new CoordinatorPart();
  part.show(coordinated('running', more).coordinator as ICoordinator);
  return part.node;
}

function facts(node: HTMLElement): Record<string, string> {
  const [names, texts] = ['dt', 'dd'].map(tag =>
    [...node.querySelectorAll(tag)].map(element => element.textContent)
  );
  return Object.fromEntries(names.map((name, i) => [name, texts[i]]));
}

const cells = (node: HTMLElement) =>
  [...node.querySelectorAll('.tfd-latency tr')].map(row =>
    [...row.children].map(cell => cell.textContent)
  );

test('percentiles are a table', () => {
  const node = show({ queue_ms: [57_000, 59_000, 59_400], run_ms: [6.8, 13, 85] });
  expect(cells(node)).toEqual([
    ['latency', 'p50', 'p90', 'p99'],
    ['waited', '57 s', '59 s', '59 s'],
    ['ran', '6.8 ms', '13 ms', '85 ms']
  ]);
  const numbers = node.querySelectorAll('.tfd-latency td, .tfd-latency th[scope=col] ~ th');
  expect([...numbers].every(cell => cell.className === 'tfd-number')).toBe(true);
});

test('without closures there is no table', () => {
  expect(show({}).querySelector<HTMLElement>('.tfd-latency')!.hidden).toBe(true);
  expect(cells(show({ run_ms: [6.8, 13, 85] })).map(([name]) => name)).toEqual(['latency', 'ran']);
});

test('an ETA has its uncertainty', () => {
  expect(facts(show({ left_s: [24, 22, 26] })).ETA).toBe('24 s ± 2 s');
  expect(facts(show({ left_s: [24, 24, 24.1] })).ETA).toBe('24 s');
});

test('traces are counted as retracing', () => {
  expect(facts(show({ traces: { step: 2 } })).retracing).toBe('step 2');
});
