// Style rules of the individual views.

export const PARTS = `
.tfd-head { display: flex; flex-wrap: wrap; gap: 1px 10px; align-items: baseline; min-width: 0; }
.tfd-name { font-weight: 600; max-width: 100%; }
.tfd-alerts:focus-visible { outline-offset: -2px; }
.tfd-alert {
  display: flex; flex-wrap: wrap; align-items: center; gap: 4px 8px; margin: 3px 0; padding: 4px 8px;
  border-left: 3px solid var(--tfd-warn); background: color-mix(in srgb, var(--tfd-warn) 16%, transparent);
}
.tfd-alert-error { border-color: var(--tfd-bad); background: color-mix(in srgb, var(--tfd-bad) 16%, transparent); }
.tfd-alert > .tfd-clamp {
  display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3; overflow: hidden;
  flex: 1 1 140px; min-width: 0; overflow-wrap: anywhere;
}
.tfd-limit {
  display: flex; align-items: baseline; gap: 8px; margin: 3px 0; padding-left: 8px;
  border-left: 3px solid var(--tfd-accent);
}
.tfd-live .tfd-limit > button { flex: none; }
.tfd-tools { margin: 6px 0 2px; }
.tfd-tools > form { display: contents; }
.tfd-tools > .tfd-danger { margin-left: auto; }
.tfd-count > .tfd-button { min-width: 24px; padding: 1px 4px; }
.tfd-spark { display: inline-block; vertical-align: middle; width: 60px; height: 16px; color: var(--tfd-accent); }
.tfd-spark .tfd-baseline { stroke: var(--tfd-line); stroke-width: 1; }
.tfd-spark path { fill: none; stroke: currentColor; stroke-width: 1.3; vector-effect: non-scaling-stroke; }
.tfd-live .tfd-toggle, .tfd-live .tfd-sort, .tfd-live .tfd-legend > button {
  font: inherit; color: inherit; border: 0; padding: 0; background: none; cursor: pointer;
}
.tfd-live .tfd-toggle {
  display: inline-flex; gap: 5px; max-width: 100%; align-items: baseline; text-align: left;
}
.tfd-openable { cursor: pointer; }
.tfd-live.tfd-live .tfd-openable:hover { background: var(--tfd-raised); }
.tfd-tasks .tfd-toggle::before { content: '▸'; flex: none; width: .8em; color: var(--tfd-quiet); }
.tfd-tasks .tfd-toggle[aria-expanded='true']::before { content: '▾'; }
.tfd-sort:hover { text-decoration: underline; }
[aria-sort] > .tfd-sort::after { content: ' ▴'; }
[aria-sort='descending'] > .tfd-sort::after { content: ' ▾'; }
.tfd-live.tfd-live td.tfd-role { white-space: normal; max-width: none; }
.tfd-live .tfd-no-gpu .tfd-gpu-column, .tfd-live .tfd-no-restarts .tfd-restarts { display: none; }
.tfd-live.tfd-live td.tfd-more { white-space: normal; max-width: none; padding: 2px 0 8px 14px; overflow: visible; }
.tfd-live.tfd-live .tfd-facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 1px 8px; margin: 2px 0 6px; }
.tfd-live .tfd-facts > dt, .tfd-live .tfd-facts > dd { float: none; width: auto; margin: 0; padding: 0; font-weight: inherit; }
.tfd-live .tfd-facts > dt { color: var(--tfd-quiet); }
.tfd-facts dd { overflow-wrap: anywhere; }
.tfd-live.tfd-live table.tfd-latency { width: auto; margin: 2px 0 6px; }
.tfd-latency .tfd-number { min-width: 4.5em; }
.tfd-gpuhost { margin: 3px 0 5px; min-width: 0; }
.tfd-gpuhost > .tfd-row { align-items: flex-end; gap: 2px 10px; }
.tfd-gputask { min-width: 0; max-width: 100%; }
.tfd-gpurow { display: flex; flex-wrap: wrap; gap: 3px; }
.tfd-gpu {
  display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 0; width: 5.1em;
  padding: 0 3px 3px; border: 1px solid var(--tfd-line); border-radius: 2px; line-height: 1.35;
}
.tfd-free .tfd-gpu { border-style: dashed; }
.tfd-gpu > i { flex: 0 0 auto; height: 0; max-width: 100%; border-top: 4px solid var(--tfd-accent); }
.tfd-gpu > i { margin-right: 100%; }
.tfd-gpu > i.tfd-idle { border-top-color: var(--tfd-quiet); }
.tfd-gpu > i.tfd-busy { border-top-color: var(--tfd-good); }
.tfd-gpu > i.tfd-memory { border-top: 3px double var(--tfd-text); }
.tfd-gpu > i.tfd-full { border-top-color: var(--tfd-warn); }
.tfd-live ol.tfd-phases { list-style: none; display: flex; flex-wrap: wrap; gap: 1px 14px; margin: 3px 0; padding: 0; }
.tfd-phases li { margin: 0; }
.tfd-phases .tfd-here { font-weight: 600; }
.tfd-reserved { width: 8em; max-width: 100%; accent-color: var(--tfd-accent); }
.tfd-onspark .tfd-more .tfd-log { height: auto; max-height: 240px; }
.tfd-onspark a { color: var(--jp-content-link-color, var(--tfd-accent)); overflow-wrap: anywhere; }
.tfd-stream { margin: 4px 0; min-width: 0; }
.tfd-stream .tfd-row > .tfd-cut { max-width: 16em; }
.tfd-live ul.tfd-notices { list-style: none; margin: 2px 0; padding: 0; }
.tfd-notices li { margin: 2px 0; overflow-wrap: anywhere; }
.tfd-notices time { color: var(--tfd-quiet); margin-right: 6px; }
.tfd-findings > .tfd-row {
  align-items: baseline; justify-content: space-between; border-bottom: 1px solid var(--tfd-faint);
}
.tfd-live .tfd-findings h4 { border: 0; }
.tfd-findings li { margin: 4px 0 8px; }
@container (max-width: 760px) {
  .tfd-c5, .tfd-w3 { display: none; }
}
@container (max-width: 560px) {
  .tfd-c4, .tfd-w2 { display: none; }
}
@container (max-width: 420px) {
  /* Screen readers ignore elements that are not displayed. */
  .tfd-live .tfd-word {
    display: inline-block; width: 1px; height: 1px; margin-right: -1px; overflow: hidden;
    clip-path: inset(50%); white-space: nowrap; vertical-align: bottom;
  }
}
@container (max-width: 320px) {
  .tfd-c2, .tfd-w1 { display: none; }
  .tfd-spark { width: 44px; }
  .tfd-live.tfd-live .tfd-latency th, .tfd-live.tfd-live .tfd-latency td { padding-right: 4px; }
}
@container (max-width: 280px) {
  .tfd-trend { display: none; }
}
@container (max-width: 220px) {
  .tfd-c3 { display: none; }
}
.tfd-compact .tfd-c4, .tfd-compact .tfd-c5,
.tfd-compact .tfd-w2, .tfd-compact .tfd-w3 { display: none; }
.tfd-live.tfd-compact td, .tfd-live.tfd-compact th { padding-right: 5px; }
.tfd-live.tfd-compact .tfd-tasks td:first-child:not([colspan]) { max-width: 9em; }
.tfd-live.tfd-compact input[type='number'] { width: 4.2em; }

.tfd-kpis > .tfd-banner { display: none; }
.tfd-live .tfd-tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9em, 1fr)); gap: 8px; margin: 0; }
.tfd-tile { min-width: 0; padding: 4px 8px; border: 1px solid var(--tfd-faint); border-radius: 2px; }
.tfd-live .tfd-tile > dt { margin: 0; font-weight: inherit; color: var(--tfd-quiet); }
.tfd-live .tfd-tile > dd { display: flex; align-items: center; justify-content: space-between; gap: 6px; margin: 0; font-size: 1.3em; }

.tfd-chart { margin: 2px 0 4px; min-height: 40px; overflow: hidden; }
.tfd-chart .uplot { font: inherit; width: min-content; line-height: 1.5; }
.tfd-chart .uplot, .tfd-chart .uplot * { box-sizing: border-box; }
.tfd-chart .u-wrap { position: relative; user-select: none; }
.tfd-chart .u-over, .tfd-chart .u-under { position: absolute; }
.tfd-chart .u-under { overflow: hidden; }
.tfd-chart .u-wrap canvas { display: block; position: relative; width: 100%; height: 100%; }
.tfd-chart .u-axis { position: absolute; }
.tfd-chart .u-cursor-x, .tfd-chart .u-cursor-y { position: absolute; left: 0; top: 0; pointer-events: none; }
.tfd-chart .u-cursor-x { height: 100%; border-right: 1px dashed var(--tfd-quiet); }
.tfd-chart .u-cursor-y { display: none; }
.tfd-chart .u-select {
  position: absolute; pointer-events: none; background: var(--tfd-accent); opacity: .25; forced-color-adjust: none;
}
.tfd-marks { position: absolute; inset: 0; pointer-events: none; }
.tfd-marks > div { position: absolute; top: 0; bottom: 0; width: 7px; margin-left: -3px; pointer-events: auto; }
.tfd-marks > div::before { content: ''; position: absolute; left: 3px; height: 100%; border-left: 1px solid; }
.tfd-chart .u-cursor-pt { position: absolute; top: 0; left: 0; border-radius: 50%; pointer-events: none; }
.tfd-chart .u-off { display: none; }
.tfd-legend { display: flex; flex-wrap: wrap; gap: 1px 12px; margin: 0 0 6px; }
.tfd-legend > span, .tfd-live .tfd-legend > button {
  display: inline-flex; gap: 5px; align-items: center; max-width: 22em; min-width: 0;
}
.tfd-live .tfd-legend > button[aria-pressed='false'] { opacity: .6; text-decoration: line-through; }
.tfd-legend i { flex: none; width: 10px; height: 10px; border-radius: 2px; }

.tfd-gridhost {
  position: relative; height: 320px; min-height: 120px; resize: vertical; overflow: hidden;
  border: 1px solid var(--tfd-line); margin: 4px 0;
}
.tfd-live .tfd-button.tfd-bad { color: color-mix(in srgb, var(--tfd-bad) 75%, var(--tfd-text)); }
.tfd-gridhost .lm-Widget { box-sizing: border-box; position: relative; }
.tfd-gridhost .lm-mod-hidden { display: none !important; }
.tfd-gridhost .lm-DataGrid { position: absolute; inset: 0; min-width: 64px; min-height: 64px; border: 0; outline: none; }
.tfd-gridhost .lm-DataGrid:focus-within { outline: 2px solid var(--tfd-accent); outline-offset: -2px; }
.tfd-gridhost .lm-DataGrid-scrollCorner { background: var(--tfd-raised); }
.tfd-gridhost .lm-ScrollBar { display: flex; user-select: none; background: var(--tfd-raised); }
.tfd-gridhost .lm-ScrollBar[data-orientation='vertical'] { flex-direction: column; min-width: 12px; max-width: 12px; }
.tfd-gridhost .lm-ScrollBar[data-orientation='horizontal'] { min-height: 12px; max-height: 12px; }
.tfd-gridhost .lm-ScrollBar-button { display: none; }
.tfd-gridhost .lm-ScrollBar-track { position: relative; overflow: hidden; flex: 1 1 auto; box-sizing: border-box; }
.tfd-gridhost .lm-ScrollBar-thumb { position: absolute; box-sizing: border-box; border-radius: 6px; background: var(--tfd-quiet); opacity: .6; }
.tfd-gridhost .lm-ScrollBar[data-orientation='vertical'] .lm-ScrollBar-thumb { left: 2px; right: 2px; min-height: 20px; }
.tfd-gridhost .lm-ScrollBar[data-orientation='horizontal'] .lm-ScrollBar-thumb { top: 2px; bottom: 2px; min-width: 20px; }
.tfd-details { border: 1px solid var(--tfd-faint); padding: 4px 8px; margin: 4px 0; }
.tfd-live .tfd-error {
  max-height: 240px; overflow: auto; margin: 4px 0; padding: 4px 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-family: var(--tfd-mono); font-size: 12px; line-height: 1.4;
  background: var(--tfd-raised); color: inherit; border: 0;
}

.tfd-lanes { position: relative; max-height: 420px; overflow-x: hidden; overflow-y: auto; border: 1px solid var(--tfd-line); margin: 4px 0; }
.tfd-lanes canvas { display: block; touch-action: pan-y; cursor: grab; }
.tfd-lanes canvas:active { cursor: grabbing; }
.tfd-live .tfd-lanes canvas:focus-visible { outline-offset: -2px; }
.tfd-plot { position: relative; }
.tfd-tip {
  position: absolute; z-index: 1; max-width: min(100%, 48em); max-height: 9em; overflow: hidden;
  padding: 2px 6px; border: 1px solid var(--tfd-line); border-radius: 2px; background: var(--tfd-back);
  overflow-wrap: anywhere; pointer-events: none;
}

.tfd-counts { display: flex; height: 14px; border: 1px solid var(--tfd-line); overflow: hidden; margin: 6px 0 2px; background: var(--tfd-raised); }
.tfd-counts > span { flex: 0 1 auto; min-width: 0; }
.tfd-holds { display: flex; flex-wrap: wrap; align-items: center; gap: 4px; }
.tfd-state { font-weight: 600; overflow-wrap: anywhere; }

.tfd-more .tfd-logs { margin-top: 6px; }
.tfd-log {
  height: 240px; min-height: 60px; resize: vertical; overflow: auto; margin: 4px 0; padding: 2px 0;
  border: 1px solid var(--tfd-line); background: var(--tfd-back); font-family: var(--tfd-mono);
  font-size: 12px; line-height: 1.4;
}
.tfd-log:empty::before { content: "no output yet"; padding: 0 6px; color: var(--tfd-quiet); }
.tfd-log > div { padding: 0 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
.tfd-log .tfd-times { margin-left: 8px; padding: 0 5px; border-radius: 7px; background: var(--tfd-raised); color: var(--tfd-quiet); white-space: nowrap; }
.tfd-log mark { background: var(--jp-warn-color2, var(--vscode-editor-findMatchHighlightBackground, #ffd54f)); color: inherit; }

.tfd-form { display: grid; grid-template-columns: minmax(6em, max-content) minmax(0, 1fr); gap: 5px 10px; align-items: baseline; max-width: 56em; }
.tfd-form > label { overflow-wrap: anywhere; }
.tfd-start summary { margin: 6px 0; cursor: pointer; }
.tfd-footer {
  position: sticky; bottom: 0; padding: 4px 0; background: var(--tfd-back);
  border-top: 1px solid var(--tfd-faint);
}
.tfd-form .tfd-help { display: block; color: var(--tfd-quiet); overflow-wrap: anywhere; }
.tfd-form input[type='text'], .tfd-form select { width: 100%; max-width: 24em; }
@container (max-width: 380px) {
  .tfd-form { gap: 2px 8px; }
  .tfd-form > div { display: contents; }
  .tfd-form input[type='checkbox'] { justify-self: start; }
  .tfd-form .tfd-help { grid-column: 1 / -1; margin-bottom: 6px; }
}
.tfd-live.tfd-resolve { display: flex; flex-direction: column; gap: 6px; margin: 6px 0; }
@container (max-width: 760px) {
  .tfd-live.tfd-live .tfd-found td:not(.tfd-wide) { max-width: 11em; }
}
@container (max-width: 420px) {
  .tfd-live.tfd-live .tfd-found td.tfd-wide { white-space: nowrap; max-width: 8em; }
  .tfd-live.tfd-live .tfd-found td:first-child:first-child { max-width: 9em; }
  .tfd-resolve .tfd-facts { grid-template-columns: minmax(0, 1fr); }
  .tfd-live.tfd-resolve .tfd-facts > dd { padding-left: 12px; }
}
.tfd-live .tfd-no-identity .tfd-identity, .tfd-live .tfd-no-accelerators .tfd-accelerators,
.tfd-live .tfd-no-reason .tfd-wide { display: none; }
.tfd-live .tfd-no-reason .tfd-where { display: table-cell; }
.tfd-resolve input[type='text'] { flex: 1 1 9em; max-width: 24em; }
.tfd-resolve summary { cursor: pointer; overflow-wrap: anywhere; }
.tfd-live .tfd-changes { list-style: none; margin: 2px 0 0; padding: 0; overflow-wrap: anywhere; }
.tfd-live pre.tfd-cell {
  margin: 2px 0 6px; padding: 4px 8px; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid var(--tfd-faint); background: none; color: inherit; font-family: var(--tfd-mono);
}
.tfd-live code.tfd-line {
  display: block; margin: 4px 0; padding: 3px 6px; overflow-wrap: anywhere; white-space: pre-wrap;
  font-family: var(--tfd-mono); font-size: 12px; background: var(--tfd-raised); color: inherit;
}

.tfd-tabs { display: flex; flex-wrap: wrap; gap: 2px; border-bottom: 1px solid var(--tfd-line); margin-bottom: 6px; }
.tfd-live .tfd-tabs button {
  font: inherit; color: var(--tfd-quiet); background: none; border: 0; padding: 3px 10px;
  border-bottom: 2px solid transparent; cursor: pointer;
}
.tfd-live .tfd-tabs button[aria-selected='true'] { color: var(--tfd-text); border-bottom-color: var(--tfd-accent); }
.tfd-live .tfd-tabs button:focus-visible { outline-offset: -2px; }
@media (forced-colors: active) {
  .tfd-legend i, .tfd-counts > span { forced-color-adjust: none; }
  .tfd-live .tfd-button[aria-pressed='true'] {
    forced-color-adjust: none; border-color: Highlight; background: Highlight; color: HighlightText;
  }
  .tfd-live .tfd-tabs button[aria-selected='false'] { border-bottom-color: Canvas; }
}
`;
