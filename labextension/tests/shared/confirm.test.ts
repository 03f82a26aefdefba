import { afterEach, expect, test } from 'vitest';

import { confirmInline, stopQuestion, taskQuestion } from '../../src/shared/confirm';
import { clearPage, press } from './page';

const MARKUP = '<img src=x onerror="alert(1)">';

afterEach(clearPage);

/** Show a question below a button, which has the focus. */
function show(question = stopQuestion(MARKUP)) {
  const near = document.createElement('button');
  document.body.append(near);
  near.focus();
  const confirmed = confirmInline(question, near);
  return { confirmed, near, node: document.querySelector<HTMLElement>('[role=alertdialog]')! };
}

test('the title is the question, and the body is its consequence', () => {
  expect(taskQuestion('Kill', 'data_worker:1')).toEqual({
    title: 'Kill data_worker:1?',
    body:
      'It restarts on the same port if the policy of the cluster allows it. ' +
      'Elements that it has prepared are lost or delivered again.',
    verb: 'Kill'
  });
  expect(taskQuestion('Restart', 'ps:0').body).toBe(
    'It restarts on the same port. Its variables are lost.'
  );
  expect(taskQuestion('Restart', 'evaluator:0').body).toBe('It restarts on the same port.');
});

test('the buttons are Cancel and the verb', async () => {
  const { confirmed, near, node } = show();
  expect([...node.querySelectorAll('button')].map(button => button.textContent)).toEqual([
    'Cancel',
    'Stop'
  ]);
  expect(node.getAttribute('aria-label')).toBe(`Stop ${MARKUP}?`);
  const body = document.getElementById(node.getAttribute('aria-describedby')!)!;
  expect(body.textContent).toContain('All its tasks are stopped.');
  expect(node.querySelector('img')).toBeNull();
  expect(document.activeElement!.textContent).toBe('Cancel');
  press({ node }, 'Stop');
  expect(await confirmed).toBe(true);
  expect(document.activeElement).toBe(near);
});

test('Cancel and Escape confirm nothing', async () => {
  const first = show();
  press(first, 'Cancel');
  expect(await first.confirmed).toBe(false);
  const second = show();
  second.node.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }));
  expect(await second.confirmed).toBe(false);
  expect(document.querySelector('[role=alertdialog]')).toBeNull();
});
