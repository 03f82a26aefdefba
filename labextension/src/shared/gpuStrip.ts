// The GPUs of a cluster, grouped by host and by the task that uses them. Each tile shows index,
// utilization and memory.

import { h, KeyedParts, setAttribute, setTruncatedText, setText, show } from './dom';
import { percent } from './figures';
import type { IGpu } from './protocol';

/** Maximum number of tiles. */
const MAX_TILES = 256;
const UNASSIGNED = 'not assigned';
/** Percentages that change the color of a bar: of the use, and of the memory. */
const [IDLE, BUSY, FULL] = [10, 50, 90];
const SCALE = `use: gray below ${IDLE} %, green from ${BUSY} %; memory: orange from ${FULL} %`;

export class GpuStrip {
  readonly node = h('div', { class: 'tfd-gpus', role: 'group', 'aria-label': 'GPUs' });
  private readonly _summary = h('div', { class: 'tfd-quiet tfd-wrap' });
  private readonly _list = h('div');
  private readonly _more = h('div', { class: 'tfd-quiet' });
  private readonly _hosts = new KeyedParts(this._list, () => new Host());

  constructor() {
    this._summary.title = SCALE;
    this.node.append(h('h4', {}, 'GPUs'), this._summary, this._list, this._more);
  }

  show(gpus: readonly IGpu[]): void {
    setText(this._summary, gpus.length ? `${summary(gpus)}; bars: use, memory` : '');
    const hosts = new Map<string, IGpu[]>();
    for (const gpu of gpus.slice(0, MAX_TILES)) {
      hosts.set(gpu.host, [...(hosts.get(gpu.host) ?? []), gpu]);
    }
    this._hosts.update([...hosts.keys()], (part, host) => part.show(host, hosts.get(host)!));
    setText(this._more, gpus.length > MAX_TILES ? `… and ${gpus.length - MAX_TILES} more` : '');
    show(this.node, gpus.length > 0);
  }
}

class Host {
  readonly node = h('div', { class: 'tfd-gpuhost' });
  private readonly _name = h('div', { class: 'tfd-cut' });
  private readonly _row = h('div', { class: 'tfd-row' });
  private readonly _groups = new KeyedParts(this._row, () => new Group());

  constructor() {
    this.node.append(this._name, this._row);
  }

  show(host: string, gpus: readonly IGpu[]): void {
    setTruncatedText(this._name, host);
    const groups = new Map(
      runsOf(gpus).map(group => [`${group[0].task ?? ''} ${group[0].index}`, group])
    );
    this._groups.update([...groups.keys()], (part, key) => part.show(groups.get(key)!));
  }
}

/** Adjacent GPUs of the same task, or of no task. */
class Group {
  readonly node = h('div', { class: 'tfd-gputask' });
  private readonly _task = h('div', { class: 'tfd-cut tfd-quiet' });
  private readonly _row = h('div', { class: 'tfd-gpurow' });
  private readonly _tiles = new KeyedParts(this._row, () => new Tile());

  constructor() {
    this.node.append(this._task, this._row);
  }

  show(gpus: readonly IGpu[]): void {
    const { task } = gpus[0];
    setTruncatedText(this._task, task ?? UNASSIGNED);
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
    const [use, memory] = [gpu.use_percent ?? 0, filled(gpu) ?? 0];
    [use, memory].forEach((share, i) => {
      this._bars[i].style.width = `${Math.min(100, share).toFixed(0)}%`;
    });
    this._bars[0].classList.toggle('tfd-idle', use < IDLE);
    this._bars[0].classList.toggle('tfd-busy', use >= BUSY);
    this._bars[1].classList.toggle('tfd-full', memory >= FULL);
    const label = labelOf(gpu);
    setAttribute(this.node, 'aria-label', label);
    setAttribute(this.node, 'title', label);
  }
}

/** Return the accessible label of a GPU. */
function labelOf(gpu: IGpu): string {
  const use =
    gpu.use_percent === undefined ? 'utilization unknown' : `${percent(gpu.use_percent)} busy`;
  const memory = memoryOf([gpu]);
  const name = gpu.name ? ` (${gpu.name})` : '';
  return (
    `GPU ${gpu.index} of ${gpu.host}${name}, seen by ${gpu.task ?? 'no task'}: ${use}` +
    (memory ? `, ${memory} used` : '')
  );
}

/** Return number, unassigned GPUs, mean utilization and memory. */
function summary(gpus: readonly IGpu[]): string {
  const hosts = new Set(gpus.map(gpu => gpu.host)).size;
  const unassigned = gpus.filter(gpu => !gpu.task).length;
  const known = gpus.flatMap(gpu => gpu.use_percent ?? []);
  const memory = memoryOf(gpus);
  return [
    hosts > 1 ? `${gpus.length} on ${hosts} hosts` : String(gpus.length),
    unassigned ? `${unassigned} ${UNASSIGNED}` : '',
    known.length
      ? `${percent(known.reduce((sum, share) => sum + share, 0) / known.length)} busy`
      : '',
    memory ? `${memory} used` : ''
  ]
    .filter(Boolean)
    .join(', ');
}

/** Return used and total memory of the GPUs that report both. */
function memoryOf(gpus: readonly IGpu[]): string {
  const known = gpus.filter(gpu => filled(gpu) !== undefined);
  const sum = (name: 'used_mb' | 'memory_mb') =>
    known.reduce((total, gpu) => total + (gpu[name] ?? 0), 0) / 1e3;
  return known.length ? `${sum('used_mb').toFixed(1)} of ${sum('memory_mb').toFixed(0)} GB` : '';
}

/** Return the used memory in percent. */
function filled(gpu: IGpu): number | undefined {
  return gpu.used_mb === undefined || !gpu.memory_mb
    ? undefined
    : (100 * gpu.used_mb) / gpu.memory_mb;
}

/** Split GPUs into runs of the same task. */
function runsOf(gpus: readonly IGpu[]): IGpu[][] {
  const parts: IGpu[][] = [];
  for (const gpu of gpus) {
    const last = parts.at(-1);
    if (last && (last[0].task ?? '') === (gpu.task ?? '')) {
      last.push(gpu);
    } else {
      parts.push([gpu]);
    }
  }
  return parts;
}
