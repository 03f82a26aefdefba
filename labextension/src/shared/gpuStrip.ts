// The GPUs of a cluster in one strip: by host, in it by the task that sees them. Each has its
// number, its use in figures and as a bar, and its memory as another one.

import { h, Parts, setAttribute, setCut, setText, show } from './dom';
import { percent } from './figures';
import type { IGpu } from './protocol';

/** GPUs that are drawn one by one. */
const MOST = 256;
const FREE = 'free';

export class GpuStrip {
  readonly node = h('div', { class: 'tfd-gpus', role: 'group', 'aria-label': 'GPUs' });
  private readonly _summary = h('div', { class: 'tfd-quiet tfd-wrap' });
  private readonly _list = h('div');
  private readonly _more = h('div', { class: 'tfd-quiet' });
  private readonly _hosts = new Parts(this._list, () => new Host());

  constructor() {
    this.node.append(h('h4', {}, 'GPUs'), this._summary, this._list, this._more);
  }

  show(gpus: readonly IGpu[]): void {
    setText(this._summary, gpus.length ? `${summary(gpus)}; bars: use, memory` : '');
    const drawn = runs(gpus.slice(0, MOST), gpu => gpu.host);
    const hosts = new Map(drawn.map(own => [own[0].host, own]));
    this._hosts.update([...hosts.keys()], (part, host) => part.show(host, hosts.get(host)!));
    setText(this._more, gpus.length > MOST ? `… and ${gpus.length - MOST} more` : '');
    show(this.node, gpus.length > 0);
  }
}

class Host {
  readonly node = h('div', { class: 'tfd-gpuhost' });
  private readonly _name = h('div', { class: 'tfd-cut' });
  private readonly _row = h('div', { class: 'tfd-row' });
  private readonly _groups = new Parts(this._row, () => new Group());

  constructor() {
    this.node.append(this._name, this._row);
  }

  show(host: string, gpus: readonly IGpu[]): void {
    setCut(this._name, host);
    const groups = new Map(
      runs(gpus, gpu => gpu.task ?? '').map(own => [`${own[0].task ?? ''} ${own[0].index}`, own])
    );
    this._groups.update([...groups.keys()], (part, key) => part.show(groups.get(key)!));
  }
}

/** GPUs beside each other that the same task sees, or none. */
class Group {
  readonly node = h('div', { class: 'tfd-gputask' });
  private readonly _task = h('div', { class: 'tfd-cut tfd-quiet' });
  private readonly _row = h('div', { class: 'tfd-gpurow' });
  private readonly _tiles = new Parts(this._row, () => new Tile());

  constructor() {
    this.node.append(this._task, this._row);
  }

  show(gpus: readonly IGpu[]): void {
    const { task } = gpus[0];
    setCut(this._task, task ?? FREE);
    this.node.classList.toggle('tfd-free', !task);
    const known = new Map(gpus.map(gpu => [String(gpu.index), gpu]));
    this._tiles.update([...known.keys()], (part, key) => part.show(known.get(key)!));
  }
}

class Tile {
  readonly node = h('div', { class: 'tfd-gpu', role: 'img' });
  private readonly _index = h('span', { class: 'tfd-quiet' });
  private readonly _use = h('span');
  private readonly _bars = [h('i'), h('i', { class: 'tfd-memory' })];

  constructor() {
    this.node.append(this._index, this._use, ...this._bars);
  }

  show(gpu: IGpu): void {
    setText(this._index, String(gpu.index));
    setText(this._use, percent(gpu.use_percent) || '–');
    [gpu.use_percent, filled(gpu)].forEach((share, i) => {
      this._bars[i].style.width = `${Math.min(100, share ?? 0).toFixed(0)}%`;
    });
    const words = wordsOf(gpu);
    setAttribute(this.node, 'aria-label', words);
    setAttribute(this.node, 'title', words);
  }
}

/** A GPU in words, as those read it who do not see the strip. */
function wordsOf(gpu: IGpu): string {
  const use = gpu.use_percent === undefined ? 'use unknown' : `${percent(gpu.use_percent)} busy`;
  const memory = memoryOf([gpu]);
  const name = gpu.name ? ` (${gpu.name})` : '';
  return (
    `GPU ${gpu.index} of ${gpu.host}${name}, seen by ${gpu.task ?? 'no task'}: ${use}` +
    (memory ? `, ${memory} used` : '')
  );
}

/** How many there are, how many of them no task sees, and what they do together. */
function summary(gpus: readonly IGpu[]): string {
  const hosts = new Set(gpus.map(gpu => gpu.host)).size;
  const free = gpus.filter(gpu => !gpu.task).length;
  const known = gpus.flatMap(gpu => gpu.use_percent ?? []);
  const memory = memoryOf(gpus);
  return [
    hosts > 1 ? `${gpus.length} on ${hosts} hosts` : String(gpus.length),
    free ? `${free} free` : '',
    known.length ? `${percent(known.reduce((sum, one) => sum + one, 0) / known.length)} busy` : '',
    memory ? `${memory} used` : ''
  ]
    .filter(Boolean)
    .join(', ');
}

/** Used and whole memory of those of which both are known. */
function memoryOf(gpus: readonly IGpu[]): string {
  const known = gpus.filter(gpu => filled(gpu) !== undefined);
  const sum = (name: 'used_mb' | 'memory_mb') =>
    known.reduce((total, gpu) => total + (gpu[name] ?? 0), 0) / 1e3;
  return known.length ? `${sum('used_mb').toFixed(1)} of ${sum('memory_mb').toFixed(0)} GB` : '';
}

/** How much of its memory is used, in percent. */
function filled(gpu: IGpu): number | undefined {
  return gpu.used_mb === undefined || !gpu.memory_mb
    ? undefined
    : (100 * gpu.used_mb) / gpu.memory_mb;
}

/** Parts of a list of which `key` says the same, in order. */
function runs(gpus: readonly IGpu[], key: (gpu: IGpu) => string): IGpu[][] {
  const parts: IGpu[][] = [];
  for (const gpu of gpus) {
    const last = parts.at(-1);
    if (last && key(last[0]) === key(gpu)) {
      last.push(gpu);
    } else {
      parts.push([gpu]);
    }
  }
  return parts;
}
