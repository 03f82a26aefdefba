// One polite live region for the page. Of several texts within PAUSE_MS only the last is announced.

const PAUSE_MS = 3000;

let region: HTMLElement | null = null;
let next = '';
let timer: ReturnType<typeof setTimeout> | null = null;

/** Announce `text` to screen readers. `immediate` skips the pause after the previous one. */
export function announce(text: string, immediate = false): void {
  next = text;
  if (immediate && timer !== null) {
    clearTimeout(timer);
    timer = null;
  }
  if (timer === null) {
    flush();
  }
}

function flush(): void {
  timer = null;
  if (!next) {
    return;
  }
  if (!region?.isConnected) {
    region = document.createElement('div');
    region.className = 'tfd-visually-hidden';
    region.setAttribute('aria-live', 'polite');
    document.body.append(region);
  }
  region.textContent = next;
  next = '';
  timer = setTimeout(flush, PAUSE_MS);
}
