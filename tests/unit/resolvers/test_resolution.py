"""`tfd.resolve` for servers that answer, hang, have ended, or are a different task."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._grpc import Server, status
from tfd_notebook import errors
from tfd_notebook.model.resolution import COLUMNS
from tfd_notebook.resolvers import TFConfigResolver
from tfd_notebook.resolvers.forms import ResolveService

pytestmark = pytest.mark.usefixtures("plain_environment")

tf_resolvers = tf.distribute.cluster_resolver


@pytest.fixture
def worker() -> Iterator[Server]:
    with Server(status("worker:0", "CPU", "GPU", "GPU")) as server:
        yield server


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "{}:{}".format(*server.getsockname())


@pytest.fixture
def refused() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # without listen()
        yield "{}:{}".format(*held.getsockname())


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a TCP server that calls `serve` for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def work() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.settimeout(60)
                        serve(connection)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield "{}:{}".format(*server.getsockname())
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def answer_http(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def states(resolution: tfd.Resolution) -> list[str]:
    return list(resolution.to_frame()["state"])


class TestTable:
    @pytest.mark.slow
    def test_every_state_is_reported(self, worker: Server, silent: str, refused: str) -> None:
        with serving(answer_http) as http, Server({}) as grpc:
            addresses = [worker.address, worker.address, silent, refused, http, grpc.address]
            resolution = tfd.resolve({"worker": [*addresses, "no-such-host.invalid:1"]})
        frame = resolution.to_frame()
        assert tuple(frame.columns) == COLUMNS
        assert list(frame["state"]) == [
            "alive",
            "mismatch",
            "hung",
            "refused",
            "foreign",
            "foreign",
            "unreachable",
        ]
        assert list(frame["task"]) == list(range(7))
        assert frame["identity"][1] == "worker:0"
        assert frame["accelerators"][0] == "GPU:2"
        assert "worker:0 answers there" in frame["reason"][1]
        assert frame["reason"][0] == ""
        assert all(frame["reason"][1:])

    def test_data_service_among_workers_is_a_mismatch(self) -> None:
        from tfd_notebook.net import tf_messages

        version = tf_messages.GetVersionResponse(version=9).SerializeToString()
        with Server({"/tensorflow.data.DispatcherService/GetVersion": version}) as server:
            resolution = tfd.resolve({"dispatcher": [server.address], "worker": [server.address]})
        frame = resolution.to_frame()
        assert list(frame["state"]) == ["alive", "mismatch"]
        assert "a dispatcher answers there" in frame["reason"][1]
        assert f'tfd.attach("grpc://{server.address}")' in resolution.cell

    def test_swapped_identities_are_mismatches(self) -> None:
        with Server(status("worker:0", "CPU")) as server, Server(status("worker:1", "CPU")) as two:
            resolution = tfd.resolve({"worker": [two.address, server.address]})
        assert states(resolution) == ["mismatch", "mismatch"]
        assert list(resolution.to_frame()["identity"]) == ["worker:1", "worker:0"]

    def test_union_compares_jobs_only(self, worker: Server) -> None:
        union = tfd.resolvers.UnionResolver(
            tf_resolvers.SimpleClusterResolver(tf.train.ClusterSpec({"worker": ["127.0.0.1:1"]})),
            tf_resolvers.SimpleClusterResolver(tf.train.ClusterSpec({"worker": [worker.address]})),
        )
        assert states(tfd.resolve(union)) == ["refused", "alive"]

    def test_proxy_of_tensorflow_is_used(
        self, monkeypatch: pytest.MonkeyPatch, worker: Server
    ) -> None:
        """TensorFlow uses the proxy in gRPC's variables, so that a different server can answer."""
        with serving(answer_http) as proxy:
            monkeypatch.setenv("http_proxy", f"http://{proxy}")
            resolution = tfd.resolve({"worker": [worker.address]})
            (row,) = resolution.last.tasks
            assert row.state != "alive"
            assert "http_proxy" in row.reason
            assert "directly it is alive" in row.reason
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            assert resolution.probe().tasks[0].state == "alive"

    @pytest.mark.slow
    def test_silent_tasks_are_probed_concurrently(self) -> None:
        """Sequential probes would exceed the timeout of the test."""
        with socket.create_server(("", 0), backlog=1024) as server:
            port = server.getsockname()[1]
            addresses = [f"127.0.0.{number}:{port}" for number in range(1, 201)]
            resolution = tfd.resolve({"worker": addresses})
        assert resolution.last.counts == {"hung": 200}

    def test_address_of_several_tasks_is_alive_for_one(self, worker: Server, refused: str) -> None:
        spec = {"ps": [refused] * 5, "worker": [worker.address] * 2, "dispatcher": [refused]}
        resolution = tfd.resolve(spec)
        assert resolution.last.counts == {"alive": 1, "refused": 6, "mismatch": 1}
        reasons = list(resolution.to_frame()["reason"])
        assert all("has the same address" in reason for reason in reasons[:5] + reasons[-2:])
        assert reasons[5] == ""

    def test_task_of_this_process_need_not_listen(
        self, monkeypatch: pytest.MonkeyPatch, worker: Server, refused: str
    ) -> None:
        spec = {"chief": [refused], "worker": [worker.address]}
        config = {"cluster": spec, "task": {"type": "chief", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        resolution = tfd.resolve()
        assert states(resolution) == ["own", "alive"]
        assert "this process" in resolution.last.tasks[0].reason
        TFConfigResolver().check()
        assert TFConfigResolver().num_accelerators("worker", 0) == {"GPU": 2}
        assert not tfd.doctor(TFConfigResolver())
        assert "TFD809" not in tfd.doctor().codes
        cluster = resolution.attach(connect=False)
        try:
            rows = {row.task: (row.state, row.reason) for row in cluster.snapshot().tasks}
            assert rows["chief:0"][0] == "planned"
            assert "this process" in rows["chief:0"][1]
            assert cluster.state == "ready"
            assert not tfd.doctor(cluster)
        finally:
            cluster.stop()
        assert not tfd.doctor(spec)  # a mapping with the addresses of TF_CONFIG
        cluster = tfd.attach(spec, name="same", connect=False)
        try:
            assert cluster.state == "ready"
        finally:
            cluster.stop()
        assert tfd.doctor({**spec, "chief": ["localhost:1"]}).codes == ("TFD809",)

    def test_reasons_remain_after_attach(self, worker: Server) -> None:
        spec = {"worker": [worker.address, worker.address, "no-such-host.invalid:1"]}
        resolution = tfd.resolve(spec)
        before = [task.reason for task in resolution.last.tasks]
        assert "worker:0 has the same address" in before[1]
        assert "address of the host is unknown" in before[2]
        cluster = tfd.attach(resolution, connect=False)
        try:
            after = [row.reason for row in cluster.snapshot().tasks]
            # The coordinator assigns the index, so that no other task answers.
            assert after == ["", "worker:0 has the same address", before[2]]
            assert [str(row.state) for row in cluster.snapshot().tasks] == ["ready", "lost", "lost"]
        finally:
            cluster.stop()


class TestFirst:
    def test_tf_config_is_resolved(self, monkeypatch: pytest.MonkeyPatch, worker: Server) -> None:
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": [worker.address]}}))
        resolution = tfd.resolve()
        assert resolution.rule == "tf_config"
        assert isinstance(resolution.resolver, TFConfigResolver)
        assert resolution.cluster_spec().as_dict() == {"worker": [worker.address]}
        assert resolution.cell == "cluster = tfd.resolve().attach()"
        assert "1 alive" in repr(resolution)

    def test_suggestion_for_a_task_starts_a_server(
        self, monkeypatch: pytest.MonkeyPatch, refused: str, worker: Server
    ) -> None:
        config = {
            "cluster": {"worker": [worker.address, refused]},
            "task": {"type": "worker", "index": 1},
        }
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        resolution = tfd.resolve()
        assert "tf.distribute.Server(" in resolution.cell
        compile(resolution.cell, "cell", "exec")

    @pytest.mark.parametrize("is_listed", [True, False])
    def test_suggestion_for_an_evaluator_starts_no_server(
        self, monkeypatch: pytest.MonkeyPatch, refused: str, worker: Server, is_listed: bool
    ) -> None:
        cluster = {"worker": [worker.address]} | ({"evaluator": [refused]} if is_listed else {})
        config = {"cluster": cluster, "task": {"type": "evaluator", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        resolution = tfd.resolve()
        reasons = {task.job: task.reason for task in resolution.last.tasks if task.state == "own"}
        assert ["starts no server" in reason for reason in reasons.values()] == [True] * is_listed
        assert "Server(" not in resolution.cell
        assert "attach(" not in resolution.cell
        assert "starts no server" in resolution.cell
        compile(resolution.cell, "cell", "exec")

    def test_argument_overrides_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["w:1"]}}))
        path = tmp_path / "c.json"
        path.write_text('{"ps": ["127.0.0.1:1"]}')
        for resolution in (tfd.resolve(str(path)), tfd.resolve("file", path=str(path))):
            assert resolution.rule == "argument"
            assert resolution.cluster_spec().jobs == ["ps"]

    def test_invalid_tf_config_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TF_CONFIG", '{"cluster": ')
        with pytest.raises(errors.Malformed, match="TF_CONFIG: invalid JSON"):
            tfd.resolve()

    def test_suggestion_does_not_resolve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TPU_NAME", "mine")
        resolution = tfd.resolve()
        assert resolution.resolver is None
        for use in (resolution.cluster_spec, resolution.probe, lambda: next(resolution.watch(1))):
            with pytest.raises(errors.NotThere, match="TPU_NAME"):
                use()
        assert len(resolution.to_frame()) == 0

    @pytest.mark.parametrize(
        ("arguments", "options", "what"),
        [
            (("slurmy",), {}, "no resolver 'slurmy'"),
            (("slurm",), {"tasks": 3}, "the resolver 'slurm'"),
            ((42,), {}, "invalid resolver 42"),
            (({"worker": ["h:1"]},), {"port": 3}, "only the name of a resolver takes arguments"),
            (("local",), {}, "no cluster on this host"),
            (("local",), {"name": "gone"}, "no cluster 'gone'"),
        ],
    )
    def test_invalid_arguments_are_refused(
        self, arguments: tuple[Any, ...], options: dict[str, Any], what: str
    ) -> None:
        with pytest.raises(errors.UsageError, match=what):
            tfd.resolve(*arguments, **options)

    def test_invalid_addresses_are_rejected(self) -> None:
        with pytest.raises(errors.Malformed, match="invalid address 'host'"):
            tfd.resolve({"worker": ["host"]})

    def test_missing_remote_kernel_is_an_error(self) -> None:
        with pytest.raises(errors.NotThere, match="kernel"):
            tfd.resolve("jupyter")

    def test_failing_tensorflow_resolver_is_reported(self) -> None:
        class Broken(tf_resolvers.ClusterResolver):  # type: ignore[misc,name-defined]
            def cluster_spec(self) -> Any:
                raise RuntimeError("no such thing")

            def master(self, *_: Any) -> str:
                return ""

        with pytest.raises(errors.ResolveError, match=r"Broken\.cluster_spec\(\) failed"):
            tfd.resolve(Broken())


class TestWatch:
    def test_state_changes_are_published(self) -> None:
        server = Server(status("worker:0", "CPU"))
        resolution = tfd.resolve({"worker": [server.address]})
        received = []
        with contextlib.closing(resolution):
            for look in resolution.watch(60, every=0.05):
                received.append(look.tasks[0].state)
                if len(received) == 1:
                    server.stop()
                elif len(received) == 2:
                    server = Server(status("worker:0", "CPU"), server.port)
                elif look.tasks[0].state == "alive":
                    break
        server.stop()
        assert (received[0], received[-1]) == ("alive", "alive")
        assert "refused" in received
        changes = resolution.history().to_frame()
        assert changes["before"][0] == "alive"
        assert list(changes["after"])[-1] == "alive"

    def test_new_tasks_and_invalid_files_are_published(
        self, tmp_path: Path, worker: Server
    ) -> None:
        path = tmp_path / "c.json"
        path.write_text(json.dumps({"worker": [worker.address]}))
        resolution = tfd.resolve(str(path))
        looks = resolution.watch(60, every=0.05)
        assert next(looks).trouble == ""
        path.write_text("{")
        look = next(looks)
        assert "invalid JSON" in look.trouble
        assert look.counts == {"alive": 1}
        path.write_text(json.dumps({"worker": [worker.address, "127.0.0.1:1"]}))
        # The file may be read while it is still empty.
        while (look := next(looks)).trouble:
            pass
        assert look.counts == {"alive": 1, "refused": 1}
        assert (look.changes[-1].before, look.changes[-1].after) == ("", "refused")
        looks.close()
        resolution.close()

    def test_watch_ends_after_its_time(self, worker: Server) -> None:
        resolution = tfd.resolve({"worker": [worker.address]})
        assert len(list(resolution.watch(0.2, every=0.05))) == 1
        resolution.close()
        for wrong in (0, -1, float("nan"), "1"):
            with pytest.raises(errors.UsageError, match=r"invalid \w+=.*: expected more than 0"):
                next(resolution.watch(wrong))  # type: ignore[arg-type]


class TestForms:
    def test_repeated_call_returns_the_same_resolution(
        self, worker: Server, tmp_path: Path
    ) -> None:
        path = tmp_path / "c.json"
        path.write_text(json.dumps({"worker": [worker.address]}))
        service = ResolveService()
        request = {"resolver": "file", "options": {"path": str(path)}}
        answer = json.loads(json.dumps(service.resolve(request)))
        assert answer["counts"] == {"alive": 1}
        path.write_text(json.dumps({"worker": [worker.address, "127.0.0.1:1"]}))
        again = service.resolve({**request, "probe": True})
        assert [change["task"] for change in again["changes"]] == ["worker:1"]
        assert again["changed"] == 1
        assert [(task["job"], task["task"]) for task in again["tasks"]] == [
            ("worker", 0),
            ("worker", 1),
        ]
        assert service.resolve(request)["changes"] == ()
        assert service.resolution(request).last.counts == {"alive": 1, "refused": 1}
        names = [item["name"] for item in service.choices()["choices"]]
        assert names[0] == "auto"
        service.close()

    @pytest.mark.parametrize(
        "form",
        [
            {"resolver": 7},
            {"resolver": "x" * 2000},
            {"resolver": "slurm", "options": 3},
            {"resolver": "slurm", "options": {"a b": 3}},
            {"resolver": "slurm", "options": {"resolver": "file"}},
        ],
    )
    def test_invalid_forms_are_refused(self, form: dict[str, Any]) -> None:
        with pytest.raises(errors.UsageError):
            ResolveService().resolve(form)


class TestCommandLine:
    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tfd_notebook", "resolve", *words],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    @pytest.mark.slow
    def test_command_prints_table_json_and_changes(self, worker: Server, refused: str) -> None:
        config = json.dumps({"cluster": {"worker": [worker.address, refused]}})
        completed = self.run(TF_CONFIG=config)
        assert completed.returncode == 0, completed.stderr
        assert "1 alive, 1 refused" in completed.stdout
        assert "tfd.resolve().attach()" in completed.stdout
        completed = self.run("--json", "--watch", "0.3", TF_CONFIG=config)
        (line,) = completed.stdout.splitlines()
        assert [task["state"] for task in json.loads(line)["tasks"]] == ["alive", "refused"]

    @pytest.mark.slow
    def test_command_reports_errors(self) -> None:
        completed = self.run(TF_CONFIG="{")
        assert (completed.returncode, completed.stdout) == (1, "")
        assert "TFD702" in completed.stderr
        completed = self.run("slurmy")
        assert completed.returncode == 2
        assert "TFD101" in completed.stderr
        completed = self.run("--set", "x")
        assert completed.returncode == 2
