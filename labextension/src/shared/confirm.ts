// Inline confirmation for pages without a dialog.

import { button, h } from './dom';

/** Show the question below `near`; resolve to true only on Yes. */
export function confirmInline(question: string, near: HTMLElement): Promise<boolean> {
  return new Promise(resolve => {
    const before = document.activeElement;
    const end = (confirmed: boolean) => {
      box.remove();
      if (before instanceof HTMLElement && before.isConnected) {
        before.focus();
      }
      resolve(confirmed);
    };
    const yes = button('Yes', 'Confirm', () => end(true));
    const no = button('No', 'Cancel', () => end(false));
    const box = h(
      'div',
      { class: 'tfd-confirm', role: 'alertdialog', 'aria-label': question },
      h('span', {}, question),
      yes,
      no
    );
    box.addEventListener('keydown', event => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        end(false);
      }
    });
    near.after(box);
    no.focus();
  });
}
