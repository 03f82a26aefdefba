// A kernel in the panel: its name, what can be done in it, and its clusters.

import { button, h, Keyed, setCut, setText, show } from '../shared/dom';
import { ResolveView } from '../shared/resolveView';
import { StartForm } from '../shared/startForm';
import { hasEnded } from '../shared/protocol';
import { type IActions, type IView, linkTrouble } from '../shared/view';
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
  /** What the form said when it had got a cluster; it is gone itself then. */
  private readonly _started = h('div', { class: 'tfd-lab-words tfd-asked tfd-good', hidden: true });
  private readonly _list = h('div', { class: 'tfd-lab-clusters' });
  private readonly _parts = new Map<HTMLElement, ClusterPart>();
  private readonly _keyed: Keyed<HTMLElement>;
  private readonly _find: HTMLButtonElement;
  private _form: IView | null = null;
  /** The button that opened the form. */
  private _opened: HTMLButtonElement | null = null;
  private _startedName = '';

  constructor(
    readonly kernel: IKernel,
    private readonly _clusters: IClusters,
    private readonly _folds: IFolds
  ) {
    this._start = button('Start cluster', 'start a cluster in this kernel', () =>
      this._opened === this._start ? this._close() : this.start()
    );
    this._start.setAttribute('aria-expanded', 'false');
    this._find = button('Find', 'find a cluster that somebody else runs, and its tasks', () =>
      this._opened === this._find ? this._close() : this._resolve()
    );
    this._find.setAttribute('aria-expanded', 'false');
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
      this._find,
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
    const usable = loaded && !readOnly && reader.link.state === 'ready';
    show(this._start, usable);
    show(this._find, usable);
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
    if (this._opened !== this._start && !this._start.hidden) {
      this._open(
        this._start,
        new StartForm(this.kernel.reader.link, this._actions, (name, said) => this._got(name, said))
      );
    }
    this.node.scrollIntoView({ block: 'nearest' });
  }

  /** Show what finds a cluster. */
  private _resolve(): void {
    this._open(
      this._find,
      new ResolveView(this.kernel.reader.link, this._actions, (name, said) => this._got(name, said))
    );
  }

  dispose(): void {
    this._close();
    this._keyed.update([], () => undefined);
    this.node.remove();
  }

  private get _actions(): IActions {
    return this._clusters.actions(this.kernel, 'panel');
  }

  private _open(opened: HTMLButtonElement, form: IView): void {
    this._close();
    show(this._started, false);
    this._form = form;
    this._opened = opened;
    this._place.append(form.node);
    opened.setAttribute('aria-expanded', 'true');
    setText(opened, 'Close');
  }

  /** There is a cluster now, which is shown below. */
  private _got(name: string, said: string): void {
    const opened = this._opened;
    this._close();
    this._startedName = name;
    setText(this._started, said);
    show(this._started, true);
    opened?.focus();
    this.node.scrollIntoView({ block: 'nearest' });
  }

  private _close(): void {
    this._form?.dispose();
    this._form = null;
    this._opened?.setAttribute('aria-expanded', 'false');
    this._opened = null;
    setText(this._start, 'Start cluster');
    setText(this._find, 'Find');
  }

  private _make(name: string): HTMLElement {
    const part = new ClusterPart(this.kernel, name, this._actions, this._folds);
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
