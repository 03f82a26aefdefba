// Findings of the doctor, shown until they are closed.

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
    const close = button('Close', 'Close the findings', () => show(this.node, false));
    close.className = 'tfd-link';
    this.node.append(h('div', { class: 'tfd-row' }, this._count, close), this._list);
  }

  show(findings: readonly IFinding[]): void {
    setText(this._count, findingCount(findings));
    this._list.replaceChildren(...findingItems(findings));
    show(this.node, findings.length > 0);
  }
}

export function findingCount(findings: readonly IFinding[]): string {
  return findings.length ? plural(findings.length, 'finding') : 'No problems found';
}

export function findingItems(findings: readonly IFinding[]): HTMLElement[] {
  return findings.map(itemOf);
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
