// The timeline of closures: one lane per worker, with idle gaps, failures and lost attempts.

import { announce } from './announce';
import type { ClosureTable } from './closures';
import { button, h, KeyedList, setTruncatedText, setText, show } from './dom';
import { brief, clock, errorSummary, percent, plural } from './figures';
import type { Link } from './link';
import type { ICluster } from './protocol';
import { colors, onTheme } from './theme';
import { AXIS, drawTimeline, type IWindow, leftOf, timeAt } from './timelineDraw';
import {
  adjacentRow,
  anyInFlight,
  busyShares,
  endOf,
  lanesOf,
  nowOf,
  pick,
  type Picked,
  spanOf
} from './timelineModel';
import { type IActions, View } from './view';
import { ClosureSubscription } from './subscription';

const FOLLOW_MS = 500;
const SHORTEST = 1e-4;
const MAX_NAMED = 8;

export class TimelineView extends View {
  private readonly _canvas = h('canvas', { tabindex: 0, role: 'img' });
  private readonly _lanes = h('div', { class: 'tfd-lanes' }, this._canvas);
  private readonly _followButton: HTMLButtonElement;
  private readonly _tip = h('div', { class: 'tfd-tip' });
  private readonly _summary = h('div', { class: 'tfd-quiet tfd-wrap' });
  private readonly _legend = h('div', { class: 'tfd-legend' });
  private readonly _functions: KeyedList<HTMLElement>;
  private readonly _subscription: ClosureSubscription;
  private _span = 30;
  private _to = 0;
  private _follow = true;
  private _lane = 0;
  private _selected = -1;
  private _frame = 0;
  private _drag: { x: number; to: number } | null = null;

  constructor(link: Link, cluster: string, actions: IActions) {
    super(link, cluster, actions, 'tfd-timeline');
    this.node.setAttribute('aria-label', `timeline of ${cluster}`);
    this._subscription = new ClosureSubscription(link, cluster);
    this._followButton = button('Follow now', 'Keep the current time at the right edge', () => {
      this._setFollow(!this._follow);
      this.refresh();
    });
    this._functions = new KeyedList<HTMLElement>(this._legend, () =>
      h('span', {}, h('i'), h('span', { class: 'tfd-cut' }))
    );
    this.body.append(
      h(
        'div',
        { class: 'tfd-row' },
        button('+', 'Zoom in', () => this._zoom(0.5)),
        button('−', 'Zoom out', () => this._zoom(2)),
        button('All', 'Show all closures', () => this._all()),
        this._followButton
      ),
      this._lanes,
      this._tip,
      this._legend,
      this._summary
    );
    this._addListeners();
    const timer = setInterval(() => {
      if (this._follow && this.connected && this.visible && anyInFlight(this._table)) {
        this.refresh();
      }
    }, FOLLOW_MS);
    this.onDispose(() => clearInterval(timer));
    this.onDispose(() => this._subscription.dispose());
    this.onDispose(() => cancelAnimationFrame(this._frame));
    this.onDispose(onTheme(this.node, () => this.refresh()));
    if (typeof ResizeObserver !== 'undefined') {
      const sizes = new ResizeObserver(() => this.refresh());
      sizes.observe(this._lanes);
      this.onDispose(() => sizes.disconnect());
    }
    this._setFollow(true);
    this.begin();
  }

  protected override onVisibilityChange(visible: boolean): void {
    this._subscription.set(visible);
  }

  protected draw(snapshot: ICluster | undefined): void {
    const table = this._table;
    const now = nowOf(table, this.connected);
    const span = spanOf(table, now);
    show(this._lanes, span !== null);
    show(this._legend, span !== null);
    if (!span) {
      setText(this._summary, 'No closures have run.');
      return;
    }
    if (this._follow || !this._to) {
      this._to = anyInFlight(table) ? now : span[1];
    }
    const view = this._view(snapshot);
    const from = Math.max(view.from, span[0]);
    const shares = busyShares(table, view.lanes, from, Math.min(view.to, span[1]), now);
    this._paint(view, table, now, shares);
    const palette = colors(this.node).series;
    this._functions.update(table.functions.slice(0, MAX_NAMED), (item, name) => {
      const index = table.functions.indexOf(name) % palette.length;
      (item.children[0] as HTMLElement).style.background = palette[index];
      setTruncatedText(item.children[1], name);
    });
    this._summarize(view, shares);
  }

  private get _table(): ClosureTable {
    return this.link.closures(this.cluster);
  }

  private _view(snapshot = this.last): IWindow {
    const workers = Object.keys(snapshot?.coordinator?.workers ?? {}).length;
    const lanes = lanesOf(this._table, workers);
    return {
      from: this._to - this._span,
      to: this._to + this._span * 0.02,
      width: Math.max(this._lanes.clientWidth, 120),
      lanes,
      laneHeight: lanes <= 16 ? 22 : lanes <= 48 ? 14 : 8
    };
  }

  private _paint(view: IWindow, table: ClosureTable, now: number, shares: Float64Array): void {
    const context = this._canvas.getContext('2d');
    if (!context) {
      return;
    }
    const ratio = window.devicePixelRatio || 1;
    const height = AXIS + view.lanes * view.laneHeight;
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
    const marked = { lane: focused ? this._lane : -1, row: this._selectedRow() };
    drawTimeline(context, view, table, now, shares, marked, colors(this.node));
  }

  private _summarize(view: IWindow, shares: Float64Array): void {
    const busy = shares.reduce((sum, share) => sum + share, 0) / Math.max(view.lanes, 1);
    const lost = this._table.lost.length;
    const summary =
      `${plural(view.lanes, 'worker')}, busy ${percent(100 * busy)} of the shown time` +
      (lost ? `; ${plural(lost, 'attempt')} lost with a worker (hatched)` : '');
    setText(this._summary, summary);
    this._canvas.setAttribute(
      'aria-label',
      `${summary}. Arrow keys move between closures and workers, plus and minus zoom.`
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
        this._select(this._pickAt(event));
      }
    });
    canvas.addEventListener('pointerleave', () => this._describe(this._selection()));
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
      const x = event.clientX - this._canvas.getBoundingClientRect().left;
      this._zoom(Math.exp(event.deltaY / 400), timeAt(this._view(), x));
    }
  }

  private _move(event: PointerEvent): void {
    if (this._drag) {
      const view = this._view();
      const scale = (view.to - view.from) / (view.width - leftOf(view));
      if (Math.abs(event.clientX - this._drag.x) > 3) {
        this._setFollow(false);
        this._to = this._drag.to - (event.clientX - this._drag.x) * scale;
        this._scheduleRefresh();
      }
    } else {
      const picked = this._pickAt(event);
      this._describe(picked ?? this._selection());
    }
  }

  private _key(event: KeyboardEvent): void {
    const table = this._table;
    const row = this._selectedRow();
    const time = row < 0 ? NaN : table.dispatched[row];
    const step = (lane: number, from: number, forward: boolean) => {
      const next = adjacentRow(table, lane, from, forward);
      this._lane = lane;
      if (next >= 0) {
        this._select({ kind: 'closure', row: next }, true);
      }
      this._scheduleRefresh();
    };
    const lanes = this._view().lanes;
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
        if (lane >= 0 && lane < lanes) {
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
    const span = spanOf(this._table, nowOf(this._table, this.connected));
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

  private _pickAt(event: MouseEvent): Picked {
    const box = this._canvas.getBoundingClientRect();
    const view = this._view();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (x < leftOf(view) || y < AXIS) {
      return null;
    }
    const lane = Math.floor((y - AXIS) / view.laneHeight);
    const near = (3 * (view.to - view.from)) / view.width;
    return pick(this._table, lane, timeAt(view, x), near, nowOf(this._table, this.connected));
  }

  private _select(picked: Picked, announced = false): void {
    const table = this._table;
    this._selected = picked?.kind === 'closure' ? table.first + picked.row : -1;
    if (picked?.kind === 'closure') {
      this._lane = table.worker[picked.row];
      const view = this._view();
      const at = table.dispatched[picked.row];
      this._setFollow(false); // keep the selected closure in view
      if (at < view.from || at > view.to) {
        this._to = at + this._span / 2;
      }
    }
    this._describe(picked);
    if (announced) {
      announce(this._tip.textContent ?? '');
    }
    this._scheduleRefresh();
  }

  private _selectedRow(): number {
    const row = this._selected - this._table.first;
    return this._selected >= 0 && row >= 0 && row < this._table.length ? row : -1;
  }

  private _selection(): Picked {
    const row = this._selectedRow();
    return row < 0 ? null : { kind: 'closure', row };
  }

  private _describe(picked: Picked): void {
    const table = this._table;
    if (!picked) {
      setText(this._tip, '');
    } else if (picked.kind === 'lost') {
      const { id, worker, dispatched, ended } = picked.attempt;
      setText(
        this._tip,
        `closure ${id} was lost with worker ${worker} after ${brief(ended - dispatched)}, ` +
          `at ${clock(ended, 3)}, and was queued again`
      );
    } else {
      const { row } = picked;
      const took = endOf(table, row, nowOf(table, this.connected)) - table.dispatched[row];
      const error = table.errorOf(row);
      const attempts = table.attempts[row];
      setText(
        this._tip,
        `closure ${table.first + row} ${table.functionOf(row)}: ${table.stateOf(row)} on worker ` +
          `${table.worker[row]}, from ${clock(table.dispatched[row], 3)}, ${brief(took)}` +
          (attempts > 1 ? `, attempt ${attempts}` : '') +
          (error ? `: ${errorSummary(error)}` : '')
      );
    }
  }
}
