"""Changes that a tf.data service makes to the elements of a dataset.

Each data worker runs the pipeline before ``distribute`` on its own share of the sources. In some
modes it runs all of it, and delivers a share of the results. Operations that count, pair, order,
draw or remember elements then do so on each data worker. TensorFlow does not report this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tfd_notebook._compat.tf_data.pipeline_model import Stage, nodes_of, user_name
from tfd_notebook.data.service.changes import Change, joining, lost, times
from tfd_notebook.data.service.dataset_graph import DatasetGraph, reshuffles, stops_early
from tfd_notebook.data.service.flow import Flow, Operation
from tfd_notebook.data.service.function_changes import COUNTER, EARLIER
from tfd_notebook.data.service.function_facts import Facts
from tfd_notebook.data.service.operations import (
    EXPANDING,
    OPERATIONS,
    UNDIVIDED,
    is_examined,
    node_kind,
)
from tfd_notebook.data.service.python_state import counters, renewal
from tfd_notebook.data.service.random_parts import CERTAINLY, REPLACING, RandomParts

#: Modes in which each data worker gets a share of the sources, or of the results.
_BY_SOURCE, _BY_RESULT = ("DYNAMIC", "FILE", "FILE_OR_DATA"), ("DATA", "FILE_OR_DATA")
#: Kinds of changes that one data worker does not cause.
_BY_DIVISION = ("pairing", "order", "counting", "neighbors", "grouping", "external")
#: Modes in which each data worker runs all of a pipeline, or of a part of it.
_ALONE = ("OFF", "DATA", "FILE_OR_DATA", "HINT")
#: The effect of operations that count, by kind, if each data worker gets a share of the sources.
_COUNTED = {
    "Take": "each data worker takes {count}, so {total} may arrive{joining}",
    "Skip": "each data worker skips {count}, so {total} may be missing{joining}",
    "TakeWhile": "each data worker stops at its first element that is not accepted, so those after "
    "the first one may arrive, up to all of them",
    "Scan": "each data worker starts with the initial state, so up to all results may differ",
    "Shard": "each data worker selects from its elements, so others arrive, up to {others} more or "
    "fewer{joining}",
    "Unique": "each data worker compares its own elements, so one may occur {times}",
    "AssertCardinality": "each data worker has fewer elements, so reading fails",
    "": "each data worker counts its own elements, so up to all elements may be others",
}
#: TensorFlow's AutoShardPolicy.DATA.
_BY_DATA = 2
_REFILLED = "so up to all elements differ in each epoch"
#: Next steps for operations that select by position or number, and for a random order.
_ANY = (
    "after distribute, where elements arrive in any order. It cannot separate data for validation"
)
_SEED = 'call shuffle() with a seed, and use processing_mode="data"'


class Semantics:
    """The operations of a pipeline, and the changes that a service makes to their results.

    Parameters
    ----------
    definition : tf.compat.v1.GraphDef
        The graph of the dataset.
    last : Stage, optional
        The last stage of the dataset, for the user's names and lines.
    deterministic : bool
        Whether parallel operations keep the order of the elements. Default true.
    """

    def __init__(self, definition: Any, last: Stage | None = None, deterministic: bool = True):
        self._graph = DatasetGraph(definition, deterministic)
        self._random = RandomParts(self._graph)
        self._stages = {} if last is None else nodes_of(definition, last)
        self._found: dict[tuple[str, int, bool], list[Change]] = {}
        self._operations: dict[tuple[str, int, bool], list[Operation]] = {}
        self._visited = 0

    def changes(self, mode: str, workers: int, in_process: bool = False) -> list[Change]:
        """Return the changes of an epoch that is read in `mode`.

        Parameters
        ----------
        mode : str
            The name of TensorFlow's ShardingPolicy.
        workers : int
            Number of data workers. With one of them, no change is refused.
        in_process : bool
            Whether the data workers run in this process. They then share its Python objects.
        """
        key = mode, workers, in_process
        if key not in self._found:
            self._found[key] = self._find_changes(*key)
        return list(self._found[key])

    def _find_changes(self, mode: str, workers: int, in_process: bool) -> list[Change]:
        found: dict[tuple[str, str], Change] = {}
        for operation in self._listed(mode, max(2, workers), in_process):
            for change in operation.changes:
                if workers < 2 and in_process and change.kind == "python":
                    continue  # it is not shared with a second one
                if workers < 2 and change.kind in _BY_DIVISION:
                    change = dataclasses.replace(
                        change,
                        what=f"with a second data worker, {change.what}",
                        refused=False,
                    )
                found.setdefault((change.kind, change.operation), change)
        return sorted(found.values(), key=lambda change: not change.refused)

    def _listed(self, mode: str, workers: int, in_process: bool = False) -> list[Operation]:
        """Return the result of `operations`, which is found once."""
        key = mode, workers, in_process
        if key not in self._operations:
            self._operations[key] = list(self.operations(*key))
        return self._operations[key]

    def operations(self, mode: str, workers: int, in_process: bool = False) -> Iterator[Operation]:
        """Yield the dataset operations, each after its inputs, with their changes.

        The parameters are those of `changes`. If the caller sets the `flow` of an operation, the
        operations after it see that.
        """
        twice = None
        if mode == "FILE_OR_DATA":
            mode, twice = self._graph.file_or_data
        if mode == "HINT" and not self.has_hint:
            mode = "OFF"  # each data worker then delivers the whole dataset
        flows: dict[str, Flow] = {}
        for node in self._graph.ordered:
            self._visited += 1
            inputs = self._graph.before(node)
            before = [flows[each.name] for each in inputs]
            facts = self._graph.facts_of(node)
            flow = self._flow(node, facts, before)
            operation = Operation(
                node,
                self._name(node),
                node_kind(node),
                "pairing" if self._graph.joins_calls(node) else self._graph.effect(node),
                tuple(each.name for each in inputs),
                self._stages.get(node.name),
                flow,
                OPERATIONS.get(node_kind(node)) == "ordering"
                and not self._graph.is_seeded(node)
                and reshuffles(node),
                [
                    change
                    for change in self._changes(node, facts, flow, before, mode, workers)
                    if change.kind != "python" or not in_process
                ]
                + (
                    self._shared_state(node, facts, flow, mode)
                    if in_process and workers > 1
                    else []
                ),
            )
            if node is twice:
                operation.changes.append(
                    Change(
                        "counting",
                        operation.name,
                        "because of it, TensorFlow divides the results, after it has divided the "
                        f"files, {lost(mode, workers)}",
                        "distribute the datasets that are not files separately",
                        refused=True,
                    )
                )
            yield operation
            flows[node.name] = operation.flow

    def keeps_elements(self, mode: str) -> bool:
        """Return True if the data workers deliver the elements of the pipeline, and no others.

        In mode ``"OFF"``, each of them then delivers all of these elements.
        """
        changing = ["pairing", "order", "counting", "neighbors", "undivided", "cached", "unknown"]
        operations = self._listed(mode, 2)
        if mode not in ("OFF", "DATA") or (
            mode == "DATA" and any(each.kind == "Snapshot" for each in operations)
        ):
            changing.append("external")
        for each in operations:
            states = self._graph.facts_of(each.node).states
            if mode not in _ALONE and each.flow.divided and counters(states, [COUNTER, EARLIER]):
                return False  # of other elements, or in another order
            if mode in _ALONE and each.kind not in REPLACING and counters(states):
                return False  # each data worker takes other elements from an iterator
        actual = self._graph.file_or_data[0] if mode == "FILE_OR_DATA" else mode
        flows = {each.node.name: each.flow for each in operations}
        for each in operations:
            before = [flows[name] for name in each.inputs]
            if (
                each.effect == "grouping"
                and any(flow.divided for flow in before)
                and (actual in _BY_SOURCE or any(flow.hinted for flow in before))
                and not all(flow.shuffled for flow in before)
            ):
                return False  # the rows are the same, but each group has others
        return not (
            any(change.kind in changing for each in operations for change in each.changes)
            or (mode == "OFF" and any(each.flow.reselected for each in operations[-1:]))
        )

    def is_before_files(self, mode: str, node: Any) -> bool:
        """Return True for an operation before the readers of the files that `mode` divides."""
        by_file = mode == "FILE" or (mode == "FILE_OR_DATA" and "FILE" in self._graph.file_or_data)
        return by_file and node.name in self._graph.before_files

    def numbers_by_order(self) -> RandomParts:
        """Return the parts that depend on the order in which elements reach the functions."""
        return RandomParts(self._graph, by_order=True)

    def constant(self, node: Any, index: int) -> Any:
        """Return the value of an input of an operation that is a constant, else None."""
        return self._graph.constant(node, index)

    @property
    def has_hint(self) -> bool:
        """True if the pipeline has a ``shard(SHARD_HINT, SHARD_HINT)``."""
        return self._graph.has_hint

    @property
    def ops(self) -> list[str]:
        """The ops of the pipeline, without those of datasets that its functions use."""
        return [node.op for node in self._graph.ordered]

    @property
    def visited(self) -> int:
        """The number of nodes that were examined."""
        followed = self._random.visited + self._graph.rows.visited
        return self._visited + self._graph.functions.visited + followed

    def _flow(self, node: Any, facts: Facts, before: list[Flow]) -> Flow:
        kind, effect = node_kind(node), self._graph.effect(node)
        divided = any(each.divided for each in before)
        if not before and OPERATIONS.get(kind) != "single" and not self._graph.is_counter(node):
            divided = True  # a source, or datasets from outside of a tf.function
        joins = kind in ("Concatenate", "Zip", "DirectedInterleave")
        others = [each for each in self._graph.before(node) if not self._graph.is_counter(each)]
        if (joins and len(others) > 1) or self._graph.reads_again(node):
            divided = True
        hinted = any(each.hinted for each in before)
        if kind == "Shard" and self._graph.constant(node, 1) == -1:
            hinted = divided = True
        source = kind == "Random"
        drawn = source and not self._graph.is_seeded(node)
        selects = kind == "DirectedInterleave"  # the first input selects the others
        read = before[1:] if selects and before[:1] and before[0].only_drawn else before
        parts = [each.random for each in before]
        random_order = (effect == "ordering" and not self._graph.is_seeded(node)) or facts.shuffles
        selection = self._random.selection(node, parts)
        reordered = any(each.reordered for each in before)
        return Flow(
            divided,
            hinted,
            source or (bool(before) and all(each.only_drawn for each in before)),
            self._graph.is_endless(node, [each.endless for each in before]),
            (CERTAINLY,) if drawn else self._random.after(node, self._graph.before(node), parts),
            effect == "ordering"
            or (kind not in EXPANDING and bool(before) and all(each.shuffled for each in before)),
            reordered
            or random_order
            or self._graph.is_unordered(node)
            or (bool(selection) and (selects or facts.names)),
            any(each.reselected for each in read)
            or (reordered and self._graph.selects_by_position(node))
            or (bool(selection) and not (selects and self._graph.selects_all(node)))
            or ((facts.shuffles or self._graph.is_unordered_inside(node)) and facts.condenses)
            or drawn
            or kind == "Sampling",
            bool(facts.states) or any(each.stateful for each in before),
            (kind == "Cache" and not self._graph.path(node)) or any(each.cached for each in before),
            (effect == "ordering" and not self._graph.is_seeded(node) and not reshuffles(node))
            or any(each.kept_order for each in before),
            self._graph.repeats(node) or any(each.repeated for each in before),
            self._graph.is_late(node) or (len(before) == 1 and before[0].late),
            any(state.kind == EARLIER for state in facts.states),
        )

    def _changes(
        self,
        node: Any,
        facts: Facts,
        flow: Flow,
        before: list[Flow],
        mode: str,
        workers: int,
    ) -> Iterator[Change]:
        kind = node_kind(node)
        effect = OPERATIONS.get("Map" if self._graph.is_single(node) else kind)
        name = self._name(node)

        def change(kind: str, what: str, fix: str, refused: bool = False) -> Change:
            return Change(kind, name, what, fix, refused)

        divided = [each for each in before if each.divided]
        if effect == "pairing" and len(before) > 1 and not self._graph.joins_one(node):
            divided = before  # each source is divided separately, even if it is one unit
        drops = effect == "grouping" and self._graph.drops_last(node)
        if effect != "counting" and not drops:  # the selector of sample_from_datasets
            divided = [each for each in divided if each.hinted or not each.only_drawn]
        by_source = bool(divided) and (
            mode in _BY_SOURCE or (mode == "HINT" and any(each.hinted for each in before))
        )
        by_result = mode in _BY_RESULT or (mode == "HINT" and not flow.hinted)
        ordering = effect == "ordering" and not self._graph.is_seeded(node)
        if mode == "FILE" and node.name in self._graph.before_files:
            by_source, by_result = False, True
            ordering = False  # TensorFlow moves a shuffle after the division of the files
            if node.name in self._graph.before_shuffle and self._graph.selects_by_position(node):
                yield change(
                    "order",
                    "TensorFlow moves the shuffle of the names after it, so it takes other names, "
                    "and up to all elements differ",
                    "shuffle the list of names, before the dataset is made",
                    refused=True,
                )
        unknown = [*facts.unknown, *(() if is_examined(node) else (node.op,))]
        if not self._graph.is_examined(node):
            unknown.append("a dataset that the function uses")
        if unknown:
            names = ", ".join(dict.fromkeys(unknown))
            yield change(
                "unknown",
                f"{names} is not covered by the check, so the elements may differ",
                "compare the elements with and without the service",
            )
        if (
            (by_source or mode == "OFF")
            and any(each.kept_order for each in before)
            and self._graph.selects_by_position(node)
        ):
            yield change(
                "random",
                "shuffle(reshuffle_each_iteration=False) gives each data worker and epoch another "
                "order, so each of them may take up to all elements from other positions",
                _SEED if by_source else "call shuffle() with a seed",
            )
        if by_source:
            yield from self._by_source(kind, effect, node, change, facts, before, mode, workers)
        if by_result:
            yield from self._by_result(kind, ordering, node, change, facts, before, mode, workers)
        alike = by_result and not by_source and self._graph.repeats_numbers(node)
        yield from self._repeated(kind, node, change, facts, alike, by_result, by_source)
        if mode == "DYNAMIC" and self._graph.repeats(node) and any(each.cached for each in before):
            yield change(
                "cached",
                "each data worker repeats the elements that it has cached, so those of one that "
                "leaves or restarts, up to all of them, do not arrive again, and one that joins "
                "later has none",
                "call repeat(), or cache() and repeat(), after distribute",
            )
        yield from self._written(node, flow, change, by_source, by_result or mode == "OFF")
        path = self._graph.path(node) if effect == "external" else ""
        if kind == "Cache" and not path and any(each.random or each.reselected for each in before):
            yield change(
                "random",
                f"each epoch fills it again, with other random numbers, {_REFILLED}",
                "call cache() after distribute",
            )
        elif kind == "Cache" and not path and any(each.stateful for each in before):
            yield change(
                "captured",
                f"each epoch fills it again, with the state of Python functions, {_REFILLED}",
                "call cache() after distribute",
            )
        if mode == "HINT" and kind in ("Concatenate", "DirectedInterleave"):
            read = before[1:] if kind == "DirectedInterleave" else before
            if any(each.hinted for each in read) and not all(each.hinted for each in read):
                yield change(
                    "counting",
                    "elements of its datasets without shard(SHARD_HINT, SHARD_HINT) occur "
                    f"{times(mode, workers)}",
                    f"call shard(SHARD_HINT, SHARD_HINT) after {user_name(kind)}()",
                )
        if mode == "DYNAMIC" and self._graph.reads_all(node) and any(each.late for each in before):
            yield change(
                "counting",
                "after shuffle() or repeat(), each data worker reads the whole source for it, so "
                f"each element occurs {times(mode, workers)}",
                "use num_parallel_calls=tf.data.AUTOTUNE in interleave()"
                if kind == "Interleave"
                else f"call {user_name(kind)}() after distribute",
                refused=True,
            )
        if mode == "DYNAMIC" and kind in UNDIVIDED:
            yield change("undivided", "it cannot be divided, so reading fails", UNDIVIDED[kind])
        elif path:
            what = f"each data worker writes all of its elements to {path}"
            if kind == "Cache":
                what += ", and fails while another one writes there"
            if kind == "Cache" and by_source:
                what += (
                    ". Later, it delivers the whole file instead of its share, so elements may be "
                    f"missing, or occur {times(mode, workers)}"
                )
            if kind == "Snapshot" and by_result:
                what += (
                    f". One that starts later reads them in another order, {lost(mode, workers)}"
                )
            yield change("external", what, "write after distribute, where one process does it")

    def _written(
        self, node: Any, flow: Flow, change: Callable[..., Change], by_source: bool, by_all: bool
    ) -> Iterator[Change]:
        """Yield the changes of files that the calls of a function write."""
        fix = f"call {user_name(node_kind(node))}() after distribute"
        for write, own in self._graph.writes(node):
            if own and (by_all or (by_source and flow.repeated)):
                what = "several data workers can write to the path of an element at the same time"
            elif not own and (by_all or by_source):
                what = f"each data worker writes to {write.path or 'one path'} in its function"
                fix = fix if by_all else f"use another path for each element, or {fix}"
            else:
                continue
            if write.kind == "Save":
                what += ", so up to all elements may be missing when it is read"
            else:
                what += ", and fails while another one writes there"
            if by_source and not own and write.elements_of:
                what += ". Later, the file has the elements of any call, so up to all may differ"
            yield change("external", what, fix)

    def _shared_state(self, node: Any, facts: Facts, flow: Flow, mode: str) -> list[Change]:
        """Return the change of an object that the data workers of this process share."""
        by_name = mode == "FILE" and node.name in self._graph.before_files
        alone = not flow.hinted and (by_name or mode in _ALONE)
        if alone or node_kind(node) not in REPLACING:
            names = counters(facts.states)
        else:  # the numbers of a random generator are as good for any element
            names = counters(facts.states, [COUNTER, EARLIER])
        if not names or not (alone or flow.divided):
            return []
        calls = "each of them calls the function for all elements"
        if not alone:
            calls = "call the function for elements in any order"
        what = f"the data workers share {names}, and {calls}, so up to all results differ"
        return [Change("python", self._name(node), what, renewal(facts.states))]

    def _by_source(
        self,
        kind: str,
        effect: str | None,
        node: Any,
        change: Callable[..., Change],
        facts: Facts,
        before: list[Flow],
        mode: str,
        workers: int,
    ) -> Iterator[Change]:
        """Yield the changes if each data worker gets a share of the sources."""
        after = f"call {user_name(kind)}() after distribute"
        later, often = joining(mode), times(mode, workers)
        endless = any(each.endless for each in before)
        if effect == "pairing" and not self._graph.joins_one(node):
            if kind == "DirectedInterleave" and self._graph.selects_at_random(node):
                if stops_early(node):
                    yield change(
                        "counting",
                        "each data worker stops at the end of its first dataset, so elements may "
                        "be missing, up to all of them",
                        "use stop_on_empty_dataset=False",
                    )
                return
            yield change(
                "pairing",
                "elements that do not belong together are joined, up to all of them, because each "
                "data worker gets different parts of each source",
                "make the pairs in one source, as from_tensor_slices((features, labels)) does",
                refused=True,
            )
        elif effect == "pairing" and not self._graph.is_enumeration(node):
            return
        elif effect == "pairing":
            if " of snapshot()" in self._name(node):
                return  # these numbers are not a part of its elements
            what = "each data worker counts from the start, so what uses the number may differ"
            what += f", and a number may occur {often}"
            method = self._name(node).partition("(")[0]  # or zip() with a counter
            yield change("counting", what, f"call {method}() {_ANY}")
        elif effect == "counting" and (kind != "Shard" or self._graph.constant(node, 1) != -1):
            if self._graph.keeps_all(node) or node.name in self._graph.only_numbers:
                return
            if kind == "AutoShard" and node.attr["auto_shard_policy"].i == _BY_DATA:
                kind = "Shard"
            count = self._graph.constant(node, 1) if kind in ("Take", "Skip") else 0
            text = _COUNTED.get("" if count is None else kind, _COUNTED[""])
            what = text.format(
                count=count,
                total=workers * (count or 0),
                others=workers - 1,
                times=often,
                joining=later,
            )
            kept = any(each.kept_order for each in before)
            yield change("counting", what, _SEED if kept else f"call {user_name(kind)}() {_ANY}")
        elif effect == "reducing":
            yield change(
                "undivided",
                "TensorFlow cannot divide the sources before it, so reading fails",
                "join the datasets with concatenate()" if kind == "WeightedFlatMap" else after,
            )
        elif kind == "GlobalShuffle":
            yield change(
                "counting",
                f"each data worker delivers all elements, so each of them occurs {often}",
                "use shuffle()",
            )
        elif effect == "neighbors" and not all(each.shuffled for each in before):
            if self._graph.constant(node, 1) == self._graph.constant(node, 2) == 1:
                return  # each element is a window
            yield change(
                "neighbors",
                "each data worker makes windows of its elements, so up to all windows join "
                "elements that are not neighbors",
                "use batch() if they need not be neighbors, or make the windows in the function of "
                "flat_map()",
            )
        elif effect == "neighbors" and not self._graph.partitions(node) and not endless:
            yield change(
                "counting",
                "each data worker makes windows of its elements, so their number may differ"
                f"{self._graph.added_windows(node, workers)}{later}",
                after,
            )
        elif kind == "GroupByWindow" and facts.condenses:
            yield change(
                "counting",
                "each data worker makes groups of its elements, so up to all results are those "
                "of other elements",
                after,
            )
        elif node.name in self._graph.joined_batches and not all(each.shuffled for each in before):
            yield self._joined(node, change)
        elif effect in ("grouping", "neighbors") and not endless:
            keys = "each key and " if kind == "GroupByWindow" else ""
            if keys and not facts.groups:
                return  # it delivers the elements one by one
            if facts.drops if keys else self._graph.drops_last(node):
                what = (
                    "each data worker drops its incomplete last batch, so elements are missing, at "
                    f"most a batch for {keys}each data worker{later}"
                )
                yield change("counting", what, after)
            else:
                what = (
                    "each data worker groups its own elements, so the last group of "
                    f"{keys}each data worker may be short{later}"
                )
                yield change("grouping", what, after)

    def _joined(self, batch: Any, change: Callable[..., Change]) -> Change:
        """Return the change of batches whose rows an operation joins."""
        joiner = self._graph.joined_batches[batch.name]
        if OPERATIONS[node_kind(joiner)] == "grouping" and joiner is not batch:
            return change(
                "neighbors",
                "each data worker makes batches of its elements, so up to all examples of a later "
                "batch join elements that are not neighbors",
                "use one batch() and tf.reshape if they need not be neighbors, or make the "
                "examples in the function of flat_map()",
            )
        function = "its function" if joiner is batch else self._name(joiner)
        return change(
            "neighbors",
            f"each data worker makes batches of its elements, and {function} can join elements of "
            "a batch, so up to all of its results may differ",
            "shuffle before it if they need not be neighbors, or make the batches in the function "
            "of flat_map()",
        )

    def _by_result(
        self,
        kind: str,
        ordering: bool,
        node: Any,
        change: Callable[..., Change],
        facts: Facts,
        before: list[Flow],
        mode: str,
        workers: int,
    ) -> Iterator[Change]:
        """Yield the changes if each data worker runs all, and delivers a share of the results."""
        loses = lost(mode, workers)
        if ordering or facts.shuffles:
            fix = f"call {user_name(kind)}() with a seed"
            if facts.shuffles and not before:  # it has to be called here
                fix = "shuffle after distribute, not in its function"
            elif facts.shuffles or (reshuffles(node) and kind != "GlobalShuffle"):
                fix = f"call {user_name(kind)}() after distribute"
            what = f"the order differs on each data worker, {loses}"
            yield change("order", what, fix, refused=True)
        elif self._graph.is_unordered(node):
            yield change(
                "order",
                f"parallel calls deliver in any order, which differs on each data worker, {loses}",
                "use sloppy=False"
                if kind == "LegacyParallelInterleave"
                else "use deterministic=True",
                refused=True,
            )
        parts = [each.random for each in before]
        selection = self._random.selection(node, parts)
        if selection == CERTAINLY or kind == "Sampling":
            yield change(
                "order",
                f"the random selection differs on each data worker, {loses}",
                "select by a part of the element, such as a hash of its key",
                refused=True,
            )
        elif selection:
            source = "an operation before it" if any(parts) else "an operation in it"
            if facts.names:
                source = "a Python function"
            yield change(
                "order",
                f"if it selects or orders by random numbers of {source}, the result differs on "
                f"each data worker, {loses}",
                "select by a part of the element, such as a hash of its key, and shuffle after "
                "distribute",
            )

    def _repeated(
        self,
        kind: str,
        node: Any,
        change: Callable[..., Change],
        facts: Facts,
        alike: bool,
        whole: bool,
        divided: bool,
    ) -> Iterator[Change]:
        """Yield the changes of random numbers and of captured state, in all modes.

        If `alike` is true, each element has the same numbers of a seed on each data worker. If
        `whole` is true, each data worker needs the same order. If `divided` is true, it gets a part
        of the elements.
        """
        unseeded = "use tf.random.uniform or the like without a seed, or tf.random.stateless_* "
        variables, tables = self._graph.captured_state(node)
        if variables and (facts.generates or (facts.assigns and facts.derives)):
            yield change(
                "random",
                "a generator, or a layer that draws numbers, gives the same numbers on each data "
                "worker and in each epoch",
                f"{unseeded}with a seed that is a part of the element",
            )
        elif (variables or tables) and facts.assigns:
            what = (
                f"each data worker changes its own copy of a {'variable' if variables else 'table'}"
            )
            what += ", in each epoch from the start"
            yield change("captured", what, "change it after distribute")
            tables = False
        elif variables:
            yield change(
                "captured",
                "variables keep the value that they have now",
                "distribute the dataset again after a variable has changed",
            )
        if facts.states:
            names = " and ".join({state.name: None for state in facts.states})
            what = f"each data worker has a copy of {names} as it is now"
            if divided and counters(facts.states, [COUNTER, EARLIER]):
                what += ", and changes it, so up to all results differ"
            yield change("python", what, renewal(facts.states, divided))
        if tables:
            yield change(
                "captured",
                "tables keep the entries that they have now",
                "distribute the dataset again after a table has changed",
            )
        source = kind in ("Random", "Sampling") and self._graph.is_seeded(node)
        fix = "omit the seed" if source else f"{unseeded}with a seed that is a part of the element"
        if (facts.seeded or source) and not alike:
            yield change("random", "the seed gives the same numbers on each data worker", fix)
        if OPERATIONS.get(kind) == "ordering" and self._graph.is_seeded(node) and reshuffles(node):
            yield change(
                "random",
                "the seed gives the same order in each epoch",
                ("" if whole else "omit the seed, also of tf.random.set_seed, or ")
                + "shuffle after distribute, if it does not separate data for validation",
            )

    def _name(self, node: Any) -> str:
        stage = self._stages.get(node.name)
        name = user_name(node_kind(node)) if stage is None else stage.name
        if node_kind(node) == "DirectedInterleave" and not self._graph.selects_at_random(node):
            name = name.replace("sample_from_datasets", "choose_from_datasets", 1)
        before = self._graph.before(node)
        if (
            node_kind(node) == "Zip"
            and len(before) == 2
            and any(map(self._graph.is_counter, before))
        ):
            name = name.replace("zip", "enumerate", 1)
        return name if stage is not None else f"{name}()"
