import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    environment: 'jsdom',
    include: ['tests/**/*.test.ts'],
    // Two workers are enough, and leave room on small machines.
    maxWorkers: 2,
    server: { deps: { inline: [/@jupyter/, /@lumino/] } }
  }
});
