// Log lines; repeated lines are merged into one with a count.

export interface ILogLine {
  text: string;
  /** Number of consecutive repetitions. */
  count: number;
}

/** The timestamp at the start of a line, which is ignored when lines are compared. */
const STAMP =
  /^\s*(?:[IWEF]\d{4}\s+)?[[(]?(?:\d{4}-\d{2}-\d{2}[T ])?\d{1,2}:\d{2}:\d{2}(?:[.,]\d+)?Z?[\])]?:?\s*(?:\d+\s+)?/;

/** Return a line without its timestamp. */
export function withoutTimestamp(line: string): string {
  return line.replace(STAMP, '');
}

export class LogLines {
  readonly lines: ILogLine[] = [];
  /** Number of lines dropped so far. */
  dropped = 0;

  constructor(private readonly _maxLines: number) {}

  /** Add lines; return the position of the first changed or new line. */
  add(lines: readonly string[]): number {
    let first = this.lines.length;
    for (const text of lines) {
      const last = this.lines[this.lines.length - 1];
      if (last && withoutTimestamp(last.text) === withoutTimestamp(text)) {
        last.text = text;
        last.count += 1;
        first = Math.min(first, this.lines.length - 1);
      } else {
        this.lines.push({ text, count: 1 });
      }
    }
    const over = this.lines.length - this._maxLines;
    if (over > 0) {
      this.lines.splice(0, over);
      this.dropped += over;
      first = Math.max(0, first - over);
    }
    return first;
  }

  /** Return all lines as text, repeated lines merged. */
  text(): string {
    return this.lines
      .map(({ text, count }) => (count > 1 ? `${text}  × ${count}` : text))
      .join('\n');
  }
}
