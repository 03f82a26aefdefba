// Subscription of a view to the closures of a cluster. It ends LINGER_MS after the view is hidden,
// because a new subscription sends the whole table.

import type { Link } from './link';

const LINGER_MS = 10_000;

export class ClosureSubscription {
  private _end: (() => void) | null = null;
  private _timer: ReturnType<typeof setTimeout> | null = null;

  constructor(
    private readonly _link: Link,
    private readonly _cluster: string
  ) {}

  set(active: boolean): void {
    if (this._timer !== null) {
      clearTimeout(this._timer);
      this._timer = null;
    }
    if (active) {
      this._end ??= this._link.subscribe(this._cluster);
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
