// A kernel in the panel: name, buttons and clusters.

import { button, h, KeyedList, setTruncatedText, setText, show } from '../shared/dom';
import { ResolveView } from '../shared/resolveView';
import { StartForm } from '../shared/startForm';
import { hasEnded } from '../shared/protocol';
import { type IActions, type IView, linkProblem } from '../shared/view';
import { ClusterPart, type IFoldState } from './clusterPart';
import { clustersOf, type IKernel } from './kernels';
import { LOAD } from './kernelClient';
import type { IClusters } from './tokens';

/** Time for which the message of a started cluster is shown. */
const MESSAGE_MS = 30_000;

export class KernelPart {
  readonly node: HTMLElement;

  private readonly _name = h('span', { class: 'tfd-lab-name tfd-cut' });
  private readonly _spec = h('span', { class: 'tfd-lab-spec tfd-quiet tfd-cut' });
  private readonly _text = h('div', { class: 'tfd-lab-words tfd-wrap' });
  private readonly _start: HTMLButtonElement;
  private readonly _load: HTMLButtonElement;
  private readonly _container = h('div', { class: 'tfd-lab-form' });
  /** The success message of a form that is closed. */
  private readonly _started = h('div', {
    class: 'tfd-lab-words tfd-status-line tfd-good',
    hidden: true
  });
  private readonly _list = h('div', { class: 'tfd-lab-clusters' });
  private readonly _parts = new Map<HTMLElement, ClusterPart>();
  private readonly _keyed: KeyedList<HTMLElement>;
  private readonly _find: HTMLButtonElement;
  private _form: IView | null = null;
  /** The button that opened the form. */
  private _activeButton: HTMLButtonElement | null = null;
  private _startedName = '';
  /** Ended clusters that the user has removed from this page. */
  private readonly _dismissed = new Set<string>();
  private _timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    readonly kernel: IKernel,
    private readonly _clusters: IClusters,
    private readonly _folds: IFoldState,
    /** Called when the form or the list of clusters changes. */
    private readonly _onChange: () => void
  ) {
    this._start = button('Start cluster', 'Start a cluster in this kernel', () =>
      this._activeButton === this._start ? this._close() : this.start()
    );
    this._start.setAttribute('aria-expanded', 'false');
    this._find = button('Find', 'Find an external cluster and show its tasks', () =>
      this._activeButton === this._find ? this._close() : this._resolve()
    );
    this._find.setAttribute('aria-expanded', 'false');
    this._load = button('Load', `Run ${LOAD} in this kernel`, () => void kernel.client.load());
    this._keyed = new KeyedList(
      this._list,
      name => this._createPart(name),
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
      { class: 'tfd-lab-kernel', tabindex: -1 },
      head,
      this._text,
      this._container,
      this._started,
      this._list
    );
  }

  update(isExpandedByDefault: boolean): void {
    const { client, name, path, spec } = this.kernel;
    const { readOnly, showEnded } = this._clusters.settings;
    setTruncatedText(this._name, name, path);
    setTruncatedText(this._spec, spec);
    this.node.setAttribute('aria-label', `kernel of ${name}`);
    const loaded = client.state === 'loaded';
    const usable = loaded && !readOnly && client.link.usable;
    show(this._start, usable);
    show(this._find, usable);
    show(this._load, client.state === 'unloaded' && !readOnly);
    this._load.disabled = client.loading;
    const text = this._problem();
    setText(this._text, text);
    show(this._text, text !== '');
    this._text.classList.toggle('tfd-bad', client.problem !== '');
    const clusters = clustersOf(this.kernel);
    const running = clusters.filter(cluster => !hasEnded(cluster));
    running.forEach(cluster => this._dismissed.delete(cluster.name));
    const shown = clusters.filter(
      cluster => running.includes(cluster) || (showEnded && !this._dismissed.has(cluster.name))
    );
    this._keyed.update(
      shown.map(cluster => cluster.name),
      (node, key) => this._parts.get(node)!.update(client.link.cluster(key)!, isExpandedByDefault)
    );
    const started = client.link.cluster(this._startedName);
    if (!loaded || (started && hasEnded(started))) {
      show(this._started, false);
    }
    if (!loaded) {
      this._close();
    }
  }

  /** Show the form for a new cluster. */
  start(): void {
    if (this._activeButton !== this._start && !this._start.hidden) {
      this._start.focus(); // so that the form takes the focus
      this._open(
        this._start,
        new StartForm(
          this.kernel.client.link,
          this._actions,
          (name, message) => this._onCluster(name, message),
          () => {
            this._close();
            this._start.focus();
          }
        )
      );
    }
    this.node.scrollIntoView({ block: 'nearest' });
  }

  /** Number of the shown clusters. */
  get clusterCount(): number {
    return this._parts.size;
  }

  /** Whether the form for a new cluster is open. */
  get isStarting(): boolean {
    return this._form !== null && this._activeButton === this._start;
  }

  /** Show the form that resolves a cluster. */
  private _resolve(): void {
    this._open(
      this._find,
      new ResolveView(this.kernel.client.link, this._actions, (name, message) =>
        this._onCluster(name, message)
      )
    );
  }

  dispose(): void {
    this._close();
    clearTimeout(this._timer);
    this._keyed.update([], () => undefined);
    this.node.remove();
  }

  private get _actions(): IActions {
    return this._clusters.actions(this.kernel, 'panel');
  }

  private _open(button: HTMLButtonElement, form: IView): void {
    this._close();
    show(this._started, false);
    this._form = form;
    this._activeButton = button;
    this._container.append(form.node);
    button.setAttribute('aria-expanded', 'true');
    setText(button, 'Close');
    this._onChange();
  }

  /** Close the form and show its message above the new cluster. */
  private _onCluster(name: string, message: string): void {
    const button = this._activeButton;
    const { activeElement } = document;
    // Not if the user has moved the focus, such as to a cell.
    const focused = this.node.contains(activeElement) || activeElement === document.body;
    this._close();
    this._startedName = name;
    setText(this._started, message);
    show(this._started, true);
    clearTimeout(this._timer);
    this._timer = setTimeout(() => show(this._started, false), MESSAGE_MS);
    if (focused) {
      button?.focus();
      this.node.scrollIntoView({ block: 'nearest' });
    }
  }

  private _close(): void {
    if (this._form) {
      this._form.dispose();
      this._form = null;
      this._onChange();
    }
    this._activeButton?.setAttribute('aria-expanded', 'false');
    this._activeButton = null;
    setText(this._start, 'Start cluster');
    setText(this._find, 'Find');
  }

  private _createPart(name: string): HTMLElement {
    const part = new ClusterPart(this.kernel, name, this._actions, this._folds, () => {
      this._dismissed.add(name);
      (this._start.hidden ? this.node : this._start).focus();
      this._onChange();
    });
    this._parts.set(part.node, part);
    return part.node;
  }

  private _problem(): string {
    const { client } = this.kernel;
    if (client.loading) {
      return client.busy ? 'Loading is queued until the running cell ends.' : 'Loading …';
    }
    if (client.problem) {
      return client.problem;
    }
    switch (client.state) {
      case 'connecting':
        return 'Connecting to the kernel …';
      case 'ended':
        return 'The kernel has ended. Next: restart it.';
      case 'loaded':
        return linkProblem(client.link);
      default:
        return '';
    }
  }
}
