"""Who reaches a server of TensorFlow: tried from another host, a network namespace."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import views
from tfd_notebook.net import ports as net_ports
from tfd_notebook.net.probe import probe

pytestmark = [pytest.mark.integration, pytest.mark.root]
HERE, THERE = ("10.251.7.1", "fd00:251:7::1"), ("10.251.7.2", "fd00:251:7::2")
KNOCK = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.5)
print("connected", flush=True)
peer.settimeout(5)
while peer.recv(4096):
    pass
print("closed", flush=True)
"""


class OtherHost:
    """A network namespace with a cable to this host."""

    def __init__(self) -> None:
        self.name = f"tfd-{os.getpid()}"
        self._cable = f"tfd{os.getpid() % 10**7}a", f"tfd{os.getpid() % 10**7}b"

    def __enter__(self) -> OtherHost:
        near, far = self._cable
        self._ip("netns", "add", self.name)
        self._ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self.name)
        for prefix, end, addresses in (((), near, HERE), (("-n", self.name), far, THERE)):
            for address in addresses:
                size, more = ("64", ["nodad"]) if ":" in address else ("24", [])
                self._ip(*prefix, "addr", "add", f"{address}/{size}", "dev", end, *more)
            self._ip(*prefix, "link", "set", end, "up")
        return self

    def __exit__(self, *_: object) -> None:
        self._ip("netns", "del", self.name)  # its end of the cable goes with it, and so ours

    def knock(self, address: str, port: int) -> subprocess.Popen[str]:
        """Connect from there, and stay connected."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, "-c", KNOCK, address, str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def reaches(self, address: str, port: int) -> bool:
        with self.knock(address, port) as knock:
            assert knock.stdout
            said = knock.stdout.readline()
            knock.kill()
        return said == "connected\n"

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def other_host() -> Iterator[OtherHost]:
    with OtherHost() as other:
        yield other


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a dispatcher in this process."""
    import tensorflow as tf

    service = tf.data.experimental.service
    with net_ports.reserve_port() as held:
        port: int = held.getsockname()[1]
        server: Any = service.DispatchServer(service.DispatcherConfig(port=port))
        yield port
        del server


def test_open_closed_opened(other_host: OtherHost, port: int) -> None:
    def reached() -> list[bool]:
        return [other_host.reaches(address, port) for address in HERE]

    assert reached() == [True, True]  # as TensorFlow leaves it
    assert net_ports.restrict_port(port) == "this host"
    assert reached() == [False, False]
    for address in ("127.0.0.1", "[::1]", "localhost", HERE[0], f"[{HERE[1]}]"):
        assert probe(f"{address}:{port}").kind == "dispatcher"
    mapped = socket.create_connection((f"::ffff:{HERE[0]}", port), 1)
    mapped.close()
    for allow, expected in (
        (["10.251.7.0/24"], [True, False]),
        (["10.251.7.2/31"], [True, False]),
        (["10.251.7.2"], [True, False]),
        (["10.251.7.0/31"], [False, False]),
        (["fd00:251:7::/64"], [False, True]),
        (["fd00:251:7::2/127"], [False, True]),
        (["fd00:251:7::/127"], [False, False]),
        (["fd00::/9", "10.0.0.0/8", "192.168.0.0/16"], [True, True]),
    ):
        assert net_ports.restrict_port(port, allow).startswith("this host, ")
        assert reached() == expected, allow
    assert net_ports.restrict_port(port) == "this host"
    assert reached() == [False, False]


def test_a_server_on_localhost_lets_in_loopback_only(other_host: OtherHost, port: int) -> None:
    assert net_ports.restrict_port(port, host="localhost") == "loopback"
    assert [other_host.reaches(address, port) for address in HERE] == [False, False]
    for address in ("127.0.0.1", "[::1]", "localhost"):
        assert probe(f"{address}:{port}").kind == "dispatcher"
    for address in HERE:  # this host by an address that it may lose to another one
        with pytest.raises(TimeoutError):
            socket.create_connection((address, port), 0.5)


#: Run in a network namespace: a port that is closed there, and the addresses that still reach it.
CROWDED = """
import json, socket, sys
from tfd_notebook.errors import FilterFailed
from tfd_notebook.net import ports as sockets

def reached(address):
    try:
        socket.create_connection((address, port), 0.5).close()
    except OSError:
        return False
    return True

allow = json.loads(sys.argv[1])
with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    port = server.getsockname()[1]
    said = {}
    for host in ("localhost", "10.9.0.2", None):
        try:
            said[str(host)] = sockets.restrict_port(port, allow, host)
        except FilterFailed as error:
            said[str(host)] = str(error)
        said[f"{host} reached"] = [
            address for address in ("127.0.0.1", "10.9.0.2", "10.9.0.4") if reached(address)
        ]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def crowded() -> Iterator[str]:
    """A network namespace with more addresses than a filter can name."""
    name = f"tfd-crowd-{os.getpid()}"
    # Every other one, so that they cannot be merged, and many link-local ones.
    lines = ["link set lo up"]
    lines += [f"addr add 10.9.{n // 128}.{n % 128 * 2}/32 dev lo" for n in range(1, 1600)]
    lines += [f"addr add fe80::{n:x}/64 dev lo nodad" for n in range(1, 600)]
    OtherHost._ip("netns", "add", name)
    try:
        subprocess.run(
            ["ip", "-n", name, "-batch", "-"], input="\n".join(lines), text=True, check=True
        )
        yield name
    finally:
        OtherHost._ip("netns", "del", name)


def crowd(name: str, *allow: str) -> dict[str, Any]:
    command = ["ip", "netns", "exec", name, sys.executable, "-c", CROWDED, json.dumps(allow)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_a_host_with_many_addresses_is_closed_all_the_same(crowded: str) -> None:
    said = crowd(crowded)
    assert said["localhost"] == "loopback"
    assert said["localhost reached"] == ["127.0.0.1"]
    # Too many for one filter: the one by which peers come is enough.
    assert said["10.9.0.2"] == "loopback, 10.9.0.2/32"
    assert said["10.9.0.2 reached"] == ["127.0.0.1", "10.9.0.2"]
    assert said["None"] == "loopback"
    assert said["None reached"] == ["127.0.0.1"]


def test_a_filter_that_does_not_fit_is_an_error(crowded: str) -> None:
    said = crowd(crowded, *(f"10.{i // 128}.{i % 128 * 2}.0/24" for i in range(2000)))
    for host in ("localhost", "10.9.0.2", "None"):
        assert said[host].startswith("[TFD205] restricting port"), said[host]
        assert "net.core.optmem_max" in said[host]


@pytest.mark.parametrize("kind", [tfd.launchers.Local, tfd.launchers.InProcess])
def test_a_task_whose_port_stays_open_is_not_announced(kind: Any) -> None:
    allow = [f"10.{i // 128}.{i % 128 * 2}.0/24" for i in range(2000)]
    with pytest.raises(tfd.errors.LaunchError, match="restricting port") as caught:
        tfd.Cluster(data_workers=1, launcher=kind(allow=allow), name="open")
    assert "optmem_max" in str(caught.value)
    with pytest.raises(tfd.errors.FilterFailed):
        tfd.Dispatcher(allow=allow)


@pytest.mark.parametrize("family", [0, 1], ids=["ipv4", "ipv6"])
def test_who_came_before_is_shut_out(other_host: OtherHost, port: int, family: int) -> None:
    with other_host.knock(HERE[family], port) as stranger:
        assert stranger.stdout
        assert stranger.stdout.readline() == "connected\n"
        with socket.create_connection(("localhost", port)) as ours:
            ours.settimeout(0.2)
            net_ports.restrict_port(port)
            assert stranger.stdout.readline() == "closed\n"
            assert ours.recv(4096)  # gRPC's greeting
            with pytest.raises(TimeoutError):  # no end: it stays connected
                list(iter(lambda: ours.recv(4096), b""))


def test_who_is_allowed_stays(other_host: OtherHost, port: int) -> None:
    with other_host.knock(HERE[0], port) as friend:
        assert friend.stdout
        assert friend.stdout.readline() == "connected\n"
        net_ports.restrict_port(port, ["10.251.7.2/32"])
        with pytest.raises(subprocess.TimeoutExpired):
            friend.wait(0.5)
        friend.kill()


@pytest.mark.parametrize("kind", ["local", "inprocess"])
def test_a_cluster_is_closed_at_every_port(other_host: OtherHost, kind: str) -> None:
    with tfd.Cluster(data_workers=1, launcher=kind, name=f"closed-{kind}") as cluster:
        assert [ports_reached(other_host, cluster), opened(cluster)] == [[], {"loopback"}]
        cluster.restart("data_worker:0")
        assert [ports_reached(other_host, cluster), opened(cluster)] == [[], {"loopback"}]
        if kind == "local":  # what comes back after a crash is as closed
            before = cluster.kill("data_worker:0")
            deadline = time.monotonic() + 20
            while (row := cluster.snapshot().task("data_worker:0")).pid in (None, before) or (
                row.state != "ready"
            ):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert [ports_reached(other_host, cluster), opened(cluster)] == [[], {"loopback"}]


@pytest.mark.usefixtures("no_coordinator")
def test_a_cluster_that_trains_is_closed_at_every_port(other_host: OtherHost) -> None:
    with tfd.Cluster(workers=1, ps=1, evaluator=True, name="closed-train") as cluster:
        assert [ports_reached(other_host, cluster), opened(cluster)] == [[], {"loopback"}]
        for task in ("ps:0", "worker:0"):
            cluster.restart(task)
        assert [ports_reached(other_host, cluster), opened(cluster)] == [[], {"loopback"}]
    allowed = tfd.launchers.Local(allow="10.251.7.0/24")
    with tfd.Cluster(workers=1, ps=1, launcher=allowed, name="open-train") as cluster:
        assert len(ports_reached(other_host, cluster)) == 2


@pytest.mark.parametrize("kind", [tfd.launchers.Local, tfd.launchers.InProcess])
def test_a_cluster_that_is_opened_says_so(other_host: OtherHost, kind: Any) -> None:
    launcher = kind(allow="10.251.7.0/24")
    with tfd.Cluster(data_workers=1, launcher=launcher, name="opened") as cluster:
        assert len(ports_reached(other_host, cluster)) == 2
        (said,) = opened(cluster)
        assert "10.251.7.0/24" in said
        assert "10.251.7.0/24" in repr(views.View(cluster.snapshot()))


#: A coordinator's own process, which opens a port for each cluster that it connects to.
COORDINATOR = """
import sys
import tfd_notebook as tfd
from tfd_notebook._compat.tf_coordinator import connection as connecting


def show(what):
    print(what, connecting.server_port(), flush=True)
    sys.stdin.readline()

with tfd.Cluster(workers=1, ps=1, name="closed-kernel") as cluster:
    show("started")
    for number in range(3):
        cluster.strategy()
        show(f"strategy {number}")
        cluster.scale(workers=2 + number)
        show(f"scaled {number}")
    cluster.recover()
    show("recovered")
with tfd.Cluster(workers=1, ps=1, name="closed-again") as cluster:
    cluster.strategy()
    show("the next cluster")
opened = tfd.launchers.Local(allow="10.251.7.0/24")
with tfd.Cluster(workers=1, ps=1, launcher=opened, name="open-kernel") as cluster:
    cluster.strategy()
    show("opened")
"""


def test_the_coordinators_own_port_is_closed(other_host: OtherHost) -> None:
    command = [sys.executable, "-c", COORDINATOR]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as coordinator:
        assert coordinator.stdin
        assert coordinator.stdout
        reached = {}
        for line in coordinator.stdout:
            what, _, port = line.strip().rpartition(" ")
            if what == "started":  # this process connects with its first strategy
                assert port == "None"
            else:
                socket.create_connection(("localhost", int(port)), 5).close()
                reached[what] = [other_host.reaches(address, int(port)) for address in HERE]
            coordinator.stdin.write("\n")
            coordinator.stdin.flush()
    assert coordinator.returncode == 0
    assert reached.pop("opened") == [True, False]
    assert len(reached) == 8
    assert set(map(tuple, reached.values())) == {(False, False)}, reached


def ports_reached(other_host: OtherHost, cluster: tfd.Cluster) -> list[int]:
    """Return the ports of the cluster's tasks that the other host reaches."""
    ports = [int(row.address.rpartition(":")[2]) for row in cluster.snapshot().tasks]
    return [port for port in ports if other_host.reaches(HERE[0], port)]


def opened(cluster: tfd.Cluster) -> set[str]:
    return {row.open_to for row in cluster.snapshot().tasks}


#: A service on the other host, whose data worker lets in what its standard input names.
SERVICE = """
import sys
import tensorflow as tf
from tfd_notebook.net import ports as sockets

service = tf.data.experimental.service
dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
at = dispatcher.target.rpartition(":")[2]
host = sys.argv[1]
with sockets.reserve_port() as held:
    port = held.getsockname()[1]
    worker = service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=f"{host}:{at}", worker_address=f"{host}:{port}", port=port,
            heartbeat_interval_ms=100,
        )
    )
    for line in sys.stdin:
        print(at, port, sockets.restrict_port(port, line.split(), host), flush=True)
"""


def test_a_data_worker_that_the_filter_keeps_away_is_named(other_host: OtherHost) -> None:
    OtherHost._ip("-n", other_host.name, "link", "set", "lo", "up")
    command = ["ip", "netns", "exec", other_host.name, sys.executable, "-c", SERVICE, THERE[0]]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other_process:
        assert other_process.stdin
        assert other_process.stdout

        def let_in(networks: str) -> tuple[str, str]:
            assert other_process.stdin
            assert other_process.stdout
            other_process.stdin.write(f"{networks}\n")
            other_process.stdin.flush()
            dispatcher, worker, _ = other_process.stdout.readline().split(maxsplit=2)
            return f"{THERE[0]}:{dispatcher}", f"{THERE[0]}:{worker}"

        service, worker = let_in("")
        (found,) = tfd.doctor(service)
        assert found.code == "TFD811"
        for words in (worker, "unreachable", "packet filter", HERE[0]):
            assert words in found.what
        assert f"allow='{HERE[0]}'" in found.fix
        cluster = tfd.attach(f"grpc://{service}", "filtered")
        try:
            with pytest.raises(tfd.errors.NoWorkers, match=worker) as caught:
                cluster.distribute("dynamic")(tf_range())
            assert HERE[0] in str(caught.value)
            assert "no data worker" not in str(caught.value)
            let_in(HERE[0])  # as in the advice
            assert list(tfd.doctor(service)) == []
            until(lambda: cluster.snapshot().task("data_worker:0").state == "ready")  # type: ignore[union-attr]
            assert sorted(cluster.distribute("dynamic")(tf_range()).as_numpy_iterator()) == [0, 1]
        finally:
            cluster.stop()
            other_process.stdin.close()


def tf_range() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(2)
