// Views in a page, and the state of a coordinator for them.

import type { IView } from '../../src/shared/view';

const open: IView[] = [];

/** Add a view to the page. */
export function attach<V extends IView>(view: V): V {
  open.push(view);
  document.body.append(view.node);
  return view;
}

/** Dispose of all views and clear the page. */
export function clearPage(): void {
  open.splice(0).forEach(view => view.dispose());
  document.body.replaceChildren();
}

/** Click the first button with this label. */
export function press({ node }: { node: HTMLElement }, label: string): HTMLButtonElement {
  const match = [...node.querySelectorAll('button')].find(
    button => button.textContent.trim() === label
  );
  match!.click();
  return match!;
}

export const settle = () => new Promise(resolve => setTimeout(resolve, 60));

export function coordinated(
  state: string,
  more: Record<string, unknown> = {}
): Record<string, unknown> {
  return {
    coordinator: {
      state,
      reason: state === 'paused' ? 'from a terminal' : undefined,
      counts: { queued: 3, ready: 1 },
      closures_per_s: 0,
      workers: {
        '0': { index: 0, state: 'idle', done: 1, failed: 0, lost: 0, built: 0, unbuilt: 0 },
        '1': { index: 1, state: 'idle', done: 1, failed: 0, lost: 0, built: 0, unbuilt: 0 }
      },
      traces: {},
      ps_bytes: {},
      held: [],
      break_on_failure: false,
      reduced: false,
      ...more
    }
  };
}
