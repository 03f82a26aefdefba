// The base class of all views. A view listens to its link and draws only while it is visible. It
// shows a banner if the kernel has ended or has an incompatible version.

import { h, setText, show } from './dom';
import { confirmInline, type IQuestion } from './confirm';
import { clock } from './figures';
import type { Link } from './link';
import { hasEnded, type ICluster, PROTOCOL } from './protocol';
import { ensureStyle } from './css';

/** Actions that the host of a view provides. */
export interface IActions {
  /** Hide all controls that change a cluster, for hosted sites. */
  readOnly: boolean;
  /** Name of the place that sends commands, such as "the panel". */
  source?: string;
  /** Insert code into the next cell of the notebook. */
  insert?: (code: string) => void;
  /** Open the dashboard of a cluster. */
  open?: (cluster: string) => void;
  confirm?: (question: IQuestion) => Promise<boolean>;
}

/** Return the text while a command runs: `text`, or how to run it although a cell is running. */
export function pendingText({ transport }: Link, text: string): string {
  const hint = transport.hint ? ` To run it now, in a terminal: ${transport.hint}` : '';
  return transport.concurrent ? text : `Queued until the cell ends.${hint}`;
}

export interface IView {
  readonly node: HTMLElement;
  dispose(): void;
}

export abstract class View implements IView {
  readonly node: HTMLElement;
  /** Parent of the view's elements; dimmed while they are out of date. */
  protected readonly body = h('div', { class: 'tfd-body' });
  protected disposed = false;
  /** The last known state of the cluster; kept after it has ended. */
  protected last: ICluster | undefined;
  /** Time of `last` in seconds since the Unix epoch. */
  private _lastTime = 0;

  private readonly _banner = h('div', { class: 'tfd-banner', hidden: true });
  private readonly _cleanups: (() => void)[] = [];
  private _observer: IntersectionObserver | null = null;
  private _intersecting = typeof IntersectionObserver === 'undefined';
  private _stale = true;
  private _started = false;

  constructor(
    readonly link: Link,
    readonly cluster: string,
    readonly actions: IActions,
    className: string
  ) {
    ensureStyle();
    this.node = h('section', { class: `tfd-live ${className}` }, this._banner, this.body);
    this.onDispose(link.onChange(() => this.refresh()));
  }

  dispose(): void {
    if (this.disposed) {
      return;
    }
    this.disposed = true;
    this._observer?.disconnect();
    for (const cleanup of this._cleanups.splice(0)) {
      cleanup();
    }
    this.node.remove();
  }

  /** Draw now, or as soon as the view is visible. */
  refresh(): void {
    this._stale = true;
    if (this.visible && this._started && !this.disposed) {
      this._draw();
    }
  }

  /** Whether the view is on screen in a visible page. */
  get visible(): boolean {
    return this._intersecting && !document.hidden;
  }

  /** Draw the cluster; called at most once per frame. */
  protected abstract draw(cluster: ICluster | undefined): void;

  /** Called when the view becomes visible or hidden. */
  protected onVisibilityChange(_visible: boolean): void {
    // for subclasses
  }

  protected onDispose(cleanup: () => void): void {
    this._cleanups.push(cleanup);
  }

  /** Call `callback` when the size of an element changes. */
  protected onResize(node: Element, callback: () => void): void {
    if (typeof ResizeObserver !== 'undefined') {
      const sizes = new ResizeObserver(callback);
      sizes.observe(node);
      this.onDispose(() => sizes.disconnect());
    }
  }

  /** Start drawing; subclasses call it at the end of their constructor. */
  protected begin(): void {
    this._started = true;
    this._draw();
    const check = () => {
      this.onVisibilityChange(this.visible);
      if (this.visible && this._stale) {
        this._draw();
      }
    };
    document.addEventListener('visibilitychange', check);
    this.onDispose(() => document.removeEventListener('visibilitychange', check));
    if (this._intersecting) {
      this.onVisibilityChange(true);
      return;
    }
    this._observer = new IntersectionObserver(
      entries => {
        this._intersecting = entries[entries.length - 1].isIntersecting;
        check();
      },
      { rootMargin: '200px' }
    );
    this._observer.observe(this.node);
  }

  protected confirm(question: IQuestion, near: HTMLElement): Promise<boolean> {
    return this.actions.confirm ? this.actions.confirm(question) : confirmInline(question, near);
  }

  /** Whether the cluster accepts commands. */
  protected get connected(): boolean {
    const cluster = this.link.cluster(this.cluster);
    return this.link.usable && cluster !== undefined && !hasEnded(cluster);
  }

  private _draw(): void {
    this._stale = false;
    const present = this.link.cluster(this.cluster);
    if (present) {
      this.last = present;
      this._lastTime = this.link.lastMessage;
    }
    const problem = this.problem();
    setText(this._banner, problem);
    show(this._banner, problem !== '');
    this.body.classList.toggle('tfd-dimmed', problem !== '' && !this.connected);
    this.draw(this.last);
  }

  /** Return the text of the banner, empty without a problem. */
  protected problem(): string {
    return linkProblem(this.link) || this._missing();
  }

  private _missing(): string {
    if (!this.link.synced) {
      return this.link.transport.concurrent
        ? 'Waiting for the kernel …'
        : 'Waiting for the kernel, which replies when the running cell ends.';
    }
    if (this.link.cluster(this.cluster)) {
      return '';
    }
    return this.last
      ? `Cluster ${this.cluster} no longer exists.${lastKnown(this._lastTime)}`
      : `Cluster ${this.cluster} not found in this kernel.`;
  }
}

/** Return the time of a state that is not updated, as a second sentence; empty for no state. */
export function lastKnown(seconds: number): string {
  return seconds ? ` Last known state of ${clock(seconds)}.` : '';
}

/** Return the problem of a link, empty if it works. */
export function linkProblem(link: Link): string {
  if (link.state === 'ended') {
    return `The kernel has ended or does not respond.${lastKnown(link.lastMessage)}`;
  }
  if (!link.connected && link.lastMessage) {
    return `The connection to the kernel is interrupted.${lastKnown(link.lastMessage)}`;
  }
  if (link.state === 'mismatch') {
    const old = link.kernelProtocol < PROTOCOL;
    return (
      `tfd-notebook ${link.kernelVersion} in the kernel (protocol ${link.kernelProtocol}) and ` +
      `${link.version} in this page (protocol ${PROTOCOL}) are not compatible. Next: ` +
      (old
        ? 'update tfd-notebook in the kernel’s environment and restart the kernel.'
        : 'update tfd-notebook where JupyterLab runs, and reload this page.')
    );
  }
  return '';
}
