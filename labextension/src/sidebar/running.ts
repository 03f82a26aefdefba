// Clusters in JupyterLab's own list of what runs.

import type { IRunningSessions } from '@jupyterlab/running';
import type { TranslationBundle } from '@jupyterlab/translation';
import { type ISignal, Signal } from '@lumino/signaling';

import { confirmStop, stop } from './commands';
import type { IDetached } from './detached';
import { clusterIcon } from './icon';
import type { IFound } from './kernels';
import type { IClusters } from './tokens';

export class RunningClusters implements IRunningSessions.IManager {
  readonly name: string;
  readonly shutdownLabel: string;
  readonly shutdownAllLabel: string;

  private _shown = '';
  private _runningChanged = new Signal<this, void>(this);

  constructor(
    private readonly _clusters: IClusters,
    private readonly _trans: TranslationBundle
  ) {
    this.name = _trans.__('TFD clusters');
    this.shutdownLabel = _trans.__('Stop');
    this.shutdownAllLabel = _trans.__('Stop All');
    const look = () => this._look();
    _clusters.kernels.changed.connect(look);
    _clusters.kernels.updated.connect(look);
    _clusters.settingsChanged.connect(look);
    _clusters.detached.changed.connect(look);
  }

  get runningChanged(): ISignal<this, void> {
    return this._runningChanged;
  }

  get shutdownAllConfirmationText(): string {
    return this._clusters.settings.readOnly
      ? this._trans.__('This site shows clusters, and changes nothing: none will be stopped.')
      : this._trans.__('Stop all clusters and their tasks?');
  }

  running(): IRunningSessions.IRunningItem[] {
    return [
      ...this._clusters.kernels.living().map(found => this._item(found)),
      ...this._clusters.detached.clusters.map(cluster => this._detached(cluster))
    ];
  }

  refreshRunning(): void {
    this._clusters.detached.lookOnce();
    this._runningChanged.emit();
  }

  shutdownAll(): void {
    if (!this._clusters.settings.readOnly) {
      for (const found of this._clusters.kernels.living()) {
        void stop(found, this._trans);
      }
      for (const cluster of this._clusters.detached.clusters) {
        void this._stopDetached(cluster);
      }
    }
  }

  private _item(found: IFound): IRunningSessions.IRunningItem {
    const { kernel, cluster } = found;
    const item: IRunningSessions.IRunningItem = {
      open: () => this._clusters.open(kernel, cluster.name),
      icon: () => clusterIcon,
      label: () => cluster.name,
      labelTitle: () => `${kernel.path}: ${cluster.name}, ${cluster.state}`,
      detail: () => kernel.name
    };
    if (!this._clusters.settings.readOnly) {
      item.shutdown = () => void this._stop(found);
    }
    return item;
  }

  private _detached(cluster: IDetached): IRunningSessions.IRunningItem {
    const label = this._clusters.detached.label(cluster);
    const item: IRunningSessions.IRunningItem = {
      open: () => this._clusters.showPanel(),
      icon: () => clusterIcon,
      label: () => label,
      labelTitle: () => `${label}, ${cluster.state}, ${this._trans.__('held by no kernel')}`,
      detail: () => this._trans.__('detached')
    };
    if (!this._clusters.settings.readOnly) {
      item.shutdown = () => void this._confirmDetached(cluster, label);
    }
    return item;
  }

  private async _confirmDetached(cluster: IDetached, label: string): Promise<void> {
    const question = this._trans.__('Stop the detached cluster %1 and all its tasks?', label);
    if (await this._clusters.confirm(question)) {
      await this._stopDetached(cluster);
    }
  }

  private async _stopDetached(cluster: IDetached): Promise<void> {
    try {
      await this._clusters.detached.stop(cluster);
    } catch (error) {
      this._clusters.warn(error instanceof Error ? error.message : String(error));
    }
  }

  private async _stop(found: IFound): Promise<void> {
    if (await confirmStop([found], this._trans)) {
      await stop(found, this._trans);
    }
  }

  /** Figures change all the time; what is listed does not. */
  private _look(): void {
    const now = JSON.stringify([
      this._clusters.settings.readOnly,
      ...this._clusters.kernels
        .living()
        .map(({ kernel, cluster }) => [kernel.id, kernel.name, cluster.name, cluster.state]),
      ...this._clusters.detached.clusters.map(({ name, agent, state }) => [name, agent, state])
    ]);
    if (now !== this._shown) {
      this._shown = now;
      this._runningChanged.emit();
    }
  }
}
