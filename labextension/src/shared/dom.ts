// Elements without a library. Text only ever gets in as text.

type Child = Node | string | null | undefined;
type Value = string | number | boolean | null | undefined | ((event: never) => void);

/** Make an element: `onclick` and the like are listeners, a false or absent value is left out. */
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

/** Set an attribute, or remove it; does nothing where nothing changes. */
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

/** Set the text of an element; does nothing where nothing changes, so that a selection stays. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** Text that is cut with an ellipsis where there is no room, and whole in its title. */
export function setCut(element: Element, text: string, title = text): void {
  setText(element, text);
  setAttribute(element, 'title', title || null);
}

export function show(element: HTMLElement, shown: boolean): void {
  if (element.hidden === shown) {
    element.hidden = !shown;
  }
}

type Control = HTMLButtonElement | HTMLInputElement | HTMLSelectElement;

/** Let a control be used, unless what it asked for last is not answered yet. */
export function enable(control: Control, usable: boolean): void {
  const disabled = !usable || control.dataset.busy !== undefined;
  if (control.disabled !== disabled) {
    control.disabled = disabled;
  }
}

/** Whether what a control asked for is not answered yet. */
export function setBusy(control: Control, busy: boolean): void {
  if (busy) {
    control.dataset.busy = '';
  } else {
    delete control.dataset.busy;
  }
  control.disabled = busy;
}

let ids = 0;

/** An id for labels and the like. */
export function uniqueId(): string {
  ids += 1;
  return `tfd-${Date.now().toString(36)}-${ids}`;
}

/** A button of words, with a title that says what it does. */
export function button(
  label: string,
  title: string,
  onClick: (button: HTMLButtonElement) => void
): HTMLButtonElement {
  const made = h('button', { type: 'button', class: 'tfd-button', title }, label);
  made.addEventListener('click', () => onClick(made));
  return made;
}

/** A label that goes with an input. */
export function labelled(label: string, input: HTMLElement, title = ''): HTMLLabelElement {
  return h('label', { class: 'tfd-labelled', title: title || null }, h('span', {}, label), input);
}

/** Keep one element for each key, in the order of `keys`; those that stay are not touched. */
export class Keyed<E extends HTMLElement> {
  private _elements = new Map<string, E>();

  constructor(
    private readonly _parent: HTMLElement,
    private readonly _make: (key: string) => E,
    private readonly _drop: (element: E) => void = () => undefined,
    /** A child of the parent that stays before all of them. */
    private readonly _head: ChildNode | null = null
  ) {}

  get(key: string): E | undefined {
    return this._elements.get(key);
  }

  update(keys: readonly string[], fill: (element: E, key: string) => void): void {
    const wanted = new Set(keys);
    for (const [key, element] of this._elements) {
      if (!wanted.has(key)) {
        element.remove();
        this._drop(element);
        this._elements.delete(key);
      }
    }
    let before = this._head;
    for (const key of wanted) {
      let element = this._elements.get(key);
      if (!element) {
        element = this._make(key);
        this._elements.set(key, element);
      }
      fill(element, key);
      const place: ChildNode | null = before ? before.nextSibling : this._parent.firstChild;
      if (place !== element) {
        this._parent.insertBefore(element, place);
      }
      before = element;
    }
  }
}

/** As Keyed, for parts that keep more than an element. */
export class Parts<P extends { readonly node: HTMLElement }> {
  private readonly _parts = new Map<HTMLElement, P>();
  private readonly _nodes: Keyed<HTMLElement>;

  constructor(parent: HTMLElement, make: () => P, head: ChildNode | null = null) {
    this._nodes = new Keyed<HTMLElement>(
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
