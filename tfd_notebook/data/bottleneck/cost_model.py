"""Cost of each stage of a pipeline, from TensorFlow's model of an iterator.

A pipeline consists of lanes. Stages that run one after the other in one thread form a lane. A stage
that runs in a thread pool is a lane by itself. All lanes run concurrently, so the busiest one is
the bottleneck (as in Plumber, Kuchnik et al., MLSys 2022).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tfd_notebook._compat.tf_data.pipeline_model import READERS, Model, Node, Stage

#: Nodes of TensorFlow's model that correspond to no stage.
_INTERNAL_NODES = (
    "Root",
    "Model",
    "Options",
    "LatencyStats",
    "SetStatsAggregator",
    "AssertCardinality",
    "MemoryCacheImpl",
)

#: Stages that return an element for each one that they receive, or several.
_IMMEDIATE = ("Map", "FlatMap", "Interleave", "Scan")
#: Elements after which a filter counts as one that accepts none.
_REFUSED = 1000

_POOLS = ("Map", "MapAndBatch", "Batch", "Interleave", "Filter")


@dataclass(frozen=True)
class StageCost:
    """The work of one stage in a lane.

    Parameters
    ----------
    stage : Stage or None
        None for nodes that TensorFlow added.
    kind : str
    inner : bool
        Whether the node belongs to a dataset that the function of `stage` creates.
    seconds : float
        Busy time of all its threads.
    elements : int
        Number of elements that `stage` produced. 0 for inner nodes.
    """

    stage: Stage | None
    kind: str
    inner: bool
    seconds: float
    elements: int


@dataclass(frozen=True)
class LaneCost:
    """The work of a lane: stages that share threads.

    Parameters
    ----------
    busy : float
        Share of the time that its threads were busy, 0 to 1 or slightly more.
    parts : tuple of StageCost
        Stages with the most work first.
    """

    busy: float
    parts: tuple[StageCost, ...]


_Key = tuple[int, int, str, bool]


class Costs:
    """Sums the readings of an iterator's model.

    Parameters
    ----------
    last : Stage
        The pipeline's last stage.
    """

    def __init__(self, last: Stage) -> None:
        self._last = last
        self._before: dict[int, Node] = {}
        self._is_new_iterator = False
        self._seconds: dict[_Key, float] = defaultdict(float)
        self._threads: dict[int, float] = defaultdict(float)
        self._stages: dict[_Key, Stage | None] = {}
        # Elements that a stage produced, and elements of the datasets that its function created.
        # The latter datasets and their counts can disappear between two readings.
        self._produced: dict[int, int] = defaultdict(int)
        self._created: dict[int, int] = defaultdict(int)
        self._wall = 0.0
        # The elements of each stage since its iterator was created.
        self._totals: dict[int, int] = {}
        # The stage of each input of a node: by the node, then by the input.
        self._inputs: dict[int, dict[int, Stage]] = {}

    def add(self, model: Model, seconds: float) -> None:
        """Add the work since the previous reading, `seconds` ago."""
        first = not self._before and not self._is_new_iterator
        self._is_new_iterator = False
        for node, stage, depth, lane in self._nodes_with_stages(model):
            old = self._before.get(node.id)
            if not depth:
                self._totals[id(stage)] = node.elements
            key = (lane, id(stage), node.kind, depth > 0)
            if not first:
                elements = max(0, node.elements - (old.elements if old else 0))
                self._stages[key] = stage
                self._seconds[key] += max(0.0, node.seconds - (old.seconds if old else 0.0))
                if depth < 2:
                    (self._created if depth else self._produced)[id(stage)] += elements
            if lane == node.id and not first:
                self._threads[lane] += node.parallelism * seconds
        self._before = dict(model.nodes)
        if not first:
            self._wall += seconds

    def restart(self) -> None:
        """Continue with a new iterator of the same pipeline, which has done no work yet."""
        self._before = {}
        self._inputs = {}
        self._totals = {}
        self._is_new_iterator = True

    def silent(self) -> Stage | None:
        """Return the first stage that has received elements, and returned none."""
        for stage in reversed([*self._last.walk()]):
            received = min((self._totals.get(id(each), 0) for each in stage.inputs), default=0)
            least = _REFUSED if stage.kind == "Filter" else 1
            if self._totals.get(id(stage)) == 0 and received >= least:
                return stage if stage.kind in (*_IMMEDIATE, "Filter") else None
        return None

    def lanes(self) -> list[LaneCost]:
        """Return the lanes, busiest first."""
        by_lane: dict[int, list[StageCost]] = defaultdict(list)
        for key, seconds in self._seconds.items():
            lane, stage, kind, inner = key
            if inner and (created := self._created[stage]):
                seconds *= max(1.0, self._produced[stage] / created)
            produced = 0 if inner else self._produced[stage]
            by_lane[lane].append(StageCost(self._stages[key], kind, inner, seconds, produced))
        lanes = []
        for lane, parts in by_lane.items():
            available = self._threads.get(lane, self._wall)
            if available:
                parts.sort(key=lambda part: part.seconds, reverse=True)
                total = sum(part.seconds for part in parts)
                lanes.append(LaneCost(total / available, tuple(parts)))
        return sorted(lanes, key=lambda lane: lane.busy, reverse=True)

    def _nodes_with_stages(self, model: Model) -> Iterator[tuple[Node, Stage | None, int, int]]:
        """Yield each node with its stage, its depth inside that stage, and its lane."""
        # Entries: a node, the stage of the node or of one before it, the depth, and the lane.
        todo: list[tuple[int, Stage | None, int, int]] = [(model.output, self._last, 0, 0)]
        while todo:
            number, expected, depth, lane = todo.pop()
            node = model.nodes.get(number)
            if node is None:
                continue
            if depth:
                yield node, expected, depth, lane
                todo += [(child, expected, depth + 1, lane) for child in node.inputs]
                continue
            stage = _match(node.kind, expected)
            if node.kind == "MapAndBatch" and stage and stage.inputs[0].kind == "Map":
                stage = stage.inputs[0]  # attribute the cost to the function
            own = node.id if node.asynchronous and node.kind in _POOLS else lane
            yield node, stage, 0, own
            # The inputs of an asynchronous node run in a separate thread.
            below = -node.id if node.asynchronous else lane
            if stage is None:  # a node of TensorFlow, the user's stages are its inputs
                todo += [(child, expected, 0, below) for child in node.inputs]
                continue
            following = stage.inputs
            if stage.kind in ("DataService", "Generator"):
                following = ()
            inputs = self._inputs_of(node, following, model)
            for child in node.inputs:
                if child in inputs:
                    todo.append((child, inputs[child], 0, below))
                else:  # created by the stage's function, which runs in the pool's threads
                    todo.append((child, stage, 1, own))

    def _inputs_of(
        self, node: Node, following: tuple[Stage, ...], model: Model
    ) -> dict[int, Stage]:
        """Return the stages of a node's inputs.

        Inputs change over time. A concatenation has one input after the other, and a repetition has
        a new input for each epoch. A stage's function creates inputs all the time.
        """
        known = self._inputs.setdefault(node.id, {})
        if len(following) == 1:  # a repetition replaces its input in each epoch
            known = {child: stage for child, stage in known.items() if child in node.inputs}
            self._inputs[node.id] = known
        for child in sorted(set(node.inputs) - set(known)):
            free = list(following)  # one dataset can be several of them
            for stage in known.values():
                if stage in free:
                    free.remove(stage)
            if not free:
                break
            kind = model.nodes[child].kind if child in model.nodes else ""
            known[child] = next((stage for stage in free if _match(kind, stage)), free[0])
        return known


def _match(kind: str, expected: Stage | None) -> Stage | None:
    """Return the stage of a node of `kind`: `expected`, or one before it."""
    if kind in _INTERNAL_NODES:
        return None
    stage = expected
    while stage is not None:
        # Attribute other nodes to the service, but not those of the user's stages after it.
        if _is_kind_of(kind, stage) or (stage.kind == "DataService" and stage is expected):
            return stage
        if kind == "Prefetch":  # TensorFlow adds one after most pipelines
            return None
        # TensorFlow may have removed a stage, or fused it with another.
        stage = stage.inputs[0] if len(stage.inputs) == 1 else None
    return None


_ALIASES = {
    "MapAndBatch": "Batch",
    "MemoryCache": "Cache",
    "FileCache": "Cache",
    "FromTensor": "Tensor",
    "ShuffleAndRepeat": "Shuffle",
}


def _is_kind_of(kind: str, stage: Stage) -> bool:
    if kind == stage.kind:
        return True
    if kind in ("FlatMap", "Interleave"):  # TensorFlow reads files with these
        return stage.kind in (*READERS, "Generator")
    return _ALIASES.get(kind) == stage.kind


@dataclass(frozen=True)
class Measurement:
    """Measurements of a running pipeline.

    Parameters
    ----------
    seconds : float
        Duration without the warm-up.
    elements, bytes : int
        Delivered in that time.
    waited : float
        Seconds that the consumer waited for data.
    first : float
        Seconds from the start of the first epoch to its first element.
    cpu : float
        Average number of cores that this process used.
    locked : float
        Share of the time that the GIL was held by another thread.
    lanes : tuple of LaneCost
    empty : bool
        Whether the dataset has no elements.
    stalled : float
        Seconds of the last wait, if no element ended it.
    silent : Stage, optional
        The first stage that has received elements, and returned none.
    """

    seconds: float
    elements: int
    bytes: int
    waited: float
    first: float
    cpu: float
    locked: float
    lanes: tuple[LaneCost, ...]
    empty: bool = False
    stalled: float = 0.0
    silent: Stage | None = None

    @property
    def rate(self) -> float:
        """Elements per second."""
        return self.elements / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_fraction(self) -> float:
        """Share of the time that the consumer waited."""
        return min(1.0, self.waited / self.seconds) if self.seconds > 0 else 1.0

    def after_service(self, last: Stage) -> str:
        """Return a clause about the stages after a tf.data service, or an empty text.

        Parameters
        ----------
        last : Stage
            The pipeline's last stage, whose costs were measured.
        """
        stages = [*last.walk()]
        here = [stage for stage in stages if stage.kind not in ("DataService", "Prefetch")]
        if not here or not any(stage.kind == "DataService" for stage in stages):
            return ""
        clause = f"this process runs {', '.join(stage.label for stage in reversed(here))} after it"
        if not self.lanes or not self.seconds:
            return clause
        parts = (part for lane in self.lanes for part in lane.parts)
        seconds = sum(part.seconds for part in parts if part.stage in here)
        return f"{clause}, busy {100 * min(1.0, seconds / self.seconds):.0f} % of the time"

    def figures(self) -> dict[str, float]:
        """Return the figures for a `Limit`."""
        return {
            "elements_per_s": self.rate,
            "bytes_per_s": self.bytes / self.seconds if self.seconds > 0 else 0.0,
            "wait_fraction": self.wait_fraction,
            "cpu_cores": self.cpu,
            "first_element_s": self.first,
        }
