// A kernel in the panel: its name, what can be done in it, and its clusters.

import { button, h, Keyed, setCut, setText, show } from '../shared/dom';
import { StartForm } from '../shared/startForm';
import { hasEnded } from '../shared/protocol';
import { linkTrouble } from '../shared/view';
import { ClusterPart, type IFolds } from './clusterPart';
import { clustersOf, type IKernel } from './kernels';
import { LOAD } from './reader';
import type { IClusters } from './tokens';

export class KernelPart {
  readonly node: HTMLElement;

  private readonly _name = h('span', { class: 'tfd-lab-name tfd-cut' });
  private readonly _spec = h('span', { class: 'tfd-lab-spec tfd-quiet tfd-cut' });
  private readonly _words = h('div', { class: 'tfd-lab-words tfd-wrap' });
  private readonly _start: HTMLButtonElement;
  private readonly _load: HTMLButtonElement;
  private readonly _place = h('div', { class: 'tfd-lab-form' });
  /** What the form said when it had started a cluster; it is gone itself then. */
  private readonly _started = h('div', { class: 'tfd-lab-words tfd-asked tfd-good', hidden: true });
  private readonly _list = h('div', { class: 'tfd-lab-clusters' });
  private readonly _parts = new Map<HTMLElement, ClusterPart>();
  private readonly _keyed: Keyed<HTMLElement>;
  private _form: StartForm | null = null;
  private _startedName = '';

  constructor(
    readonly kernel: IKernel,
    private readonly _clusters: IClusters,
    private readonly _folds: IFolds
  ) {
    this._start = button('Start cluster', 'start a cluster in this kernel', () =>
      this._form ? this._close() : this.start()
    );
    this._start.setAttribute('aria-expanded', 'false');
    this._load = button('Load', `run ${LOAD} in this kernel`, () => void kernel.reader.load());
    this._keyed = new Keyed(
      this._list,
      name => this._make(name),
      node => {
        this._parts.get(node)?.dispose();
        this._parts.delete(node);
      }
    );
    const head = h(
      'div',
      { class: 'tfd-lab-head' },
      h('div', { class: 'tfd-lab-title' }, this._name, this._spec),
      this._load,
      this._start
    );
    this.node = h(
      'section',
      { class: 'tfd-lab-kernel' },
      head,
      this._words,
      this._place,
      this._started,
      this._list
    );
    this.update();
  }

  update(): void {
    const { reader, name, path, spec } = this.kernel;
    const { readOnly, showEnded } = this._clusters.settings;
    setCut(this._name, name, path);
    setCut(this._spec, spec);
    this.node.setAttribute('aria-label', `kernel of ${name}`);
    const loaded = reader.state === 'loaded';
    show(this._start, loaded && !readOnly && reader.link.state === 'ready');
    show(this._load, reader.state === 'unloaded' && !readOnly);
    this._load.disabled = reader.loading;
    const words = this._trouble();
    setText(this._words, words);
    show(this._words, words !== '');
    this._words.classList.toggle('tfd-bad', reader.problem !== '');
    const shown = clustersOf(this.kernel).filter(cluster => showEnded || !hasEnded(cluster));
    this._keyed.update(
      shown.map(cluster => cluster.name),
      (node, key) => this._parts.get(node)!.update(reader.link.cluster(key)!)
    );
    const started = reader.link.cluster(this._startedName);
    if (!loaded || (started && hasEnded(started))) {
      show(this._started, false);
    }
    if (!loaded) {
      this._close();
    }
  }

  /** Show the form for a new cluster. */
  start(): void {
    if (!this._form && !this._start.hidden) {
      const { reader } = this.kernel;
      show(this._started, false);
      this._form = new StartForm(
        reader.link,
        this._clusters.actions(this.kernel, 'panel'),
        (name, said) => {
          this._close();
          this._startedName = name;
          setText(this._started, said);
          show(this._started, true);
          this._start.focus();
          this.node.scrollIntoView({ block: 'nearest' });
        }
      );
      this._place.append(this._form.node);
      this._start.setAttribute('aria-expanded', 'true');
      this._start.textContent = 'Close';
    }
    this.node.scrollIntoView({ block: 'nearest' });
  }

  dispose(): void {
    this._close();
    this._keyed.update([], () => undefined);
    this.node.remove();
  }

  private _close(): void {
    if (this._form) {
      this._form.dispose();
      this._form = null;
      this._start.setAttribute('aria-expanded', 'false');
      this._start.textContent = 'Start cluster';
    }
  }

  private _make(name: string): HTMLElement {
    const actions = this._clusters.actions(this.kernel, 'panel');
    const part = new ClusterPart(this.kernel, name, actions, this._folds);
    this._parts.set(part.node, part);
    return part.node;
  }

  private _trouble(): string {
    const { reader } = this.kernel;
    if (reader.loading) {
      return reader.busy ? 'Loading is queued until the running cell ends.' : 'Loading …';
    }
    if (reader.problem) {
      return reader.problem;
    }
    switch (reader.state) {
      case 'connecting':
        return 'Asking the kernel …';
      case 'ended':
        return 'The kernel has ended. Next: restart it.';
      case 'loaded':
        return linkTrouble(reader.link);
      default:
        return '';
    }
  }
}
