"""Bottlenecks of a pipeline: their detection from figures, and their texts."""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tfd_notebook._compat.tf_data.pipeline_model import Model, Node, Splits, Stage, splits_of
from tfd_notebook.data.bottleneck.advice import advise, missing_consumers
from tfd_notebook.data.bottleneck.classification import (
    Bottleneck,
    judge,
    judge_service,
    needs_cores,
    slow_worker,
)
from tfd_notebook.data.bottleneck.cost_model import Costs, Measurement
from tfd_notebook.data.bottleneck.live_limit import worker_limit
from tfd_notebook.data.bottleneck.scaling_estimate import forecast
from tfd_notebook.data.bottleneck.usage import Delivery, WorkerUtilization
from tfd_notebook.model.limit import DATA_KINDS, Limit, compare

FIGURES = {"elements_per_s": 40.0, "wait_fraction": 0.9, "cpu_cores": 1.0}


def stage(kind: str, *inputs: Stage, python: bool = False, number: int | None = None) -> Stage:
    return Stage(
        kind, kind.lower(), "In[1], line 2", inputs, python, dataset=object(), number=number
    )


def node(
    number: int,
    kind: str,
    *inputs: int,
    seconds: float = 0.0,
    pool: bool = False,
    threads: float = 1.0,
) -> Node:
    return Node(number, kind, pool, inputs, round(100 * seconds), seconds, threads, 0)


def grown(*nodes: Node) -> list[Model]:
    """Return an empty model and the model with `nodes`."""
    before = [Node(n.id, n.kind, n.asynchronous, n.inputs, 0, 0.0, n.parallelism, 0) for n in nodes]
    return [Model({n.id: n for n in each}, nodes[0].id) for each in (before, nodes)]


def costs(last: Stage, *nodes: Node, seconds: float = 10.0) -> Costs:
    result = Costs(last)
    for model in grown(*nodes):
        result.add(model, seconds)
    return result


def measured(lanes: tuple = (), **figures: float) -> Measurement:
    known = {"elements": 400, "bytes": 4_000, "seconds": 10.0, "waited": 9.5, "first": 0.01}
    known |= {"cpu": 1.0, "locked": 0.0}
    return Measurement(**{**known, **figures}, lanes=lanes)  # type: ignore[arg-type]


class TestSentence:
    @pytest.mark.parametrize("kind", DATA_KINDS)
    def test_each_kind_is_one_line_with_its_rate(self, kind: str) -> None:
        limit = Limit(kind, "map(f) (In[3], line 4)", 0.93, FIGURES, "do less", 1.8, "no service")
        text = repr(limit)
        advice = "Do less" if kind == "none" else "Try: do less"
        assert text.endswith(f"elements/s). {advice} (about 1.8x faster). Service: no service.")
        assert "40 elements/s" in text
        assert text.count(". ") == 2
        assert "\n" not in text

    def test_no_bottleneck_gives_no_advice(self) -> None:
        assert repr(Limit("none")) == "No bottleneck."

    def test_stage_has_its_source_location(self) -> None:
        assert "map(f) (In[3], line 4)" in repr(Limit("stage", "map(f) (In[3], line 4)", 0.5))


class TestCompare:
    def test_faster_gain_has_its_factor(self) -> None:
        before = Limit("stage", "map(f)", 0.9, FIGURES, "change it", 2.0)
        after = Limit("consumer", "", 0.9, {**FIGURES, "elements_per_s": 76.0})
        result = compare(before, after)
        assert result.gain == pytest.approx(1.9)
        assert "40.0 to 76.0 elements/s" in repr(result)
        assert "1.9x faster (expected: 2.0x)" in repr(result)
        assert "was map(f), is now consumer" in repr(result)

    def test_slower_and_the_same(self) -> None:
        slow = Limit("stage", "map(f)", 0.9, {**FIGURES, "elements_per_s": 20.0})
        fast = Limit("stage", "map(f)", 0.9, FIGURES)
        assert "2.0x slower" in repr(compare(fast, slow))
        assert "as fast as before" in repr(compare(fast, fast))
        assert "still map(f)" in repr(compare(fast, fast))

    def test_batches_and_single_elements_are_compared_by_bytes(self) -> None:
        single = Limit("transfer", figures={"elements_per_s": 4000.0, "bytes_per_s": 32_000.0})
        batched = Limit("none", figures={"elements_per_s": 400.0, "bytes_per_s": 204_800.0})
        change = compare(single, batched)
        assert change.gain == pytest.approx(6.4)
        assert "6.4x faster" in repr(change)
        assert "bytes/s" in repr(change)

    def test_coordinators(self) -> None:
        slow, fast = (Limit("compute", figures={"closures_per_s": rate}) for rate in (10.0, 30.0))
        assert compare(slow, fast).gain == 3.0
        assert "closures/s" in repr(compare(slow, fast))

    def test_gain_over_a_zero_rate_is_infinite(self) -> None:
        nothing = Limit("none", figures={"elements_per_s": 0.0})
        assert compare(nothing, Limit("none", figures=FIGURES)).gain == float("inf")
        assert compare(nothing, nothing).gain == 1.0

    def test_object_with_a_limit_is_accepted(self) -> None:
        class Stream:
            limit = Limit("none", figures=FIGURES)

        assert compare(Stream(), Stream()).gain == 1.0  # type: ignore[arg-type]


class TestCosts:
    def test_stages_of_one_thread_share_their_cost(self) -> None:
        source = stage("Range")
        mapped = stage("Map", source)
        last = stage("Batch", mapped)
        lanes = costs(
            last,
            node(1, "Root", 2),
            node(2, "Prefetch", 3, pool=True),  # TensorFlow's own
            node(3, "Batch", 4, seconds=1.0),
            node(4, "Map", 5, seconds=8.0),
            node(5, "Range", seconds=0.5),
        ).lanes()
        assert lanes[0].busy == pytest.approx(0.95)
        assert [part.stage for part in lanes[0].parts] == [mapped, last, source]

    def test_thread_pool_has_a_separate_cost(self) -> None:
        source = stage("TFRecord")
        mapped = stage("Map", source)
        lanes = costs(
            mapped,
            node(1, "Root", 2),
            node(2, "Map", 3, seconds=12.0, pool=True, threads=2),
            node(3, "FlatMap", 4, 5, seconds=1.0),
            node(4, "TensorSlice", seconds=0.0),
            node(5, "TFRecord", seconds=6.0),
        ).lanes()
        assert lanes[0].busy == pytest.approx(0.7)
        assert lanes[0].parts[0].stage is source
        assert lanes[0].parts[0].inner
        assert lanes[1].busy == pytest.approx(0.6)
        assert lanes[1].parts[0].stage is mapped

    def test_fused_batch_and_map_is_one_stage(self) -> None:
        source = stage("Range")
        last = stage("Batch", stage("Map", source))
        lanes = costs(
            last, node(1, "MapAndBatch", 2, seconds=9.0, pool=True), node(2, "Range", seconds=1.0)
        ).lanes()
        assert lanes[0].parts[0].stage is last.inputs[0]
        assert lanes[1].parts[0].stage is source

    def test_injected_prefetch_is_not_a_stage_of_the_user(self) -> None:
        wanted = stage("Prefetch", stage("Range"))
        mapped = stage("Map", wanted)
        lanes = costs(
            mapped,
            node(1, "Prefetch", 2, pool=True, seconds=0.1),
            node(2, "Map", 3, seconds=9.0),
            node(3, "Prefetch", 4, pool=True, seconds=0.2),
            node(4, "Range", seconds=3.0),
        ).lanes()
        assert lanes[0].parts[0].stage is mapped
        assert wanted in [part.stage for part in lanes[0].parts]

    def test_second_part_of_a_concatenation_is_measured(self) -> None:
        first, second = stage("Map", stage("Range")), stage("Map", stage("Range"))
        measured_costs = Costs(stage("Concatenate", first, second))

        def reading(child: int, seconds: float) -> Model:
            nodes = (node(1, "Concatenate", child), node(child, "Map", seconds=seconds))
            return Model({n.id: n for n in nodes}, 1)

        for model in (reading(2, 0.0), reading(2, 1.0), reading(5, 0.0), reading(5, 7.0)):
            measured_costs.add(model, 10.0)
        (lane,) = measured_costs.lanes()
        by_stage = {id(part.stage): part.seconds for part in lane.parts}
        assert by_stage[id(first)] == 1.0
        assert by_stage[id(second)] == 7.0

    def test_unseen_first_part_is_identified_by_its_kind(self) -> None:
        second = stage("Map", stage("Range"))
        measured_costs = costs(
            stage("Concatenate", stage("Range"), second),
            node(1, "Concatenate", 4),
            node(4, "Map", seconds=3.0),
        )
        (lane,) = measured_costs.lanes()
        assert lane.parts[0].stage is second

    def test_dataset_that_is_joined_with_itself_has_the_cost_of_each_use(self) -> None:
        mapped = stage("Map", stage("Range"))
        last = stage("Zip", mapped, mapped)
        lanes = costs(
            last,
            node(1, "Zip", 2, 3),
            node(2, "Map", seconds=3.0),
            node(3, "Map", seconds=4.0),
        ).lanes()
        (part,) = [part for lane in lanes for part in lane.parts if part.stage is mapped]
        assert (part.seconds, part.elements, part.inner) == (7.0, 700, False)

    def test_repetitions_are_the_same_stage(self) -> None:
        slow = stage("Map", stage("Range"))
        measured_costs = Costs(stage("Repeat", slow))
        for child, seconds in ((2, 0.0), (2, 1.0), (5, 2.0), (8, 3.0)):
            nodes = (node(1, "Repeat", child), node(child, "Map", seconds=seconds))
            measured_costs.add(Model({n.id: n for n in nodes}, 1), 10.0)
        (lane,) = measured_costs.lanes()
        assert [(part.stage, part.inner, part.seconds) for part in lane.parts[:1]] == [
            (slow, False, 6.0)
        ]

    def test_new_iterator_starts_from_zero(self) -> None:
        measured_costs = Costs(last := stage("Range"))
        for model in grown(node(1, "Range", seconds=5.0)):
            measured_costs.add(model, 10.0)
        measured_costs.restart()
        measured_costs.add(grown(node(7, "Range", seconds=5.0))[1], 10.0)
        (lane,) = measured_costs.lanes()
        assert lane.busy == pytest.approx(0.5)
        assert lane.parts[0].stage is last


class TestJudge:
    def lanes(self, busy: float, kind: str = "Map", **options: Any) -> tuple:
        self.source = stage("Range")
        self.last = stage(kind, self.source, **options)
        return tuple(
            costs(
                self.last, node(1, kind, 2, seconds=10 * busy), node(2, "Range", seconds=0.1)
            ).lanes()
        )

    def test_consumer_that_never_waits_is_the_bottleneck(self) -> None:
        lanes = self.lanes(0.9)
        bottleneck = judge(measured(lanes, waited=0.2), self.last, 2, has_consumer=True)
        assert (bottleneck.kind, bottleneck.share) == ("consumer", pytest.approx(0.98))

    def test_busy_stage_is_the_bottleneck(self) -> None:
        lanes = self.lanes(0.95)
        bottleneck = judge(measured(lanes), self.last, 4, has_consumer=True)
        assert (bottleneck.kind, bottleneck.stage, bottleneck.saturated) == (
            "stage",
            self.last,
            False,
        )

    def test_busy_source_is_the_bottleneck(self) -> None:
        last = stage("Map", source := stage("TFRecord"))
        lanes = costs(last, node(1, "Map", 2, seconds=1), node(2, "TFRecord", seconds=8)).lanes()
        bottleneck = judge(measured(tuple(lanes), cpu=0.2), last, 2, has_consumer=False)
        assert (bottleneck.kind, bottleneck.stage) == ("source", source)

    def test_python_with_the_gil_is_the_bottleneck(self) -> None:
        lanes = self.lanes(0.95, python=True)
        bottleneck = judge(measured(lanes, locked=0.9), self.last, 4, has_consumer=False)
        assert (bottleneck.kind, bottleneck.stage) == ("python", self.last)

    def test_waiting_python_function_is_a_stage(self) -> None:
        lanes = self.lanes(0.95, python=True)
        bottleneck = judge(measured(lanes, locked=0.0, cpu=0.1), self.last, 4, has_consumer=False)
        assert bottleneck.kind == "stage"

    def test_filling_buffer_is_the_bottleneck(self) -> None:
        lanes = self.lanes(0.9, kind="Shuffle", number=1_000)
        bottleneck = judge(measured(lanes, first=8.0), self.last, 4, has_consumer=False)
        assert (bottleneck.kind, bottleneck.stage) == ("stage", self.last)
        assert bottleneck.share == pytest.approx(8 / 18)

    @pytest.mark.parametrize(
        ("seconds", "kind"), [(0.0, "source"), (0.1, "stage"), (10.0, "source")]
    )
    def test_filling_buffer_is_found_on_a_busy_machine(self, seconds: float, kind: str) -> None:
        """The stage that fills the buffer hardly runs, and has produced some or all elements."""
        last = stage("Shuffle", source := stage("Range"), number=1_000)
        nodes = node(1, "Shuffle", 2), node(2, "Range", seconds=seconds)
        lanes = costs(last, *nodes, seconds=100.0).lanes()
        bottleneck = judge(measured(tuple(lanes), elements=0), last, 4, has_consumer=False)
        assert (bottleneck.kind, bottleneck.stage) == (kind, last if kind == "stage" else source)

    def test_small_buffer_does_not_explain_a_slow_start(self) -> None:
        lanes = self.lanes(0.9, kind="Shuffle", number=10)
        bottleneck = judge(measured(lanes, first=8.0), self.last, 4, has_consumer=False)
        assert bottleneck.share == pytest.approx(0.9, abs=0.02)

    def test_missing_elements_are_not_a_filling_buffer(self) -> None:
        last = stage("Shuffle", stage("Generator"), number=100)
        verdict = judge(measured(elements=0, first=10.0), last, 2, False)
        assert verdict.kind == "source"

    def test_slow_elements_are_not_a_filling_buffer(self) -> None:
        lanes = self.lanes(0.9, kind="Shuffle", number=1_000)
        bottleneck = judge(measured(lanes, first=5.0, elements=4), self.last, 4, has_consumer=False)
        assert bottleneck.share == pytest.approx(0.9, abs=0.02)

    def test_even_costs_have_no_bottleneck(self) -> None:
        lanes = self.lanes(0.2)
        assert judge(measured(lanes), self.last, 2, has_consumer=False).kind == "none"

    def test_single_elements(self) -> None:
        lanes = self.lanes(0.2)
        bottleneck = judge(measured(lanes, elements=90_000), self.last, 2, has_consumer=False)
        assert (bottleneck.kind, bottleneck.stage) == ("consumer", self.last)

    def test_missing_model_gives_no_bottleneck(self) -> None:
        assert judge(measured(), stage("Range"), 2, has_consumer=False).kind == "none"

    def test_wait_for_a_service_is_explained_by_the_service(self) -> None:
        last = stage("Map", stage("DataService"))
        lanes = costs(last, node(1, "Map", 2, seconds=1), node(2, "DataService", seconds=9)).lanes()
        assert judge(measured(tuple(lanes)), last, 2, has_consumer=True).kind == "workers"

    def test_busy_stage_after_a_service_is_the_bottleneck(self) -> None:
        last = stage("Map", stage("DataService"))
        lanes = costs(last, node(1, "Map", 2, seconds=9), node(2, "DataService", seconds=1)).lanes()
        bottleneck = judge(measured(tuple(lanes)), last, 4, has_consumer=True)
        assert (bottleneck.kind, bottleneck.stage) == ("stage", last)


class TestService:
    def workers(self, *rates: float, cpu: float = 0.5) -> list[WorkerUtilization]:
        return [
            WorkerUtilization(f"data_worker:{i}", "ready", cpu, r, (r, r, r))
            for i, r in enumerate(rates)
        ]

    def test_computing_workers_are_the_bottleneck(self) -> None:
        result = judge_service(measured(cpu=0.1), self.workers(1e6, 1e6, cpu=0.9), 2, 0.045, None)
        assert (result.kind, result.saturated) == ("workers", True)

    def test_sleeping_workers_need_no_core(self) -> None:
        """Another process, or the consumer, uses all cores."""
        result = judge_service(measured(cpu=2.0), self.workers(1e3, 1e3, cpu=0.03), 2, 0.1, None)
        assert (result.kind, result.saturated) == ("workers", False)
        inside = [WorkerUtilization("data_worker:0", "ready", None, None)]
        assert [needs_cores(inside, cpu) for cpu in (0.03, 0.9)] == [False, True]

    def test_transfer_that_costs_more_than_work_is_found(self) -> None:
        result = judge_service(measured(cpu=0.8), self.workers(1e6, 1e6), 2, 0.001, None)
        assert result.kind == "transfer"

    def test_transfer_is_estimated_from_bytes_without_a_local_run(self) -> None:
        heavy = measured(cpu=0.8, bytes=4_000_000_000)
        assert judge_service(heavy, self.workers(1e8, 1e8), 2, None, None).kind == "transfer"
        light = measured(cpu=0.1, bytes=4_000)
        busy = self.workers(1e3, 1e3, cpu=0.9)
        assert judge_service(light, busy, 2, None, None).kind == "workers"

    def test_inprocess_workers_have_no_transfer(self) -> None:
        workers = [WorkerUtilization(f"data_worker:{n}", "ready", None, None) for n in range(2)]
        result = measured(elements=3_000, bytes=4_500_000_000, cpu=1.9)
        assert judge_service(result, workers, 2, None, None).kind == "workers"

    def test_slow_worker_is_named(self) -> None:
        result = judge_service(measured(), self.workers(10.0, 10.0, 1.0, 9.0), 2, 0.01, None)
        assert (result.kind, result.task, result.share) == ("workers", "data_worker:2", 0.9)

    def test_missing_worker_is_named(self) -> None:
        gone = WorkerUtilization("data_worker:1", "restarting", None, None)
        result = judge_service(measured(), [*self.workers(1.0), gone], 2, 0.01, None)
        assert (result.kind, result.name) == ("workers", "data_worker:1 (restarting)")

    def test_worker_without_splits_is_not_named(self) -> None:
        idle = WorkerUtilization("data_worker:3", "ready", 0.0, 0.0)
        new = WorkerUtilization("data_worker:4", "starting", None, None)
        workers = [*self.workers(10.0, 10.0, 10.0, cpu=0.6), idle, new]
        assert judge_service(measured(), workers, 2, 0.04, None).task == ""


class TestWorkerLimit:
    def test_workers_are_busy_idle_slow_or_unknown(self) -> None:
        names = [f"data_worker:{number}" for number in range(4)]
        rates = (0.99, 10.0), (0.1, 10.0), (0.1, 1.0), (0.1, 9.0)
        workers = [
            WorkerUtilization(n, "ready", *r, (r[1],) * 3)
            for n, r in zip(names, rates, strict=True)
        ]
        kinds = [worker_limit(name, workers).kind for name in names]
        assert kinds == ["workers", "none", "workers", "none"]
        assert "restart or replace data_worker:2" in worker_limit(names[2], workers).advice
        assert worker_limit("dispatcher:0", workers).kind == "none"

    def test_busy_worker_gets_advice_only_while_it_is_the_bottleneck(self) -> None:
        busy = [WorkerUtilization("data_worker:0", "ready", 0.99, 10.0)]
        for now, kind in (
            (Limit("workers", figures=FIGURES), "workers"),
            (Limit("workers", figures={**FIGURES, "elements_per_s": 0.0}), "none"),
            (Limit("consumer", figures=FIGURES), "none"),
        ):
            limit = worker_limit("data_worker:0", busy, now=now)
            assert (limit.kind, bool(limit.advice)) == (kind, kind == "workers")

    def test_slower_worker_of_two_is_named(self) -> None:
        workers = [
            WorkerUtilization("data_worker:0", "ready", 0.9, 100.0, (100.0,) * 3),
            WorkerUtilization("data_worker:1", "ready", 0.2, 10.0, (10.0,) * 3),
        ]
        assert worker_limit("data_worker:1", workers).share == pytest.approx(0.9)
        even = [WorkerUtilization(w.task, w.state, w.cpu, 100.0, (100.0,) * 3) for w in workers]
        assert worker_limit("data_worker:1", even).kind == "none"


def accused(*workers: tuple[tuple[float, ...], float | None]) -> str:
    """Return the slow worker, given the rates and the busy share of each worker."""
    result = slow_worker(
        [
            WorkerUtilization(f"data_worker:{i}", "ready", 0.1, sum(r) / max(len(r), 1), r, working)
            for i, (r, working) in enumerate(workers)
        ],
        None,
    )
    return result.task if result is not None else ""


class TestSlowWorker:
    """Measured rates, about one per second, the latest last."""

    def test_worker_without_a_split_of_the_source_is_not_slow(self) -> None:
        class Cluster:
            """Stand-in for a cluster."""

        cluster, splits = Cluster(), Splits(1, "from_generator(slow)", "Generator")
        delivery = Delivery(weakref.ref(cluster), -1, "DYNAMIC", None, splits=splits)  # type: ignore[arg-type]
        rates = [(30.0, 31.0, 30.0), (100.0, 99.0, 101.0)]
        workers = [
            WorkerUtilization(f"data_worker:{i}", "ready", 0.1, each[-1], each)
            for i, each in enumerate(rates)
        ]
        assert slow_worker(workers, None) is not None
        assert slow_worker(workers, delivery) is None
        failed = [replace(workers[0], state="failed"), workers[1]]
        assert slow_worker(failed, delivery) is not None

    def test_worker_with_equal_bytes_and_waiting_peers(self) -> None:
        slow, fast = ((80.0, 81.0, 79.0), 1.0), ((81.0, 80.0, 80.0), 0.3)
        assert accused(fast, slow, fast) == "data_worker:1"
        assert accused(fast, fast, fast) == accused(slow, slow, slow) == ""

    def test_worker_that_stops_again_and_again(self) -> None:
        """Four workers of a coordinated read. One of them is stopped in 0.45 s of every 0.5 s.

        It is measured less often, so that its average is still that before the stops.
        """
        fast = (3_918_835.0, 595_327.0, 774_746.0, 815_682.0), 0.16
        stalled = (7_603_857.0, 3_245_924.0, 595_620.0, 754_848.0), 0.95
        assert accused(fast, fast, stalled, fast) == "data_worker:2"
        fast, stalled = ((1_109.0, 1_085.0, 1_070.0), 0.4), ((989.0, 1_122.0, 661.0), 1.0)
        assert accused(fast, fast, stalled, fast) == "data_worker:2"

    def test_worker_with_late_replies(self) -> None:
        """All workers of mode "off" are busy. The stopped one has been measured once, or never."""

        def named(*workers: tuple[float | None, int]) -> str:
            result = slow_worker(
                [
                    WorkerUtilization(f"data_worker:{i}", "ready", 0.1, sent, (), 1.0, late)
                    for i, (sent, late) in enumerate(workers)
                ],
                None,
            )
            return result.task if result is not None else ""

        fast = (12_000.0, 0)
        assert named(fast, fast, (1_300.0, 2)) == named(fast, fast, (None, 2)) == "data_worker:2"
        assert named(fast, (1_300.0, 3), (9_000.0, 1)) == "data_worker:1"
        # It stopped once, its host is overloaded, or it replies late because it works more.
        assert named(fast, fast, (1_300.0, 1)) == named((12_000.0, 2), (1_300.0, 3)) == ""
        assert named((100.0, 0), (12_000.0, 3)) == named((None, 3)) == ""

    def test_slow_worker_between_two_batches(self) -> None:
        """It computes all the time, and sends a batch every few seconds."""
        fast, slow = ((11_929.0, 14_629.0, 12_060.0), 0.8), ((94.0, 68.0, 933.0), 0.92)
        assert accused(fast, fast, slow, fast) == "data_worker:2"

    def test_worker_with_proportional_work_is_not_slow(self) -> None:
        assert accused(((40.0,) * 3, 0.4), ((80.0,) * 3, 1.0)) == ""

    def test_first_seconds_are_not_judged(self) -> None:
        assert accused(((0.4, 62.0), None), ((0.4, 129.0), None)) == ""
        assert accused(((129.0,), None), ((0.1,), None)) == ""
        assert accused(((0.0, 7.0, 7.0), 0.5), ((1.0, 54.0, 54.0), 0.5)) == ""

    def test_short_stops_do_not_count(self) -> None:
        """Rates of three workers after one of them was stopped for 2 s."""
        rates = (152.0, 154.0, 24.0), (154.0, 153.0, 58.0), (152.0, 154.0, 12.0)
        assert accused(*((each, 1.0) for each in rates)) == ""
        rates = (154.0, 24.0, 169.0), (154.0, 24.0, 169.0), (153.0, 0.0, 30.0)
        assert accused(*((each, 1.0) for each in rates)) == ""

    def test_an_idle_worker(self) -> None:
        working, idle = ((154.0, 150.0, 160.0), 1.0), ((0.0, 0.0, 0.0), 0.0)
        assert accused(working, idle, working) == ""
        assert accused(working, idle, idle) == ""
        for share in (0.2, None):  # it sends empty answers
            assert accused(working, ((0.5, 0.6, 0.5), share)) == ""


class TestAdvice:
    def test_more_workers_are_advised_only_with_a_free_core(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Cluster:
            """Stand-in for a cluster with a variable in `__main__`."""

            owner = object()

        workers = Bottleneck("workers", 0.9)
        assert advise(workers, 2) == "cluster.scale(data_workers=3)"
        assert advise(replace(workers, saturated=True), 2).endswith("all cores are busy")
        cluster = Cluster()
        delivery = Delivery(weakref.ref(cluster), -1, "OFF", None)  # type: ignore[arg-type]
        assert advise(workers, 2, delivery) == "cluster.scale(data_workers=3)"
        monkeypatch.setattr(sys.modules["__main__"], "images", cluster.owner, raising=False)
        assert advise(workers, 2, delivery) == "images.scale(data_workers=3)"
        busy = [WorkerUtilization("data_worker:0", "ready", 0.99, None)]
        assert worker_limit("data_worker:0", busy).advice == "cluster.scale(data_workers=2)"
        assert worker_limit("data_worker:0", busy, saturated=True).advice.endswith(
            "all cores are busy"
        )

    def test_pipeline_for_one_data_worker_gets_no_advice_to_scale(self) -> None:
        delivery = Delivery(lambda: None, -1, "DYNAMIC", None, one_worker=True)  # type: ignore[arg-type, return-value]
        assert [delivery.can_use(count) for count in (1, 2, 3)] == [1, 1, 1]
        text = advise(Bottleneck("workers", 0.9), 1, delivery)
        assert 'semantics="same"' in text
        assert "scale(" not in text

    @pytest.mark.parametrize("mode", ["DYNAMIC", "FILE", "FILE_OR_DATA", "DATA"])
    def test_source_without_more_to_read_gets_no_advice_to_scale(self, mode: str) -> None:
        class Cluster:
            """Stand-in for a cluster."""

            owner = None

        cluster, splits = Cluster(), Splits(2, "TFRecordDataset()", "TFRecord")
        delivery = Delivery(weakref.ref(cluster), -1, mode, None, splits=splits)  # type: ignore[arg-type]
        few = 1 if mode == "DATA" else 2
        assert [delivery.can_use(count) for count in (1, 2, 3)] == [1, few, few]
        text = advise(Bottleneck("workers", 0.9), 2, delivery)
        assert "More data workers cannot help" in text
        assert "scale(" not in text
        # The second of two data workers has a share of the data, so it can be slow.
        workers = [
            WorkerUtilization(f"data_worker:{i}", "ready", 0.1, each, (each,) * 3)
            for i, each in enumerate((30.0, 100.0))
        ]
        slow = slow_worker(workers, delivery)
        assert slow is not None
        assert slow.task == "data_worker:0"

    @pytest.mark.parametrize(
        ("local", "others", "text"),
        [
            ([0], 0, "but not with consumer_index=1 and consumer_index=2"),
            ([0], 1, "consumer_index=2. Other processes read with 1 of these"),
            ([0, 2], 0, "consumer_index=0 and consumer_index=2, but not with consumer_index=1"),
            ([0, 2], 1, ""),
            ([0, 1, 2], 0, ""),
            (
                [0, 1],
                None,
                "consumer_index=2. Other processes may read with these",
            ),
            ([0, 1, 2], None, ""),
        ],
    )
    def test_missing_consumers_of_a_coordinated_read_are_named(
        self, local: list[int], others: int | None, text: str
    ) -> None:
        cluster: Any = SimpleNamespace(readers=lambda job_name: (local, others))
        delivery = Delivery(lambda: cluster, -1, "OFF", "rounds", consumer=(0, 3))  # type: ignore[arg-type]
        advice = missing_consumers(delivery)
        assert advice.endswith(text)
        assert advice.startswith("start the missing consumers of job 'rounds'") == bool(text)
        assert bool(missing_consumers(delivery, unregistered=1)) == (len(local) < 3)
        assert missing_consumers(replace(delivery, consumer=None)) == missing_consumers(None) == ""

    def test_repeated_files_are_assigned_once(self) -> None:
        names = tf.data.Dataset.from_tensor_slices(["a", "b"])
        for read in (
            names.interleave(tf.data.TFRecordDataset),
            tf.data.TFRecordDataset(["a", "b"]),
        ):
            assert splits_of(read.repeat()) is None
            splits = splits_of(read.repeat().batch(2), by_file=True)
            assert splits is not None
            assert splits.count == 2
        assert splits_of(names.repeat().interleave(tf.data.TFRecordDataset), by_file=True) is None

    def test_code_for_a_dataset_names_its_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Dataset:
            """Stand-in for a dataset, of which only the variable's name matters."""

            element_spec = ()

        origin, read = Dataset(), Dataset()
        transfer, copy = Bottleneck("transfer", 0.9), Bottleneck("device_copy", 0.9)
        unnamed = advise(transfer, 2, dataset=read, origin=origin)
        assert unnamed == advise(transfer, 2)
        assert unnamed.startswith("call batch() before distribute, or pass")
        assert advise(copy, 2, dataset=read) == advise(copy, 2)
        monkeypatch.setattr(sys.modules["__main__"], "numbers", origin, raising=False)
        monkeypatch.setattr(sys.modules["__main__"], "images", read, raising=False)
        assert advise(transfer, 2, dataset=read, origin=origin).startswith(
            "call batch() before distribute: numbers.batch(64), or pass"
        )
        assert advise(copy, 2, dataset=read).endswith(": images = images.prefetch(2)")

    def test_elements_without_batches_become_tensors_first(self) -> None:
        optionals = tf.data.Dataset.range(2).map(tf.experimental.Optional.from_value)
        consumer = Bottleneck("consumer", 0.9, stage("Range"))
        convert = "turn the elements into tensors, and "
        for dataset, first in ((tf.data.Dataset.range(2), ""), (optionals, convert)):
            assert advise(consumer, 0, dataset=dataset).startswith(f"{first}call batch() before")
            transfer = advise(Bottleneck("transfer", 0.9), 2, origin=dataset)
            assert transfer.startswith(f"{first}call batch() before distribute")

    def test_unset_variable_is_not_the_clusters_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Cluster:
            """Stand-in for a cluster without a variable."""

            owner = None

        delivery = Delivery(weakref.ref(Cluster()), -1, "OFF", None)  # type: ignore[arg-type]
        monkeypatch.setattr(sys.modules["__main__"], "empty", None, raising=False)
        assert advise(Bottleneck("workers", 0.9), 2, delivery) == "cluster.scale(data_workers=3)"


class TestForecast:
    def estimate(self, **changes: object) -> list:
        known = {
            "workers": 1,
            "rates": [100.0, 100.0],
            "wait_fraction": 0.99,
            "worker_cpu": 0.5,
            "consumer_cpu": 0.0,
            "cores": 4,
        }
        return forecast((1, 2, 4, 16), **{**known, **changes})  # type: ignore[arg-type]

    def test_rate_grows_with_workers_up_to_the_cores(self) -> None:
        result = self.estimate()
        assert [round(f.elements_per_s) for f in result] == [100, 200, 400, 800]
        assert [f.because for f in result] == ["workers", "workers", "workers", "processors"]

    def test_consumer_that_does_not_wait_gains_nothing(self) -> None:
        result = self.estimate(wait_fraction=0.0)
        assert [f.because for f in result[1:]] == ["consumer"] * 3
        assert result[-1].elements_per_s == pytest.approx(100)

    def test_bottleneck_after_the_workers_limits_the_gain(self) -> None:
        result = self.estimate(behind=True)
        assert [f.because for f in result[1:]] == ["pipeline"] * 3
        assert result[-1].elements_per_s == pytest.approx(100)

    def test_slow_worker_limits_the_gain(self) -> None:
        result = self.estimate(slow=True, workers=2)
        assert [f.because for f in result] == ["workers", *["slow_worker"] * 3]
        assert [round(f.elements_per_s) for f in result] == [50, 100, 100, 100]

    def test_more_workers_than_splits_do_not_help(self) -> None:
        result = self.estimate(useful=lambda count: min(count, 2))
        assert [round(f.elements_per_s) for f in result] == [100, 200, 200, 200]
        assert [f.because for f in result] == ["workers", "workers", "splits", "splits"]

    def test_remote_workers_add_cores(self) -> None:
        assert self.estimate(cores=None, wait_fraction=1.0)[-1].elements_per_s == pytest.approx(
            1600
        )

    def test_uncertainty_grows_with_noise_and_extrapolation(self) -> None:
        calm, noisy = self.estimate(), self.estimate(rates=[50.0, 150.0])
        for points in (calm, noisy):
            assert all(f.low <= f.elements_per_s <= f.high for f in points)
            assert points[0].high - points[0].low < points[1].high - points[1].low
        assert noisy[0].high > calm[0].high
