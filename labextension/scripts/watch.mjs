// Rebuild both outputs after every source change, until interrupted.

import { spawn } from 'node:child_process';

import * as esbuild from 'esbuild';

import { options } from './widget.mjs';

const context = await esbuild.context({ ...options, logLevel: 'info', sourcemap: 'inline' });
await context.watch();

const children = [
  ['tsc', '--watch', '--preserveWatchOutput'],
  ['jupyter-builder', 'watch', '.']
].map(([command, ...args]) => spawn(command, args, { stdio: 'inherit' }));

process.on('SIGINT', () => {
  children.forEach(child => child.kill());
  void context.dispose();
});
