// The ranks of the latest `cluster.run`: one process for each training worker.

import { h, KeyedParts, setText, setTruncatedText, show } from './dom';
import { errorSummary, signed, tone } from './figures';
import type { ICluster, IRank } from './protocol';
import { placeOf, ranksOf, titleOf } from './ranks';

const MAX_RANKS = 30;

export class RankList {
  readonly node = h('div');
  private readonly _title = h('h4');
  private readonly _list = h('div');
  private readonly _more = h('div', { class: 'tfd-quiet' });
  private readonly _rows = new KeyedParts(this._list, () => new RankRow());

  constructor() {
    this.node.append(this._title, this._list, this._more);
  }

  show(snapshot: ICluster): void {
    const ranks = snapshot.ranks ?? {};
    const all = ranksOf(snapshot);
    show(this.node, all.length > 0);
    if (!all.length) {
      return;
    }
    const attempt = all[0].attempt;
    const repeated = attempt > 1 ? `, attempt ${attempt}` : '';
    setText(this._title, `${titleOf(all)}${repeated}`);
    this._rows.update(
      all.slice(0, MAX_RANKS).map(rank => rank.task),
      (row, task) => row.show(ranks[task])
    );
    const rest = all.length - MAX_RANKS;
    setText(this._more, rest > 0 ? `… and ${rest} more` : '');
  }
}

class RankRow {
  readonly node = h('div', { class: 'tfd-stream' });
  private readonly _rank = h('span');
  private readonly _state = h('span');
  private readonly _place = h('span', { class: 'tfd-quiet tfd-cut' });
  private readonly _reason = h('div', { class: 'tfd-bad tfd-wrap' });

  constructor() {
    this.node.append(
      h('div', { class: 'tfd-row' }, this._rank, this._state, this._place),
      this._reason
    );
  }

  show(rank: IRank): void {
    setText(this._rank, `rank ${rank.rank}`);
    setText(this._state, signed(rank.state));
    this._state.className = `tfd-${tone(rank.state)}`;
    setTruncatedText(this._place, placeOf(rank));
    setText(this._reason, rank.reason ? errorSummary(rank.reason) : '');
    this._reason.title = rank.reason ?? '';
    show(this._reason, Boolean(rank.reason));
  }
}
