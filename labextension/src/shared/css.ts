// The style sheet of all views. VS Code has no --jp-* variables, and other pages have neither these
// nor --vscode-*. The HTML views in saved notebooks bring their own sheet for .tfd-view, so live
// views use the class .tfd-live.

import { PARTS } from './cssParts';

const BASE = `
.tfd-live, .tfd-visually-hidden { box-sizing: border-box; }
.tfd-live {
  --tfd-text: var(--jp-ui-font-color1, var(--vscode-foreground, CanvasText));
  --tfd-quiet: var(--jp-ui-font-color2, var(--vscode-descriptionForeground, GrayText));
  --tfd-back: var(--jp-layout-color1, var(--vscode-editor-background, Canvas));
  --tfd-raised: var(--jp-layout-color2, var(--vscode-editorWidget-background, rgba(128,128,128,.12)));
  --tfd-line: var(--jp-border-color1, var(--vscode-contrastBorder, var(--vscode-panel-border, rgba(128,128,128,.5))));
  --tfd-faint: var(--jp-border-color2, var(--vscode-panel-border, rgba(128,128,128,.3)));
  --tfd-accent: var(--jp-brand-color1, var(--vscode-focusBorder, #1976d2));
  --tfd-good: var(--jp-success-color1, var(--vscode-charts-green, #2e7d32));
  --tfd-warn: var(--jp-warn-color0, var(--vscode-charts-orange, #b35900));
  --tfd-bad: var(--jp-error-color1, var(--vscode-errorForeground, #c62828));
  --tfd-field: var(--jp-input-background, var(--vscode-input-background, transparent));
  --tfd-mono: var(--jp-code-font-family, var(--vscode-editor-font-family, monospace));
  container-type: inline-size;
  display: block; min-width: 0; max-width: 100%; margin: 0;
  color: var(--tfd-text);
  font-family: var(--jp-ui-font-family, var(--vscode-font-family, system-ui, sans-serif));
  font-size: var(--jp-ui-font-size1, var(--vscode-font-size, 13px));
  line-height: 1.45;
  font-variant-numeric: tabular-nums;
}
.tfd-live *, .tfd-live *::before { box-sizing: border-box; }
.tfd-live [hidden] { display: none !important; }
.tfd-visually-hidden {
  position: absolute; width: 1px; height: 1px; margin: -1px; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap;
}
.tfd-dimmed { opacity: .65; }
.tfd-banner {
  margin: 0 0 6px; padding: 4px 8px; border: 1px solid var(--tfd-line);
  border-left: 3px solid var(--tfd-warn); overflow-wrap: anywhere;
}
.tfd-good { color: color-mix(in srgb, var(--tfd-good) 75%, var(--tfd-text)); }
.tfd-warn { color: color-mix(in srgb, var(--tfd-warn) 75%, var(--tfd-text)); }
.tfd-bad { color: color-mix(in srgb, var(--tfd-bad) 75%, var(--tfd-text)); }
.tfd-live .tfd-quiet, .tfd-dimmed .tfd-good, .tfd-dimmed .tfd-warn { color: var(--tfd-quiet); }
.tfd-cut { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; min-width: 0; }
.tfd-wrap { overflow-wrap: anywhere; white-space: normal; }
.tfd-row { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 8px; min-width: 0; }
.tfd-live .tfd-button, .tfd-live .tfd-link {
  font: inherit; color: inherit; cursor: pointer; max-width: 100%;
}
.tfd-live .tfd-button {
  min-height: 24px; padding: 1px 9px; border-radius: 2px; white-space: nowrap;
  border: 1px solid var(--tfd-line);
  background: var(--jp-layout-color2, var(--vscode-button-secondaryBackground, transparent));
  color: var(--jp-ui-font-color1, var(--vscode-button-secondaryForeground, inherit));
}
.tfd-live .tfd-button:hover:not(:disabled) {
  background: var(--jp-layout-color3, var(--vscode-button-secondaryHoverBackground, rgba(128,128,128,.25)));
}
.tfd-live .tfd-button.tfd-main {
  background: var(--jp-brand-color1, var(--vscode-button-background, #1565c0));
  border-color: transparent;
  color: var(--jp-ui-inverse-font-color1, var(--vscode-button-foreground, #fff));
}
.tfd-live .tfd-button.tfd-main:hover:not(:disabled) {
  background: var(--jp-brand-color1, var(--vscode-button-hoverBackground, #1565c0)); filter: brightness(1.12);
}
body[data-jp-theme-light='false'] .tfd-live .tfd-button.tfd-main {
  color: var(--jp-layout-color0, #111);
}
.tfd-live .tfd-button[aria-pressed='true'] {
  border-color: var(--tfd-accent); box-shadow: inset 0 0 0 1px var(--tfd-accent);
}
.tfd-live .tfd-button.tfd-danger {
  border-color: var(--tfd-bad); color: color-mix(in srgb, var(--tfd-bad) 75%, var(--tfd-text));
}
.tfd-live .tfd-button:disabled { opacity: .5; cursor: default; }
.tfd-live .tfd-link {
  border: 0; padding: 0; background: none; text-align: left;
  color: var(--jp-content-link-color, var(--vscode-textLink-foreground, var(--tfd-accent)));
}
.tfd-live .tfd-link:hover { text-decoration: underline; }
.tfd-live :focus-visible { outline: 2px solid var(--tfd-accent); outline-offset: 1px; }
.tfd-live input:not([type='checkbox']), .tfd-live select {
  font: inherit; min-height: 24px; padding: 1px 5px; max-width: 100%; min-width: 0;
  color: var(--jp-ui-font-color1, var(--vscode-input-foreground, inherit));
  background: var(--tfd-field); border: 1px solid var(--tfd-line); border-radius: 2px;
}
.tfd-live select option { color: initial; background: initial; }
.tfd-live input[type='number'] { width: 5.5em; }
.tfd-labeled { display: inline-flex; align-items: center; gap: 4px; min-width: 0; }
.tfd-status-line { margin: 4px 0; overflow-wrap: anywhere; white-space: pre-line; }
.tfd-confirm {
  display: flex; flex-wrap: wrap; align-items: center; gap: 4px 8px; margin: 4px 0; padding: 4px 8px;
  border: 1px solid var(--tfd-line); border-left: 3px solid var(--tfd-warn);
}
.tfd-confirm > :not(button) { overflow-wrap: anywhere; }
.tfd-live h4 {
  margin: 8px 0 2px; font-size: inherit; font-weight: 600; color: var(--tfd-quiet);
  border-bottom: 1px solid var(--tfd-faint);
}
.tfd-live h4::first-letter, .tfd-tile dt::first-letter, .tfd-live th::first-letter, .tfd-sort::first-letter,
.tfd-form > label::first-letter { text-transform: uppercase; }
.tfd-live .tfd-latency thead .tfd-number::first-letter { text-transform: none; }
.tfd-live.tfd-live table {
  border-collapse: collapse; width: 100%; margin: 0; font-size: inherit; color: inherit;
  table-layout: auto; border: 0;
}
.tfd-live.tfd-live th, .tfd-live.tfd-live td {
  padding: 2px 8px 2px 0; border: 0; text-align: left; vertical-align: top; white-space: nowrap;
  max-width: 18em; overflow: hidden; text-overflow: ellipsis; line-height: 1.45; background: none;
}
.tfd-live.tfd-live th { font-weight: 400; color: var(--tfd-quiet); }
.tfd-live.tfd-live tr { background: none; }
.tfd-live.tfd-live .tfd-number { text-align: right; }
.tfd-live.tfd-live td.tfd-wide { white-space: normal; overflow-wrap: anywhere; width: 40%; max-width: none; }
.tfd-scroll { overflow-x: auto; scrollbar-width: thin; }
@media (forced-colors: active) {
  .tfd-live .tfd-button, .tfd-banner, .tfd-confirm { border-color: CanvasText; }
}
`;

/** Add the style sheet to the page unless it is already there. */
export function ensureStyle(): void {
  const text = BASE + PARTS;
  const sheets = document.querySelectorAll('style[data-tfd-notebook]');
  if (![...sheets].some(sheet => sheet.textContent === text)) {
    const sheet = document.createElement('style');
    sheet.setAttribute('data-tfd-notebook', '');
    sheet.textContent = text;
    document.head.append(sheet);
  }
}
