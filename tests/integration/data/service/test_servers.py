"""`Dispatcher` and `DataWorker`: TensorFlow's contract in every state."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service

import tfd_notebook as tfd
from tests._programs import program
from tests._reading import read
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook._compat.tf_data import servers as compat
from tfd_notebook.errors import (
    LaunchError,
    PortInUse,
    StateError,
    TimeLimit,
    UsageError,
    WorkDirError,
)
from tfd_notebook.net import ports
from tfd_notebook.net.probe import probe

pytestmark = pytest.mark.integration


@pytest.fixture
def dispatcher() -> Iterator[tfd.Dispatcher]:
    result = tfd.Dispatcher()
    yield result
    result.stop()


def worker_of(dispatcher: tfd.Dispatcher, **options: Any) -> tfd.DataWorker:
    return tfd.DataWorker(service.WorkerConfig(dispatcher.address), **options)


def test_default_intervals_are_those_of_tensorflow(dispatcher: tfd.Dispatcher) -> None:
    """A heartbeat arrives every 30 s. One every millisecond would answer 10 kB/s."""
    worker = worker_of(dispatcher)
    try:
        sent = ports.SentBytes(int(dispatcher.address.rpartition(":")[2]))
        before = sent.read()
        time.sleep(1)
        assert sent.read() - before < 2_000
    finally:
        worker.stop()


def test_epoch_that_was_left_is_discarded() -> None:
    config = service.DispatcherConfig(job_gc_check_interval_ms=100, job_gc_timeout_ms=500)
    dispatcher = tfd.Dispatcher(config)
    worker = worker_of(dispatcher)
    try:
        source = service.distribute(processing_mode="distributed_epoch", service=dispatcher.target)
        iterator = iter(tf.data.Dataset.range(1_000_000).apply(source))
        next(iterator)
        assert len(probe(worker.address, 10.0, expect="data_worker").tasks) == 1
        del iterator
        until(lambda: not probe(worker.address, 10.0, expect="data_worker").tasks)
    finally:
        worker.stop()
        dispatcher.stop()


def test_servers_follow_the_contract_of_tensorflow(dispatcher: tfd.Dispatcher) -> None:
    worker = worker_of(dispatcher)
    try:
        assert dispatcher.target == f"grpc://{dispatcher.address}"
        assert dispatcher.workers == (worker.address,)
        assert dispatcher.open_to == worker.open_to == "loopback"
        dataset = tf.data.Dataset.range(10).apply(
            service.distribute(processing_mode="parallel_epochs", service=dispatcher.target)
        )
        assert list(dataset.as_numpy_iterator()) == list(range(10))
    finally:
        worker.stop()


def test_methods_are_safe_before_the_start() -> None:
    planned = tfd.Dispatcher(start=False)
    assert planned.state == "planned"
    assert planned.workers == ()
    assert planned.open_to == ""
    assert probe(planned.target).state == "refused"
    with pytest.raises(StateError, match="not started"):
        planned.join(timeout=1)
    target = planned.target
    planned.start()
    planned.start()
    assert planned.target == target
    assert probe(target).kind == "dispatcher"
    planned.stop()


def test_server_stopped_before_its_start_stays_stopped() -> None:
    planned = tfd.Dispatcher(start=False)
    planned.stop()
    planned.join(timeout=1)
    with pytest.raises(StateError, match="was stopped"):
        planned.start()


def test_stopped_server_cannot_start_again(dispatcher: tfd.Dispatcher) -> None:
    dispatcher.stop()
    dispatcher.stop()
    assert dispatcher.state == "stopped"
    assert dispatcher.workers == ()
    assert probe(dispatcher.target).state == "refused"
    dispatcher.join()
    with pytest.raises(StateError, match="create a new Dispatcher"):
        dispatcher.start()


def test_join_ends_at_stop_and_at_its_timeout(dispatcher: tfd.Dispatcher) -> None:
    with pytest.raises(TimeLimit, match="still runs"):
        dispatcher.join(timeout=0.05)
    ended = threading.Event()

    def wait() -> None:
        dispatcher.join()
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    dispatcher.stop()
    assert ended.wait(60)
    thread.join()


def test_ctrl_c_ends_join() -> None:
    code = (
        "import tfd_notebook as tfd\n"
        "d = tfd.Dispatcher()\n"
        "try:\n    print('ready', flush=True)\n    d.join()\n"
        "except KeyboardInterrupt:\n    print(d.state, flush=True)\n"
    )
    with program(code) as (child, line):
        assert line == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=60)[0] == "ready\n"
    assert child.returncode == 0


def test_server_stops_with_its_last_reference() -> None:
    dispatcher = tfd.Dispatcher()
    worker = worker_of(dispatcher)
    addresses = (dispatcher.address, worker.address)
    del dispatcher, worker
    gc.collect()
    assert [probe(address).state for address in addresses] == ["refused", "refused"]


def test_port_in_use_is_refused(dispatcher: tfd.Dispatcher) -> None:
    port = int(dispatcher.address.rpartition(":")[2])
    with pytest.raises(PortInUse, match=rf"tf.data dispatcher in this process \(pid {os.getpid()}"):
        tfd.Dispatcher(service.DispatcherConfig(port=port))
    bare = service.DispatchServer()
    with pytest.raises(PortInUse, match="dispatcher"):
        tfd.Dispatcher(service.DispatcherConfig(port=int(bare.target.rpartition(":")[2])))
    with (
        socket.create_server(("", 0)) as listener,
        pytest.raises(PortInUse, match="in this process"),
    ):
        tfd.Dispatcher(service.DispatcherConfig(port=listener.getsockname()[1]))


def test_requested_port_can_be_reused_after_stop() -> None:
    first = tfd.Dispatcher()
    port = int(first.address.rpartition(":")[2])
    first.stop()
    second = tfd.Dispatcher(service.DispatcherConfig(port=port))
    assert second.target == f"grpc://localhost:{port}"
    second.stop()


def test_replaced_worker_on_the_same_port_is_read_in_memory(
    dispatcher: tfd.Dispatcher,
) -> None:
    """TensorFlow's finalizer of the old server would unregister the new one."""
    dataset = tf.data.Dataset.range(10).apply(
        service.distribute(
            service.ShardingPolicy.OFF, dispatcher.target, data_transfer_protocol="local"
        )
    )
    worker = worker_of(dispatcher)
    port = int(worker.address.rpartition(":")[2])
    for _ in range(3):
        try:
            assert read(dataset) == list(range(10))
        finally:
            worker.stop()
        worker = tfd.DataWorker(service.WorkerConfig(dispatcher.address, port=port))
    worker.stop()


@pytest.mark.parametrize("port", [-1, 65536, "5050", True])
def test_invalid_ports_are_refused(port: Any) -> None:
    with pytest.raises(UsageError, match="port"):
        tfd.Dispatcher(service.DispatcherConfig(port=port))


def test_invalid_configs_are_refused() -> None:
    with pytest.raises(UsageError, match="DispatcherConfig"):
        tfd.Dispatcher("localhost:5050")
    with pytest.raises(UsageError, match="work_dir"):
        tfd.Dispatcher(service.DispatcherConfig(fault_tolerant_mode=True))
    with pytest.raises(UsageError, match="WorkerConfig"):
        tfd.DataWorker(service.DispatcherConfig())
    with pytest.raises(UsageError, match="dispatcher"):
        tfd.DataWorker(service.WorkerConfig(""))


@pytest.mark.slow
def test_unknown_protocol_does_not_crash_the_process() -> None:
    """TensorFlow also raises an error, and crashes when it finalizes the incomplete server."""
    code = (
        "import gc, tensorflow as tf, tfd_notebook as tfd\n"
        "from tensorflow.data.experimental import service\n"
        "good = tfd.Dispatcher()\n"
        "for _ in range(10):\n"
        "    for make in (\n"
        "        lambda: tfd.Dispatcher(service.DispatcherConfig(protocol='unknown')),\n"
        "        lambda: tfd.DataWorker(service.WorkerConfig(good.address, protocol='unknown')),\n"
        "    ):\n"
        "        try:\n            make()\n"
        "        except tf.errors.InvalidArgumentError as error:\n"
        "            print(error.code, isinstance(error, tfd.errors.UsageError))\n"
        "        gc.collect()\n"
        "good.stop()\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    assert completed.stdout == "TFD101 True\n" * 20


def test_errors_have_the_classes_of_tensorflow(dispatcher: tfd.Dispatcher, tmp_path: Path) -> None:
    """TensorFlow's `start`, `join` and `stop` promise a ``tf.errors.OpError``."""
    port = int(dispatcher.address.rpartition(":")[2])
    file = tmp_path / "file"
    file.write_text("")
    unusable = service.DispatcherConfig(work_dir=str(file / "below"), fault_tolerant_mode=True)
    stopped = tfd.Dispatcher()
    stopped.stop()
    planned = tfd.Dispatcher(start=False)
    planned_worker = tfd.DataWorker(service.WorkerConfig("localhost:1"), start=False)
    cases: list[tuple[Any, type[errors.TfdError], type[tf.errors.OpError]]] = [
        (
            lambda: tfd.Dispatcher(service.DispatcherConfig(port=port)),
            errors.PortInUse,
            tf.errors.AlreadyExistsError,
        ),
        (
            lambda: tfd.Dispatcher(unusable),
            errors.WorkDirError,
            tf.errors.FailedPreconditionError,
        ),
        (stopped.start, errors.StateError, tf.errors.FailedPreconditionError),
        (planned.join, errors.StateError, tf.errors.FailedPreconditionError),
        (
            lambda: dispatcher.join(timeout=0.01),
            errors.TimeLimit,
            tf.errors.DeadlineExceededError,
        ),
        (planned_worker.start, errors.LaunchError, tf.errors.UnavailableError),
        (
            lambda: tfd.DataWorker(service.WorkerConfig("")),
            errors.UsageError,
            tf.errors.InvalidArgumentError,
        ),
    ]
    for call, kind, of_tensorflow in cases:
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, of_tensorflow)
        assert caught.value.message == caught.value.what
        assert type(pickle.loads(pickle.dumps(caught.value))) is kind
        assert str(caught.value).startswith(f"[{kind.code}]")
    planned.stop()
    planned_worker.stop()


def check_op_error(
    call: Any, kind: type[errors.TfdError], of_tensorflow: type[tf.errors.OpError], text: str
) -> None:
    """Check that `call` raises an error of both classes, with `text`."""
    with pytest.raises(of_tensorflow, match=text) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert caught.value.fix or kind is UsageError


@pytest.mark.parametrize("timeout", [-1, float("nan"), True, "10"])
def test_invalid_timeouts_have_the_class_of_tensorflow(
    dispatcher: tfd.Dispatcher, timeout: Any
) -> None:
    for call in (lambda: dispatcher.stop(timeout), lambda: dispatcher.join(timeout)):
        check_op_error(call, UsageError, tf.errors.InvalidArgumentError, "timeout")
    assert dispatcher.state == "ready"


def test_failed_stop_has_the_class_of_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop without a result would otherwise count as one that takes longer."""
    stop = compat.stop

    def fail(server: Any) -> None:
        stop(server)
        raise tf.errors.InternalError(None, None, "the channel is closed")

    server = tfd.Dispatcher()
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            server.join()
        except tf.errors.OpError as error:
            waiting.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    monkeypatch.setattr(compat, "stop", fail)
    text = "stopping the dispatcher at localhost:.* failed: the channel is closed"
    for call in (lambda: server.stop(60), lambda: server.join(60)):
        check_op_error(call, StateError, tf.errors.InternalError, text)
    thread.join(60)
    assert [type(error).__name__ for error in waiting] == ["StateError"]


def test_stop_during_a_start_ends_at_its_timeout(
    dispatcher: tfd.Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(dispatcher, start=False)
    entered, leave = threading.Event(), threading.Event()

    def check() -> None:
        entered.set()
        assert leave.wait(60)

    monkeypatch.setattr(worker, "_check", check)
    thread = threading.Thread(target=worker.start, daemon=True)
    thread.start()
    assert entered.wait(60)
    try:
        check_op_error(
            lambda: worker.stop(timeout=0.01),
            TimeLimit,
            tf.errors.DeadlineExceededError,
            "still starting",
        )
    finally:
        leave.set()
        thread.join(60)
    worker.stop()
    assert worker.state == "stopped"


@pytest.mark.skipif(sys.platform != "linux", reason="ends listening by the socket's descriptor")
def test_workers_of_a_silent_dispatcher_have_the_class_of_tensorflow() -> None:
    silent = tfd.Dispatcher()
    assert ports.stop_listening(int(silent.address.rpartition(":")[2]))
    check_op_error(
        lambda: silent.workers, errors.DispatcherLost, tf.errors.UnavailableError, "no dispatcher"
    )
    silent.stop()


def test_worker_without_a_dispatcher_is_refused(dispatcher: tfd.Dispatcher) -> None:
    with pytest.raises(LaunchError, match="connection refused"):
        tfd.DataWorker(service.WorkerConfig("localhost:1"))
    worker = worker_of(dispatcher)
    try:
        with pytest.raises(LaunchError, match="a data worker answers"):
            tfd.DataWorker(service.WorkerConfig(worker.address))
    finally:
        worker.stop()


def test_proxy_that_intercepts_grpc_is_named(
    dispatcher: tfd.Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://localhost:1")
    for variable in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(LaunchError, match=r"(?s)http_proxy.*add localhost .* no_proxy"):
        worker_of(dispatcher)


def test_unusable_work_dir_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for work_dir in (tmp_path / "file" / "below", Path("/proc/none")):
        config = service.DispatcherConfig(work_dir=str(work_dir), fault_tolerant_mode=True)
        with pytest.raises(WorkDirError, match=str(work_dir)):
            tfd.Dispatcher(config)


@pytest.mark.root
def test_full_work_dir_is_named(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)]
    subprocess.run(mount, check=True)
    try:
        config = service.DispatcherConfig(work_dir=str(tmp_path), fault_tolerant_mode=True)
        with pytest.raises(WorkDirError, match="is full"):
            tfd.Dispatcher(config)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_journal_is_written_to_a_new_work_dir(tmp_path: Path) -> None:
    config = service.DispatcherConfig(work_dir=str(tmp_path / "new"), fault_tolerant_mode=True)
    dispatcher = tfd.Dispatcher(config)
    dispatcher.stop()
    assert (tmp_path / "new" / "tf_data_dispatcher_journal").is_dir()


def test_stop_waits_for_a_python_function(dispatcher: tfd.Dispatcher) -> None:
    """TensorFlow's stop would hold the GIL, which the function needs."""
    worker = worker_of(dispatcher)
    entered, leave = threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        if x > 0:
            entered.set()
            leave.wait(60)
        return x

    dataset = tf.data.Dataset.range(100).map(lambda x: tf.numpy_function(slow, [x], tf.int64))
    iterator = iter(dataset.apply(service.distribute("distributed_epoch", dispatcher.target)))
    assert next(iterator) == 0
    assert entered.wait(60)
    check_op_error(
        lambda: worker.stop(timeout=0.2),
        TimeLimit,
        tf.errors.DeadlineExceededError,
        "still stopping after",
    )
    assert worker.state == "stopped"
    leave.set()
    worker.join(timeout=60)
    assert probe(worker.address).state == "refused"
    del iterator


def test_stop_without_the_gil_is_available() -> None:
    bare = service.DispatchServer()
    assert compat.unlocked_stop(bare._server) is not None, tf.__version__
    compat.stop(bare)
    assert probe(bare.target).state == "refused"


FORKED = """
import os, sys
import tensorflow as tf
import tfd_notebook as tfd
from tfd_notebook.net import ports
from tfd_notebook.net.probe import probe

dispatcher = tfd.Dispatcher()
child = os.fork()
if child == 0:
    dispatcher.stop()
    sys.stdout.flush()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert probe(dispatcher.address, 10.0).alive
dispatcher.stop()
print("kept")
"""


@pytest.mark.slow
def test_dispatcher_keeps_running_after_a_forked_child_ends() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=100
    )
    assert completed.stdout == "kept\n", completed.stderr
