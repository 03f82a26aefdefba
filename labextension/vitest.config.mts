import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    environment: 'jsdom',
    include: ['tests/**/*.test.ts'],
    // Two workers are sufficient and suit machines with two cores.
    maxWorkers: 2,
    // These tests do not measure time, so the timeout allows for a busy machine.
    testTimeout: 60_000,
    server: { deps: { inline: [/@jupyter/, /@lumino/] } }
  }
});
