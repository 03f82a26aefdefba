// What the doctor found, until somebody has read it.

import { button, h, setText, show } from './dom';
import { clean, plural, signed, tone } from './figures';

export interface IFinding {
  code: string;
  severity: string;
  where: string;
  what: string;
  why: string;
  fix: string;
}

export class Findings {
  readonly node = h('section', { class: 'tfd-findings', 'aria-label': 'findings', hidden: true });
  private readonly _count = h('h4');
  private readonly _list = h('ul', { class: 'tfd-notices' });

  constructor() {
    const close = button('Close', 'show the findings no more', () => show(this.node, false));
    close.className = 'tfd-link';
    this.node.append(h('div', { class: 'tfd-row' }, this._count, close), this._list);
  }

  show(found: readonly IFinding[]): void {
    setText(this._count, counted(found));
    this._list.replaceChildren(...found.map(itemOf));
    show(this.node, found.length > 0);
  }
}

export function counted(found: readonly IFinding[]): string {
  return found.length ? plural(found.length, 'finding') : 'nothing was found';
}

function itemOf({ code, severity, where, what, why, fix }: IFinding): HTMLElement {
  return h(
    'li',
    { title: where },
    h(
      'div',
      {},
      h('span', { class: `tfd-${tone(severity)}` }, signed(severity)),
      h('span', { class: 'tfd-quiet' }, ` ${code}`)
    ),
    h('div', {}, clean(what)),
    h('div', { class: 'tfd-quiet' }, clean(why)),
    h('div', {}, `Next: ${clean(fix)}`)
  );
}
