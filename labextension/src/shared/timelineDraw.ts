// The timeline on its canvas.

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

/** Where the lanes begin, right of their labels. */
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

/** Where something of a lane is drawn, at least so many pixels wide. */
function boxOf(view: IWindow, lane: number, from: number, to: number, least: number): IBox {
  const x = xOf(view, from);
  return {
    x,
    y: AXIS + lane * view.laneHeight + 2,
    width: Math.max(xOf(view, to) - x, least),
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
  seen: IColors
): void {
  const height = AXIS + view.lanes * view.laneHeight;
  context.clearRect(0, 0, view.width, height);
  context.fillStyle = seen.back;
  context.fillRect(0, 0, view.width, height);
  drawLanes(context, view, shares, marked.lane, seen);
  context.save();
  context.beginPath();
  context.rect(leftOf(view), 0, view.width - leftOf(view), height);
  context.clip();
  drawBars(context, view, table, now, seen);
  drawLost(context, view, table, seen);
  if (marked.row >= 0) {
    markBar(context, view, table, marked.row, now, seen);
  }
  const x = xOf(view, now);
  context.fillStyle = seen.accent;
  context.fillRect(x, AXIS, 1, height - AXIS);
  drawAxis(context, view, seen);
  context.restore();
}

function drawLanes(
  context: CanvasRenderingContext2D,
  view: IWindow,
  shares: Float64Array,
  chosen: number,
  seen: IColors
): void {
  const left = leftOf(view);
  context.font = `11px ${seen.font}`;
  context.textBaseline = 'middle';
  for (let lane = 0; lane < view.lanes; lane++) {
    const y = AXIS + lane * view.laneHeight;
    context.fillStyle = seen.raised;
    context.fillRect(left, y + 1, view.width - left, view.laneHeight - 2);
    if (view.laneHeight >= 11) {
      context.fillStyle = lane === chosen ? seen.accent : seen.text;
      const name = view.width < 400 ? String(lane) : `worker ${lane}`;
      const share = `${Math.round(shares[lane] * 100)}%`;
      context.textAlign = 'left';
      context.fillText(name, 4, y + view.laneHeight / 2, left - 34);
      context.fillStyle = seen.quiet;
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
  seen: IColors
): void {
  // Bars thinner than a pixel that lie upon each other are drawn once.
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
    context.fillStyle = seen.series[table.function[row] % seen.series.length];
    // A gap of a pixel between bars that touch, where there is room for it.
    context.fillRect(x, y, Math.max(width > 4 ? width - 1 : width, 1), height);
  }
  for (const row of failures) {
    markFailure(context, view, table, row, now, seen);
  }
}

function markFailure(
  context: CanvasRenderingContext2D,
  view: IWindow,
  table: ClosureTable,
  row: number,
  now: number,
  seen: IColors
): void {
  const end = endOf(table, row, now);
  const { x, y, width, height } = boxOf(view, table.worker[row], table.dispatched[row], end, 3);
  context.fillStyle = seen.bad;
  context.fillRect(x, y + height - Math.min(4, height), width, Math.min(4, height));
  if (width > 10 && height > 9) {
    context.strokeStyle = seen.back;
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
  seen: IColors
): void {
  context.strokeStyle = seen.warn;
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
  seen: IColors
): void {
  const end = endOf(table, row, now);
  const { x, y, width, height } = boxOf(view, table.worker[row], table.dispatched[row], end, 2);
  context.strokeStyle = seen.text;
  context.lineWidth = 2;
  context.strokeRect(x - 1, y - 1, width + 2, height + 2);
}

/** Ticks at 1, 2 or 5 times a power of ten, as a time of day or as what is between two of them. */
function drawAxis(context: CanvasRenderingContext2D, view: IWindow, seen: IColors): void {
  const span = view.to - view.from;
  const most = Math.max(2, Math.floor((view.width - leftOf(view)) / 90));
  const power = 10 ** Math.floor(Math.log10(span / most));
  const step = power * ([1, 2, 5, 10].find(factor => span / (power * factor) <= most) ?? 10);
  const digits = step >= 1 ? 0 : 3;
  context.font = `11px ${seen.font}`;
  context.textAlign = 'left';
  context.textBaseline = 'middle';
  context.fillStyle = seen.quiet;
  for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
    const x = Math.round(xOf(view, time));
    context.fillRect(x, AXIS - 5, 1, 5);
    const words = step < 0.001 ? `+${brief(time - view.from)}` : clock(time + step / 1e6, digits);
    // Half a time would be read as another one.
    if (x + 3 + context.measureText(words).width <= view.width) {
      context.fillText(words, x + 3, AXIS / 2 - 1);
    }
  }
}
