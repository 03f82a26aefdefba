// The bottleneck of a coordinator or a stream: one line that expands to the whole sentence.

import { h, KeyedParts, setAttribute, setText, setTruncatedText, show } from './dom';
import { hasEnded, type ICluster } from './protocol';

/** The kernel measures a bottleneck several times a second; a text stays for this time. */
const HOLD_MS = 10_000;
/** Start of the sentences without a result. */
const UNKNOWN = 'Not known yet';

export class BottleneckList {
  readonly node = h('div');
  private readonly _rows = new KeyedParts(this.node, () => new BottleneckRow());
  /** The text of each row, and the time until which it stays. */
  private readonly _held = new Map<string, { text: string; until: number }>();
  private _snapshot: ICluster | undefined;
  private _timer: ReturnType<typeof setTimeout> | undefined;

  show(snapshot: ICluster): void {
    this._snapshot = snapshot;
    this._update();
  }

  dispose(): void {
    clearTimeout(this._timer);
  }

  private _update(): void {
    const now = Date.now();
    const limits = limitsOf(this._snapshot!);
    let next = Infinity;
    for (const key of this._held.keys()) {
      if (!limits.has(key)) {
        this._held.delete(key);
      }
    }
    for (const [key, text] of limits) {
      const held = this._held.get(key);
      if (held && held.text !== text && now < held.until) {
        next = Math.min(next, held.until);
      } else if (text === '') {
        this._held.delete(key);
      } else if (held?.text !== text) {
        this._held.set(key, { text, until: now + HOLD_MS });
      }
    }
    this._rows.update([...this._held.keys()], (row, key) => row.show(this._held.get(key)!.text));
    show(this.node, this._held.size > 0);
    clearTimeout(this._timer);
    if (next < Infinity) {
      this._timer = setTimeout(() => this._update(), next - now);
    }
  }
}

class BottleneckRow {
  readonly node = h('div', { class: 'tfd-limit' });
  private readonly _text = h('span');
  private readonly _toggle = h('button', { type: 'button', class: 'tfd-link' });
  private _expanded = false;

  constructor() {
    this._toggle.addEventListener('click', () => this._expand(!this._expanded));
    this.node.append(this._text, this._toggle);
    this._expand(false);
  }

  show(text: string): void {
    setTruncatedText(this._text, text);
  }

  private _expand(expanded: boolean): void {
    this._expanded = expanded;
    this._text.className = expanded ? 'tfd-wrap' : 'tfd-cut';
    setText(this._toggle, expanded ? 'Less' : 'More');
    setAttribute(this._toggle, 'title', expanded ? 'Show one line' : 'Show the whole sentence');
    setAttribute(this._toggle, 'aria-expanded', String(expanded));
  }
}

/**
 * Return the current bottlenecks of the coordinator and of the streams that are read.
 *
 * A text is empty while the bottleneck is not known, and between two closures.
 */
function limitsOf(snapshot: ICluster): Map<string, string> {
  const limits = new Map<string, string>();
  const { coordinator } = snapshot;
  if (hasEnded(snapshot)) {
    return limits;
  }
  if (coordinator?.state === 'running') {
    limits.set('coordinator', known(coordinator.limit));
  } else if (coordinator?.state === 'idle') {
    limits.set('coordinator', '');
  }
  for (const { name, state, limit } of Object.values(snapshot.streams)) {
    if (state === 'running') {
      limits.set(`stream ${name}`, known(limit, `${name}: `));
    }
  }
  return limits;
}

function known(limit: string | undefined, label = ''): string {
  return limit && !limit.startsWith(UNKNOWN) ? label + limit : '';
}
