// Canvas drawing of the timeline.

import type { ClosureTable } from './closures';
import { brief, clock } from './figures';
import type { IColors } from './theme';
import { endOf, FAILED } from './timelineModel';

export const AXIS = 20;
const LABEL = 96;
const NARROW = 52;

export interface IWindow {
  from: number;
  to: number;
  width: number;
  lanes: number;
  laneHeight: number;
}

/** Return the x position at which the lanes begin. */
export function leftOf(view: IWindow): number {
  return view.width < 400 ? NARROW : LABEL;
}

export function xOf(view: IWindow, time: number): number {
  const left = leftOf(view);
  return left + ((time - view.from) / (view.to - view.from)) * (view.width - left);
}

export function timeAt(view: IWindow, x: number): number {
  const left = leftOf(view);
  return view.from + ((x - left) / (view.width - left)) * (view.to - view.from);
}

interface IBox {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** Return the box of an interval in a lane, at least `minWidth` pixels wide. */
function boxOf(view: IWindow, lane: number, from: number, to: number, minWidth: number): IBox {
  const x = xOf(view, from);
  return {
    x,
    y: AXIS + lane * view.laneHeight + 2,
    width: Math.max(xOf(view, to) - x, minWidth),
    height: Math.max(view.laneHeight - 4, 2)
  };
}

export function drawTimeline(
  context: CanvasRenderingContext2D,
  view: IWindow,
  table: ClosureTable,
  now: number,
  shares: Float64Array,
  marked: { lane: number; row: number },
  theme: IColors
): void {
  const height = AXIS + view.lanes * view.laneHeight;
  context.clearRect(0, 0, view.width, height);
  context.fillStyle = theme.back;
  context.fillRect(0, 0, view.width, height);
  drawLanes(context, view, shares, marked.lane, theme);
  context.save();
  context.beginPath();
  context.rect(leftOf(view), 0, view.width - leftOf(view), height);
  context.clip();
  drawBars(context, view, table, now, theme);
  drawLost(context, view, table, theme);
  if (marked.row >= 0) {
    markBar(context, view, table, marked.row, now, theme);
  }
  const x = xOf(view, now);
  context.fillStyle = theme.accent;
  context.fillRect(x, AXIS, 1, height - AXIS);
  drawAxis(context, view, theme);
  context.restore();
}

function drawLanes(
  context: CanvasRenderingContext2D,
  view: IWindow,
  shares: Float64Array,
  selected: number,
  theme: IColors
): void {
  const left = leftOf(view);
  context.font = `11px ${theme.font}`;
  context.textBaseline = 'middle';
  for (let lane = 0; lane < view.lanes; lane++) {
    const y = AXIS + lane * view.laneHeight;
    context.fillStyle = theme.raised;
    context.fillRect(left, y + 1, view.width - left, view.laneHeight - 2);
    if (view.laneHeight >= 11) {
      context.fillStyle = lane === selected ? theme.accent : theme.text;
      const name = view.width < 400 ? String(lane) : `worker ${lane}`;
      const share = `${Math.round(shares[lane] * 100)}%`;
      context.textAlign = 'left';
      context.fillText(name, 4, y + view.laneHeight / 2, left - 34);
      context.fillStyle = theme.quiet;
      context.textAlign = 'right';
      context.fillText(share, left - 3, y + view.laneHeight / 2, 30);
    }
  }
}

function drawBars(
  context: CanvasRenderingContext2D,
  view: IWindow,
  table: ClosureTable,
  now: number,
  theme: IColors
): void {
  // Overlapping bars thinner than a pixel are drawn once.
  const drawn = new Int32Array(view.lanes).fill(-1);
  const failures: number[] = [];
  for (let row = 0; row < table.length; row++) {
    const start = table.dispatched[row];
    const end = endOf(table, row, now);
    if (!(end >= view.from && start <= view.to)) {
      continue;
    }
    const lane = table.worker[row];
    const { x, y, width, height } = boxOf(view, lane, start, end, 0);
    if (table.state[row] === FAILED) {
      failures.push(row);
    }
    if (width < 1 && drawn[lane] === Math.floor(x)) {
      continue;
    }
    drawn[lane] = Math.floor(x + width);
    context.fillStyle = theme.series[table.function[row] % theme.series.length];
    // Leave a gap of one pixel between adjacent bars that are wide enough.
    context.fillRect(x, y, Math.max(width > 4 ? width - 1 : width, 1), height);
  }
  for (const row of failures) {
    markFailure(context, view, table, row, now, theme);
  }
}

function markFailure(
  context: CanvasRenderingContext2D,
  view: IWindow,
  table: ClosureTable,
  row: number,
  now: number,
  theme: IColors
): void {
  const end = endOf(table, row, now);
  const { x, y, width, height } = boxOf(view, table.worker[row], table.dispatched[row], end, 3);
  context.fillStyle = theme.bad;
  context.fillRect(x, y + height - Math.min(4, height), width, Math.min(4, height));
  if (width > 10 && height > 9) {
    context.strokeStyle = theme.back;
    context.lineWidth = 2;
    const [cx, cy] = [x + Math.min(width / 2, 12), y + (height - 4) / 2];
    context.beginPath();
    context.moveTo(cx - 3, cy - 3);
    context.lineTo(cx + 3, cy + 3);
    context.moveTo(cx + 3, cy - 3);
    context.lineTo(cx - 3, cy + 3);
    context.stroke();
  }
}

function drawLost(
  context: CanvasRenderingContext2D,
  view: IWindow,
  table: ClosureTable,
  theme: IColors
): void {
  context.strokeStyle = theme.warn;
  context.lineWidth = 1;
  for (const { worker, dispatched, ended } of table.lost) {
    if (ended < view.from || dispatched > view.to) {
      continue;
    }
    const [from, to] = [Math.max(dispatched, view.from), Math.min(ended, view.to)];
    const { x, y, width, height } = boxOf(view, worker, from, to, 3);
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.stroke();
    context.clip();
    context.beginPath();
    for (let at = x - height; at < x + width; at += 5) {
      context.moveTo(at, y + height);
      context.lineTo(at + height, y);
    }
    context.stroke();
    context.restore();
  }
}

function markBar(
  context: CanvasRenderingContext2D,
  view: IWindow,
  table: ClosureTable,
  row: number,
  now: number,
  theme: IColors
): void {
  const end = endOf(table, row, now);
  const { x, y, width, height } = boxOf(view, table.worker[row], table.dispatched[row], end, 2);
  context.strokeStyle = theme.text;
  context.lineWidth = 2;
  context.strokeRect(x - 1, y - 1, width + 2, height + 2);
}

/** Draw ticks at 1, 2 or 5 times a power of ten, as time of day or as an offset below 1 ms. */
function drawAxis(context: CanvasRenderingContext2D, view: IWindow, theme: IColors): void {
  const span = view.to - view.from;
  const max = Math.max(2, Math.floor((view.width - leftOf(view)) / 90));
  const power = 10 ** Math.floor(Math.log10(span / max));
  const step = power * ([1, 2, 5, 10].find(factor => span / (power * factor) <= max) ?? 10);
  const digits = step >= 1 ? 0 : 3;
  context.font = `11px ${theme.font}`;
  context.textAlign = 'left';
  context.textBaseline = 'middle';
  context.fillStyle = theme.quiet;
  for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
    const x = Math.round(xOf(view, time));
    context.fillRect(x, AXIS - 5, 1, 5);
    const label = step < 0.001 ? `+${brief(time - view.from)}` : clock(time + step / 1e6, digits);
    // A truncated time would be misread.
    if (x + 3 + context.measureText(label).width <= view.width) {
      context.fillText(label, x + 3, AXIS / 2 - 1);
    }
  }
}
