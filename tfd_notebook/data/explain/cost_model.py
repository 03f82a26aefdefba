"""Who works how much in a pipeline: TensorFlow's model of an iterator, by the user's stages.

A pipeline is cut into lanes. What runs in one thread after the other is a lane, and so is each
stage that does its work in a pool of threads. All lanes work at the same time, so the busiest one
sets the pace (the same view as in Plumber, Kuchnik et al., MLSys 2022).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tfd_notebook._compat.tf_data.pipeline_model import READERS, Model, Node, Stage

#: Nodes of TensorFlow's model that are no stage of anybody's.
_PLUMBING = (
    "Root",
    "Model",
    "Options",
    "LatencyStats",
    "SetStatsAggregator",
    "AssertCardinality",
    "MemoryCacheImpl",
)

_POOLS = ("Map", "MapAndBatch", "Batch", "Interleave", "Filter")


@dataclass(frozen=True)
class StageCost:
    """What one stage did in a lane.

    Parameters
    ----------
    stage : Stage or None
        None for what TensorFlow put in by itself.
    kind : str
    inner : bool
        Whether it belongs to the datasets that the function of `stage` makes.
    seconds : float
        Time that it worked, its threads together.
    elements : int
        How many `stage` gave; 0 for what is inside of it.
    """

    stage: Stage | None
    kind: str
    inner: bool
    seconds: float
    elements: int


@dataclass(frozen=True)
class ThreadCost:
    """What shares threads.

    Parameters
    ----------
    busy : float
        Share of the time that its threads worked, 0 to 1 or a little more.
    threads : float
        How many there were, on average.
    parts : tuple of Part
        The one that worked most first.
    """

    busy: float
    threads: float
    parts: tuple[StageCost, ...]


_Key = tuple[int, int, str, bool]


class Costs:
    """Adds up readings of an iterator's model.

    Parameters
    ----------
    last : Stage
        The pipeline's last stage.
    """

    def __init__(self, last: Stage) -> None:
        self._last = last
        self._before: dict[int, Node] = {}
        self._fresh = False
        self._seconds: dict[_Key, float] = defaultdict(float)
        self._threads: dict[int, float] = defaultdict(float)
        self._stages: dict[_Key, Stage | None] = {}
        # Elements that a stage gave, and those of the datasets that its function made: these come
        # and go between two readings, with what they had counted.
        self._given: dict[int, int] = defaultdict(int)
        self._made: dict[int, int] = defaultdict(int)
        self._wall = 0.0
        # Which stage an input of a node is; by the node, then by the input.
        self._inputs: dict[int, dict[int, Stage]] = {}

    def add(self, model: Model, seconds: float) -> None:
        """Take in what happened since the reading before, which is `seconds` ago."""
        first = not self._before and not self._fresh
        self._fresh = False
        for node, stage, depth, lane in self._places(model):
            old = self._before.get(node.id)
            key = (lane, id(stage), node.kind, depth > 0)
            if not first:
                elements = max(0, node.elements - (old.elements if old else 0))
                self._stages[key] = stage
                self._seconds[key] += max(0.0, node.seconds - (old.seconds if old else 0.0))
                if depth < 2:
                    (self._made if depth else self._given)[id(stage)] += elements
            if lane == node.id and not first:
                self._threads[lane] += node.parallelism * seconds
        self._before = dict(model.nodes)
        if not first:
            self._wall += seconds

    def restart(self) -> None:
        """Begin with another iterator of the same pipeline, which has done nothing yet."""
        self._before = {}
        self._inputs = {}
        self._fresh = True

    def lanes(self) -> list[ThreadCost]:
        """Return the lanes, the busiest first."""
        by_lane: dict[int, list[StageCost]] = defaultdict(list)
        for key, seconds in self._seconds.items():
            lane, stage, kind, inner = key
            if inner and (made := self._made[stage]):
                seconds *= max(1.0, self._given[stage] / made)
            given = 0 if inner else self._given[stage]
            by_lane[lane].append(StageCost(self._stages[key], kind, inner, seconds, given))
        lanes = []
        for lane, parts in by_lane.items():
            available = self._threads.get(lane, self._wall)
            if available:
                parts.sort(key=lambda part: part.seconds, reverse=True)
                total = sum(part.seconds for part in parts)
                lanes.append(ThreadCost(total / available, available / self._wall, tuple(parts)))
        return sorted(lanes, key=lambda lane: lane.busy, reverse=True)

    def _places(self, model: Model) -> Iterator[tuple[Node, Stage | None, int, int]]:
        """Give each node with its stage, how deep it is inside that, and its lane."""
        # A node, the stage that it or one before it is, how deep inside, and the lane it runs in.
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
                stage = stage.inputs[0]  # the function is what costs
            own = node.id if node.asynchronous and node.kind in _POOLS else lane
            yield node, stage, 0, own
            # What feeds an asynchronous node runs in a thread of its own.
            below = -node.id if node.asynchronous else lane
            if stage is None:  # TensorFlow's own; the user's stages go on below it
                todo += [(child, expected, 0, below) for child in node.inputs]
                continue
            following = stage.inputs
            if stage.kind in ("DataService", "Generator"):
                following = ()
            inputs = self._inputs_of(node, following, model)
            for child in node.inputs:
                if child in inputs:
                    todo.append((child, inputs[child], 0, below))
                else:  # made by the stage's function: the pool's threads run it
                    todo.append((child, stage, 1, own))

    def _inputs_of(
        self, node: Node, following: tuple[Stage, ...], model: Model
    ) -> dict[int, Stage]:
        """Return which of a node's inputs is which of the stages that come before it.

        Inputs come and go: those of a concatenation one after the other, that of a repetition
        again and again, those that a function makes all the time.
        """
        known = self._inputs.setdefault(node.id, {})
        if len(following) == 1:  # of a repetition, another one each time
            known = {child: stage for child, stage in known.items() if child in node.inputs}
            self._inputs[node.id] = known
        for child in sorted(set(node.inputs) - set(known)):
            free = [stage for stage in following if stage not in known.values()]
            if not free:
                break
            kind = model.nodes[child].kind if child in model.nodes else ""
            known[child] = next((stage for stage in free if _match(kind, stage)), free[0])
        return known


def _match(kind: str, expected: Stage | None) -> Stage | None:
    """Return the stage that a node of `kind` is: `expected`, or one that comes before it."""
    if kind in _PLUMBING:
        return None
    stage = expected
    while stage is not None:
        # Everything that is left is the service's, but not what the user did behind it.
        if _same(kind, stage) or (stage.kind == "DataService" and stage is expected):
            return stage
        if kind == "Prefetch":  # TensorFlow puts one behind most pipelines
            return None
        # TensorFlow may have left a stage out, or drawn it together with another.
        stage = stage.inputs[0] if len(stage.inputs) == 1 else None
    return None


_ALIASES = {
    "MapAndBatch": "Batch",
    "MemoryCache": "Cache",
    "FileCache": "Cache",
    "FromTensor": "Tensor",
    "ShuffleAndRepeat": "Shuffle",
}


def _same(kind: str, stage: Stage) -> bool:
    if kind == stage.kind:
        return True
    if kind in ("FlatMap", "Interleave"):  # how TensorFlow reads files, one or several at a time
        return stage.kind in (*READERS, "Generator")
    return _ALIASES.get(kind) == stage.kind


@dataclass(frozen=True)
class Measurement:
    """What was seen while a pipeline ran.

    Parameters
    ----------
    seconds : float
        How long, without the warm-up.
    elements, bytes : int
        What came in that time.
    waited : float
        Seconds that the consumer waited for data.
    first : float
        Seconds from the start of the first pass to its first element.
    cpu : float
        Processors that this process used, on average.
    locked : float
        Share of the time that the interpreter's lock was held by somebody who computes.
    lanes : tuple of Lane
    empty : bool
        Whether the data ended without an element.
    """

    seconds: float
    elements: int
    bytes: int
    waited: float
    first: float
    cpu: float
    locked: float
    lanes: tuple[ThreadCost, ...]
    empty: bool = False

    @property
    def rate(self) -> float:
        """Elements per second."""
        return self.elements / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_fraction(self) -> float:
        """Share of the time that the consumer waited."""
        return min(1.0, self.waited / self.seconds) if self.seconds > 0 else 1.0

    def figures(self) -> dict[str, float]:
        """Return what a `Limit` says of it."""
        return {
            "elements_per_s": self.rate,
            "bytes_per_s": self.bytes / self.seconds if self.seconds > 0 else 0.0,
            "wait_fraction": self.wait_fraction,
            "cpu_cores": self.cpu,
            "first_element_s": self.first,
        }
