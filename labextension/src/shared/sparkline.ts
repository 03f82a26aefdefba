// A sparkline: a small line chart without axes.

const NS = 'http://www.w3.org/2000/svg';
const WIDTH = 60;
const HEIGHT = 16;

export class Sparkline {
  readonly node = document.createElementNS(NS, 'svg');
  private readonly _path = document.createElementNS(NS, 'path');

  constructor(private readonly _points = 60) {
    this.node.setAttribute('class', 'tfd-spark');
    this.node.setAttribute('viewBox', `0 0 ${WIDTH} ${HEIGHT}`);
    this.node.setAttribute('preserveAspectRatio', 'none');
    this.node.setAttribute('role', 'img');
    this.node.append(this._path);
  }

  /** Draw the latest values; null is a gap. */
  show(values: readonly (number | null)[], label: string): void {
    const shown = values.slice(-this._points);
    const top = shown.reduce<number>((high, value) => Math.max(high, value ?? 0), 0) || 1;
    const step = WIDTH / Math.max(this._points - 1, 1);
    const start = WIDTH - step * (shown.length - 1);
    let path = '';
    let down = false;
    shown.forEach((value, i) => {
      if (value === null) {
        down = false;
        return;
      }
      const x = start + i * step;
      const y = HEIGHT - 1 - (Math.max(value, 0) / top) * (HEIGHT - 2);
      path += `${down ? 'L' : 'M'}${x.toFixed(1)} ${y.toFixed(1)}`;
      down = true;
    });
    if (this._path.getAttribute('d') !== path) {
      this._path.setAttribute('d', path);
    }
    if (this.node.getAttribute('aria-label') !== label) {
      this.node.setAttribute('aria-label', label);
    }
  }
}
