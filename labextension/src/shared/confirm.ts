// Questions before a command that cannot be undone, and their dialog in pages without one.

import { button, h, uniqueId } from './dom';

export interface IQuestion {
  title: string;
  /** The consequence. */
  body: string;
  /** Label of the button that confirms. */
  verb: string;
}

/** Consequences of the end of a task by its role. */
const CONSEQUENCES: Record<string, string> = {
  dispatcher: 'Reads wait until it is ready.',
  data_worker: 'Elements that it has prepared are lost or delivered again.',
  worker: 'Its closure runs again on another worker.',
  ps: 'Its variables are lost.'
};

export function taskQuestion(verb: 'Kill' | 'Restart', task: string): IQuestion {
  const condition = verb === 'Kill' ? ' if the policy of the cluster allows it' : '';
  const consequence = CONSEQUENCES[task.split(':')[0]] ?? '';
  const body = `It restarts on the same port${condition}. ${consequence}`.trim();
  return { title: `${verb} ${task}?`, body, verb };
}

export function stopQuestion(cluster: string): IQuestion {
  return {
    title: `Stop ${cluster}?`,
    body: 'All its tasks are stopped. Reads and closures that are running end with an error.',
    verb: 'Stop'
  };
}

/** Show the question below `near`; resolve to true only if it is confirmed. */
export function confirmInline(
  { title, body, verb }: IQuestion,
  near: HTMLElement
): Promise<boolean> {
  return new Promise(resolve => {
    const before = document.activeElement;
    const end = (confirmed: boolean) => {
      box.remove();
      if (before instanceof HTMLElement && before.isConnected) {
        before.focus();
      }
      resolve(confirmed);
    };
    const cancel = button('Cancel', 'Change nothing', () => end(false));
    const text = h('span', { id: uniqueId() }, body);
    const box = h(
      'div',
      {
        class: 'tfd-confirm',
        role: 'alertdialog',
        'aria-label': title,
        'aria-describedby': text.id
      },
      h('strong', {}, title),
      text,
      cancel,
      button(verb, title, () => end(true))
    );
    box.addEventListener('keydown', event => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        end(false);
      }
    });
    near.after(box);
    cancel.focus();
  });
}
