"""The operations of a pipeline, and the properties of the elements after each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfd_notebook._compat.tf_data.pipeline_model import Stage
from tfd_notebook.data.service.changes import Change
from tfd_notebook.data.service.random_parts import Parts


@dataclass(frozen=True)
class Flow:
    """Properties of the elements after an operation."""

    divided: bool = False  # several units of the sources can have produced them
    hinted: bool = False  # a shard(SHARD_HINT) is before it
    only_drawn: bool = False  # all sources before it are random
    endless: bool = False
    random: Parts = ()  # the parts of its elements that depend on random numbers
    shuffled: bool = False  # elements that follow each other do not belong together
    reordered: bool = False  # the order differs in each iteration
    reselected: bool = False  # the elements may differ in each iteration
    stateful: bool = False  # a Python function before it uses an object with state
    cached: bool = False  # a cache in memory is before it
    kept_order: bool = False  # a shuffle gives all epochs one random order
    repeated: bool = False  # an element can occur again
    late: bool = False  # the iterator of a source is created when an element is read
    earlier: bool = False  # its Python function keeps values of earlier elements


@dataclass
class Operation:
    """A dataset operation of a pipeline.

    Parameters
    ----------
    node : tf.compat.v1.NodeDef
    name : str
        In the user's notation, with its line if known.
    kind : str
        As in `Stage`.
    effect : str or None
        As in `OPERATIONS`. `COUNTER` for the numbers of ``enumerate``, and ``"random"`` for a
        random selection of datasets that delivers all of their elements. ``"pairing"`` for a
        function whose calls use one file, with the elements of one of them.
    inputs : tuple of str
        The nodes whose elements it reads.
    stage : Stage or None
    flow : Flow
    reorders : bool
        Whether it gives the elements another order in each epoch.
    changes : list of Change
    """

    node: Any
    name: str
    kind: str
    effect: str | None
    inputs: tuple[str, ...]
    stage: Stage | None
    flow: Flow
    reorders: bool
    changes: list[Change]
