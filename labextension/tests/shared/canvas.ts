// Canvases that record what is drawn, and elements of a fixed size, which jsdom does not provide.
// Import this module before modules that import Lumino or uPlot.

import { vi } from 'vitest';

export interface IDrawn {
  operation: string;
  args: unknown[];
  fillStyle: unknown;
  globalAlpha: unknown;
}

const drawn: IDrawn[] = [];
const contexts = new WeakMap<HTMLCanvasElement, object>();

function contextOf(canvas: HTMLCanvasElement): object {
  const results: Record<string, (text: string) => unknown> = {
    measureText: text => ({ width: 6 * text.length }),
    createLinearGradient: () => ({ addColorStop: () => undefined }),
    getImageData: () => ({ data: [] })
  };
  const state: Record<string, unknown> = { canvas, globalAlpha: 1 };
  return new Proxy(state, {
    get: (_, name: string) =>
      name in state
        ? state[name]
        : (...args: unknown[]) => {
            const { fillStyle, globalAlpha } = state;
            drawn.push({ operation: name, args, fillStyle, globalAlpha });
            return results[name]?.(String(args[0]));
          }
  });
}

Object.assign(globalThis, {
  matchMedia: () => new EventTarget(),
  DragEvent: class extends MouseEvent {},
  CanvasRenderingContext2D: class {
    drawImage(): void {
      // nothing to copy
    }
  }
});
HTMLCanvasElement.prototype.getContext = function (this: HTMLCanvasElement) {
  const context = contexts.get(this) ?? contextOf(this);
  contexts.set(this, context);
  return context as never;
};

const observers = new Set<() => void>();

class FakeResizeObserver {
  constructor(private readonly _callback: () => void) {}

  observe(): void {
    observers.add(this._callback);
    queueMicrotask(this._callback);
  }

  disconnect(): void {
    observers.delete(this._callback);
  }
}

/** Report another size of all observed elements. */
export function resize(): void {
  observers.forEach(callback => callback());
}

/** Give all elements this size, until the mocks are restored; return the record of all drawing. */
export function fakeSizes(width = 600, height = 300): IDrawn[] {
  drawn.length = 0;
  vi.stubGlobal('ResizeObserver', FakeResizeObserver);
  vi.spyOn(HTMLElement.prototype, 'offsetWidth', 'get').mockReturnValue(width);
  vi.spyOn(HTMLElement.prototype, 'offsetHeight', 'get').mockReturnValue(height);
  vi.spyOn(Element.prototype, 'clientWidth', 'get').mockReturnValue(width);
  vi.spyOn(Element.prototype, 'clientHeight', 'get').mockReturnValue(height);
  return drawn;
}
