// The status line of a command: pending, done, or the error with its next step.

import { announce } from './announce';
import { h, setBusy, setText } from './dom';
import { CommandError, type Link } from './link';

const HIDE_MS = 8000;

type Button = HTMLButtonElement | HTMLInputElement;

export class StatusLine {
  readonly node = h('div', { class: 'tfd-status-line', hidden: true });

  private readonly _text = h('span');
  private _timer: ReturnType<typeof setTimeout> | null = null;
  private _latest = 0;

  constructor() {
    this.node.append(this._text);
  }

  /**
   * Run `work` and show its progress.
   *
   * The buttons are disabled until it ends. Return the result, or undefined after an error, which
   * the status line shows.
   */
  async attempt<T>(
    operation: string,
    work: () => Promise<T>,
    buttons: readonly Button[] = [],
    format: (value: T) => string = () => `${operation}: done`,
    pending = `${operation}: pending …`
  ): Promise<T | undefined> {
    this._latest += 1;
    const run = this._latest;
    this._show(pending, 'quiet');
    // A disabled element loses the focus; it is restored below.
    const focused = document.activeElement;
    for (const button of buttons) {
      setBusy(button, true);
    }
    try {
      const value = await work();
      if (run === this._latest) {
        this._show(format(value), 'good');
        this._timer = setTimeout(() => (this.node.hidden = true), HIDE_MS);
      }
      return value;
    } catch (error) {
      if (run === this._latest) {
        this._show(`${operation} failed: ${problemText(error)}`, 'bad');
      }
      return undefined;
    } finally {
      for (const button of buttons) {
        setBusy(button, false);
        if (button === focused && document.activeElement === document.body) {
          button.focus();
        }
      }
    }
  }

  /** Show another text. */
  report(text: string, tone: 'quiet' | 'good' | 'bad'): void {
    this._latest += 1;
    this._show(text, tone);
  }

  dispose(): void {
    if (this._timer !== null) {
      clearTimeout(this._timer);
    }
  }

  private _show(text: string, tone: string): void {
    if (this._timer !== null) {
      clearTimeout(this._timer);
      this._timer = null;
    }
    this.node.hidden = false;
    this.node.className = `tfd-status-line tfd-${tone}`;
    setText(this._text, text);
    if (tone !== 'quiet') {
      announce(text);
    }
  }
}

/** The status line of commands that a kernel executes. */
export class CommandStatus extends StatusLine {
  constructor(
    private readonly _link: Link,
    private readonly _cluster: string
  ) {
    super();
  }

  /** Send a command to the kernel; see `attempt`. */
  run<T = unknown>(
    operation: string,
    command: string,
    args: Record<string, unknown> = {},
    buttons: readonly Button[] = [],
    format: (value: T) => string = () => `${operation}: done`
  ): Promise<T | undefined> {
    const { concurrent, hint } = this._link.transport;
    const named = this._cluster ? { name: this._cluster, ...args } : args;
    return this.attempt(
      operation,
      async () => (await this._link.command(command, named)) as T,
      buttons,
      format,
      concurrent
        ? undefined
        : `${operation}: queued until the cell ends.${hint ? ` To run it now, in a terminal: ${hint}` : ''}`
    );
  }
}

/** Return the message of an error with its next step. */
export function problemText(error: unknown): string {
  if (error instanceof CommandError) {
    const { what, task, fix } = error.problem;
    const head = task && !what.includes(task) ? `${task}: ${what}` : what;
    return fix ? `${head}${head.endsWith('.') ? '' : '.'} Next: ${fix}` : head;
  }
  return error instanceof Error ? error.message : String(error);
}
