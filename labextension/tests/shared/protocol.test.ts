import { expect, test } from 'vitest';

import { hasEnded, type ICluster, mergePatch } from '../../src/shared/protocol';

// The examples of RFC 7396, appendix A.
const EXAMPLES: [unknown, unknown, unknown][] = [
  [{ a: 'b' }, { a: 'c' }, { a: 'c' }],
  [{ a: 'b' }, { b: 'c' }, { a: 'b', b: 'c' }],
  [{ a: 'b' }, { a: null }, {}],
  [{ a: 'b', b: 'c' }, { a: null }, { b: 'c' }],
  [{ a: ['b'] }, { a: 'c' }, { a: 'c' }],
  [{ a: 'c' }, { a: ['b'] }, { a: ['b'] }],
  [{ a: { b: 'c' } }, { a: { b: 'd', c: null } }, { a: { b: 'd' } }],
  [{ a: [{ b: 'c' }] }, { a: [1] }, { a: [1] }],
  [
    ['a', 'b'],
    ['c', 'd'],
    ['c', 'd']
  ],
  [{ a: 'b' }, ['c'], ['c']],
  [{ a: 'foo' }, null, null],
  [{ a: 'foo' }, 'bar', 'bar'],
  [{ e: null }, { a: 1 }, { e: null, a: 1 }],
  [[1, 2], { a: 'b', c: null }, { a: 'b' }],
  [{}, { a: { bb: { ccc: null } } }, { a: { bb: {} } }]
];

test.each(EXAMPLES)('%j with %j becomes %j', (target, patch, result) => {
  const before = JSON.stringify(target);
  expect(mergePatch(target, patch)).toEqual(result);
  expect(JSON.stringify(target)).toBe(before);
});

test.each([
  ['ready', false],
  ['degraded', false],
  ['stopped', true],
  ['failed', true],
  ['lost', true],
  ['left', true]
])('a cluster that is %s has ended: %s', (state, ended) => {
  expect(hasEnded({ state } as ICluster)).toBe(ended);
});
