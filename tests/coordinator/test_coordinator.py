"""A coordinator on real servers: TensorFlow's contract and the extensions."""

from __future__ import annotations

import contextlib
import copy
import errno
import inspect
import os
import pickle
import re
import socket
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook._compat.tf_coordinator import connection
from tfd_notebook.coordinator.coordinator import Coordinator
from tfd_notebook.errors import (
    FilterFailed,
    NoWorkers,
    PausedError,
    StateError,
    TimeLimit,
    UnknownName,
    UsageError,
    ValueGone,
)
from tfd_notebook.net import ports

pytestmark = pytest.mark.integration

#: Long enough to run throughout a test, which cancels it.
ENDLESS = 10**12


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(workers=2, ps=1, name="coordinated") as cluster:
        cluster.coordinator()  # its threads run until the cluster stops
        yield cluster


@pytest.fixture(scope="module")
def variable(cluster: tfd.Cluster) -> Any:
    with cluster.coordinator().strategy.scope():
        return tf.Variable(0.0)


@pytest.fixture(scope="module")
def add(variable: Any) -> Any:
    @tf.function
    def add(amount: Any) -> Any:
        variable.assign_add(amount)
        return variable.read_value()

    return add


@tf.function
def count_to(limit: Any) -> Any:
    number = tf.constant(0, tf.int64)
    while number < limit:
        number += 1
    return number


@tf.function
def fail(number: Any) -> Any:
    tf.debugging.assert_less(number, 0.0, message="this one fails")
    return number


@pytest.fixture
def coordinator(cluster: tfd.Cluster) -> Iterator[Coordinator]:
    """Return the coordinator in its initial state: not paused, empty, without breakpoints."""
    result = cluster.coordinator()
    yield result
    result.break_on(failure=False)
    result.resume()
    for worker in result.paused_workers:
        result.resume_worker(worker)
    result.join(timeout=60)


def state_of(coordinator: Coordinator, value: Any) -> str:
    return str(coordinator.values.records(1_000)[value._tfd_key]["state"])


def error_text(error: BaseException) -> str:
    """Return the displayed text of an error."""
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


def scalar() -> Any:
    return tf.constant(1.0)


class TestContract:
    def test_coordinator_is_tensorflows_class_and_a_singleton(self, cluster: tfd.Cluster) -> None:
        coordinator = cluster.coordinator()
        assert isinstance(coordinator, tf.distribute.coordinator.ClusterCoordinator)
        again = tf.distribute.coordinator.ClusterCoordinator(coordinator.strategy)
        assert again is coordinator

    def test_a_copy_is_the_coordinator(self, cluster: tfd.Cluster) -> None:
        """A second object would stop the threads of the first one when it is collected."""
        coordinator = cluster.coordinator()
        assert copy.copy(coordinator) is coordinator
        assert copy.deepcopy([coordinator])[0] is coordinator
        with pytest.raises(UsageError, match="this Coordinator cannot be sent"):
            pickle.dumps(coordinator)
        assert cluster.coordinator(coordinator.strategy) is coordinator
        assert {coordinator: 1}[coordinator] == 1
        assert coordinator == copy.copy(coordinator) != cluster
        assert repr(coordinator).startswith("<Coordinator on: 2 workers, <")
        assert copy.deepcopy([coordinator.values])[0] is coordinator.values

    def test_a_copy_is_the_remote_value(self, cluster: tfd.Cluster) -> None:
        """Another object would never get the result of the closure."""
        value = cluster.coordinator().schedule(tf.function(scalar))
        assert copy.copy(value) is value
        assert copy.deepcopy({"loss": value})["loss"] is value
        with pytest.raises(UsageError, match="send the result of its fetch"):
            pickle.dumps(value)
        assert value.fetch() == 1.0

    def test_the_doctor_ignores_variables_that_the_strategy_sets(
        self, cluster: tfd.Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY" in os.environ
        assert "TFD832" not in tfd.doctor(cluster).codes
        monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "3")
        (finding,) = (f for f in tfd.doctor(cluster) if f.code == "TFD832")
        assert finding.what.startswith("TF_NUM_INTEROP_THREADS changed")

    def test_schedule_join_done_and_fetch_work(
        self, coordinator: Coordinator, add: Any, variable: Any
    ) -> None:
        before = variable.numpy()
        values = [coordinator.schedule(add, args=(scalar(),)) for _ in range(20)]
        coordinator.join()
        assert coordinator.done()
        assert max(coordinator.fetch(values)) == before + 20
        assert values[0].fetch() == values[0].get().numpy()
        assert coordinator.fetch({"a": values[1], "b": 3})["b"] == 3

    def test_results_are_copied_without_functions(self, coordinator: Coordinator) -> None:
        """TensorFlow runs ``tf.identity`` of a remote tensor as a function on its worker."""

        @tf.function
        def structure() -> Any:
            return tf.constant(1.0), {"ragged": tf.ragged.constant([[1], [2, 3]])}

        value = coordinator.schedule(structure)
        coordinator.join(timeout=60)
        operations: list[str] = []

        def record(name: str, *_: Any, **__: Any) -> None:
            operations.append(name)

        op_callbacks.add_op_callback(record)
        try:
            scalar, parts = value.get()
        finally:
            op_callbacks.remove_op_callback(record)
        assert operations == []
        assert (float(scalar), parts["ragged"].to_list()) == (1.0, [[1], [2, 3]])

    def test_a_function_without_a_result_and_keywords(self, coordinator: Coordinator) -> None:
        @tf.function
        def nothing(x: Any, y: Any = None) -> None:
            tf.print(x, y, output_stream=tf.compat.v1.logging.info)

        assert (
            coordinator.schedule(nothing, args=(scalar(),), kwargs={"y": scalar()}).fetch() is None
        )

    def test_error_of_a_result_has_an_explanation(self, coordinator: Coordinator) -> None:
        @tf.function
        def gone(x: Any) -> None:
            tf.debugging.assert_less(x, 0.0, "invalid device")

        value = coordinator.schedule(gone, args=(scalar(),))
        for fetch in (value.fetch, value.get, lambda: coordinator.fetch([value])):
            with pytest.raises(tf.errors.InvalidArgumentError) as caught:
                fetch()
            assert "create it again with the current strategy" in error_text(caught.value)
        with pytest.raises(tf.errors.InvalidArgumentError):
            coordinator.join()

    def test_cluster_waits_for_its_closures(
        self, coordinator: Coordinator, cluster: tfd.Cluster, add: Any
    ) -> None:
        coordinator.schedule(add, args=(scalar(),))
        assert cluster.join(timeout=60)
        assert coordinator.done()
        endless = coordinator.schedule(count_to, args=(tf.constant(ENDLESS, tf.int64),))
        with pytest.raises(TimeLimit, match="1 are running"):
            cluster.join(timeout=0.2)
        coordinator.cancel(endless)
        coordinator.pause()
        coordinator.schedule(add, args=(scalar(),))
        with pytest.raises(PausedError):
            cluster.join()

    def test_each_worker_has_a_dataset(self, coordinator: Coordinator) -> None:
        dataset = coordinator.create_per_worker_dataset(
            lambda: tf.data.Dataset.from_tensor_slices([3] * 3).repeat()
        )
        iterator = iter(dataset)

        @tf.function
        def following(iterator: Any) -> Any:
            return next(iterator)

        assert coordinator.schedule(following, args=(iterator,)).fetch() == 3

    @pytest.mark.parametrize("given", ["function", "dataset", "step"])
    def test_dataset_in_the_memory_of_this_process_is_refused(
        self, coordinator: Coordinator, given: str
    ) -> None:
        """A step on a worker in another process would wait for its elements indefinitely."""

        @tf.function
        def following(iterator: Any) -> Any:
            return next(iterator)

        with tfd.Cluster(data_workers=1, name="inside", launcher="inprocess") as inside:

            def dataset(**options: Any) -> Any:
                return tf.data.Dataset.range(8).batch(4).apply(inside.distribute("off", **options))

            def use(**options: Any) -> Any:
                if given == "step":
                    step = tf.function(lambda: next(iter(dataset(**options))))
                    return [coordinator.schedule(step) for _ in range(2)][-1]
                create = partial(dataset, **options)
                each = coordinator.create_per_worker_dataset(
                    create if given == "function" else create()
                )
                return coordinator.schedule(following, args=(iter(each),))

            for options in ({}, {"target_workers": "LOCAL", "data_transfer_protocol": "grpc"}):
                with pytest.raises(NoWorkers, match="another process and would wait") as caught:
                    use(**options)
                assert inside.dispatcher.target.removeprefix("grpc://") in str(caught.value)
                assert 'data_transfer_protocol="grpc"' in str(caught.value.fix)
            assert use(data_transfer_protocol="grpc").fetch().tolist() == [0, 1, 2, 3]
        coordinator.join()

    def test_documented_example_runs(self, coordinator: Coordinator) -> None:
        strategy = coordinator.strategy

        def dataset_fn() -> Any:
            return tf.data.Dataset.from_tensor_slices([1, 1, 1])

        with strategy.scope():
            total = tf.Variable(initial_value=0)

        @tf.function
        def worker_fn(iterator: Any) -> Any:
            def replica_fn(x: Any) -> Any:
                total.assign_add(x)
                return total.read_value()

            return strategy.run(replica_fn, args=(next(iterator),))

        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        result = coordinator.schedule(worker_fn, args=(iterator,))
        assert coordinator.fetch(result) == 1

    def test_error_cancels_the_other_closures_once(
        self, coordinator: Coordinator, add: Any
    ) -> None:
        coordinator.pause()
        bad = coordinator.schedule(fail, args=(scalar(),))
        rest = [coordinator.schedule(add, args=(scalar(),)) for _ in range(5)]
        coordinator.pause_worker(1)
        coordinator.step(1)
        with pytest.raises(tf.errors.InvalidArgumentError, match="this one fails"):
            coordinator.join()
        with pytest.raises(tf.errors.InvalidArgumentError, match="this one fails"):
            bad.fetch()
        for value in rest:
            with pytest.raises(tf.errors.CancelledError):
                value.fetch()
        coordinator.resume()
        assert coordinator.schedule(add, args=(scalar(),)).fetch() > 0
        assert coordinator.done()

    def test_schedule_works_during_join(self, coordinator: Coordinator, add: Any) -> None:
        running = coordinator.schedule(count_to, args=(tf.constant(ENDLESS, tf.int64),))
        joined = threading.Thread(target=coordinator.join)
        joined.start()
        later = coordinator.schedule(add, args=(scalar(),))
        assert later.fetch() > 0
        assert joined.is_alive()
        assert coordinator.cancel(running)
        joined.join(60)
        assert not joined.is_alive()


class TestBadInput:
    def test_plain_function_can_be_scheduled(self, coordinator: Coordinator) -> None:
        with pytest.raises(TypeError, match=r"tf\.function"):
            coordinator.schedule(lambda: 1)

    def test_remote_value_can_be_an_argument(self, coordinator: Coordinator, add: Any) -> None:
        value = coordinator.schedule(add, args=(scalar(),))
        with pytest.raises(ValueError, match="RemoteValue"):
            coordinator.schedule(add, args=(value,))
        assert coordinator.schedule(add, args=(scalar(),)).fetch() > 0

    def test_untraceable_function_is_an_error(self, coordinator: Coordinator, add: Any) -> None:
        @tf.function
        def broken() -> Any:
            raise RuntimeError("not traceable")

        with pytest.raises(RuntimeError, match="not traceable"):
            coordinator.schedule(broken)
        assert coordinator.schedule(add, args=(scalar(),)).fetch() > 0

    @pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
    def test_invalid_number_of_steps_is_refused(self, coordinator: Coordinator, count: Any) -> None:
        coordinator.pause()
        with pytest.raises(UsageError, match="step"):
            coordinator.step(count)

    def test_step_without_a_pause_is_refused(self, coordinator: Coordinator) -> None:
        with pytest.raises(StateError, match="not paused"):
            coordinator.step()

    @pytest.mark.parametrize("worker", [2, -1, "0", True])
    def test_unknown_worker_is_refused(self, coordinator: Coordinator, worker: Any) -> None:
        with pytest.raises(UnknownName, match="use 0 to 1"):
            coordinator.pause_worker(worker)

    def test_cancel_of_an_unknown_value_is_refused(self, coordinator: Coordinator) -> None:
        for unknown in (10**9, "x", object(), True):
            with pytest.raises(UnknownName):
                coordinator.cancel(unknown)

    def test_join_raises_after_timeout(
        self, coordinator: Coordinator, cluster: tfd.Cluster
    ) -> None:
        value = coordinator.schedule(count_to, args=(tf.constant(ENDLESS, tf.int64),))
        with pytest.raises(TimeLimit, match="0 closure\\(s\\) are queued and 1 are running"):
            coordinator.join(timeout=0.5)
        assert cluster.snapshot().coordinator is not None
        assert coordinator.cancel(value)
        with pytest.raises(tf.errors.CancelledError):
            value.fetch()
        coordinator.join(timeout=60)

    def test_failure_during_an_uncancellable_closure(
        self, coordinator: Coordinator, cluster: tfd.Cluster, add: Any
    ) -> None:
        coordinator.schedule(add, args=(scalar(),)).fetch()
        # Tracing sends a function to all workers, and blocks on a frozen worker.
        count_to.get_concrete_function(tf.constant(5, tf.int64))
        fail.get_concrete_function(scalar())
        coordinator.pause_worker(1)
        hung = psutil.Process(cluster.snapshot().task("worker:0").pid)
        hung.suspend()
        try:
            coordinator.schedule(count_to, args=(tf.constant(5, tf.int64),))
            until(lambda: coordinator.values.counts()["running"] == 1)
            coordinator.resume_worker(1)
            coordinator.schedule(fail, args=(scalar(),))
            with pytest.raises((TimeLimit, tf.errors.InvalidArgumentError)):
                coordinator.join(timeout=3)
        finally:
            hung.resume()
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            coordinator.join(timeout=60)
        assert coordinator.schedule(add, args=(scalar(),)).fetch() > 0

    def test_negative_timeout_is_refused(self, coordinator: Coordinator) -> None:
        with pytest.raises(UsageError, match="timeout"):
            coordinator.join(timeout=-1)


class TestStepping:
    def test_step_with_nothing_queued(self, coordinator: Coordinator, add: Any) -> None:
        coordinator.pause()
        assert coordinator.step(3) == 0
        coordinator.schedule(add, args=(scalar(),))
        assert coordinator.values.counts()["paused"] == 1  # no permit is left

    def test_join_waits_for_a_controller_that_can_resume(
        self, coordinator: Coordinator, add: Any
    ) -> None:
        coordinator.pause()
        coordinator.schedule(add, args=(scalar(),))
        with coordinator.control():
            joined = threading.Thread(target=coordinator.join)
            joined.start()
            joined.join(0.7)
            assert joined.is_alive()
            coordinator.resume()
            joined.join(60)
            assert not joined.is_alive()

    def test_paused_worker_gets_no_closures(self, coordinator: Coordinator, add: Any) -> None:
        coordinator.pause_worker(0)
        first = len(coordinator.values)
        for _ in range(8):
            coordinator.schedule(add, args=(scalar(),))
        coordinator.join(timeout=60)
        workers = {row["worker"] for row in coordinator.values.records(8)}
        assert workers == {1}
        assert len(coordinator.values) == first + 8

    def test_all_workers_can_be_paused(self, coordinator: Coordinator, add: Any) -> None:
        coordinator.pause_worker(0)
        coordinator.pause_worker(1)
        coordinator.schedule(add, args=(scalar(),))
        with pytest.raises(PausedError, match="all workers"):
            coordinator.join()

    def test_step_waits_for_its_closures(self, coordinator: Coordinator, add: Any) -> None:
        running = coordinator.schedule(count_to, args=(tf.constant(200_000, tf.int64),))
        until(lambda: state_of(coordinator, running) == "running")
        coordinator.pause()
        values = [coordinator.schedule(add, args=(scalar(),)) for _ in range(2)]
        assert coordinator.step(1) == 1
        assert state_of(coordinator, values[0]) == "ready"
        assert coordinator.cancel(values[1])
        assert coordinator.step(1, timeout=0) == 0
        later = coordinator.schedule(add, args=(scalar(),))
        assert state_of(coordinator, later) == "paused"

    def test_join_waits_while_a_viewer_inspects_a_failure(
        self, coordinator: Coordinator, add: Any, variable: Any
    ) -> None:
        coordinator.break_on(failure=True)
        coordinator.pause()
        before = variable.numpy()
        bad = coordinator.schedule(fail, args=(scalar(),))
        siblings = [coordinator.schedule(add, args=(scalar(),)) for _ in range(3)]
        with coordinator.control():
            coordinator.resume_worker(0)
            coordinator.pause_worker(1)
            coordinator.resume()
            joining = coordinator.join_in_background()
            until(lambda: state_of(coordinator, bad) == "failed")
            with pytest.raises(TimeLimit):
                joining.wait(1.2)  # longer than the poll interval of join
            assert joining.state == "waiting"
            assert {state_of(coordinator, value) for value in siblings} == {"paused"}
            with pytest.raises(TimeLimit):
                coordinator.join(timeout=0.1)
            assert {state_of(coordinator, value) for value in siblings} == {"paused"}
            coordinator.resume()
            with pytest.raises(tf.errors.InvalidArgumentError, match="this one fails"):
                joining.wait(60)
        assert {state_of(coordinator, value) for value in siblings} == {"cancelled"}
        assert variable.numpy() == before
        assert not coordinator.paused

    def test_break_before_a_function_and_a_worker(self, coordinator: Coordinator, add: Any) -> None:
        coordinator.break_on(failure=False, function=add)
        value = coordinator.schedule(add, args=(scalar(),))
        until(lambda: bool(coordinator.paused))
        assert "add" in coordinator.paused
        assert state_of(coordinator, value) == "paused"
        assert coordinator.step() == 1
        coordinator.resume()
        coordinator.break_on(failure=False, worker=1)
        coordinator.pause_worker(0)
        value = coordinator.schedule(add, args=(scalar(),))
        until(lambda: "worker:1" in coordinator.paused)
        coordinator.resume()
        assert value.fetch() > 0

    def test_queued_and_running_closures_can_be_cancelled(
        self, coordinator: Coordinator, add: Any
    ) -> None:
        running = coordinator.schedule(count_to, args=(tf.constant(ENDLESS, tf.int64),))
        until(lambda: state_of(coordinator, running) == "running")
        coordinator.pause()
        queued = coordinator.schedule(add, args=(scalar(),))
        kept = coordinator.schedule(add, args=(scalar(),))
        assert coordinator.cancel(queued)
        assert coordinator.cancel(running)
        coordinator.resume()
        coordinator.join(timeout=60)
        for value in (queued, running):
            with pytest.raises(tf.errors.CancelledError):
                value.fetch()
            assert state_of(coordinator, value) == "cancelled"
            assert not coordinator.cancel(value)
        assert kept.fetch() > 0

    def test_cancel_returns_whether_it_was_in_time(
        self, coordinator: Coordinator, add: Any
    ) -> None:
        for number in (1, 10, 1_000, ENDLESS):
            for _ in range(3):
                value = coordinator.schedule(count_to, args=(tf.constant(number, tf.int64),))
                until(lambda value=value: state_of(coordinator, value) not in ("queued", "paused"))
                if coordinator.cancel(value):
                    with pytest.raises(tf.errors.CancelledError):
                        value.fetch()
                else:
                    assert number != ENDLESS
                    assert value.fetch() == number
        # No worker still runs a cancelled closure.
        values = [coordinator.schedule(add, args=(scalar(),)) for _ in range(8)]
        coordinator.join(timeout=60)
        assert len(coordinator.fetch(values)) == 8

    def test_cancel_does_not_affect_other_closures(self, coordinator: Coordinator) -> None:
        both = [
            coordinator.schedule(count_to, args=(tf.constant(number, tf.int64),))
            for number in (ENDLESS, 300_000)
        ]
        until(lambda: state_of(coordinator, both[0]) == "running")
        assert coordinator.cancel(both[0])
        assert both[1].fetch() == 300_000


class TestSeeing:
    def test_columns_of_the_values(self, coordinator: Coordinator, add: Any) -> None:
        coordinator.schedule(add, args=(scalar(),))
        coordinator.join(timeout=60)
        frame = coordinator.values.to_frame()
        from tfd_notebook.coordinator.values import VALUE_COLUMNS

        assert tuple(frame.columns) == VALUE_COLUMNS
        last = frame.iloc[-1]
        assert (last.function, last.state, last.attempts) == ("add", "ready", 1)
        assert last.worker in (0, 1)
        assert last.queued <= last.dispatched <= last.started <= last.finished
        assert min(last.queue_ms, last.run_ms, last.fetch_ms) >= 0

    def test_results_are_not_kept_in_memory(self, coordinator: Coordinator, add: Any) -> None:
        value = coordinator.schedule(add, args=(scalar(),))
        key = value._tfd_key
        coordinator.join(timeout=60)
        assert coordinator.values.value(key) is value
        del value
        with pytest.raises(ValueGone, match=str(key)):
            coordinator.values.value(key)
        with pytest.raises(UnknownName):
            coordinator.values.value(10**9)

    def test_limit_explains_the_rate(self, coordinator: Coordinator) -> None:
        @tf.function
        def work(x: Any) -> Any:
            return tf.reduce_sum(tf.linalg.matmul(x, x))

        matrix = tf.constant(np.ones((600, 600), np.float32))
        coordinator.join(timeout=60)
        for _ in range(5_100):  # more than the history keeps
            coordinator.store.end(coordinator.store.add("work", "work", None), 6)
        for _ in range(12):
            coordinator.schedule(work, args=(matrix,)).fetch()
        limit = coordinator.limit
        assert limit.kind in ("few_closures", "fetch_in_loop", "compute")
        assert "closures/s" in repr(limit)


class TestResolver:
    def test_coordinator_follows_tensorflows_contract(self, cluster: tfd.Cluster) -> None:
        resolver = cluster.resolver
        assert isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver)
        assert isinstance(resolver, tfd.resolvers.OwnResolver)
        spec = resolver.cluster_spec()
        assert sorted(spec.jobs) == ["chief", "ps", "worker"]  # this process is connected
        address = spec.task_address("worker", 1)
        assert resolver.master() == ""
        assert resolver.master("worker", 1) == f"grpc://{address}"
        assert resolver.master("worker", 1, rpc_layer="") == address
        assert resolver.num_accelerators() == {}
        assert (resolver.rpc_layer, resolver.task_type, resolver.task_id) == ("grpc", None, None)
        assert resolver.environment == ""


@pytest.fixture(scope="module")
def own() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(workers=2, ps=3, name="own-strategy") as cluster:
        yield cluster


def is_closed(port: int) -> bool:
    """Return True if this process's listener on `port` has a packet filter or a device."""
    listening = ports.listening_fds(port)
    closed = []
    for descriptor in listening:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            # SO_GET_FILTER has the number of SO_ATTACH_FILTER.
            options = (26, socket.SO_BINDTODEVICE)
            closed.append(any(sock.getsockopt(socket.SOL_SOCKET, o, 1_024) for o in options))
    return bool(listening) and all(closed)


class TestOwnStrategy:
    """Strategies that users create with ``cluster.resolver``, on a different cluster."""

    @pytest.mark.parametrize(
        ("where", "first_words"),
        [
            (tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset, "strategy ="),
            (tf.distribute.coordinator.ClusterCoordinator.fetch, "strategy ="),
            (tf.distribute.ParameterServerStrategy, "# In this example, we're assuming having 3"),
        ],
    )
    def test_tensorflows_examples_run_unchanged(
        self, own: tfd.Cluster, where: Any, first_words: str
    ) -> None:
        blocks = re.findall(r"```python\n(.*?)```", inspect.getdoc(where) or "", re.DOTALL)
        (example,) = (
            block for block in map(textwrap.dedent, blocks) if block.startswith(first_words)
        )
        assert "assert " in example
        example = example.replace("cluster_resolver=...", "cluster_resolver=cluster.resolver")
        example = example.replace("strategy = ...", "strategy = make(cluster.resolver)")
        assert "..." not in example
        namespace = {"tf": tf, "cluster": own, "make": tf.distribute.ParameterServerStrategy}
        exec(example, namespace)
        (chief,) = own.resolver.cluster_spec().as_dict()["chief"]
        assert is_closed(int(chief.rpartition(":")[2]))
        external: Any = namespace["coordinator"]
        assert not isinstance(external, Coordinator)
        external.join()
        assert own.coordinator(external.strategy) is external
        assert isinstance(external, Coordinator)

    def test_successive_coordinators_of_one_cluster(self, own: tfd.Cluster) -> None:
        triple = tf.function(lambda x: 3 * x)
        triple(tf.constant(1))  # traced before the workers receive it
        twice = tf.function(lambda x: triple(x) + triple(x))
        earlier: list[Coordinator] = []
        for _ in range(2):
            strategy = tf.distribute.ParameterServerStrategy(own.resolver)
            coordinator = own.coordinator(strategy)
            assert isinstance(coordinator, Coordinator)
            assert own.coordinator() is own.coordinator(strategy) is coordinator
            assert own.current_coordinator() is coordinator
            assert coordinator.schedule(twice, args=(tf.constant(2),)).fetch() == 12
            with strategy.scope():
                kept = [tf.Variable(tf.zeros(100)) for _ in range(3)]
            until(lambda: own.snapshot().coordinator is not None)
            each = {"ps:0": 400, "ps:1": 400, "ps:2": 400}
            until(lambda current=coordinator, each=each: current.row().ps_bytes == each)
            del kept
            for before in earlier:
                assert before.stopped
                with pytest.raises(StateError, match="was stopped"):
                    own.coordinator(before.strategy)
            earlier.append(coordinator)
        last = own.strategy()  # restarts the tasks that the other strategy has used
        assert earlier[-1].stopped
        assert own.coordinator(last).schedule(twice, args=(tf.constant(2),)).fetch() == 12

    def test_coordinator_of_another_cluster(self, own: tfd.Cluster, cluster: tfd.Cluster) -> None:
        with pytest.raises(UsageError, match="does not belong to cluster 'own-strategy'"):
            own.coordinator(cluster.current_coordinator().strategy)
        with pytest.raises(UsageError, match="does not belong to cluster 'own-strategy'"):
            own.coordinator(tf.distribute.get_strategy())

    def test_port_without_a_filter_is_closed(
        self, cluster: tfd.Cluster, own: tfd.Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(sock: socket.socket, program: bytes) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        tf.distribute.ParameterServerStrategy(own.resolver)
        before = connection.server_port()
        with monkeypatch.context() as patch:
            patch.setattr(ports, "_attach", refuse)
            with pytest.raises(FilterFailed, match="The port was closed") as caught:
                tf.distribute.ParameterServerStrategy(cluster.resolver)
            assert "use fewer networks in allow=. Then restart the kernel" in str(caught.value)
        port = connection.server_port()
        assert port is not None
        assert port != before
        assert ports.listening_fds(port) == []
        for attempt in (cluster.resolver.cluster_spec, cluster.strategy):
            with pytest.raises(FilterFailed, match="was closed earlier") as caught:
                attempt()
            assert "Next: restart the kernel" in str(caught.value)
        own.strategy()  # a new connection
        assert is_closed(connection.server_port() or 0)
