// The notices of a cluster, newest first.

import { button, h, setText, show } from './dom';
import { clock, signed, tone } from './figures';
import type { INotice } from './protocol';

const FEW = 5;

export class NoticeList {
  readonly node = h('div');
  private readonly _list = h('ul', { class: 'tfd-notices' });
  private readonly _more: HTMLButtonElement;
  private _all = false;
  private _notices: readonly INotice[] = [];

  constructor() {
    this._more = button('', 'Show all notices, or only the latest', () => {
      this._all = !this._all;
      this._draw();
    });
    this._more.className = 'tfd-link';
    this.node.append(h('h4', {}, 'Notices'), this._list, this._more);
  }

  show(notices: readonly INotice[]): void {
    show(this.node, notices.length > 0);
    if (notices === this._notices || !notices.length) {
      return;
    }
    this._notices = notices;
    this._draw();
  }

  private _draw(): void {
    const latest = [...this._notices].reverse();
    const shown = this._all ? latest : latest.slice(0, FEW);
    this._list.replaceChildren(
      ...shown.map(notice =>
        h(
          'li',
          {},
          h('time', {}, clock(notice.time)),
          h('span', { class: `tfd-${tone(notice.severity)}` }, signed(notice.severity)),
          `: ${noticeText(notice)}`
        )
      )
    );
    show(this._more, latest.length > FEW);
    setText(this._more, this._all ? 'Only the latest' : `${latest.length - FEW} more`);
  }
}

export function noticeText({ what, task, fix }: INotice): string {
  const text = task && !what.includes(task) ? `${task}: ${what}` : what;
  return fix ? `${text}${text.endsWith('.') ? '' : '.'} Next: ${fix}` : text;
}
