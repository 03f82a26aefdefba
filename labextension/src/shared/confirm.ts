// A question in place, for pages that offer no dialog.

import { button, h } from './dom';

/** Ask beneath `near`; Escape and leaving it unanswered mean no. */
export function confirmInline(question: string, near: HTMLElement): Promise<boolean> {
  return new Promise(resolve => {
    const before = document.activeElement;
    const end = (said: boolean) => {
      box.remove();
      if (before instanceof HTMLElement && before.isConnected) {
        before.focus();
      }
      resolve(said);
    };
    const yes = button('Yes', 'do it', () => end(true));
    const no = button('No', 'leave it as it is', () => end(false));
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
