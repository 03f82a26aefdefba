// The clusters of all kernels, and what their views may do in this JupyterLab.

import type { INotebookTracker } from '@jupyterlab/notebook';
import { type ISignal, Signal } from '@lumino/signaling';

import type { IActions } from '../shared/view';
import { insertCode, notebookOf } from './insert';
import type { IKernel, Kernels } from './kernels';
import { DEFAULTS, type IClusters, type ISettings } from './tokens';

export interface IOptions {
  kernels: Kernels;
  notebooks: INotebookTracker | null;
  confirm(question: string): Promise<boolean>;
  open(kernel: IKernel, cluster: string): void;
  warn(words: string): void;
}

export class Clusters implements IClusters {
  readonly kernels: Kernels;

  private _settings = DEFAULTS;
  private _settingsChanged = new Signal<this, void>(this);

  constructor(private readonly _options: IOptions) {
    this.kernels = _options.kernels;
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
      who: 'the panel',
      confirm
    };
    if (notebooks && kernel.path.endsWith('.ipynb')) {
      actions.insert = code => {
        const panel = notebookOf(notebooks, kernel.id);
        if (panel) {
          insertCode(panel, code);
        } else {
          this._options.warn(`${kernel.path} is not open. Next: open it, then insert the code.`);
        }
      };
    }
    if (at === 'panel') {
      actions.open = cluster => open(kernel, cluster);
    }
    return actions;
  }

  open(kernel: IKernel, cluster: string): void {
    this._options.open(kernel, cluster);
  }
}
