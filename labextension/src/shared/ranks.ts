// The processes of the latest `cluster.run`, in their order, and their texts.

import { plural } from './figures';
import type { ICluster, IRank } from './protocol';

/** Return the ranks of the latest `cluster.run` in their order. */
export function ranksOf(snapshot: ICluster | undefined): IRank[] {
  return Object.values(snapshot?.ranks ?? {}).sort((a, b) => a.rank - b.rank);
}

/** Return the function and the number of ranks, of which there is at least one. */
export function titleOf(ranks: readonly IRank[]): string {
  return `${ranks[0].function || 'function'} on ${plural(ranks.length, 'rank')}`;
}

/** Return the worker of a rank with its host. */
export function placeOf({ task, host }: IRank): string {
  return host ? `${task} on ${host}` : task;
}

/** Return true if the timeline has lanes for a cluster. */
export function hasTimeline({ coordinator, ranks }: ICluster): boolean {
  return coordinator !== undefined || Object.keys(ranks ?? {}).length > 0;
}
