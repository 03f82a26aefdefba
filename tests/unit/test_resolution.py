"""`tfd.resolve` over servers that answer, hang, are gone or are somebody else."""

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
from tests._waiting import until
from tests.unit._grpc import Server, status
from tfd_notebook import errors
from tfd_notebook.model.resolution import COLUMNS
from tfd_notebook.resolution.service import ResolveService
from tfd_notebook.resolvers import TFConfigResolver

pytestmark = pytest.mark.usefixtures("nowhere")

theirs = tf.distribute.cluster_resolver


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
        held.bind(("127.0.0.1", 0))  # and never listens
        yield "{}:{}".format(*held.getsockname())


@contextlib.contextmanager
def talking(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server that does `serve` with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def work() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.settimeout(5)
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


def states(found: tfd.Resolution) -> list[str]:
    return list(found.to_frame()["state"])


class TestTable:
    def test_every_state(self, worker: Server, silent: str, refused: str) -> None:
        with talking(answer_http) as http, Server({}) as grpc:
            addresses = [worker.address, worker.address, silent, refused, http, grpc.address]
            found = tfd.resolve({"worker": [*addresses, "no-such-host.invalid:1"]})
        frame = found.to_frame()
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

    def test_a_data_service_among_workers(self) -> None:
        from tfd_notebook.net import tf_messages

        version = tf_messages.GetVersionResponse(version=9).SerializeToString()
        with Server({"/tensorflow.data.DispatcherService/GetVersion": version}) as server:
            found = tfd.resolve({"dispatcher": [server.address], "worker": [server.address]})
        frame = found.to_frame()
        assert list(frame["state"]) == ["alive", "mismatch"]
        assert "a dispatcher answers there" in frame["reason"][1]
        assert f'tfd.attach("grpc://{server.address}")' in found.cell

    def test_swapped_identities(self) -> None:
        with Server(status("worker:0", "CPU")) as one, Server(status("worker:1", "CPU")) as two:
            found = tfd.resolve({"worker": [two.address, one.address]})
        assert states(found) == ["mismatch", "mismatch"]
        assert list(found.to_frame()["identity"]) == ["worker:1", "worker:0"]

    def test_in_a_union_only_jobs_count(self, worker: Server) -> None:
        union = tfd.resolvers.UnionResolver(
            theirs.SimpleClusterResolver(tf.train.ClusterSpec({"worker": ["127.0.0.1:1"]})),
            theirs.SimpleClusterResolver(tf.train.ClusterSpec({"worker": [worker.address]})),
        )
        assert states(tfd.resolve(union)) == ["refused", "alive"]

    def test_a_proxy_that_tensorflow_obeys(
        self, monkeypatch: pytest.MonkeyPatch, worker: Server
    ) -> None:
        """What gRPC is told by variables is what TensorFlow does: another one may answer."""
        with talking(answer_http) as proxy:
            monkeypatch.setenv("http_proxy", f"http://{proxy}")
            found = tfd.resolve({"worker": [worker.address]})
            (row,) = found.last.tasks
            assert row.state != "alive"
            assert "http_proxy" in row.reason
            assert "directly it is alive" in row.reason
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            assert found.look().tasks[0].state == "alive"

    def test_silent_tasks_are_waited_for_together(self) -> None:
        """One after the other would take more time than a test has."""
        with socket.create_server(("", 0), backlog=1024) as server:
            port = server.getsockname()[1]
            addresses = [f"127.0.0.{number}:{port}" for number in range(1, 201)]
            found = tfd.resolve({"worker": addresses})
        assert found.last.counts == {"hung": 200}

    def test_one_address_for_several_tasks(self, worker: Server, refused: str) -> None:
        spec = {"ps": [refused] * 5, "worker": [worker.address] * 2, "dispatcher": [refused]}
        found = tfd.resolve(spec)
        assert found.last.counts == {"alive": 1, "refused": 6, "mismatch": 1}


class TestFirst:
    def test_tf_config(self, monkeypatch: pytest.MonkeyPatch, worker: Server) -> None:
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": [worker.address]}}))
        found = tfd.resolve()
        assert found.rule == "tf_config"
        assert isinstance(found.resolver, TFConfigResolver)
        assert found.cluster_spec().as_dict() == {"worker": [worker.address]}
        assert found.cell == "cluster = tfd.resolve().attach()"
        assert "1 alive" in repr(found)

    def test_a_task_is_told_to_be_a_server(
        self, monkeypatch: pytest.MonkeyPatch, refused: str, worker: Server
    ) -> None:
        config = {
            "cluster": {"worker": [worker.address, refused]},
            "task": {"type": "worker", "index": 1},
        }
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        found = tfd.resolve()
        assert "tf.distribute.Server(" in found.cell
        compile(found.cell, "cell", "exec")

    def test_an_argument_overrides(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["w:1"]}}))
        path = tmp_path / "c.json"
        path.write_text('{"ps": ["127.0.0.1:1"]}')
        for found in (tfd.resolve(str(path)), tfd.resolve("file", path=str(path))):
            assert found.rule == "argument"
            assert found.cluster_spec().jobs == ["ps"]

    def test_broken_tf_config_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TF_CONFIG", '{"cluster": ')
        with pytest.raises(errors.Malformed, match="TF_CONFIG is no JSON"):
            tfd.resolve()

    def test_an_offer_resolves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TPU_NAME", "mine")
        found = tfd.resolve()
        assert found.resolver is None
        for use in (found.cluster_spec, found.look, lambda: next(found.watch(1))):
            with pytest.raises(errors.NotThere, match="TPU_NAME"):
                use()
        assert len(found.to_frame()) == 0

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
    def test_what_cannot_be_meant(
        self, arguments: tuple[Any, ...], options: dict[str, Any], what: str
    ) -> None:
        with pytest.raises(errors.UsageError, match=what):
            tfd.resolve(*arguments, **options)

    def test_addresses_that_are_none(self) -> None:
        with pytest.raises(errors.Malformed, match="which is no address"):
            tfd.resolve({"worker": ["host"]})

    def test_no_kernel_elsewhere(self) -> None:
        with pytest.raises(errors.NotThere, match="kernel"):
            tfd.resolve("jupyter")

    def test_a_resolver_of_tensorflows_that_fails(self) -> None:
        class Broken(theirs.ClusterResolver):  # type: ignore[misc,name-defined]
            def cluster_spec(self) -> Any:
                raise RuntimeError("no such thing")

            def master(self, *_: Any) -> str:
                return ""

        with pytest.raises(errors.ResolveError, match=r"Broken\.cluster_spec\(\) failed"):
            tfd.resolve(Broken())


class TestWatch:
    def test_ups_and_downs(self) -> None:
        server = Server(status("worker:0", "CPU"))
        found = tfd.resolve({"worker": [server.address]})
        seen = []
        with contextlib.closing(found):
            for look in found.watch(60, every=0.05):
                seen.append(look.tasks[0].state)
                if len(seen) == 1:
                    server.stop()
                elif len(seen) == 2:
                    server = Server(status("worker:0", "CPU"), server.port)
                elif look.tasks[0].state == "alive":
                    break
        server.stop()
        assert (seen[0], seen[-1]) == ("alive", "alive")
        assert "refused" in seen
        changes = found.history().to_frame()
        assert changes["before"][0] == "alive"
        assert list(changes["after"])[-1] == "alive"

    def test_tasks_that_come_and_a_file_that_breaks(self, tmp_path: Path, worker: Server) -> None:
        path = tmp_path / "c.json"
        path.write_text(json.dumps({"worker": [worker.address]}))
        found = tfd.resolve(str(path))
        looks = found.watch(60, every=0.05)
        assert next(looks).trouble == ""
        path.write_text("{")
        look = next(looks)
        assert "no JSON" in look.trouble
        assert look.counts == {"alive": 1}
        path.write_text(json.dumps({"worker": [worker.address, "127.0.0.1:1"]}))
        # A file that is just written may be read when it is empty.
        while (look := next(looks)).trouble:
            pass
        assert look.counts == {"alive": 1, "refused": 1}
        assert (look.changes[-1].before, look.changes[-1].after) == ("", "refused")
        looks.close()
        found.close()

    def test_it_ends(self, worker: Server) -> None:
        found = tfd.resolve({"worker": [worker.address]})
        assert len(list(found.watch(0.2, every=0.05))) == 1
        found.close()
        for wrong in (0, -1, float("nan"), "1"):
            with pytest.raises(errors.UsageError, match="more than 0 seconds"):
                next(found.watch(wrong))  # type: ignore[arg-type]


class TestForms:
    def test_the_same_question_is_the_same_resolution(self, worker: Server, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        path.write_text(json.dumps({"worker": [worker.address]}))
        desk = ResolveService()
        ask = {"resolver": "file", "options": {"path": str(path)}}
        assert json.loads(json.dumps(desk.resolve(ask)))["counts"] == {"alive": 1}
        path.write_text(json.dumps({"worker": [worker.address, "127.0.0.1:1"]}))
        again = desk.resolve({**ask, "again": True})
        assert [change["task"] for change in again["changes"]] == ["worker:1"]
        assert again["changed"] == 1
        assert desk.resolve(ask)["changes"] == ()
        assert desk.resolution(ask).last.counts == {"alive": 1, "refused": 1}
        names = [one["name"] for one in desk.choices({})["choices"]]
        assert names[0] == "auto"
        desk.close()

    def test_who_looks_again_is_told_what_changed(self, tmp_path: Path, worker: Server) -> None:
        with Server(status("worker:1", "CPU")) as other:
            path = tmp_path / "c.json"
            path.write_text(json.dumps({"worker": [worker.address, other.address]}))
            desk = ResolveService()
            ask = {"resolver": "file", "options": {"path": str(path)}}

            def names(told: dict[str, Any]) -> list[int]:
                return [task["task"] for task in told["tasks"]]

            whole = desk.resolve(ask)
            assert (names(whole), whole["since"]) == ([0, 1], None)
            ask["again"] = True
            # Latencies may differ for good now and then, and that is told.
            until(lambda: names(desk.resolve({**ask, "since": desk.resolve(ask)["number"]})) == [])
            seen = desk.resolve(ask)
            assert names(seen) == [0, 1]
        part = desk.resolve({**ask, "since": seen["number"]})
        assert part["since"] == seen["number"] < part["number"]
        assert 1 in names(part)
        assert part["counts"] == {"alive": 1, "refused": 1}
        assert desk.resolve({**ask, "since": whole["number"] - 1})["since"] is None
        # Other tasks: the rows have another order, perhaps.
        path.write_text(json.dumps({"worker": [worker.address]}))
        shorter = desk.resolve({**ask, "since": part["number"]})
        assert (names(shorter), shorter["since"]) == ([0], None)
        fresh = desk.resolve({**ask, "again": False, "since": shorter["number"]})
        assert (names(fresh), fresh["since"]) == ([0], None)
        desk.close()

    @pytest.mark.parametrize(
        "ask",
        [
            {"resolver": 7},
            {"resolver": "x" * 2000},
            {"resolver": "slurm", "options": 3},
            {"resolver": "slurm", "options": {"a b": 3}},
            {"resolver": "slurm", "options": {"resolver": "file"}},
        ],
    )
    def test_what_a_form_must_not_say(self, ask: dict[str, Any]) -> None:
        with pytest.raises(errors.UsageError):
            ResolveService().resolve(ask)


class TestCommandLine:
    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tfd_notebook", "resolve", *words],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def test_table_json_and_watch(self, worker: Server, refused: str) -> None:
        config = json.dumps({"cluster": {"worker": [worker.address, refused]}})
        done = self.run(TF_CONFIG=config)
        assert done.returncode == 0, done.stderr
        assert "1 alive, 1 refused" in done.stdout
        assert "tfd.resolve().attach()" in done.stdout
        done = self.run("--json", "--watch", "0.3", TF_CONFIG=config)
        (line,) = done.stdout.splitlines()
        assert [task["state"] for task in json.loads(line)["tasks"]] == ["alive", "refused"]

    def test_what_goes_wrong(self) -> None:
        done = self.run(TF_CONFIG="{")
        assert (done.returncode, done.stdout) == (1, "")
        assert "TFD702" in done.stderr
        done = self.run("slurmy")
        assert done.returncode == 2
        assert "TFD101" in done.stderr
        done = self.run("--set", "x")
        assert done.returncode == 2
