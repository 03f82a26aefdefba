// DOM helpers. Text is never parsed as HTML.

import { formatInteger } from './figures';

type Child = Node | string | null | undefined;
type Value = string | number | boolean | null | undefined | ((event: never) => void);

/** Create an element; functions (`onclick`) become listeners, false and absent values are skipped. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, Value> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') {
      element.addEventListener(name.slice(2), value as (event: Event) => void);
    } else {
      setAttribute(element, name, value);
    }
  }
  for (const child of children) {
    if (child !== null && child !== undefined) {
      element.append(child);
    }
  }
  return element;
}

/** Set or remove an attribute; no-op if the value is unchanged. */
export function setAttribute(
  element: Element,
  name: string,
  value: string | number | boolean | null | undefined
): void {
  if (value === false || value === null || value === undefined) {
    if (element.hasAttribute(name)) {
      element.removeAttribute(name);
    }
    return;
  }
  const text = value === true ? '' : String(value);
  if (element.getAttribute(name) !== text) {
    element.setAttribute(name, text);
  }
}

/** Set the text of an element; no-op if unchanged, so that a text selection is kept. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** Set a text that the CSS truncates, and the full text as its title. */
export function setTruncatedText(element: Element, text: string, title = text): void {
  setText(element, text);
  setAttribute(element, 'title', title || null);
}

export function show(element: HTMLElement, shown: boolean): void {
  if (element.hidden === shown) {
    element.hidden = !shown;
  }
}

type Control = HTMLButtonElement | HTMLInputElement | HTMLSelectElement;

/** Enable or disable a control; it stays disabled while its command is pending. */
export function enable(control: Control, usable: boolean): void {
  const disabled = !usable || control.dataset.busy !== undefined;
  if (control.disabled !== disabled) {
    control.disabled = disabled;
  }
}

/** Mark the command of a control as pending or done. */
export function setBusy(control: Control, busy: boolean): void {
  if (busy) {
    control.dataset.busy = '';
  } else {
    delete control.dataset.busy;
  }
  control.disabled = busy;
}

let ids = 0;

/** Return an element id that is unique in the page. */
export function uniqueId(): string {
  ids += 1;
  return `tfd-${Date.now().toString(36)}-${ids}`;
}

/** Create a text button with a tooltip. */
export function button(
  label: string,
  title: string,
  onClick: (button: HTMLButtonElement) => void
): HTMLButtonElement {
  const element = h('button', { type: 'button', class: 'tfd-button', title }, label);
  element.addEventListener('click', () => onClick(element));
  return element;
}

/** Return a table row in which a click presses a button, except for clicks on other controls. */
export function rowWithToggle(toggle: HTMLButtonElement, ...cells: HTMLElement[]): HTMLElement {
  const onclick = ({ target }: MouseEvent) => {
    // Selecting text with the mouse also ends with a click event.
    if (!(target as Element).closest('button') && getSelection()?.type !== 'Range') {
      toggle.click();
    }
  };
  return h('tr', { class: 'tfd-openable', onclick }, ...cells);
}

/** Create a label for an input. */
export function labeled(label: string, input: HTMLElement, title = ''): HTMLLabelElement {
  return h('label', { class: 'tfd-labeled', title: title || null }, h('span', {}, label), input);
}

/** A list with one element per key; elements of unchanged keys are reused. */
export class KeyedList<E extends HTMLElement> {
  private _elements = new Map<string, E>();

  constructor(
    private readonly _parent: HTMLElement,
    private readonly _make: (key: string) => E,
    private readonly _drop: (element: E) => void = () => undefined,
    /** A child of the parent that precedes all elements. */
    private readonly _head: ChildNode | null = null
  ) {}

  update(keys: readonly string[], fill: (element: E, key: string) => void): void {
    const keySet = new Set(keys);
    for (const [key, element] of this._elements) {
      if (!keySet.has(key)) {
        element.remove();
        this._drop(element);
        this._elements.delete(key);
      }
    }
    let before = this._head;
    for (const key of keySet) {
      let element = this._elements.get(key);
      if (!element) {
        element = this._make(key);
        this._elements.set(key, element);
      }
      fill(element, key);
      const next: ChildNode | null = before ? before.nextSibling : this._parent.firstChild;
      if (next !== element) {
        this._parent.insertBefore(element, next);
      }
      before = element;
    }
  }
}

/** A button that switches between all rows of a long list, and its first rows with problems first. */
export class MoreButton {
  readonly node: HTMLButtonElement;
  private _all = false;

  constructor(
    private readonly _noun: string,
    private readonly _maxRows: number,
    redraw: () => void
  ) {
    this.node = button('', `Show all ${_noun}, or problems first`, () => {
      this._all = !this._all;
      redraw();
    });
  }

  /** Return the keys of the rows to show. */
  select(keys: string[], isUrgent: (key: string) => boolean): string[] {
    show(this.node, keys.length > this._maxRows);
    setText(this.node, this._all ? 'Fewer' : `All ${formatInteger(keys.length)} ${this._noun}`);
    if (this._all || keys.length <= this._maxRows) {
      return keys;
    }
    const chosen = new Set([...keys.filter(isUrgent), ...keys].slice(0, this._maxRows));
    return keys.filter(key => chosen.has(key));
  }
}

/** A keyed list of components that own an element each. */
export class KeyedParts<P extends { readonly node: HTMLElement }> {
  private readonly _parts = new Map<HTMLElement, P>();
  private readonly _nodes: KeyedList<HTMLElement>;

  constructor(parent: HTMLElement, make: () => P, head: ChildNode | null = null) {
    this._nodes = new KeyedList<HTMLElement>(
      parent,
      () => {
        const part = make();
        this._parts.set(part.node, part);
        return part.node;
      },
      node => this._parts.delete(node),
      head
    );
  }

  update(keys: readonly string[], fill: (part: P, key: string) => void): void {
    this._nodes.update(keys, (node, key) => fill(this._parts.get(node)!, key));
  }
}
