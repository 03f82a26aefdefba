// The timeline: one lane per worker with its closures, and one per rank of `cluster.run`.

import { announce } from './announce';
import type { ClosureTable } from './closures';
import { button, h, KeyedList, setTruncatedText, setText, show } from './dom';
import { clock, percent, plural } from './figures';
import type { Link } from './link';
import type { ICluster, IRank } from './protocol';
import { ranksOf, titleOf } from './ranks';
import { colors, onTheme } from './theme';
import { AXIS, drawTimeline, heightOf, type IWindow, leftOf, timeAt, xOf } from './timelineDraw';
import {
  adjacentRow,
  busyShares,
  lanesOf,
  nowOf,
  pick,
  type Picked,
  pickedText,
  spanOf
} from './timelineModel';
import { type IActions, View } from './view';
import { ClosureSubscription } from './subscription';

const FOLLOW_MS = 500;
const SHORTEST = 1e-4;
const MAX_NAMED = 8;
const SPANS: readonly [string, number][] = [
  ['30 s', 30],
  ['2 min', 120],
  ['10 min', 600]
];

export class TimelineView extends View {
  private readonly _canvas = h('canvas', { tabindex: 0, role: 'img' });
  private readonly _lanes = h('div', { class: 'tfd-lanes' }, this._canvas);
  private readonly _followButton: HTMLButtonElement;
  private readonly _tip = h('div', { class: 'tfd-tip', hidden: true });
  private readonly _plot = h('div', { class: 'tfd-plot' }, this._lanes, this._tip);
  private readonly _presets: HTMLButtonElement[];
  private readonly _summary = h('div', { class: 'tfd-quiet tfd-wrap' });
  private readonly _legend = h('div', { class: 'tfd-legend' });
  private readonly _functions: KeyedList<HTMLElement>;
  private readonly _subscription: ClosureSubscription;
  private _span = SPANS[0][1];
  private _to = 0;
  private _follow = true;
  private _lane = 0;
  private _selected: number | null = null;
  /** The worker of the selected rank; empty without one. */
  private _selectedRank = '';
  private _frame = 0;
  /** The latest time at which the kernel was connected. */
  private _time = 0;
  private _drag: { x: number; to: number } | null = null;
  /** Position of the mouse on the canvas. */
  private _pointer: { x: number; y: number } | null = null;

  constructor(link: Link, cluster: string, actions: IActions) {
    super(link, cluster, actions, 'tfd-timeline');
    this.node.setAttribute('aria-label', `timeline of ${cluster}`);
    this._subscription = new ClosureSubscription(link, cluster);
    this._followButton = button('Follow now', 'Keep the current time at the right edge', () => {
      this._setFollow(!this._follow);
      this.refresh();
    });
    this._presets = SPANS.map(([label, seconds]) =>
      button(label, `Show the last ${label}`, () => {
        this._span = seconds;
        this._setFollow(true);
        this.refresh();
      })
    );
    this._functions = new KeyedList<HTMLElement>(this._legend, () =>
      h('span', {}, h('i'), h('span', { class: 'tfd-cut' }))
    );
    this._legend.append(h('span', { class: 'tfd-quiet' }, 'light: dispatched or fetching'));
    this.body.append(
      h(
        'div',
        { class: 'tfd-row' },
        ...this._presets,
        button('+', 'Zoom in', () => this._zoom(0.5)),
        button('−', 'Zoom out', () => this._zoom(2)),
        button('All', 'Show the full time range', () => this._all()),
        this._followButton
      ),
      this._plot,
      this._legend,
      this._summary
    );
    this._addListeners();
    const timer = setInterval(() => {
      if (this._follow && this.connected && this.visible) {
        this.refresh();
      }
    }, FOLLOW_MS);
    this.onDispose(() => clearInterval(timer));
    this.onDispose(() => this._subscription.dispose());
    this.onDispose(() => cancelAnimationFrame(this._frame));
    this.onDispose(onTheme(this.node, () => this.refresh()));
    this.onResize(this._lanes, () => this.refresh());
    this._setFollow(true);
    this.begin();
  }

  protected override onVisibilityChange(visible: boolean): void {
    this._subscription.set(visible);
  }

  protected draw(snapshot: ICluster | undefined): void {
    const table = this._table;
    const ranks = ranksOf(snapshot);
    const now = this._now();
    const span = spanOf(table, ranks, now);
    show(this._plot, span !== null);
    show(this._legend, table.length > 0);
    SPANS.forEach(([, seconds], i) =>
      this._presets[i].setAttribute('aria-pressed', String(seconds === this._span))
    );
    if (!span) {
      setText(this._summary, 'No closures or ranks have run.');
      return;
    }
    if (this._follow || !this._to) {
      this._to = now || span[1];
    }
    this._showSelected();
    const view = this._view(snapshot);
    const shares = busyShares(table, view.workers, view.from, view.to, now);
    this._paint(view, table, now, shares);
    const palette = colors(this.node).series;
    this._functions.update(table.functions.slice(0, MAX_NAMED), (item, name) => {
      const index = table.functions.indexOf(name) % palette.length;
      (item.children[0] as HTMLElement).style.background = palette[index];
      setTruncatedText(item.children[1], name);
    });
    this._summarize(view, shares, span[1]);
    this._showTip();
  }

  private get _table(): ClosureTable {
    return this.link.closures(this.cluster);
  }

  /** Return the current time; it stops while the kernel is disconnected. */
  private _now(): number {
    if (this._table.now) {
      return nowOf(this._table, this.connected);
    }
    if (this.connected) {
      this._time = Date.now() / 1000;
    }
    return this._time;
  }

  private _view(snapshot = this.last): IWindow {
    const workers = Object.keys(snapshot?.coordinator?.workers ?? {}).length;
    const lanesOfWorkers = lanesOf(this._table, workers);
    const ranks = ranksOf(snapshot);
    const lanes = lanesOfWorkers + ranks.length;
    return {
      from: this._to - this._span,
      to: this._to + this._span * 0.02,
      width: Math.max(this._lanes.clientWidth, 120),
      lanes,
      workers: lanesOfWorkers,
      ranks,
      laneHeight: lanes <= 16 ? 22 : lanes <= 48 ? 14 : 8
    };
  }

  private _paint(view: IWindow, table: ClosureTable, now: number, shares: Float64Array): void {
    const context = this._canvas.getContext('2d');
    if (!context) {
      return;
    }
    const ratio = window.devicePixelRatio || 1;
    const height = heightOf(view);
    const [width, tall] = [Math.round(view.width * ratio), Math.round(height * ratio)];
    if (this._canvas.width !== width || this._canvas.height !== tall) {
      this._canvas.width = width;
      this._canvas.height = tall;
      // The CSS size must match the drawn size; otherwise the canvas is stretched until the next draw.
      this._canvas.style.width = `${view.width}px`;
      this._canvas.style.height = `${height}px`;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const focused = document.activeElement === this._canvas;
    const marked = {
      lane: focused ? this._lane : -1,
      row: this._selectedRow(),
      rank: this._selectedRank
    };
    drawTimeline(context, view, table, now, shares, marked, colors(this.node));
  }

  private _summarize(view: IWindow, shares: Float64Array, end: number): void {
    const busy = shares.reduce((sum, share) => sum + share, 0) / Math.max(view.workers, 1);
    const lost = this._table.lost.length;
    const parts = [
      view.workers
        ? `${plural(view.workers, 'worker')}, busy ${percent(100 * busy)} of the shown time`
        : '',
      end < view.from ? `the last bar ended at ${clock(end)}` : '',
      lost ? `${plural(lost, 'attempt')} lost with a worker (hatched)` : '',
      view.ranks.length ? titleOf(view.ranks) : ''
    ];
    const summary = parts.filter(Boolean).join('; ');
    setText(this._summary, summary);
    this._canvas.setAttribute(
      'aria-label',
      `${summary}. Arrow keys move between bars and lanes, plus and minus zoom.`
    );
  }

  // User input

  private _addListeners(): void {
    const canvas = this._canvas;
    canvas.addEventListener('wheel', event => this._wheel(event), { passive: false });
    canvas.addEventListener('pointerdown', event => {
      if (event.button === 0) {
        canvas.setPointerCapture(event.pointerId);
        this._drag = { x: event.clientX, to: this._to };
      }
    });
    canvas.addEventListener('pointermove', event => this._move(event));
    canvas.addEventListener('pointerup', event => {
      const moved = this._drag && Math.abs(event.clientX - this._drag.x) > 3;
      this._drag = null;
      if (!moved) {
        this._select(this._pickAt(this._positionOf(event)));
      }
    });
    canvas.addEventListener('pointerleave', () => {
      this._pointer = null;
      this._showTip();
    });
    canvas.addEventListener('keydown', event => this._key(event));
    canvas.addEventListener('focus', () => this._scheduleRefresh());
    canvas.addEventListener('blur', () => this._scheduleRefresh());
  }

  private _wheel(event: WheelEvent): void {
    // The wheel scrolls the page unless the canvas has the focus or a modifier key is pressed.
    if (!event.ctrlKey && !event.shiftKey && document.activeElement !== this._canvas) {
      return;
    }
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this._pan((this._span * (event.deltaX || event.deltaY)) / 600);
    } else {
      const { x } = this._positionOf(event);
      this._zoom(Math.exp(event.deltaY / 400), timeAt(this._view(), x));
    }
  }

  private _move(event: PointerEvent): void {
    this._pointer = this._positionOf(event);
    if (this._drag) {
      const view = this._view();
      const scale = (view.to - view.from) / (view.width - leftOf(view));
      if (Math.abs(event.clientX - this._drag.x) > 3) {
        this._setFollow(false);
        this._to = this._drag.to - (event.clientX - this._drag.x) * scale;
        this._scheduleRefresh();
      }
    } else {
      this._showTip();
    }
  }

  private _key(event: KeyboardEvent): void {
    const table = this._table;
    const view = this._view();
    this._lane = Math.min(this._lane, view.lanes - 1);
    const row = this._selectedRow();
    const time = row < 0 ? NaN : table.dispatched[row];
    const step = (lane: number, from: number, forward: boolean) => {
      const next = adjacentRow(table, lane, from, forward);
      this._lane = lane;
      const rank = rankAt(view, lane);
      if (rank) {
        this._select({ kind: 'rank', rank }, true);
      } else if (next >= 0) {
        this._select({ kind: 'closure', row: next }, true);
      }
      this._scheduleRefresh();
    };
    switch (event.key) {
      case 'ArrowRight':
        step(this._lane, Number.isNaN(time) ? -Infinity : time, true);
        break;
      case 'ArrowLeft':
        step(this._lane, Number.isNaN(time) ? Infinity : time, false);
        break;
      case 'ArrowUp':
      case 'ArrowDown': {
        const lane = this._lane + (event.key === 'ArrowUp' ? -1 : 1);
        if (lane >= 0 && lane < view.lanes) {
          step(lane, Number.isNaN(time) ? Infinity : time + 1e-9, false);
        }
        break;
      }
      case 'Home':
        step(this._lane, -Infinity, true);
        break;
      case 'End':
        step(this._lane, Infinity, false);
        break;
      case '+':
      case '=':
        this._zoom(0.5);
        break;
      case '-':
        this._zoom(2);
        break;
      case 'Escape':
        this._select(null);
        break;
      default:
        return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  private _zoom(factor: number, around?: number): void {
    const row = this._selectedRow();
    const middle =
      around ??
      (this._follow
        ? this._to
        : row >= 0
          ? this._table.dispatched[row]
          : this._to - this._span / 2);
    const span = Math.min(Math.max(this._span * factor, SHORTEST), 1e6);
    this._to = middle + (this._to - middle) * (span / this._span);
    this._span = span;
    if (around !== undefined) {
      this._setFollow(false);
    }
    this._scheduleRefresh();
  }

  private _pan(seconds: number): void {
    this._setFollow(false);
    this._to += seconds;
    this._scheduleRefresh();
  }

  private _all(): void {
    const span = spanOf(this._table, ranksOf(this.last), this._now());
    if (span) {
      this._span = Math.max(span[1] - span[0], SHORTEST) * 1.01;
      this._to = span[1];
      this._setFollow(false);
      this._scheduleRefresh();
    }
  }

  private _setFollow(follow: boolean): void {
    this._follow = follow;
    this._followButton.setAttribute('aria-pressed', String(follow));
  }

  private _scheduleRefresh(): void {
    cancelAnimationFrame(this._frame);
    this._frame = requestAnimationFrame(() => this.refresh());
  }

  // Details of one closure

  private _positionOf(event: MouseEvent): { x: number; y: number } {
    const box = this._canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  private _pickAt({ x, y }: { x: number; y: number }): Picked {
    const view = this._view();
    if (x < leftOf(view) || y < AXIS) {
      return null;
    }
    const lane = Math.floor((y - AXIS) / view.laneHeight);
    const near = (3 * (view.to - view.from)) / view.width;
    const rank = rankAt(view, lane);
    return rank
      ? { kind: 'rank', rank }
      : pick(this._table, lane, timeAt(view, x), near, this._now());
  }

  /** Show the bar of a closure that another view has selected. */
  private _showSelected(): void {
    const selected = this.link.selectedClosure(this.cluster);
    if (selected === this._selected) {
      return;
    }
    this._selected = selected;
    const row = this._selectedRow();
    if (row >= 0) {
      this._selectedRank = '';
      this._lane = Math.max(this._table.worker[row], 0);
      this._keepInView(this._table.dispatched[row], this._table.dispatched[row]);
    }
  }

  private _select(picked: Picked, announced = false): void {
    const table = this._table;
    this._selected = picked?.kind === 'closure' ? table.first + picked.row : null;
    this.link.selectClosure(this.cluster, this._selected);
    this._selectedRank = picked?.kind === 'rank' ? picked.rank.task : '';
    if (picked && picked.kind !== 'lost') {
      this._setFollow(false);
    }
    if (picked?.kind === 'rank') {
      const { workers, ranks } = this._view();
      this._lane = workers + ranks.indexOf(picked.rank);
      this._keepInView(picked.rank.started ?? NaN, picked.rank.ended ?? NaN);
    } else if (picked?.kind === 'closure') {
      this._lane = table.worker[picked.row];
      const at = table.dispatched[picked.row];
      this._keepInView(at, at);
    }
    this._showTip();
    if (announced) {
      announce(pickedText(table, picked, this._now()), true);
    }
    this._scheduleRefresh();
  }

  /** Keep a selected bar in view; move only if it is outside. */
  private _keepInView(start: number, end: number): void {
    const view = this._view();
    if (end < view.from || start > view.to) {
      this._setFollow(false);
      this._to = start + this._span / 2;
    }
  }

  private _selectedRow(): number {
    const row = (this._selected ?? -1) - this._table.first;
    return this._selected !== null && row >= 0 && row < this._table.length ? row : -1;
  }

  private _selection(): Picked {
    const rank = this.last?.ranks?.[this._selectedRank];
    const row = this._selectedRow();
    return rank ? { kind: 'rank', rank } : row < 0 ? null : { kind: 'closure', row };
  }

  /** Show the bar at the mouse, or the selected one while the canvas has the focus. */
  private _showTip(): void {
    const hovered = this._pointer && this._pickAt(this._pointer);
    const picked = hovered ?? this._selection();
    const view = this._view();
    setText(this._tip, pickedText(this._table, picked, this._now()));
    show(this._tip, Boolean(hovered ?? (picked && document.activeElement === this._canvas)));
    const { x, y } =
      hovered && this._pointer
        ? { x: this._pointer.x, y: this._pointer.y + 14 }
        : { x: this._selectedX(view), y: AXIS + (this._lane + 1) * view.laneHeight };
    const right = view.width - this._tip.offsetWidth;
    this._tip.style.left = `${Math.max(0, Math.min(x + 10, right))}px`;
    this._tip.style.top = `${y - this._lanes.scrollTop}px`;
  }

  private _selectedX(view: IWindow): number {
    const row = this._selectedRow();
    const start =
      row < 0 ? this.last?.ranks?.[this._selectedRank]?.started : this._table.dispatched[row];
    return Math.min(Math.max(xOf(view, start ?? view.from), leftOf(view)), view.width);
  }
}

/** Return the rank of a lane; undefined for the lane of a worker. */
function rankAt({ workers, ranks }: IWindow, lane: number): IRank | undefined {
  return ranks[lane - workers];
}
