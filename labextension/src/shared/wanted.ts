// Has the closures of a cluster sent while somebody looks, and a while longer: they are sent as a
// whole when they are wanted again.

import type { Link } from './link';

const LINGER_MS = 10_000;

export class Wanted {
  private _end: (() => void) | null = null;
  private _timer: ReturnType<typeof setTimeout> | null = null;

  constructor(
    private readonly _link: Link,
    private readonly _cluster: string
  ) {}

  set(wanted: boolean): void {
    if (this._timer !== null) {
      clearTimeout(this._timer);
      this._timer = null;
    }
    if (wanted) {
      this._end ??= this._link.want(this._cluster);
    } else if (this._end) {
      this._timer = setTimeout(() => this.dispose(), LINGER_MS);
    }
  }

  dispose(): void {
    if (this._timer !== null) {
      clearTimeout(this._timer);
      this._timer = null;
    }
    this._end?.();
    this._end = null;
  }
}
