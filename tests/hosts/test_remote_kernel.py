"""Remote kernels: code, output, clusters, closures and commands."""

from __future__ import annotations

import os
import threading
from argparse import Namespace
from collections.abc import Iterator

import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tests.hosts._hosts import Hosts
from tests.hosts._jupyter import Jupyter, Jupyters
from tfd_notebook import errors
from tfd_notebook.cluster import registry
from tfd_notebook.net import control_calls
from tfd_notebook.ui.magics import lookup

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]

#: A training with its coordinator, in the remote kernel.
TRAINING = """
import logging, time
logging.getLogger("tensorflow").setLevel(logging.ERROR)
import tensorflow as tf
import tfd_notebook as tfd
cluster = tfd.Cluster(workers=2, ps=1, name="train")
coordinator = cluster.coordinator()
with coordinator.strategy.scope():
    total = tf.Variable(0.0)

@tf.function
def step():
    return total.assign_add(1.0)
"""


def kernel_at(server: Jupyter, **options: object) -> tfd.RemoteKernel:
    options = {"token": server.token, "ca": str(server.ca), **options}
    return tfd.RemoteKernel(server.url, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def kernel(jupyter: Jupyters) -> Iterator[tfd.RemoteKernel]:
    with kernel_at(jupyter["north"]) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def train(kernel: tfd.RemoteKernel) -> Iterator[object]:
    kernel.run(TRAINING)
    yield kernel.clusters["train"]
    kernel.run("cluster.stop()")


def test_output_and_variables_are_kept(
    kernel: tfd.RemoteKernel, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.run("answer = 6 * 7\nimport sys; print('a word', file=sys.stderr)")
    kernel.run("print(answer)\nanswer + 1")
    output = capsys.readouterr()
    assert output.out == "42\n43\n"
    assert "a word" in output.err


def test_error_has_the_remote_traceback(kernel: tfd.RemoteKernel) -> None:
    with pytest.raises(errors.RemoteError, match=r"(?s)ZeroDivisionError.*line 2"):
        kernel.run("x = 0\n1 / x")
    with pytest.raises(errors.UsageError, match="invalid code=42"):
        kernel.run(42)  # type: ignore[arg-type]


def test_code_is_interrupted_after_its_timeout(
    kernel: tfd.RemoteKernel, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(errors.TimeLimit, match=r"within 0\.5 s"):
        kernel.run("import time; time.sleep(60)", timeout=0.5)
    kernel.run("print('goes on')")
    assert capsys.readouterr().out == "goes on\n"


def test_code_that_ignores_interrupts_does_not_block(jupyter: Jupyters) -> None:
    with kernel_at(jupyter["east"]) as deaf:
        deaf.run("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
        deaf.run("import threading")
        with pytest.raises(errors.TimeLimit, match="within 1 s"):
            deaf.run("threading.Event().wait()", timeout=1)


def test_table_shows_the_remote_tasks(kernel: tfd.RemoteKernel, train: tfd.Cluster) -> None:
    frame = train.to_frame()
    assert list(frame["task"]) == ["ps:0", "worker:0", "worker:1"]
    assert set(frame["state"]) == {"ready"}
    assert set(frame["host"]) == {kernel.label}
    assert "worker:1" in train._repr_mimebundle_()["text/html"]
    assert "train" in repr(kernel)


def test_magics_find_remote_tasks(train: tfd.Cluster) -> None:
    cluster, task = lookup.pick_task(Namespace(name="train", task="worker:1"))
    assert (cluster, task) == (train, "worker:1")
    with pytest.raises(errors.UnknownName, match="its tasks are ps:0, worker:0, worker:1"):
        lookup.pick_task(Namespace(name="train", task="worker:7"))
    with pytest.raises(errors.StateError, match="no running stream"):
        lookup.pick_stream(None)


def test_remote_coordinator_can_be_controlled(kernel: tfd.RemoteKernel, train: tfd.Cluster) -> None:
    coordinator = train.current_coordinator()
    coordinator.pause()
    kernel.run("values = [coordinator.schedule(step) for _ in range(10)]")
    assert coordinator.values.counts()["paused"] == 10  # `run` waits for the current state
    assert len(coordinator.values.to_frame()) == 10
    assert coordinator.step(3) == 3
    assert coordinator.values.counts()["ready"] == 3
    assert coordinator.cancel(9)
    coordinator.resume()
    coordinator.join(60)
    frame = coordinator.values.to_frame()
    assert list(frame["state"]).count("ready") == 9
    assert frame["state"].iloc[-1] == "cancelled"
    assert set(frame["function"]) == {"step"}
    assert frame["run_ms"].iloc[0] > 0
    kernel.run("assert total.numpy() == 9.0")


def test_remote_coordinator_can_be_paused_while_code_runs(
    kernel: tfd.RemoteKernel, train: tfd.Cluster
) -> None:
    coordinator = train.current_coordinator()
    code = "for _ in range(400):\n    coordinator.schedule(step); time.sleep(0.01)\n"
    running = threading.Thread(target=kernel.run, args=(code + "coordinator.join()",))
    before = coordinator.values.counts()["ready"]
    running.start()
    until(lambda: coordinator.values.counts()["ready"] > before + 5)
    coordinator.pause()
    assert running.is_alive()
    until(lambda: coordinator.paused)
    until(lambda: coordinator.values.counts()["paused"] > 5)
    coordinator.resume()
    running.join(60)
    until(lambda: coordinator.values.counts()["ready"] == before + 400)


def test_command_line_and_panels_control_remote_clusters(
    kernel: tfd.RemoteKernel, train: tfd.Cluster
) -> None:
    assert registry.running_clusters()["train"] is train
    me = os.getpid()
    assert [item["name"] for item in control_calls.call(me, {"command": "list"})] == ["train"]
    control_calls.call(me, {"command": "pause", "name": "train", "source": "a terminal"})
    until(lambda: "a terminal" in train.current_coordinator().paused)
    control_calls.call(me, {"command": "resume", "name": "train"})
    until(lambda: not train.current_coordinator().paused)
    pid = train.to_frame()["pid"][1]
    assert train.kill("worker:0") == pid
    until(lambda: train.to_frame()["restarts"][1] == 1 and train.state == "ready", 60)
    with pytest.raises(errors.UnknownName, match="worker:7"):
        train.restart("worker:7")


def test_reconnected_kernel_loses_no_message(
    hosts: Hosts, kernel: tfd.RemoteKernel, capsys: pytest.CaptureFixture[str]
) -> None:
    running = threading.Thread(
        target=kernel.run, args=("for n in range(4):\n    time.sleep(1); print(n)",)
    )
    running.start()
    hosts.reset(hosts.home, hosts.north)
    hosts.heal()
    running.join(60)
    assert not running.is_alive()
    assert kernel.state == "ready"
    kernel.run("print('still here')")
    assert "still here" in capsys.readouterr().out


def test_ended_kernel_is_reported(jupyter: Jupyters) -> None:
    server = jupyter["east"]
    with kernel_at(server) as short:
        running = threading.Timer(
            0.5,
            lambda: [
                server.open(f"/api/kernels/{item['id']}", method="DELETE").close()
                for item in server.get("/api/kernels")
            ],
        )
        running.start()
        with pytest.raises(errors.RemoteError, match="has ended"):
            short.run("import time; time.sleep(60)")
        assert "has ended" in short.state
        with pytest.raises(errors.RemoteError, match="has ended"):
            short.run("1")


def test_dead_kernel_is_reported_and_removed(jupyter: Jupyters) -> None:
    server = jupyter["east"]
    with kernel_at(server) as short:
        short.run('import os, tfd_notebook as tfd; tfd.Cluster(launcher="fake", name="fake")')
        fake = short.clusters["fake"]
        until(lambda: fake.state == "ready")
        with pytest.raises(errors.RemoteError, match="its process died"):
            # Remove its socket, because the host is checked for remaining files.
            short.run(
                "from tfd_notebook.cluster import control_socket\n"
                "control_socket.stop()\nos._exit(1)"
            )
        assert fake.state == "lost"
        assert {str(task.state) for task in fake.snapshot().tasks} == {"lost"}
        with pytest.raises(errors.RemoteError, match="its process died"):
            fake.logs()
        until(lambda: not server.get("/api/kernels"), 60)


def test_close_stops_the_remote_clusters(jupyter: Jupyters) -> None:
    with kernel_at(jupyter["east"]) as short:
        short.run('import tfd_notebook as tfd; tfd.Cluster(launcher="fake", name="fake")')
        fake = short.clusters["fake"]
        until(lambda: fake.state == "ready")
        assert tfd.clusters()["fake"].state == "ready"
        with pytest.raises(errors.UnknownName, match="no cluster 'fack'"):
            short.clusters["fack"]
        with pytest.raises(errors.UnknownName, match="this process already has it"):
            tfd.attach("fake")
    assert fake.state == "stopped"
    assert {str(task.state) for task in fake.snapshot().tasks} == {"stopped"}
    fake.stop()
    assert "fake" not in tfd.clusters()


def test_kernel_shuts_down_without_a_client(hosts: Hosts, jupyter: Jupyters) -> None:
    server = jupyter["east"]
    abandoned = kernel_at(server, grace=3)
    try:
        hosts.partition(hosts.home, hosts.east)
        until(lambda: abandoned.state not in ("ready", "closed"), 60)
        hosts.heal()
        until(lambda: not server.get("/api/kernels"), 60)
    finally:
        abandoned.close()


def test_errors_at_the_start_are_reported(jupyter: Jupyters) -> None:
    server = jupyter["north"]
    with pytest.raises(errors.LaunchError, match="rejected the token"):
        kernel_at(server, token="wrong")
    with pytest.raises(errors.LaunchError, match="has no kernel 'julia'"):
        kernel_at(server, kernel="julia")
    with pytest.raises(errors.UsageError, match="invalid Jupyter server address"):
        tfd.RemoteKernel("host:8888")
