"""``launcher="jupyter"`` between hosts, each with a Jupyter server behind TLS."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tfd_notebook as tfd
from tests._waiting import SERVER_STOP_SECONDS, until
from tests.hosts._conformance import OWNER, Conformance, Make, numbers, pids_on
from tests.hosts._hosts import Hosts
from tests.hosts._jupyter import Jupyters, write_profile
from tfd_notebook import errors
from tfd_notebook.cluster import attach
from tfd_notebook.launchers.client import orphans
from tfd_notebook.net import runtime_dir

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]

#: Attaches to the cluster, and reads from it.
READER = """
import tensorflow as tf, tfd_notebook as tfd
numbers = tf.data.Dataset.range(100).apply(tfd.attach("orphan").distribute("dynamic"))
print(sum(int(x) for x in numbers))
"""


@pytest.fixture(scope="module")
def make(jupyter: Jupyters) -> Make:
    def make(**options: object) -> tfd.launchers.Jupyter:
        return tfd.launchers.Jupyter(
            [server.url for server in jupyter],
            **{
                "token": {server.url: server.token for server in jupyter},
                "ca": str(jupyter.authority.path),
                **options,
            },
        )

    return make


@pytest.fixture(scope="module")
def written(jupyter: Jupyters) -> str:
    urls = [f"{server.url}/lab?token={server.token}" for server in jupyter]
    return f"tfd.launchers.Jupyter({urls!r}, ca={str(jupyter.authority.path)!r}, grace={{grace}})"


@pytest.fixture(scope="module")
def cut(jupyter: Jupyters) -> Callable[[], None]:
    def cut() -> None:
        for kernel in jupyter["north"].get("/api/kernels"):
            jupyter["north"].open(f"/api/kernels/{kernel['id']}", method="DELETE").close()

    return cut


@pytest.fixture(scope="module")
def shared(make: Make) -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, name="shared", launcher=make()) as cluster:
        yield cluster


def kernel_counts(jupyter: Jupyters) -> list[int]:
    return [len(server.get("/api/kernels")) for server in jupyter]


class TestJupyter(Conformance):
    @pytest.mark.timeout(600)  # many checks, each with clusters
    def test_launcher_conforms(
        self,
        make: Make,
        jupyter: Jupyters,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The options of a launcher contain no tokens. A profile does."""
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        write_profile(tmp_path, jupyter)
        super().test_launcher_conforms(make)

    def test_logs_contain_no_secret(
        self, hosts: Hosts, jupyter: Jupyters, shared: tfd.Cluster
    ) -> None:
        for server in jupyter:
            secret = server.token.encode()
            assert secret not in server.log.read_bytes()
            for host in hosts:
                logs = [path for path in Path(host.directory).rglob("*.log") if path.is_file()]
                assert not any(secret in path.read_bytes() for path in logs)
        assert not any(server.token in str(shared.logs()) for server in jupyter)
        assert not any(server.token in repr(shared.snapshot()) for server in jupyter)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"token": "wrong"}, "rejected the token"),
            ({"token": ""}, "requires a token"),
            ({"ca": None}, "is not trusted"),
            ({"kernel": "julia"}, "has no kernel 'julia'"),
        ],
    )
    def test_errors_at_the_start_are_reported(
        self, make: Make, options: dict[str, str], message: str
    ) -> None:
        with pytest.raises(errors.LaunchError, match=message):
            tfd.Cluster(data_workers=1, name="wrong", launcher=make(**options))
        assert "wrong" not in tfd.clusters()

    def test_tunnels_connect_the_hosts(self, make: Make, jupyter: Jupyters) -> None:
        """Each host has a kernel for the cluster, which ends with the cluster."""
        before = kernel_counts(jupyter)
        with tfd.Cluster(data_workers=2, name="secret", launcher=make(secure=True)) as cluster:
            assert kernel_counts(jupyter) == [count + 1 for count in before]
            assert numbers(cluster) == list(range(100))
            assert set(cluster.to_frame()["open_to"]) == {"loopback"}
            assert all(row.address.startswith("localhost:") for row in cluster.snapshot().tasks)
        until(lambda: kernel_counts(jupyter) == before)

    @pytest.mark.timeout(170 + SERVER_STOP_SECONDS)
    def test_cluster_outlives_its_owner_and_is_attached(
        self,
        hosts: Hosts,
        jupyter: Jupyters,
        written: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        kernels_before = kernel_counts(jupyter)
        before = {host: host.pids() for host in hosts}
        code = OWNER.format(launcher=written.format(grace=30)).replace(
            'print("ready"', 'cluster.detach(1); print("ready"'
        )
        owner = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert owner.stdout
            assert owner.stdout.readline() == "ready\n"
        finally:
            owner.kill()
            owner.communicate()
        orphans.sweep()  # removes the files of the killed process
        assert [item["name"] for item in attach.all_clusters() if item["lease"]] == ["orphan"]
        (file,) = runtime_dir.runtime_dir().glob("detached-*.json")
        assert not any(server.token in file.read_text() for server in jupyter)
        with pytest.raises(errors.LaunchError, match=r"(?s)requires a token.*profile"):
            tfd.attach("orphan")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        write_profile(tmp_path, jupyter)
        reader = [sys.executable, "-c", READER]
        seconds = 90 + SERVER_STOP_SECONDS
        completed = subprocess.run(reader, capture_output=True, text=True, timeout=seconds)
        assert completed.stdout == "4950\n", completed.stderr
        attached = tfd.attach("orphan")
        try:
            assert numbers(attached) == list(range(100))
            attached.renew(2)
        finally:
            attached.stop()
        assert not [item for item in attach.all_clusters() if item["name"] == "orphan"]
        assert not list(runtime_dir.runtime_dir().glob("detached-*"))
        # The agents detect the end of their owner by its silence.
        until(lambda: not any(pids_on(host, before[host]) for host in hosts), 60)
        until(lambda: kernel_counts(jupyter) == kernels_before)

    def test_keys_are_not_sent_in_plain_text(self, hosts: Hosts) -> None:
        launcher = tfd.launchers.Jupyter(f"http://{hosts.west.address}:8888", secure=True)
        with pytest.raises(errors.UsageError, match="unencrypted"):
            tfd.Cluster(data_workers=1, name="open", launcher=launcher)

    def test_expired_certificate_is_reported(self, hosts: Hosts, jupyter: Jupyters) -> None:
        with jupyter.started(hosts.west, expired=True) as server:
            launcher = tfd.launchers.Jupyter(server.url, token=server.token, ca=str(server.ca))
            with pytest.raises(errors.LaunchError, match=r"(?s)has expired.*renew"):
                tfd.Cluster(data_workers=1, name="late", launcher=launcher)

    def test_other_server_is_reported(self, hosts: Hosts) -> None:
        code = (
            "import http.server as h; s = h.HTTPServer(('', 8000), h.SimpleHTTPRequestHandler);"
            "print('ready', flush=True); s.serve_forever()"
        )
        process = hosts.west.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            launcher = tfd.launchers.Jupyter(f"http://{hosts.west.address}:8000")
            with pytest.raises(errors.LaunchError, match="is not a Jupyter server"):
                tfd.Cluster(data_workers=1, name="strange", launcher=launcher)
        finally:
            process.kill()
            process.communicate()

    def test_culling_server_is_reported_and_keeps_the_kernels(
        self, hosts: Hosts, jupyter: Jupyters
    ) -> None:
        with jupyter.started(hosts.west, cull=8) as server:
            launcher = tfd.launchers.Jupyter(server.url, token=server.token, ca=str(server.ca))
            with tfd.Cluster(data_workers=1, name="idle", launcher=launcher) as cluster:
                received = [notice.what for notice in cluster.snapshot().notices]
                assert any("ends kernels that are idle for 8 s" in what for what in received)
                (kernel,) = server.get("/api/kernels")
                # The server culls an unused kernel in the meantime.
                with server.open("/api/kernels", method="POST") as reply:
                    unused = json.load(reply)["id"]
                until(lambda: unused not in {item["id"] for item in server.get("/api/kernels")})
                assert [item["id"] for item in server.get("/api/kernels")] == [kernel["id"]]
                assert numbers(cluster) == list(range(100))
