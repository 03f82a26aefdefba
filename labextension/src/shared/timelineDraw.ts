// Canvas drawing of the timeline.

import type { ClosureTable } from './closures';
import { brief, clock } from './figures';
import type { IRank } from './protocol';
import type { IColors } from './theme';
import { endOf, endOfRank, FAILED } from './timelineModel';

export const AXIS = 20;
const LABEL = 96;
const NARROW = 52;
/** Opacity of the parts of a bar in which its closure does not run. */
const LIGHT = 0.45;

export interface IWindow {
  from: number;
  to: number;
  width: number;
  /** Number of lanes: first those of workers, then those of ranks. */
  lanes: number;
  workers: number;
  ranks: IRank[];
  laneHeight: number;
}

/** Return the height of all lanes with the axis. */
export function heightOf(view: IWindow): number {
  return AXIS + view.lanes * view.laneHeight;
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
  marked: { lane: number; row: number; rank: string },
  theme: IColors
): void {
  const height = heightOf(view);
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
  drawRanks(context, view, now, marked.rank, theme);
  if (marked.row >= 0) {
    const [start, end] = [table.dispatched[marked.row], endOf(table, marked.row, now)];
    markBar(context, boxOf(view, table.worker[marked.row], start, end, 2), theme);
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
      const rank = view.ranks[lane - view.workers]?.rank;
      const [kind, number] = rank === undefined ? ['worker', lane] : ['rank', rank];
      const name =
        view.width < 400 ? `${kind === 'rank' ? 'r' : ''}${number}` : `${kind} ${number}`;
      const share = rank === undefined ? `${Math.round(shares[lane] * 100)}%` : '';
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
  const drawn = new Int32Array(view.workers).fill(-1);
  const failures: number[] = [];
  for (let row = 0; row < table.length; row++) {
    const start = table.dispatched[row];
    const end = endOf(table, row, now);
    if (!(end >= view.from && start <= view.to)) {
      continue;
    }
    if (table.state[row] === FAILED) {
      failures.push(row);
      continue;
    }
    const lane = table.worker[row];
    const { x, y, width, height } = boxOf(view, lane, start, end, 0);
    if (width < 1 && drawn[lane] === Math.floor(x)) {
      continue;
    }
    drawn[lane] = Math.floor(x + width);
    context.fillStyle = theme.series[table.function[row] % theme.series.length];
    if (width > 4) {
      context.globalAlpha = LIGHT;
      // Leave a gap of one pixel between adjacent bars.
      context.fillRect(x, y, width - 1, height);
      context.globalAlpha = 1;
      const ran = Number.isNaN(table.fetching[row]) ? end : table.fetching[row];
      if (ran > table.started[row]) {
        const part = boxOf(view, lane, table.started[row], ran, 0);
        context.fillRect(part.x, y, Math.min(part.width, x + width - 1 - part.x), height);
      }
    } else {
      context.fillRect(x, y, Math.max(width, 1), height);
    }
  }
  for (const row of failures) {
    const end = endOf(table, row, now);
    drawFailure(context, boxOf(view, table.worker[row], table.dispatched[row], end, 3), theme);
  }
}

function drawFailure(
  context: CanvasRenderingContext2D,
  { x, y, width, height }: IBox,
  theme: IColors
): void {
  context.fillStyle = theme.bad;
  context.fillRect(x, y, width > 4 ? width - 1 : width, height);
  if (width > 10 && height > 9) {
    context.strokeStyle = theme.back;
    context.lineWidth = 2;
    const [cx, cy] = [x + Math.min(width / 2, 12), y + height / 2];
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
  for (const { worker, dispatched, ended } of table.lost) {
    hatch(context, view, worker, dispatched, ended, theme);
  }
}

/** Draw the visible part of an interval that was lost. */
function hatch(
  context: CanvasRenderingContext2D,
  view: IWindow,
  lane: number,
  start: number,
  end: number,
  theme: IColors
): void {
  if (end < view.from || start > view.to) {
    return;
  }
  const [from, to] = [Math.max(start, view.from), Math.min(end, view.to)];
  const { x, y, width, height } = boxOf(view, lane, from, to, 3);
  context.strokeStyle = theme.warn;
  context.lineWidth = 1;
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

function drawRanks(
  context: CanvasRenderingContext2D,
  view: IWindow,
  now: number,
  marked: string,
  theme: IColors
): void {
  view.ranks.forEach((rank, index) => {
    const [start, end] = [rank.started ?? NaN, endOfRank(rank, now)];
    if (!(end >= view.from && start <= view.to)) {
      return;
    }
    const lane = view.workers + index;
    const box = boxOf(view, lane, start, end, 1);
    if (rank.state === 'lost') {
      hatch(context, view, lane, start, end, theme);
    } else if (rank.state === 'failed') {
      drawFailure(context, box, theme);
    } else {
      context.fillStyle = rank.state === 'stopped' ? theme.quiet : theme.series[0];
      context.fillRect(box.x, box.y, box.width, box.height);
    }
    if (rank.task === marked) {
      markBar(context, box, theme);
    }
  });
}

function markBar(
  context: CanvasRenderingContext2D,
  { x, y, width, height }: IBox,
  theme: IColors
): void {
  context.strokeStyle = theme.text;
  context.lineWidth = 2;
  context.strokeRect(x - 1, y - 1, width + 2, height + 2);
}

/** Steps of one second or more between ticks. */
const STEPS = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map(minutes => 60 * minutes), 3600];

/** Return the smallest round step, in seconds, with at most `max` ticks in `span`. */
export function tickStep(span: number, max: number): number {
  const shortest = span / max;
  if (shortest > 0.5 && shortest <= 3600) {
    return STEPS.find(step => step >= shortest)!;
  }
  const unit = shortest > 3600 ? 3600 : 1;
  const power = 10 ** Math.floor(Math.log10(shortest / unit)) * unit;
  return power * ([1, 2, 5, 10].find(factor => power * factor >= shortest) ?? 10);
}

/** Draw the axis, as time of day or as an offset below 1 ms. */
function drawAxis(context: CanvasRenderingContext2D, view: IWindow, theme: IColors): void {
  const max = Math.max(2, Math.floor((view.width - leftOf(view)) / 90));
  const step = tickStep(view.to - view.from, max);
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
