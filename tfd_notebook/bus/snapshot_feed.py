"""Clusters as a tree of JSON values, and what changed in it: a merge patch (RFC 7396)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from tfd_notebook.model.snapshot import CoordinatorRow, GpuRow, NodeRow, Snapshot, SparkRow, TaskRow

Tree = dict[str, Any]

#: Notices of a cluster that travel.
_NOTICES = 50
#: What varies by itself; of a cluster in which nothing is done it is not worth a message.
_MEASURES = ("cpu_percent", "rss_mb", "pss_mb", "bytes_sent", "bytes_per_s", "gpu")
_DIGITS = {"cpu_percent": 0, "rss_mb": 0, "pss_mb": 0, "bytes_per_s": 0, "used_mb": 0}
_FIGURES = 4
#: Fields that only the diagnosis of a data path reads.
_INTERNAL = ("rates", "working")
#: Seconds after which a node that is fed nothing has been so for long, however much longer.
_LONG_SECONDS = 600.0


def encoded(row: Any) -> Tree:
    """Return the fields of a row as JSON values."""
    names = (f.name for f in fields(row) if f.name not in _INTERNAL)
    return _shown({name: _plain(getattr(row, name), name) for name in names})


def _shown(values: Tree) -> Tree:
    """Leave out what says nothing; a zero and a false do."""
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
    """What a reader has been told, and what has changed since.

    The tree has one entry for each cluster under ``clusters``; in it tasks, streams and workers are
    mappings by name, so that a change of one row is a small patch. What is None or empty is left
    out.
    """

    def __init__(self) -> None:
        self._told: Tree = {}
        self._kept: dict[tuple[str, str], tuple[Any, Any]] = {}

    def whole(self, snapshots: Iterable[Snapshot]) -> Tree:
        """Return all of it, from which the next patch counts."""
        self._told = self._tree(snapshots)
        return self._told

    def patch(self, snapshots: Iterable[Snapshot]) -> Tree:
        """Return what changed, empty where nothing did; None stands for what is gone."""
        tree = self._tree(snapshots)
        changed = difference(self._told, tree)
        self._told = tree
        return changed

    def _tree(self, snapshots: Iterable[Snapshot]) -> Tree:
        clusters = {seen.name: self._cluster(seen) for seen in snapshots}
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] in clusters}
        return {"clusters": clusters}

    def _cluster(self, seen: Snapshot) -> Tree:
        quiet = not is_busy(seen)
        tree: Tree = {
            "name": seen.name,
            "launcher": seen.launcher,
            "state": seen.state,
            "planned": _counts(seen.planned),
            "requested": _counts(seen.requested),
            "observed": _counts(seen.observed),
            "tasks": {row.task: self._task(seen.name, row, quiet) for row in seen.tasks},
            "order": [row.task for row in seen.tasks],
            "streams": {
                row.name: self._encoded(seen.name, f"stream {row.name}", row)
                for row in seen.streams
            },
            "notices": self._encoded(
                seen.name,
                "notices",
                seen.notices[-_NOTICES:],
                lambda all_: list(map(encoded, all_)),
            ),
        }
        if seen.gpus:
            tree["gpus"] = {
                f"{row.host} {row.index}": self._gpu(seen.name, row, quiet) for row in seen.gpus
            }
        if seen.expires is not None:
            tree["expires"] = seen.expires
        if seen.lease is not None:
            tree["lease"] = seen.lease
        if seen.coordinator is not None:
            tree["coordinator"] = _coordinator(seen.coordinator)
        if seen.spark is not None:
            tree["spark"] = self._spark(seen.name, seen.spark, quiet)
        return tree

    def _spark(self, cluster: str, row: SparkRow, quiet: bool) -> Tree:
        tree = encoded(row)
        tree["nodes"] = {node.node: self._node(cluster, node, quiet) for node in row.nodes}
        tree["order"] = [node.node for node in row.nodes]
        return tree

    def _node(self, cluster: str, row: NodeRow, quiet: bool) -> Any:
        before, _ = self._kept.get((cluster, f"node {row.node}"), (None, None))
        age = row.batch_age_s
        if age is not None:
            # Of a node that takes nothing it grows for ever, which is worth a word now and then.
            known = None if before is None else before.batch_age_s
            since = age - (known or 0.0)
            if known is not None and 0 <= since < max(1.0, known / 10):
                row = replace(row, batch_age_s=known)
            elif quiet and known is not None and age > _LONG_SECONDS:
                row = replace(row, batch_age_s=max(known, _LONG_SECONDS))
        return self._encoded(cluster, f"node {row.node}", row)

    def _task(self, cluster: str, row: TaskRow, quiet: bool) -> Any:
        before, _ = self._kept.get((cluster, row.task), (None, None))
        if before is not None and quiet:
            known = {name: getattr(before, name) for name in _MEASURES}
            row = replace(row, **{name: value for name, value in known.items() if value})
        return self._encoded(cluster, row.task, row)

    def _gpu(self, cluster: str, row: GpuRow, quiet: bool) -> Any:
        name = f"gpu {row.host} {row.index}"
        before, _ = self._kept.get((cluster, name), (None, None))
        if before is not None and quiet:
            # It may sink to rest, which comes to an end, but not go up and down for ever.
            for figure in ("use_percent", "used_mb"):
                known = (getattr(before, figure), getattr(row, figure))
                if None not in known:
                    row = replace(row, **{figure: min(known)})
        return self._encoded(cluster, name, row)

    def _encoded(
        self, cluster: str, name: str, value: Any, encode: Callable[[Any], Any] = encoded
    ) -> Any:
        """Return what `encode` makes of a value; the same object while the value is the same."""
        before, made = self._kept.get((cluster, name), (None, None))
        if made is None or (value is not before and value != before):
            made = encode(value)
            self._kept[(cluster, name)] = value, made
        return made


def is_busy(seen: Snapshot) -> bool:
    """Whether work is done in a cluster: something is read from it, or closures end."""
    coordinator = seen.coordinator
    return (
        seen.state in ("starting", "stopping")
        or any(row.state == "running" and row.elements_per_s > 0 for row in seen.streams)
        or (coordinator is not None and coordinator.closures_per_s > 0)
        or (seen.spark is not None and seen.spark.rows_per_s > 0)
    )


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Tree:
    """Return the merge patch that makes `new` of `old`."""
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
