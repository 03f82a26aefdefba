// Types and tokens shared by the plugins.

import { Token } from '@lumino/coreutils';
import type { ISignal } from '@lumino/signaling';

import type { IQuestion } from '../shared/confirm';
import type { IActions } from '../shared/view';
import type { Detached, IDetached } from './detached';
import type { IKernel, Kernels } from './kernels';

export interface ISettings {
  /** Hide all controls that change a cluster. */
  readOnly: boolean;
  side: 'left' | 'right';
  /** Whether the panel keeps stopped clusters. */
  showEnded: boolean;
}

export const DEFAULTS: ISettings = { readOnly: false, side: 'left', showEnded: true };

export interface IClusters {
  readonly kernels: Kernels;
  readonly detached: Detached;
  readonly settings: ISettings;
  readonly settingsChanged: ISignal<unknown, void>;
  /** The kernel of the active notebook. */
  readonly activeKernel: IKernel | undefined;
  /** Emitted when another notebook becomes active. */
  readonly activeChanged: ISignal<unknown, void>;
  /** Return the actions of a view of a cluster in this kernel; `at` is the place of the view. */
  actions(kernel: IKernel, at: 'panel' | 'tab'): IActions;
  confirm(question: IQuestion): Promise<boolean>;
  /** Attach the active notebook to a detached cluster. */
  attach(cluster: IDetached): void;
  showPanel(): void;
  warn(text: string): void;
  /** Open the dashboard of a cluster. */
  open(kernel: IKernel, cluster: string): void;
}

export const IClusters = new Token<IClusters>(
  'tfd-notebook-lab:IClusters',
  'The clusters of all kernels that have loaded tfd-notebook.'
);
