// Theme colors for canvases, and notification of theme changes.

export interface IColors {
  dark: boolean;
  text: string;
  quiet: string;
  back: string;
  raised: string;
  line: string;
  accent: string;
  good: string;
  warn: string;
  bad: string;
  /** Distinguishable colors with contrast to the background. */
  series: readonly string[];
  font: string;
}

const LIGHT = [
  '#0b6bb8',
  '#c2500a',
  '#2a7f3f',
  '#8a3fa0',
  '#8c6d00',
  '#00798c',
  '#5a5a5a',
  '#a0527a'
];
const DARK = [
  '#5db2f2',
  '#f5985a',
  '#67c982',
  '#cf8fe3',
  '#e0c04c',
  '#4cc9d9',
  '#b5b5b5',
  '#f2a0c8'
];
const THEME_ATTRIBUTES = [
  'data-jp-theme-light',
  'data-jp-theme-name',
  'class',
  'style',
  'data-vscode-theme-kind'
];

/** Return the colors at `node`, which must be within an element of class `tfd-live`. */
export function colors(node: Element): IColors {
  const style = getComputedStyle(node);
  const read = (name: string, fallback: string) =>
    style.getPropertyValue(`--tfd-${name}`).trim() || fallback;
  const dark = isLight(style.color);
  return {
    dark,
    text: read('text', dark ? '#eee' : '#222'),
    quiet: read('quiet', dark ? '#aaa' : '#666'),
    back: read('back', dark ? '#111' : '#fff'),
    raised: read('raised', dark ? '#222' : '#f2f2f2'),
    line: read('line', '#888'),
    accent: read('accent', dark ? '#5db2f2' : '#0b6bb8'),
    good: read('good', dark ? '#67c982' : '#2a7f3f'),
    warn: read('warn', dark ? '#f5985a' : '#c2500a'),
    bad: read('bad', dark ? '#ff7b7b' : '#c62828'),
    series: dark ? DARK : LIGHT,
    font: style.fontFamily || 'sans-serif'
  };
}

/** Return true if a computed color, `rgb(…)` or `color(srgb …)`, is light. */
function isLight(color: string): boolean {
  const parts = (color.match(/[\d.]+/g) ?? ['0', '0', '0']).slice(0, 3).map(Number);
  const scale = color.startsWith('rgb') ? 255 : 1;
  const [red, green, blue] = parts.map(part => part / scale);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 0.5;
}

/** Call `listener` after theme changes; return an unsubscribe function. */
export function onTheme(node: Element, listener: () => void): () => void {
  let last = '';
  let timer: ReturnType<typeof setTimeout> | null = null;
  const check = () => {
    if (node.isConnected) {
      const now = JSON.stringify(colors(node));
      if (now !== last) {
        last = now;
        listener();
      }
    }
  };
  // JupyterLab changes the attributes before the style sheet of the theme is loaded.
  const onMutation = () => {
    check();
    if (timer !== null) {
      clearTimeout(timer);
    }
    timer = setTimeout(check, 300);
  };
  const observer = new MutationObserver(onMutation);
  for (const target of [document.body, document.documentElement]) {
    observer.observe(target, { attributes: true, attributeFilter: THEME_ATTRIBUTES });
  }
  return () => {
    observer.disconnect();
    if (timer !== null) {
      clearTimeout(timer);
    }
  };
}
