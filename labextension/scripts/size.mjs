// Fail if the compressed widget bundle exceeds MAX_KB, because notebooks load it on first use.

import { readFile } from 'node:fs/promises';
import { gzipSync } from 'node:zlib';

import { WIDGET } from './widget.mjs';

const MAX_KB = 160;

const text = await readFile(WIDGET);
const kb = gzipSync(text, { level: 9 }).length / 1000;
console.log(
  `widget.js: ${(text.length / 1000).toFixed(1)} kB, gzipped ${kb.toFixed(1)} of at most ${MAX_KB} kB`
);
process.exitCode = kb > MAX_KB ? 1 : 0;
