// The log of one task, polled while the view is visible.

import { problemText } from './statusLine';
import { button, h, labeled, setText } from './dom';
import type { Link } from './link';
import { type ILogLine, LogLines } from './logLines';
import { type IActions, View } from './view';

const MAX_LINES = 5000;
const FIRST_LINES = 500;
const PAUSE_MS = 1000;
/** Length of a reply near the limit of the kernel, after which more output is pending. */
const LARGE_REPLY = 48_000;
const CONTINUE_MS = 200;

export class LogsView extends View {
  private readonly _log = h('div', {
    class: 'tfd-log',
    role: 'log',
    'aria-live': 'off',
    tabindex: 0
  });
  private readonly _search = h('input', { type: 'search', placeholder: 'text', size: 12 });
  private readonly _status = h('span', { class: 'tfd-quiet tfd-wrap' });
  private readonly _lines = new LogLines(MAX_LINES);
  private _offset: number | null = null;
  private _timer: ReturnType<typeof setTimeout> | null = null;
  private _loading = false;
  private _visible = false;
  /** Whether the last line stays in view; false after the user has scrolled up. */
  private _following = true;

  constructor(
    link: Link,
    cluster: string,
    readonly task: string,
    actions: IActions
  ) {
    super(link, cluster, actions, 'tfd-logs');
    this._log.setAttribute('aria-label', `log of ${task}`);
    this._search.addEventListener('input', () => this._redraw(0, 0));
    this.body.append(
      h(
        'div',
        { class: 'tfd-row' },
        labeled('Find', this._search, 'Show only lines that contain this text'),
        button('Copy', 'Copy the loaded lines', () => void this._copy()),
        this._status
      ),
      this._log
    );
    this._log.addEventListener('scroll', () => {
      const { scrollHeight, scrollTop, clientHeight } = this._log;
      this._following = scrollHeight - scrollTop - clientHeight < 30;
    });
    this.onResize(this._log, () => this._scrollToEnd()); // lines wrap differently
    this.onDispose(() => this._cancelTimer());
    this.begin();
  }

  protected draw(): void {
    if (this._visible && this._timer === null && !this._loading && this.connected) {
      this._schedule(0);
    }
  }

  protected override onVisibilityChange(visible: boolean): void {
    this._visible = visible;
    if (!visible) {
      this._cancelTimer();
    } else if (this._timer === null && !this._loading) {
      this._schedule(0);
    }
  }

  private _schedule(ms: number): void {
    this._cancelTimer();
    this._timer = setTimeout(() => {
      this._timer = null;
      void this._load();
    }, ms);
  }

  private _cancelTimer(): void {
    if (this._timer !== null) {
      clearTimeout(this._timer);
      this._timer = null;
    }
  }

  private async _load(): Promise<void> {
    if (!this._visible || this.disposed || this._loading || !this.connected) {
      return;
    }
    this._loading = true;
    let pause = PAUSE_MS;
    try {
      const args =
        this._offset === null
          ? { task: this.task, lines: FIRST_LINES }
          : { task: this.task, offset: this._offset };
      const { text, offset } = (await this.link.command('logs', {
        name: this.cluster,
        ...args
      })) as { text: string; offset: number };
      if (this.disposed) {
        return;
      }
      this._offset = offset;
      this._add(text);
      this._showStatus();
      pause = text.length > LARGE_REPLY ? CONTINUE_MS : PAUSE_MS;
    } catch (error) {
      setText(this._status, problemText(error));
      pause = 5 * PAUSE_MS;
    } finally {
      this._loading = false;
      if (this._visible && !this.disposed && this.connected) {
        this._schedule(pause);
      }
    }
  }

  private _add(text: string): void {
    if (!text) {
      return;
    }
    const { dropped } = this._lines;
    const before = this._lines.lines.length;
    const first = this._lines.add(text.split('\n'));
    this._redraw(first, this._lines.dropped - dropped, before);
  }

  private _showStatus(): void {
    const kept = this._lines.lines.length;
    setText(
      this._status,
      kept ? (this._lines.dropped ? `last ${kept} lines` : '') : 'no output yet'
    );
  }

  /** Draw the lines from `first` on and remove the `dropped` oldest ones. */
  private _redraw(first: number, dropped: number, before = Infinity): void {
    const query = this._search.value.toLowerCase();
    if (query || before === Infinity || this._log.childElementCount !== before) {
      first = 0;
      this._log.replaceChildren();
    } else {
      for (let i = 0; i < dropped && this._log.firstChild; i++) {
        this._log.firstChild.remove();
      }
      while (this._log.childElementCount > first) {
        this._log.lastChild!.remove();
      }
    }
    const shown = this._lines.lines
      .slice(first)
      .filter(line => !query || line.text.toLowerCase().includes(query));
    const fragment = document.createDocumentFragment();
    fragment.append(...shown.map(line => lineElement(line, query)));
    this._log.append(fragment);
    this._scrollToEnd();
  }

  private _scrollToEnd(): void {
    if (this._following) {
      this._log.scrollTop = this._log.scrollHeight;
    }
  }

  private async _copy(): Promise<void> {
    try {
      await navigator.clipboard.writeText(this._lines.text());
      setText(this._status, 'Copied');
    } catch {
      // navigator.clipboard is not available in pages without TLS.
      getSelection()?.selectAllChildren(this._log);
      setText(this._status, 'Selected; press Ctrl+C to copy');
    }
  }
}

function lineElement({ text, count }: ILogLine, query: string): HTMLElement {
  const line = h('div');
  const start = query ? text.toLowerCase().indexOf(query) : -1;
  if (start < 0) {
    line.append(text || ' ');
  } else {
    const end = start + query.length;
    line.append(text.slice(0, start), h('mark', {}, text.slice(start, end)), text.slice(end));
  }
  if (count > 1) {
    line.append(h('span', { class: 'tfd-times', title: `repeated ${count} times` }, `× ${count}`));
  }
  return line;
}
