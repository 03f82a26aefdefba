// Fail when the widgets have become larger than a notebook should wait for.

import { readFile } from 'node:fs/promises';
import { gzipSync } from 'node:zlib';

import { WIDGET } from './widget.mjs';

const MOST_KB = 150;

const text = await readFile(WIDGET);
const kb = gzipSync(text, { level: 9 }).length / 1000;
console.log(
  `widget.js: ${(text.length / 1000).toFixed(1)} kB, gzipped ${kb.toFixed(1)} of at most ${MOST_KB} kB`
);
process.exitCode = kb > MOST_KB ? 1 : 0;
