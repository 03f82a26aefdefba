// The streams of a cluster: rate, wait share and bottleneck.

import { h, KeyedParts, setTruncatedText, setText, show } from './dom';
import { count, errorSummary, percent, rate, signed, tone } from './figures';
import type { ICluster, IStream } from './protocol';
import { Sparkline, topOf } from './sparkline';

const MAX_STREAMS = 30;

export class StreamList {
  readonly node = h('div');
  private readonly _list = h('div');
  private readonly _more = h('div', { class: 'tfd-quiet' });
  private readonly _rows = new KeyedParts(this._list, () => new StreamRow());

  constructor() {
    this.node.append(h('h4', {}, 'Streams'), this._list, this._more);
  }

  show(snapshot: ICluster): void {
    const streams = Object.values(snapshot.streams);
    // Running streams first, then newest first.
    const ordered = streams
      .reverse()
      .sort((a, b) => Number(b.state === 'running') - Number(a.state === 'running'));
    const top = topOf(streams.map(stream => stream.history));
    this._rows.update(
      ordered.slice(0, MAX_STREAMS).map(stream => stream.name),
      (row, name) => row.show(snapshot.streams[name], top)
    );
    const rest = streams.length - MAX_STREAMS;
    setText(this._more, rest > 0 ? `… and ${rest} more` : '');
    show(this.node, streams.length > 0);
  }
}

class StreamRow {
  readonly node = h('div', { class: 'tfd-stream' });
  private readonly _name = h('span', { class: 'tfd-cut' });
  private readonly _state = h('span');
  private readonly _rate = h('span');
  private readonly _bytes = h('span', { class: 'tfd-quiet' });
  private readonly _wait = h('span');
  private readonly _spark = new Sparkline();
  private readonly _notes = h('div', { class: 'tfd-quiet tfd-wrap' });
  private readonly _error = h('div', { class: 'tfd-bad tfd-wrap' });

  constructor() {
    this.node.append(
      h(
        'div',
        { class: 'tfd-row' },
        this._name,
        this._state,
        this._spark.node,
        this._rate,
        this._bytes,
        this._wait
      ),
      this._notes,
      this._error
    );
  }

  show(stream: IStream, top: number): void {
    const running = stream.state === 'running';
    setTruncatedText(this._name, stream.name);
    setText(this._state, signed(stream.state));
    this._state.className = `tfd-${tone(stream.state)}`;
    setText(
      this._rate,
      running ? `${count(stream.elements_per_s)} elements/s` : `${count(stream.elements)} elements`
    );
    setText(this._bytes, running && stream.bytes ? rate(stream.bytes_per_s) : '');
    const share = stream.wait_fraction;
    setText(this._wait, share === undefined ? '' : `waits ${percent(100 * share)}`);
    show(this._wait, share !== undefined);
    this._wait.className = running && (share ?? 0) > 0.1 ? 'tfd-warn' : 'tfd-quiet';
    this._spark.show(stream.history, top, 'elements per second in its last minute');
    const notes = [stream.epoch, running ? '' : stream.limit].filter(Boolean);
    setText(this._notes, notes.join(' · '));
    show(this._notes, notes.length > 0);
    setText(this._error, stream.error ? errorSummary(stream.error) : '');
    this._error.title = stream.error ?? '';
    show(this._error, Boolean(stream.error));
  }
}
