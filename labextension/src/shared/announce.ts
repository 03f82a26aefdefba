// One polite live region of the page; of what comes quickly only the last is said.

const PAUSE_MS = 3000;

let region: HTMLElement | null = null;
let next = '';
let timer: ReturnType<typeof setTimeout> | null = null;

/** Have screen readers say `text` when they are ready for it. */
export function announce(text: string): void {
  next = text;
  if (timer === null) {
    speak();
  }
}

function speak(): void {
  timer = null;
  if (!next) {
    return;
  }
  if (!region?.isConnected) {
    region = document.createElement('div');
    region.className = 'tfd-unseen';
    region.setAttribute('aria-live', 'polite');
    document.body.append(region);
  }
  region.textContent = next;
  next = '';
  timer = setTimeout(speak, PAUSE_MS);
}
