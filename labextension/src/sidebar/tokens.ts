// What the plugins of this package share.

import { Token } from '@lumino/coreutils';
import type { ISignal } from '@lumino/signaling';

import type { IActions } from '../shared/view';
import type { Detached, IDetached } from './detached';
import type { IKernel, Kernels } from './kernels';

export interface ISettings {
  /** Show, and change nothing. */
  readOnly: boolean;
  side: 'left' | 'right';
  /** Whether clusters that ended stay in the panel. */
  showEnded: boolean;
}

export const DEFAULTS: ISettings = { readOnly: false, side: 'left', showEnded: true };

export interface IClusters {
  readonly kernels: Kernels;
  readonly detached: Detached;
  readonly settings: ISettings;
  readonly settingsChanged: ISignal<unknown, void>;
  /** What a view of a cluster in this kernel offers; `at` is where it is shown. */
  actions(kernel: IKernel, at: 'panel' | 'tab'): IActions;
  confirm(question: string): Promise<boolean>;
  /** Have the notebook in front take up a detached cluster. */
  takeUp(cluster: IDetached): void;
  showPanel(): void;
  warn(words: string): void;
  /** Open the dashboard of a cluster. */
  open(kernel: IKernel, cluster: string): void;
}

export const IClusters = new Token<IClusters>(
  'tfd-notebook-lab:IClusters',
  'The clusters of all kernels, as tfd-notebook tells of them.'
);
