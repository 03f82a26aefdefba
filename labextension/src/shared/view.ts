// What all views share: they listen to their link, draw only while they are seen, and say what is
// the matter when the kernel is gone or of another version.

import { h, setText, show } from './dom';
import { confirmInline } from './confirm';
import type { Link } from './link';
import { type ICluster, PROTOCOL } from './protocol';
import { ensureStyle } from './css';

/** What a view's surroundings offer. */
export interface IActions {
  /** Hosted sites: nothing that changes anything. */
  readOnly: boolean;
  /** Who acts, in words, such as "the panel". */
  who?: string;
  /** Put code into the notebook's next cell, where there is one. */
  insert?: (code: string) => void;
  /** Open this cluster in a tab of its own. */
  open?: (cluster: string) => void;
  confirm?: (question: string) => Promise<boolean>;
}

export interface IView {
  readonly node: HTMLElement;
  dispose(): void;
}

export abstract class View implements IView {
  readonly node: HTMLElement;
  /** Where the view's own elements go; dimmed when they show what was. */
  protected readonly body = h('div', { class: 'tfd-body' });
  protected disposed = false;
  /** What was seen last, also after it is gone. */
  protected last: ICluster | undefined;

  private readonly _banner = h('div', { class: 'tfd-banner', hidden: true });
  private readonly _ends: (() => void)[] = [];
  private _observer: IntersectionObserver | null = null;
  private _inSight = typeof IntersectionObserver === 'undefined';
  private _stale = true;
  private _begun = false;

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
    for (const end of this._ends.splice(0)) {
      end();
    }
    this.node.remove();
  }

  /** Draw if the view is seen, otherwise as soon as it is. */
  refresh(): void {
    this._stale = true;
    if (this.visible && this._begun && !this.disposed) {
      this._draw();
    }
  }

  /** Whether somebody can see it. */
  get visible(): boolean {
    return this._inSight && !document.hidden;
  }

  /** Show what is; called at most once a frame. */
  protected abstract draw(cluster: ICluster | undefined): void;

  /** The view is seen, or no longer. */
  protected seen(_visible: boolean): void {
    // for those who have something to do then
  }

  protected onDispose(end: () => void): void {
    this._ends.push(end);
  }

  /** To be called at the end of a constructor. */
  protected begin(): void {
    this._begun = true;
    this._draw();
    const look = () => {
      this.seen(this.visible);
      if (this.visible && this._stale) {
        this._draw();
      }
    };
    document.addEventListener('visibilitychange', look);
    this.onDispose(() => document.removeEventListener('visibilitychange', look));
    if (this._inSight) {
      this.seen(true);
      return;
    }
    this._observer = new IntersectionObserver(
      entries => {
        this._inSight = entries[entries.length - 1].isIntersecting;
        look();
      },
      { rootMargin: '200px' }
    );
    this._observer.observe(this.node);
  }

  protected confirm(question: string, near: HTMLElement): Promise<boolean> {
    return this.actions.confirm ? this.actions.confirm(question) : confirmInline(question, near);
  }

  /** Whether something can be asked of the cluster. */
  protected get alive(): boolean {
    return this.link.state === 'ready' && this.link.cluster(this.cluster) !== undefined;
  }

  private _draw(): void {
    this._stale = false;
    this.last = this.link.cluster(this.cluster) ?? this.last;
    const words = this.trouble();
    setText(this._banner, words);
    show(this._banner, words !== '');
    this.body.classList.toggle('tfd-dimmed', words !== '' && !this.alive);
    this.draw(this.last);
  }

  /** What is the matter, empty where nothing is. */
  protected trouble(): string {
    return linkTrouble(this.link) || this._missing();
  }

  private _missing(): string {
    if (!this.link.synced) {
      return this.link.transport.beside
        ? 'Waiting for the kernel …'
        : 'Waiting for the kernel; this one answers when the running cell ends.';
    }
    if (this.link.cluster(this.cluster)) {
      return '';
    }
    return this.last
      ? `The cluster ${this.cluster} is gone; this is what was seen last.`
      : `There is no cluster ${this.cluster} in this kernel.`;
  }
}

/** What keeps a link from working, empty where nothing does. */
export function linkTrouble(link: Link): string {
  if (link.state === 'gone') {
    return 'The kernel has ended, or tells nothing any more; this is what was seen last.';
  }
  if (link.state === 'mismatch') {
    const old = link.kernelProtocol < PROTOCOL;
    return (
      `tfd-notebook ${link.kernelVersion} in the kernel (protocol ${link.kernelProtocol}) and ` +
      `${link.version} in this page (protocol ${PROTOCOL}) do not understand each other. Next: ` +
      (old
        ? 'update tfd-notebook in the kernel’s environment and restart the kernel.'
        : 'update tfd-notebook where JupyterLab runs, and reload this page.')
    );
  }
  return '';
}
