// The clusters of all kernels, and the actions that JupyterLab provides for their views.

import type { INotebookTracker } from '@jupyterlab/notebook';
import { type ISignal, Signal } from '@lumino/signaling';

import type { IQuestion } from '../shared/confirm';
import type { IActions } from '../shared/view';
import type { Detached, IDetached } from './detached';
import { insertCode, notebookOf } from './insert';
import type { IKernel, Kernels } from './kernels';
import { LOAD } from './kernelClient';
import { DEFAULTS, type IClusters, type ISettings } from './tokens';

export interface IOptions {
  kernels: Kernels;
  detached: Detached;
  notebooks: INotebookTracker | null;
  confirm(question: IQuestion): Promise<boolean>;
  open(kernel: IKernel, cluster: string): void;
  /** Activate the notebook of this id. */
  show(id: string): void;
  showPanel(): void;
  warn(text: string): void;
}

export class Clusters implements IClusters {
  readonly kernels: Kernels;
  readonly detached: Detached;

  private _settings = DEFAULTS;
  private _settingsChanged = new Signal<this, void>(this);
  private _activeChanged = new Signal<this, void>(this);

  constructor(private readonly _options: IOptions) {
    this.kernels = _options.kernels;
    this.detached = _options.detached;
    _options.notebooks?.currentChanged.connect(() => this._activeChanged.emit());
  }

  get activeKernel(): IKernel | undefined {
    const context = this._options.notebooks?.currentWidget?.sessionContext;
    // A notebook that has just been opened has a path, but no session.
    return context && this.kernels.find(context.session?.kernel?.id ?? '', context.path);
  }

  get activeChanged(): ISignal<this, void> {
    return this._activeChanged;
  }

  get settings(): ISettings {
    return this._settings;
  }

  get settingsChanged(): ISignal<this, void> {
    return this._settingsChanged;
  }

  change(settings: ISettings): void {
    this._settings = settings;
    this._settingsChanged.emit();
  }

  actions(kernel: IKernel, at: 'panel' | 'tab'): IActions {
    const { notebooks, confirm, open } = this._options;
    const actions: IActions = {
      readOnly: this._settings.readOnly,
      source: at === 'panel' ? 'the panel' : 'the dashboard',
      confirm
    };
    if (notebooks && kernel.path.endsWith('.ipynb')) {
      actions.insert = code => {
        const panel = notebookOf(notebooks, kernel.id);
        if (panel) {
          this._options.show(panel.id);
          insertCode(panel, code);
        } else {
          this._options.warn(
            `${kernel.path} is not open. Next: open it and insert the code again.`
          );
        }
      };
    }
    if (at === 'panel') {
      actions.open = cluster => open(kernel, cluster);
    }
    return actions;
  }

  confirm(question: IQuestion): Promise<boolean> {
    return this._options.confirm(question);
  }

  attach(cluster: IDetached): void {
    const panel = this._options.notebooks?.currentWidget;
    const id = panel?.sessionContext.session?.kernel?.id;
    const state = id === undefined ? undefined : this.kernels.find(id)?.client.state;
    if (!panel || state === undefined || state === 'unsupported' || state === 'ended') {
      this._options.warn(
        `The active tab is not a notebook with a Python kernel. Next: open one, then attach to ${cluster.name}.`
      );
      return;
    }
    const lines = ['import tfd_notebook as tfd', '', `cluster = ${this.detached.code(cluster)}`];
    // The panel shows clusters only of kernels that have loaded the extension.
    insertCode(panel, [...(state === 'loaded' ? [] : [LOAD]), ...lines].join('\n'), true);
    this._options.show(panel.id);
  }

  showPanel(): void {
    this._options.showPanel();
  }

  warn(text: string): void {
    this._options.warn(text);
  }

  open(kernel: IKernel, cluster: string): void {
    this._options.open(kernel, cluster);
  }
}
