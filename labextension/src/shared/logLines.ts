// Lines of a log, those that repeat each other folded into one.

export interface ILogLine {
  text: string;
  /** How often it came in a row. */
  times: number;
}

/** What the beginning of a line may say that makes two lines with the same words differ. */
const STAMP =
  /^\s*(?:[IWEF]\d{4}\s+)?[[(]?(?:\d{4}-\d{2}-\d{2}[T ])?\d{1,2}:\d{2}:\d{2}(?:[.,]\d+)?Z?[\])]?:?\s*(?:\d+\s+)?/;

/** The words of a line without its time. */
export function wordsOf(line: string): string {
  return line.replace(STAMP, '');
}

export class LogLines {
  readonly lines: ILogLine[] = [];
  /** How many were dropped at the beginning so far. */
  dropped = 0;

  constructor(private readonly _most: number) {}

  /** Take in lines; returns the position of the first that changed or is new. */
  add(lines: readonly string[]): number {
    let first = this.lines.length;
    for (const text of lines) {
      const last = this.lines[this.lines.length - 1];
      if (last && wordsOf(last.text) === wordsOf(text)) {
        last.text = text;
        last.times += 1;
        first = Math.min(first, this.lines.length - 1);
      } else {
        this.lines.push({ text, times: 1 });
      }
    }
    const over = this.lines.length - this._most;
    if (over > 0) {
      this.lines.splice(0, over);
      this.dropped += over;
      first = Math.max(0, first - over);
    }
    return first;
  }

  /** All of it as text, folded. */
  text(): string {
    return this.lines
      .map(({ text, times }) => (times > 1 ? `${text}  × ${times}` : text))
      .join('\n');
  }
}
