"""The stages of long pipelines, and of those that use one dataset several times."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

import tfd_notebook as tfd
from tfd_notebook._compat.tf_data import graph
from tfd_notebook._compat.tf_data.pipeline_model import (
    Stage,
    buffers_of,
    nodes_of,
    splits_of,
    stages_of,
)
from tfd_notebook.data.service import graph_inspection
from tfd_notebook.data.service.division import divide

D = tf.data.Dataset
#: More than Python's stack has room for.
LONG = 1_100


class Counted(dataset_ops.UnaryUnchangedStructureDataset):
    """A dataset that counts how often its inputs are read."""

    def __init__(self, source: Any) -> None:
        self.reads = 0
        super().__init__(source, source._variant_tensor)

    def _inputs(self) -> list[Any]:
        self.reads += 1
        return super()._inputs()


def doubled(dataset: Any, times: int) -> Any:
    """Return a dataset with 2 ** `times` paths to `dataset`."""
    for _ in range(times):
        dataset = dataset.concatenate(dataset)
    return dataset


def repeated(stage: Stage, count: int) -> Stage:
    for _ in range(count):
        stage = Stage("Repeat", "repeat()", "", (stage,))
    return stage


@pytest.fixture(scope="module")
def joined() -> Any:
    dataset = D.range(2)
    for number in range(LONG):
        dataset = dataset.concatenate(D.range(number, number + 1))
    return dataset


def test_long_pipeline_needs_no_recursion(joined: Any) -> None:
    assert len(list(stages_of(joined).walk())) == 2 * LONG + 1
    splits = splits_of(joined)
    assert splits is not None
    assert splits.count == LONG + 2
    assert buffers_of(joined) == ()
    pipeline = graph_inspection.examine(joined)
    assert pipeline.semantics.ops.count("ConcatenateDataset") == LONG
    assert divide(joined, "DYNAMIC", in_process=True) is None
    assert "TFD308" not in tfd.doctor(joined).codes
    assert list(graph.plain_reads(joined)) == []


def test_each_dataset_is_one_stage_and_is_visited_once() -> None:
    counted = Counted(D.range(3).shuffle(2))
    dataset = doubled(counted, 14)
    before = counted.reads
    last = stages_of(dataset)
    assert counted.reads == before + 1
    kinds = [stage.kind for stage in last.walk()]
    assert kinds == ["Concatenate"] * 14 + ["Counted", "Shuffle", "Range"]
    assert last.inputs[0] is last.inputs[1]
    assert [buffer.elements for buffer in buffers_of(dataset)] == [2]
    before = counted.reads
    assert list(graph.plain_reads(dataset)) == []
    assert counted.reads == before + 1


def test_walk_yields_each_stage_before_its_inputs() -> None:
    source = Stage("Range", "range()", "")
    mapped = Stage("Map", "map(f)", "", (source,))
    other = Stage("Tensor", "from_tensors()", "")
    last = Stage("Zip", "zip()", "", (source, other, mapped))
    assert list(last.walk()) in ([last, other, mapped, source], [last, mapped, source, other])
    assert len(list(repeated(last, LONG).walk())) == LONG + 4


def test_splits_count_each_path() -> None:
    splits = splits_of(doubled(D.range(3), 14))
    assert splits is not None
    assert splits.count == 3 * 2**14
    files = doubled(D.from_tensor_slices(["a", "b"]).interleave(tf.data.TextLineDataset), 3)
    found = splits_of(files.repeat(2), by_file=True)
    assert found is not None
    assert found.count == 16
    assert splits_of(files.repeat(2)) is None


def test_each_node_of_a_shared_input_has_the_stage() -> None:
    definition = tf.compat.v1.GraphDef()
    definition.node.add(name="n0", op="RangeDataset")
    stage = Stage("Range", "range()", "")
    for number in range(1, 60):
        names = [f"n{number - 1}"] * 2
        definition.node.add(name=f"n{number}", op="ConcatenateDataset", input=names)
        stage = Stage("Concatenate", "concatenate()", "", (stage, stage))
    definition.node.add(name="end", op="_Retval", input=["n59"])
    assert len(nodes_of(definition, stage)) == 60
