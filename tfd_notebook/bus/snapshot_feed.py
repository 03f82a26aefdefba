"""Clusters as a tree of JSON values, with merge patches (RFC 7396) for changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from tfd_notebook.model.snapshot import CoordinatorRow, GpuRow, NodeRow, Snapshot, SparkRow, TaskRow
from tfd_notebook.model.spec import TaskState

Tree = dict[str, Any]

#: Maximum number of sent notices of a cluster.
_NOTICES = 50
#: Measurements that fluctuate. While a cluster is idle, only lower values are sent.
_TASK_MEASURES = ("cpu_percent", "rss_mb", "pss_mb", "bytes_sent", "bytes_per_s")
_GPU_MEASURES = ("use_percent", "used_mb")
#: Seconds after the last activity in which measurements are still sent. Rates of tasks are means
#: of the last 5 seconds.
_SETTLE_SECONDS = 6.0
_DIGITS = {"cpu_percent": 0, "rss_mb": 0, "pss_mb": 0, "bytes_per_s": 0, "used_mb": 0}
_FIGURES = 4
#: Fields that only the analysis of the data path uses.
_INTERNAL = ("rates", "working", "late")
#: Upper limit in seconds of an idle node's time since its last batch.
_LONG_SECONDS = 600.0


def encoded(row: Any) -> Tree:
    """Return the fields of a row as JSON values."""
    names = (f.name for f in fields(row) if f.name not in _INTERNAL)
    return _without_empty({name: _plain(getattr(row, name), name) for name in names})


def _without_empty(values: Tree) -> Tree:
    """Return the values except None and empty strings. Zero and False are kept."""
    return {key: value for key, value in values.items() if value is not None and value != ""}


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS.get(name, _FIGURES))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, "") for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item, "") for item in value if not hasattr(item, "__dataclass_fields__")]
    return str(value) if isinstance(value, str) else value


class SnapshotFeed:
    """Encoder of snapshots, which sends only merge patches after the first message.

    The tree has one entry for each cluster under ``clusters``. In it, tasks, streams and workers
    are mappings by name, so that a changed row is a small patch. None and empty strings are
    omitted.
    """

    def __init__(self) -> None:
        self._sent: Tree = {}
        #: By cluster and name: the value, whether it was idle, the encoded value, and the result.
        self._cache: dict[tuple[str, str], tuple[Any, bool, Any, Any]] = {}
        #: The snapshot of each cluster, with its encoded tree.
        self._trees: dict[str, tuple[Snapshot, Tree]] = {}
        #: The time of the last snapshot of each cluster that was busy.
        self._busy: dict[str, float] = {}

    def full(self, snapshots: Iterable[Snapshot]) -> Tree:
        """Return the full tree, and restart the tracking of changes."""
        self._sent = self._tree(snapshots)
        return self._sent

    def patch(self, snapshots: Iterable[Snapshot]) -> Tree:
        """Return the merge patch since the last call. In it, None removes a key."""
        tree = self._tree(snapshots)
        changed = difference(self._sent, tree)
        self._sent = tree
        return changed

    def _tree(self, snapshots: Iterable[Snapshot]) -> Tree:
        before, self._trees = self._trees, {}
        for snapshot in snapshots:
            known, tree = before.get(snapshot.name, (None, {}))
            if known is not snapshot:
                tree = self._cluster(snapshot)
            self._trees[snapshot.name] = snapshot, tree
        if before.keys() - self._trees.keys():
            self._cache = {k: kept for k, kept in self._cache.items() if k[0] in self._trees}
            self._busy = {k: time for k, time in self._busy.items() if k in self._trees}
        return {"clusters": {name: tree for name, (_, tree) in self._trees.items()}}

    def _cluster(self, snapshot: Snapshot) -> Tree:
        if is_busy(snapshot):
            self._busy[snapshot.name] = snapshot.time
        # The absolute value, because the system clock may be set back.
        since = abs(snapshot.time - self._busy.get(snapshot.name, float("-inf")))
        idle = since > _SETTLE_SECONDS
        tree: Tree = {
            "name": snapshot.name,
            "launcher": snapshot.launcher,
            "state": snapshot.state,
            "planned": _counts(snapshot.planned),
            "requested": _counts(snapshot.requested),
            "observed": _counts(snapshot.observed),
            "tasks": {
                row.task: self._encoded(
                    snapshot.name, row.task, row, steady=_steady_task, idle=idle
                )
                for row in snapshot.tasks
            },
            "order": [row.task for row in snapshot.tasks],
            "streams": {
                row.name: self._encoded(snapshot.name, f"stream {row.name}", row)
                for row in snapshot.streams
            },
            "ranks": {
                row.task: self._encoded(snapshot.name, f"rank {row.task}", row)
                for row in snapshot.ranks
            },
            "notices": self._encoded(
                snapshot.name,
                "notices",
                snapshot.notices[-_NOTICES:],
                lambda all_: list(map(encoded, all_)),
            ),
        }
        if snapshot.gpus:
            tree["gpus"] = {
                (name := f"{row.host} {row.index}"): self._encoded(
                    snapshot.name, f"gpu {name}", row, steady=_steady_gpu, idle=idle
                )
                for row in snapshot.gpus
            }
        if snapshot.expires is not None:
            tree["expires"] = snapshot.expires
        if snapshot.lease is not None:
            tree["lease"] = snapshot.lease
        if snapshot.coordinator is not None:
            tree["coordinator"] = _coordinator(snapshot.coordinator)
        if snapshot.adaptation is not None:
            tree["adaptation"] = encoded(snapshot.adaptation)
        if snapshot.spark is not None:
            tree["spark"] = self._spark(snapshot.name, snapshot.spark, idle)
        return tree

    def _spark(self, cluster: str, row: SparkRow, idle: bool) -> Tree:
        tree = encoded(row)
        tree["nodes"] = {
            node.node: self._encoded(
                cluster, f"node {node.node}", node, steady=_steady_node, idle=idle
            )
            for node in row.nodes
        }
        tree["order"] = [node.node for node in row.nodes]
        return tree

    def _encoded(
        self,
        cluster: str,
        name: str,
        value: Any,
        encode: Callable[[Any], Any] = encoded,
        steady: Callable[[Any, Any, bool], Any] = lambda before, value, idle: value,
        idle: bool = False,
    ) -> Any:
        """Return the result of `encode`, cached as long as the value is equal.

        `steady` takes the value that was encoded before and the new one, and returns the one to
        encode.
        """
        known = self._cache.get((cluster, name))
        if known is None:
            result = encode(value)
            self._cache[cluster, name] = value, idle, value, result
            return result
        original, was_idle, before, result = known
        if value is not original or idle is not was_idle:
            new = steady(before, value, idle)
            if new != before:
                before, result = new, encode(new)
            self._cache[cluster, name] = value, idle, before, result
        return result


def _steady_node(before: NodeRow, row: NodeRow, idle: bool) -> NodeRow:
    """Return `row` with a time since the last batch that changes in larger and larger steps."""
    age, known = row.batch_age_s, before.batch_age_s
    if age is None or known is None:
        return row
    if 0 <= age - known < max(1.0, known / 10):
        return replace(row, batch_age_s=known)
    if idle and age > _LONG_SECONDS:
        return replace(row, batch_age_s=max(known, _LONG_SECONDS))
    return row


def _steady_task(before: TaskRow, row: TaskRow, idle: bool) -> TaskRow:
    """Return `row` without increased measurements while its cluster is idle."""
    if not idle:
        return row
    gpu = before.gpu if before.gpu and row.gpu else row.gpu  # a text of several measurements
    return replace(row, gpu=gpu, **_lower(before, row, _TASK_MEASURES))


def _steady_gpu(before: GpuRow, row: GpuRow, idle: bool) -> GpuRow:
    """Return `row` without increased measurements while its cluster is idle."""
    return replace(row, **_lower(before, row, _GPU_MEASURES)) if idle else row


def _lower(before: Any, row: Any, names: Iterable[str]) -> Tree:
    """Return the lower of two values for each name.

    A falling value converges, so it is sent. The changes of a fluctuating one would never end.
    """
    known = {name: (getattr(before, name), getattr(row, name)) for name in names}
    return {name: min(pair) for name, pair in known.items() if None not in pair}


def is_busy(snapshot: Snapshot) -> bool:
    """Return True if a cluster does work.

    Tasks start, a consumer reads, closures or ranks run, or rows are fed.
    """
    coordinator = snapshot.coordinator
    return (
        snapshot.state in ("starting", "stopping")
        or any(row.state in (TaskState.STARTING, TaskState.RESTARTING) for row in snapshot.tasks)
        or any(row.state == "running" and row.elements_per_s > 0 for row in snapshot.streams)
        or any(row.state in ("starting", "running") for row in snapshot.ranks)
        or (coordinator is not None and coordinator.state == "running")
        or (coordinator is not None and coordinator.closures_per_s > 0)
        or (snapshot.spark is not None and snapshot.spark.rows_per_s > 0)
    )


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Tree:
    """Return the merge patch from `old` to `new`."""
    changed: Tree = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if before is value:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            inner = difference(before, value)
            if inner:
                changed[key] = inner
        elif value != before or type(value) is not type(before):
            changed[key] = value
    return changed


def _coordinator(row: CoordinatorRow) -> Tree:
    tree = encoded(row)
    tree["workers"] = {str(worker.index): encoded(worker) for worker in row.workers}
    return tree


def _counts(counts: Mapping[Any, int]) -> Tree:
    return {str(role): count for role, count in counts.items()}
