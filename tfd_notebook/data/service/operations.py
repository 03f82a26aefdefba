"""All dataset operations of TensorFlow, by what their results depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfd_notebook._compat.tf_data.pipeline_model import kind_of

_SOUND = "sound"
#: The effect of a graph that is not a constant. `expanded` replaces the others.
_UNREAD = "unread"
#: The effect of the endless source of ``enumerate``.
COUNTER = "counter"
#: How each dataset operation depends on the elements before it, by its kind (`kind_of`).
#: Operations that are not listed are reported as not examined, and those of `_UNREAD`.
OPERATIONS: Mapping[str, str] = {
    kind: effect
    for effect, kinds in {
        # The source consists of one unit, which one data worker receives.
        "single": "Tensor Generator",
        "source": "Range TensorSlice SparseTensorSlice List TextLine TFRecord FixedLengthRecord "
        "CSV Sql LMDB MatchingFiles Load SnapshotDatasetReader SnapshotNestedDatasetReader "
        "SnapshotChunk ListSnapshotChunks DataService",
        # Each result depends on one element only.
        _SOUND: "Map Filter FlatMap Interleave LegacyParallelInterleave Unbatch ParseExample "
        "Prefetch Concatenate Repeat Options Model Optimize Finalize Rewrite IgnoreErrors "
        "MaxIntraOpParallelism PrivateThreadPool ThreadPool BytesProducedStats LatencyStats "
        "SetStatsAggregator AssertNext AssertPrev NonSerializable Sleep ChooseFastest "
        "ChooseFastestBranch FilterByLastComponent WrapDatasetVariant UnwrapDatasetVariant "
        "IndexFlatMap",
        "grouping": "Batch PaddedBatch MapAndBatch DenseToSparseBatch GroupByWindow Rebatch",
        # Each group is for elements that follow each other.
        "neighbors": "Window SlidingWindow",
        # TensorFlow cannot divide the sources before it.
        "reducing": "GroupByReducer WeightedFlatMap",
        "counting": "Take Skip TakeWhile Scan Shard AutoShard Unique AssertCardinality",
        "pairing": "Zip DirectedInterleave",
        "ordering": "Shuffle ShuffleAndRepeat GlobalShuffle",
        "random": "Random Sampling",
        "external": "Cache Snapshot Save",
        _UNREAD: "DatasetFromGraph",
    }.items()
    for kind in kinds.split()
}
#: Operations that give several elements for one.
EXPANDING = ("FlatMap", "IndexFlatMap", "Interleave", "LegacyParallelInterleave", "Unbatch")
#: The functions that select elements, or their group, by operation.
SELECTORS = {
    "Filter": "predicate",
    "GroupByReducer": "key_func",
    "GroupByWindow": "key_func",
    "TakeWhile": "predicate",
}
_BY_RESULT = 'use processing_mode="data"'
#: Operations whose elements the dispatcher cannot divide, with the next step.
UNDIVIDED = {
    "CSV": "create it in the function of interleave(), from a dataset of the names of its files, "
    f"or {_BY_RESULT}",
    "LMDB": _BY_RESULT,
    "Load": _BY_RESULT,
    "Snapshot": "call snapshot() after distribute, where one process writes it",
    "Sql": _BY_RESULT,
}
#: Operations for which TensorFlow computes an element from its number. It can also do so for a
#: map, but its memory errors then end the process (2.21).
NUMBERED = (
    "AssertCardinality",
    "Batch",
    "Concatenate",
    "List",
    "Model",
    "Options",
    "Prefetch",
    "Range",
    "Repeat",
    "Shard",
    "Skip",
    "Take",
    "Tensor",
    "TensorSlice",
    "Zip",
)
#: Ops with these names use datasets, and their output is none.
_NO_DATASETS = (
    "DatasetCardinality",
    "DatasetFingerprint",
    "DatasetTo",
    "ExperimentalDataset",
    "InitializeTableFromDataset",
    "ReduceDataset",
    "RegisterDataset",
)


def node_kind(node: Any) -> str:
    """Return the kind of a dataset's node, as in `OPERATIONS`."""
    return kind_of(node.op)


def is_dataset(node: Any) -> bool:
    """Return True if a node's output is a dataset."""
    return "Dataset" in node.op and not node.op.startswith(_NO_DATASETS)


def uses_datasets(node: Any) -> bool:
    """Return True if a node's inputs can be datasets."""
    return "Dataset" in node.op


def is_examined(node: Any) -> bool:
    """Return True if the effect of a dataset's node is known."""
    return OPERATIONS.get(node_kind(node), _UNREAD) != _UNREAD
