// The log of one task: what is there, then what comes, while the view is open and seen.

import { problemText } from './asker';
import { button, h, labelled, setText } from './dom';
import type { Link } from './link';
import { type ILogLine, LogLines } from './logLines';
import { type IActions, View } from './view';

const MOST_LINES = 5000;
const FIRST_LINES = 500;
const PAUSE_MS = 1000;
/** An answer of nearly as much as is sent at once has more behind it. */
const MUCH = 48_000;
const AGAIN_MS = 200;

export class LogsView extends View {
  private readonly _log = h('div', {
    class: 'tfd-log',
    role: 'log',
    'aria-live': 'off',
    tabindex: 0
  });
  private readonly _search = h('input', { type: 'search', placeholder: 'text', size: 12 });
  private readonly _said = h('span', { class: 'tfd-quiet tfd-wrap' });
  private readonly _lines = new LogLines(MOST_LINES);
  private _offset: number | null = null;
  private _timer: ReturnType<typeof setTimeout> | null = null;
  private _asking = false;
  private _open = false;

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
        labelled('Find', this._search, 'show only lines that have this text'),
        button('Copy', 'copy the lines that are kept here', () => void this._copy()),
        this._said
      ),
      this._log
    );
    this.onDispose(() => this._rest());
    this.begin();
  }

  protected draw(): void {
    if (this._open && this._timer === null && !this._asking && this.alive) {
      this._later(0);
    }
  }

  protected override seen(visible: boolean): void {
    this._open = visible;
    if (!visible) {
      this._rest();
    } else if (this._timer === null && !this._asking) {
      this._later(0);
    }
  }

  private _later(ms: number): void {
    this._rest();
    this._timer = setTimeout(() => {
      this._timer = null;
      void this._ask();
    }, ms);
  }

  private _rest(): void {
    if (this._timer !== null) {
      clearTimeout(this._timer);
      this._timer = null;
    }
  }

  private async _ask(): Promise<void> {
    if (!this._open || this.disposed || this._asking || !this.alive) {
      return;
    }
    this._asking = true;
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
      this._tell();
      pause = text.length > MUCH ? AGAIN_MS : PAUSE_MS;
    } catch (error) {
      setText(this._said, problemText(error));
      pause = 5 * PAUSE_MS;
    } finally {
      this._asking = false;
      if (this._open && !this.disposed && this.alive) {
        this._later(pause);
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

  private _tell(): void {
    const kept = this._lines.lines.length;
    setText(
      this._said,
      kept ? (this._lines.dropped ? `the last ${kept} lines` : '') : 'nothing was written yet'
    );
  }

  /** Draw the lines from `first` on, after `dropped` ones at the beginning went. */
  private _redraw(first: number, dropped: number, before = Infinity): void {
    const atEnd = this._log.scrollHeight - this._log.scrollTop - this._log.clientHeight < 30;
    const wanted = this._search.value.toLowerCase();
    if (wanted || before === Infinity || this._log.childElementCount !== before) {
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
      .filter(line => !wanted || line.text.toLowerCase().includes(wanted));
    const made = document.createDocumentFragment();
    made.append(...shown.map(line => lineElement(line, wanted)));
    this._log.append(made);
    if (atEnd) {
      this._log.scrollTop = this._log.scrollHeight;
    }
  }

  private async _copy(): Promise<void> {
    try {
      await navigator.clipboard.writeText(this._lines.text());
      setText(this._said, 'copied');
    } catch {
      // Pages without TLS have no clipboard.
      getSelection()?.selectAllChildren(this._log);
      setText(this._said, 'selected: press Ctrl+C');
    }
  }
}

function lineElement({ text, times }: ILogLine, wanted: string): HTMLElement {
  const line = h('div');
  const place = wanted ? text.toLowerCase().indexOf(wanted) : -1;
  if (place < 0) {
    line.append(text || ' ');
  } else {
    const end = place + wanted.length;
    line.append(text.slice(0, place), h('mark', {}, text.slice(place, end)), text.slice(end));
  }
  if (times > 1) {
    line.append(h('span', { class: 'tfd-times', title: `${times} times in a row` }, `× ${times}`));
  }
  return line;
}
