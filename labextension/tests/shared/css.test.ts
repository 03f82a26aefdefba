import { expect, test } from 'vitest';

import { ensureStyle } from '../../src/shared/css';

/** Return the selectors in the media rules with this condition. */
function selectors(condition: string): string[] {
  ensureStyle();
  const sheet = document.querySelector<HTMLStyleElement>('style[data-tfd-notebook]')!.sheet!;
  return [...sheet.cssRules]
    .filter(rule => rule instanceof CSSMediaRule && rule.media.mediaText.includes(condition))
    .flatMap(rule => [...(rule as CSSMediaRule).cssRules])
    .flatMap(rule => (rule as CSSStyleRule).selectorText.replaceAll('"', "'").split(', '));
}

test('colors that have a meaning stay with forced colors', () => {
  expect(selectors('forced-colors: active')).toEqual(
    expect.arrayContaining([
      '.tfd-legend i',
      '.tfd-counts > span',
      ".tfd-live .tfd-button[aria-pressed='true']",
      ".tfd-live .tfd-tabs button[aria-selected='false']"
    ])
  );
});

test('the button of failed closures is red', () => {
  ensureStyle();
  const button = (classes: string) => {
    const element = document.createElement('button');
    element.className = `tfd-button ${classes}`;
    const view = document.createElement('div');
    view.className = 'tfd-live';
    view.append(element);
    document.body.append(view);
    return getComputedStyle(element).color;
  };
  expect(button('tfd-bad')).not.toBe(button(''));
});

test('headings start with a capital letter', () => {
  ensureStyle();
  const sheet = document.querySelector('style[data-tfd-notebook]')!.textContent;
  const rule = /[^}]*\{ text-transform: uppercase; \}/.exec(sheet)![0];
  for (const selector of ['h4', 'th', '.tfd-sort', '.tfd-form > label']) {
    expect(rule).toContain(`${selector}::first-letter`);
  }
});
