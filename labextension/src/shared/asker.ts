// A line that tells what became of a click: asked, done, or what went wrong and what to do next.

import { announce } from './announce';
import { h, setBusy, setText } from './dom';
import { CommandError, type Link } from './link';

const GONE_MS = 8000;

type Button = HTMLButtonElement | HTMLInputElement;

export class Teller {
  readonly node = h('div', { class: 'tfd-asked', hidden: true });

  private readonly _text = h('span');
  private _timer: ReturnType<typeof setTimeout> | null = null;
  private _turn = 0;

  constructor() {
    this.node.append(this._text);
  }

  /**
   * Have something done.
   *
   * The buttons are disabled meanwhile. Returns the answer, undefined where there was an error,
   * which is shown here.
   */
  async attempt<T>(
    what: string,
    work: () => Promise<T>,
    buttons: readonly Button[] = [],
    say: (value: T) => string = () => `${what}: done`,
    waits = `${what}: asked …`
  ): Promise<T | undefined> {
    this._turn += 1;
    const turn = this._turn;
    this._show(waits, 'quiet');
    // A disabled element loses the focus, which is given back to it afterwards.
    const focused = document.activeElement;
    for (const one of buttons) {
      setBusy(one, true);
    }
    try {
      const value = await work();
      if (turn === this._turn) {
        this._show(say(value), 'good');
        this._timer = setTimeout(() => (this.node.hidden = true), GONE_MS);
      }
      return value;
    } catch (error) {
      if (turn === this._turn) {
        this._show(`${what}: ${problemText(error)}`, 'bad');
      }
      return undefined;
    } finally {
      for (const one of buttons) {
        setBusy(one, false);
        if (one === focused && document.activeElement === document.body) {
          one.focus();
        }
      }
    }
  }

  /** Say something else here. */
  say(words: string, tone: 'quiet' | 'good' | 'bad'): void {
    this._turn += 1;
    this._show(words, tone);
  }

  dispose(): void {
    if (this._timer !== null) {
      clearTimeout(this._timer);
    }
  }

  private _show(words: string, tone: string): void {
    if (this._timer !== null) {
      clearTimeout(this._timer);
      this._timer = null;
    }
    this.node.hidden = false;
    this.node.className = `tfd-asked tfd-${tone}`;
    setText(this._text, words);
    if (tone !== 'quiet') {
      announce(words);
    }
  }
}

/** Tells what becomes of the commands of a kernel. */
export class Asker extends Teller {
  constructor(
    private readonly _link: Link,
    private readonly _cluster: string
  ) {
    super();
  }

  /** Have the kernel do something; see `attempt`. */
  run<T = unknown>(
    what: string,
    command: string,
    args: Record<string, unknown> = {},
    buttons: readonly Button[] = [],
    say: (value: T) => string = () => `${what}: done`
  ): Promise<T | undefined> {
    const { beside, hint } = this._link.transport;
    const named = this._cluster ? { name: this._cluster, ...args } : args;
    return this.attempt(
      what,
      async () => (await this._link.command(command, named)) as T,
      buttons,
      say,
      beside
        ? undefined
        : `${what}: queued until the cell ends.${hint ? ` At once, in a terminal: ${hint}` : ''}`
    );
  }
}

/** What an error says, and the next step. */
export function problemText(error: unknown): string {
  if (error instanceof CommandError) {
    const { what, task, fix } = error.problem;
    const head = task && !what.includes(task) ? `${task}: ${what}` : what;
    return fix ? `${head}${head.endsWith('.') ? '' : '.'} Next: ${fix}` : head;
  }
  return error instanceof Error ? error.message : String(error);
}
