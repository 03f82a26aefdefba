// Clusters in JupyterLab's list of running sessions.

import type { IRunningSessions } from '@jupyterlab/running';
import type { TranslationBundle } from '@jupyterlab/translation';
import { type ISignal, Signal } from '@lumino/signaling';

import { stopQuestion } from '../shared/confirm';
import { clusterName, stop } from './commands';
import type { IDetached } from './detached';
import { clusterIcon } from './icon';
import type { IRunningCluster } from './kernels';
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
    const check = () => this._check();
    _clusters.kernels.changed.connect(check);
    _clusters.kernels.updated.connect(check);
    _clusters.settingsChanged.connect(check);
    _clusters.detached.changed.connect(check);
  }

  get runningChanged(): ISignal<this, void> {
    return this._runningChanged;
  }

  get shutdownAllConfirmationText(): string {
    return this._clusters.settings.readOnly
      ? this._trans.__('This site is read-only: no cluster will be stopped.')
      : this._trans.__('Stop all clusters and their tasks?');
  }

  running(): IRunningSessions.IRunningItem[] {
    return [
      ...this._clusters.kernels.runningClusters().map(running => this._item(running)),
      ...this._clusters.detached.clusters.map(cluster => this._detached(cluster))
    ];
  }

  refreshRunning(): void {
    this._clusters.detached.refreshOnce();
    this._runningChanged.emit();
  }

  shutdownAll(): void {
    if (!this._clusters.settings.readOnly) {
      for (const running of this._clusters.kernels.runningClusters()) {
        void stop(running, this._trans);
      }
      for (const cluster of this._clusters.detached.clusters) {
        void this._stopDetached(cluster);
      }
    }
  }

  private _item(running: IRunningCluster): IRunningSessions.IRunningItem {
    const { kernel, cluster } = running;
    const item: IRunningSessions.IRunningItem = {
      open: () => this._clusters.open(kernel, cluster.name),
      icon: () => clusterIcon,
      label: () => cluster.name,
      labelTitle: () => `${kernel.path}: ${cluster.name}, ${cluster.state}`,
      detail: () => kernel.name
    };
    if (!this._clusters.settings.readOnly) {
      item.shutdown = () => void this._stop(running);
    }
    return item;
  }

  private _detached(cluster: IDetached): IRunningSessions.IRunningItem {
    const label = this._clusters.detached.label(cluster);
    const item: IRunningSessions.IRunningItem = {
      open: () => this._clusters.showPanel(),
      icon: () => clusterIcon,
      label: () => label,
      labelTitle: () => `${label}, ${cluster.state}, ${this._trans.__('not attached to a kernel')}`,
      detail: () => this._trans.__('detached')
    };
    if (!this._clusters.settings.readOnly) {
      item.shutdown = () => void this._confirmDetached(cluster, label);
    }
    return item;
  }

  private async _confirmDetached(cluster: IDetached, label: string): Promise<void> {
    if (await this._clusters.confirm(stopQuestion(label))) {
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

  private async _stop(running: IRunningCluster): Promise<void> {
    if (await this._clusters.confirm(stopQuestion(clusterName(running)))) {
      await stop(running, this._trans);
    }
  }

  /** Emit runningChanged only if the list changed, not for every new figure. */
  private _check(): void {
    const now = JSON.stringify([
      this._clusters.settings.readOnly,
      ...this._clusters.kernels
        .runningClusters()
        .map(({ kernel, cluster }) => [kernel.id, kernel.name, cluster.name, cluster.state]),
      ...this._clusters.detached.clusters.map(({ name, agent, state }) => [name, agent, state])
    ]);
    if (now !== this._shown) {
      this._shown = now;
      this._runningChanged.emit();
    }
  }
}
