"""``launcher="jupyter"`` between hosts of their own, each with a Jupyter server behind TLS."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tests.hosts._conformance import OWNER, Conformance, Make, numbers, pids_on
from tests.hosts._hosts import Hosts
from tests.hosts._jupyter import Jupyters, write_profile
from tfd_notebook import errors
from tfd_notebook.cluster import attach
from tfd_notebook.launchers.client import orphans
from tfd_notebook.net import runtime_dir

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]


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


class TestJupyter(Conformance):
    def test_no_kernel_is_left_behind(self, jupyter: Jupyters, make: Make, shared: object) -> None:
        def kernels() -> list[int]:
            return [len(server.get("/api/kernels")) for server in jupyter]

        before = kernels()
        with tfd.Cluster(data_workers=1, name="brief", launcher=make()):
            assert kernels() == [number + 1 for number in before]
        until(lambda: kernels() == before)

    def test_no_secret_is_in_any_log(
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
        ("options", "said"),
        [
            ({"token": "wrong"}, "rejected the token"),
            ({"token": ""}, "requires a token"),
            ({"ca": None}, "is not trusted"),
            ({"kernel": "julia"}, "has no kernel 'julia'"),
        ],
    )
    def test_what_is_wrong_there_is_said(
        self, make: Make, options: dict[str, str], said: str
    ) -> None:
        with pytest.raises(errors.LaunchError, match=said):
            tfd.Cluster(data_workers=1, name="wrong", launcher=make(**options))
        assert "wrong" not in tfd.clusters()

    def test_tunnels_between_hosts(self, make: Make, hosts: Hosts) -> None:
        with tfd.Cluster(data_workers=2, name="secret", launcher=make(secure=True)) as cluster:
            assert numbers(cluster) == list(range(100))
            assert set(cluster.to_frame()["open_to"]) == {"loopback"}
            assert all(row.address.startswith("localhost:") for row in cluster.snapshot().tasks)

    def test_it_outlives_its_owner_and_is_attached(
        self,
        hosts: Hosts,
        jupyter: Jupyters,
        written: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
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
        orphans.sweep()  # what the killed process could not remove
        assert [one["name"] for one in attach.everywhere() if one["lease"]] == ["orphan"]
        (file,) = runtime_dir.runtime_dir().glob("away-*.json")
        assert not any(server.token in file.read_text() for server in jupyter)
        with pytest.raises(errors.LaunchError, match=r"(?s)requires a token.*profile"):
            tfd.attach("orphan")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        write_profile(tmp_path, jupyter)
        attached = tfd.attach("orphan")
        try:
            assert numbers(attached) == list(range(100))
            attached.renew(2)
        finally:
            attached.stop()
        assert not [one for one in attach.everywhere() if one["name"] == "orphan"]
        # The agents learn from its silence that the owner is gone.
        until(lambda: not any(pids_on(host, before[host]) for host in hosts), 60)

    def test_keys_are_not_sent_in_plain_text(self, hosts: Hosts) -> None:
        launcher = tfd.launchers.Jupyter(f"http://{hosts.west.address}:8888", secure=True)
        with pytest.raises(errors.UsageError, match="unencrypted"):
            tfd.Cluster(data_workers=1, name="open", launcher=launcher)

    def test_an_expired_certificate_is_named(self, hosts: Hosts, jupyter: Jupyters) -> None:
        with jupyter.started(hosts.west, expired=True) as server:
            launcher = tfd.launchers.Jupyter(server.url, token=server.token, ca=str(server.ca))
            with pytest.raises(errors.LaunchError, match=r"(?s)has expired.*renew"):
                tfd.Cluster(data_workers=1, name="late", launcher=launcher)

    def test_what_is_no_jupyter_server_is_named(self, hosts: Hosts) -> None:
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

    def test_a_server_that_culls_is_told_of_and_does_not_cull_ours(
        self, hosts: Hosts, jupyter: Jupyters
    ) -> None:
        with jupyter.started(hosts.west, cull=8) as server:
            launcher = tfd.launchers.Jupyter(server.url, token=server.token, ca=str(server.ca))
            with tfd.Cluster(data_workers=1, name="idle", launcher=launcher) as cluster:
                said = [notice.what for notice in cluster.snapshot().notices]
                assert any("ends kernels that are idle for 8 s" in what for what in said)
                (ours,) = server.get("/api/kernels")
                # One that nobody uses goes meanwhile.
                with server.open("/api/kernels", method="POST") as reply:
                    other = json.load(reply)["id"]
                until(lambda: other not in {one["id"] for one in server.get("/api/kernels")})
                assert [one["id"] for one in server.get("/api/kernels")] == [ours["id"]]
                assert numbers(cluster) == list(range(100))
