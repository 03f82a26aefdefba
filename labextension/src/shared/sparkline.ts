// A sparkline: a small line chart without axes.

const NS = 'http://www.w3.org/2000/svg';
const WIDTH = 60;
const HEIGHT = 16;
/** The number of values that are drawn. */
export const POINTS = 60;

export class Sparkline {
  readonly node = document.createElementNS(NS, 'svg');
  private readonly _path = document.createElementNS(NS, 'path');

  constructor() {
    const baseline = document.createElementNS(NS, 'path');
    baseline.setAttribute('class', 'tfd-baseline');
    baseline.setAttribute('d', `M0 ${HEIGHT - 0.5}H${WIDTH}`);
    this.node.setAttribute('class', 'tfd-spark');
    this.node.setAttribute('viewBox', `0 0 ${WIDTH} ${HEIGHT}`);
    this.node.setAttribute('preserveAspectRatio', 'none');
    this.node.setAttribute('role', 'img');
    this.node.append(baseline, this._path);
  }

  /** Draw the latest values, with `top` at the upper edge; null is a gap. */
  show(values: readonly (number | null)[], top: number, label: string): void {
    const shown = values.slice(-POINTS);
    const step = WIDTH / (POINTS - 1);
    const start = WIDTH - step * (shown.length - 1);
    let path = '';
    let down = false;
    shown.forEach((value, i) => {
      if (value === null) {
        down = false;
        return;
      }
      const x = start + i * step;
      const y = HEIGHT - 1 - (Math.max(value, 0) / (top || 1)) * (HEIGHT - 2);
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

/** Return the highest of the values that are drawn, for sparklines with the same scale. */
export function topOf(all: readonly (readonly (number | null)[])[]): number {
  const high = (top: number, value: number | null) => Math.max(top, value ?? 0);
  return all.reduce((top, values) => values.slice(-POINTS).reduce<number>(high, top), 0);
}
