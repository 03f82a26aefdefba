// A list of names with their values.

import { h, setText } from './dom';

export type Fact = readonly [name: string, value: string | HTMLElement];

export class Facts {
  readonly node = h('dl', { class: 'tfd-facts' });

  /** Show the facts that have a value. */
  show(facts: readonly Fact[]): void {
    const known = facts.filter(([, value]) => value);
    while (this.node.children.length > 2 * known.length) {
      this.node.lastChild!.remove();
    }
    while (this.node.children.length < 2 * known.length) {
      this.node.append(h('dt'), h('dd'));
    }
    known.forEach(([name, value], i) => {
      setText(this.node.children[2 * i], name);
      const element = this.node.children[2 * i + 1];
      if (typeof value === 'string') {
        setText(element, value);
      } else if (element.textContent !== value.textContent || !element.firstElementChild) {
        element.replaceChildren(value);
      }
    });
  }
}
