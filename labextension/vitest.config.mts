import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    environment: 'jsdom',
    include: ['tests/**/*.test.ts'],
    // Two workers are enough, and leave room on small machines.
    maxWorkers: 2,
    // Not what a busy machine meets: how long things take is no business of these tests.
    testTimeout: 60_000,
    server: { deps: { inline: [/@jupyter/, /@lumino/] } }
  }
});
