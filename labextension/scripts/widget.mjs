// Build the notebook widgets as one ES module for anywidget.

import { mkdir, readFile, writeFile } from 'node:fs/promises';
import { dirname } from 'node:path';

import * as esbuild from 'esbuild';

export const WIDGET = '../tfd_notebook/ui/widgets/static/widget.js';

export const options = {
  bundle: true,
  charset: 'utf8',
  entryPoints: ['src/widget/index.ts'],
  format: 'esm',
  legalComments: 'none',
  minify: true,
  outfile: WIDGET,
  target: 'es2022'
};

/** Return the license file of a package; Lumino packages do not contain one. */
function licenseOf(name) {
  return name.startsWith('@lumino/')
    ? 'scripts/lumino-license.txt'
    : `node_modules/${name}/LICENSE`;
}

/** Return a comment with the licenses of all bundled packages. */
async function licenses(inputs) {
  const names = new Set(
    Object.keys(inputs)
      .map(path => /node_modules\/((?:@[^/]+\/)?[^/]+)\/(?!.*node_modules)/.exec(path)?.[1])
      .filter(name => name)
  );
  const texts = new Map();
  for (const name of [...names].sort()) {
    const text = (await readFile(licenseOf(name), 'utf8')).trim();
    texts.set(text, [...(texts.get(text) ?? []), name]);
  }
  const parts = [...texts].map(([text, packages]) => `${packages.join(', ')}\n\n${text}`);
  return `/*! This file contains the following packages.\n\n${parts.join('\n\n\n')}\n*/\n`;
}

if (import.meta.filename === process.argv[1]) {
  const { metafile, outputFiles } = await esbuild.build({
    ...options,
    metafile: true,
    write: false
  });
  await mkdir(dirname(WIDGET), { recursive: true });
  await writeFile(WIDGET, outputFiles[0].text + (await licenses(metafile.inputs)));
}
