"""Packet filters of TensorFlow's ports, tested from another host in a network namespace."""

from __future__ import annotations

import contextlib
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
CONNECT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.5)
print("connected", flush=True)
peer.settimeout(60)
while peer.recv(4096):
    pass
print("closed", flush=True)
"""


class OtherHost:
    """A network namespace with a virtual link to this host."""

    def __init__(self) -> None:
        self.name = f"tfd-{os.getpid()}"
        self._link = f"tfd{os.getpid() % 10**7}a", f"tfd{os.getpid() % 10**7}b"

    def __enter__(self) -> OtherHost:
        near, far = self._link
        self._ip("netns", "add", self.name)
        self._ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self.name)
        for prefix, end, addresses in (((), near, HERE), (("-n", self.name), far, THERE)):
            for address in addresses:
                size, more = ("64", ["nodad"]) if ":" in address else ("24", [])
                self._ip(*prefix, "addr", "add", f"{address}/{size}", "dev", end, *more)
            self._ip(*prefix, "link", "set", end, "up")
        return self

    def __exit__(self, *_: object) -> None:
        self._ip("netns", "del", self.name)  # also removes the link

    def connect(self, address: str, port: int) -> subprocess.Popen[str]:
        """Connect from the other host, and stay connected."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, "-c", CONNECT, address, str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def reaches(self, address: str, port: int) -> bool:
        with self.connect(address, port) as client:
            assert client.stdout
            line = client.stdout.readline()
            client.kill()
        return line == "connected\n"

    @contextlib.contextmanager
    def without_replies(self) -> Iterator[None]:
        """Send IPv4 packets of this host to a different link-layer address."""
        entry = THERE[0], "dev", self._link[0]
        self._ip("neigh", "replace", *entry, "lladdr", "02:00:00:00:00:01", "nud", "permanent")
        try:
            yield
        finally:
            self._ip("neigh", "del", *entry)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def other_host() -> Iterator[OtherHost]:
    with OtherHost() as host:
        yield host


@pytest.fixture
def port() -> Iterator[int]:
    """Yield the port of a dispatcher in this process."""
    import tensorflow as tf

    service = tf.data.experimental.service
    with net_ports.reserve_port() as held:
        port: int = held.getsockname()[1]
        server: Any = service.DispatchServer(service.DispatcherConfig(port=port))
        yield port
        del server


def test_allow_list_selects_the_hosts_that_connect(other_host: OtherHost, port: int) -> None:
    def reached() -> list[bool]:
        return [other_host.reaches(address, port) for address in HERE]

    assert reached() == [True, True]  # the default of TensorFlow
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


def test_server_on_localhost_accepts_loopback_only(other_host: OtherHost, port: int) -> None:
    assert net_ports.restrict_port(port, host="localhost") == "loopback"
    assert [other_host.reaches(address, port) for address in HERE] == [False, False]
    for address in ("127.0.0.1", "[::1]", "localhost"):
        assert probe(f"{address}:{port}").kind == "dispatcher"
    for address in HERE:  # an address of this host that may move to another host
        with pytest.raises(TimeoutError):
            socket.create_connection((address, port), 0.5)


#: A server of a user without privileges. Restricts its port to the `host` of each line.
UNPRIVILEGED = """
import os, socket, sys
from tfd_notebook.errors import FilterFailed
from tfd_notebook.net import ports as sockets

socket.getaddrinfo("localhost", None)  # imports a codec, which the user may not read
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    port = server.getsockname()[1]
    print(port, flush=True)
    for line in sys.stdin:
        try:
            result = sockets.restrict_port(port, host=line.strip())
        except FilterFailed as error:
            result = error.what
        filtered = bool(server.getsockopt(socket.SOL_SOCKET, 26, 1024))  # SO_GET_FILTER
        print(filtered, result, flush=True)
"""


class UnprivilegedServer:
    """A server without privileges on all addresses of this host."""

    def __enter__(self) -> UnprivilegedServer:
        self._process = subprocess.Popen(
            [sys.executable, "-c", UNPRIVILEGED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()

    def restrict(self, host: str) -> tuple[bool, str]:
        """Return True if the port has a filter, and the result or the error."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{host}\n")
        self._process.stdin.flush()
        filtered, _, result = self._process.stdout.readline().strip().partition(" ")
        return filtered == "True", result


def test_server_without_privileges_accepts_loopback_only(other_host: OtherHost) -> None:
    with UnprivilegedServer() as server:
        assert [other_host.reaches(address, server.port) for address in HERE] == [True, True]
        with other_host.connect(HERE[0], server.port) as client:
            assert client.stdout
            assert client.stdout.readline() == "connected\n"
            assert server.restrict("localhost")[1] == "loopback"
            client.kill()
        for _ in range(2):
            assert [other_host.reaches(address, server.port) for address in HERE] == [False, False]
            for address in ("127.0.0.1", "::1"):
                socket.create_connection((address, server.port), 60).close()
            for address in HERE:  # refused by the device, dropped by a filter
                with pytest.raises((ConnectionRefusedError, TimeoutError)):
                    socket.create_connection((address, server.port), 0.5)
            assert server.restrict("localhost")[1] == "loopback"


def test_server_without_privileges_cannot_serve_this_host_only(other_host: OtherHost) -> None:
    with UnprivilegedServer() as server:
        filtered, result = server.restrict(HERE[0])
        # Since 2026, Linux requires CAP_NET_ADMIN for the filter.
        assert result == "this host" if filtered else "CAP_NET_ADMIN" in result


def test_unfinished_handshake_of_another_host_is_an_error(other_host: OtherHost) -> None:
    with UnprivilegedServer() as server, other_host.without_replies():
        assert not other_host.reaches(HERE[0], server.port)
        filtered, result = server.restrict("localhost")
        assert result == "loopback" if filtered else f"{THERE[0]} is connecting" in result


#: Restricts a port in a network namespace, and prints the addresses that still reach it.
RESTRICT = """
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
    results = {}
    for host in ("localhost", "10.9.0.2", None):
        try:
            results[str(host)] = sockets.restrict_port(port, allow, host)
        except FilterFailed as error:
            results[str(host)] = str(error)
        results[f"{host} reached"] = [
            address for address in ("127.0.0.1", "10.9.0.2", "10.9.0.4") if reached(address)
        ]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def many_addresses() -> Iterator[str]:
    """Yield the name of a network namespace with more addresses than fit into a filter."""
    name = f"tfd-many-{os.getpid()}"
    # Every second address, so that they cannot be merged, and many link-local ones.
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


def restrict_in(name: str, *allow: str) -> dict[str, Any]:
    command = ["ip", "netns", "exec", name, sys.executable, "-c", RESTRICT, json.dumps(allow)]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    results: dict[str, Any] = json.loads(completed.stdout)
    return results


def test_filter_supports_hosts_with_many_addresses(many_addresses: str) -> None:
    results = restrict_in(many_addresses)
    assert results["localhost"] == "loopback"
    assert results["localhost reached"] == ["127.0.0.1"]
    # Too many for one filter. The address that peers connect to is sufficient.
    assert results["10.9.0.2"] == "loopback, 10.9.0.2/32"
    assert results["10.9.0.2 reached"] == ["127.0.0.1", "10.9.0.2"]
    assert results["None"] == "loopback"
    assert results["None reached"] == ["127.0.0.1"]


def test_too_large_filter_is_an_error(many_addresses: str) -> None:
    results = restrict_in(
        many_addresses, *(f"10.{i // 128}.{i % 128 * 2}.0/24" for i in range(2000))
    )
    for host in ("localhost", "10.9.0.2", "None"):
        assert results[host].startswith("[TFD205] restricting port"), results[host]
        assert "Next: use fewer networks in allow=" in results[host]


@pytest.mark.parametrize("kind", [tfd.launchers.Local, tfd.launchers.InProcess])
def test_task_without_a_filter_is_not_announced(kind: Any) -> None:
    allow = [f"10.{i // 128}.{i % 128 * 2}.0/24" for i in range(2000)]
    with pytest.raises(tfd.errors.LaunchError, match="restricting port") as caught:
        tfd.Cluster(data_workers=1, launcher=kind(allow=allow), name="open")
    assert "use fewer networks" in str(caught.value)
    with pytest.raises(tfd.errors.FilterFailed):
        tfd.Dispatcher(allow=allow)


@pytest.mark.parametrize("family", [0, 1], ids=["ipv4", "ipv6"])
def test_filter_closes_existing_connections_of_other_hosts(
    other_host: OtherHost, port: int, family: int
) -> None:
    with other_host.connect(HERE[family], port) as client:
        assert client.stdout
        assert client.stdout.readline() == "connected\n"
        with socket.create_connection(("localhost", port)) as local:
            local.settimeout(0.2)
            net_ports.restrict_port(port)
            assert client.stdout.readline() == "closed\n"
            assert local.recv(4096)  # the first bytes of gRPC
            with pytest.raises(TimeoutError):  # the connection stays open
                list(iter(lambda: local.recv(4096), b""))


def test_filter_keeps_connections_of_allowed_hosts(other_host: OtherHost, port: int) -> None:
    with other_host.connect(HERE[0], port) as client:
        assert client.stdout
        assert client.stdout.readline() == "connected\n"
        net_ports.restrict_port(port, ["10.251.7.2/32"])
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(0.5)
        client.kill()


@pytest.mark.parametrize("kind", ["local", "inprocess"])
def test_ports_of_a_data_service_refuse_other_hosts(other_host: OtherHost, kind: str) -> None:
    with tfd.Cluster(data_workers=1, launcher=kind, name=f"closed-{kind}") as cluster:
        assert [ports_reached(other_host, cluster), opened(cluster)] == [[], {"loopback"}]
        cluster.restart("data_worker:0")
        assert [ports_reached(other_host, cluster), opened(cluster)] == [[], {"loopback"}]
        if kind == "local":  # even after a restart
            before = cluster.kill("data_worker:0")
            deadline = time.monotonic() + 60
            while (row := cluster.snapshot().task("data_worker:0")).pid in (None, before) or (
                row.state != "ready"
            ):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert [ports_reached(other_host, cluster), opened(cluster)] == [[], {"loopback"}]


@pytest.mark.usefixtures("no_coordinator")
def test_ports_of_training_tasks_refuse_other_hosts(other_host: OtherHost) -> None:
    with tfd.Cluster(workers=1, ps=1, evaluator=True, name="closed-train") as cluster:
        assert [ports_reached(other_host, cluster), opened(cluster)] == [[], {"loopback"}]
        for task in ("ps:0", "worker:0"):
            cluster.restart(task)
        assert [ports_reached(other_host, cluster), opened(cluster)] == [[], {"loopback"}]
    allowed = tfd.launchers.Local(allow="10.251.7.0/24")
    with tfd.Cluster(workers=1, ps=1, launcher=allowed, name="open-train") as cluster:
        assert len(ports_reached(other_host, cluster)) == 2


@pytest.mark.parametrize("kind", [tfd.launchers.Local, tfd.launchers.InProcess])
def test_allowed_networks_are_shown(other_host: OtherHost, kind: Any) -> None:
    launcher = kind(allow="10.251.7.0/24")
    with tfd.Cluster(data_workers=1, launcher=launcher, name="opened") as cluster:
        assert len(ports_reached(other_host, cluster)) == 2
        (allowed,) = opened(cluster)
        assert "10.251.7.0/24" in allowed
        assert "10.251.7.0/24" in repr(views.View(cluster.snapshot()))


#: A process with a coordinator, which opens a port when it first connects to a cluster.
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


def test_port_of_the_coordinator_refuses_other_hosts(other_host: OtherHost) -> None:
    command = [sys.executable, "-c", COORDINATOR]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as coordinator:
        assert coordinator.stdin
        assert coordinator.stdout
        reached = {}
        for line in coordinator.stdout:
            what, _, port = line.strip().rpartition(" ")
            if what == "started":  # the process connects with its first strategy
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


#: A process whose packet filters cannot be attached while its first cluster runs.
UNFILTERED_COORDINATOR = """
import errno, sys
import tfd_notebook as tfd
from tfd_notebook._compat.tf_coordinator import connection as connecting
from tfd_notebook.net import ports as sockets


def refuse(sock, program):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def show(what):
    print(what, connecting.server_port(), flush=True)
    sys.stdin.readline()


def fail(cluster):
    try:
        cluster.strategy()
    except tfd.errors.FilterFailed as error:
        return error.fix.rpartition("kernel")[0][-12:].strip().replace(" ", "-")

attach = sockets._attach
with tfd.Cluster(workers=1, ps=1, name="open-kernel") as cluster:
    sockets._attach = refuse
    show(f"first {fail(cluster)}")
    sockets._attach = attach
    show(f"second {fail(cluster)}")
show("stopped")
with tfd.Cluster(workers=1, ps=1, name="closed-kernel") as cluster:
    show("next cluster" if cluster.strategy() else "")
"""


def test_port_of_a_coordinator_without_a_filter_is_closed(other_host: OtherHost) -> None:
    command = [sys.executable, "-c", UNFILTERED_COORDINATOR]
    reached = {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as coordinator:
        assert coordinator.stdin
        assert coordinator.stdout
        for line in coordinator.stdout:
            what, _, port = line.strip().rpartition(" ")
            reached[what] = [
                *(other_host.reaches(address, int(port)) for address in HERE),
                net_ports.listening_addresses(int(port)) != [],
            ]
            coordinator.stdin.write("\n")
            coordinator.stdin.flush()
    assert coordinator.returncode == 0
    assert reached == {
        "first restart-the": [False, False, False],
        "second restart-the": [False, False, False],
        "stopped": [False, False, False],
        "next cluster": [False, False, True],
    }


#: A process that connects to a task that does not respond. It prints the port of its server when a
#: filter is attached. The task responds after the next line of standard input.
WAITING_COORDINATOR = """
import errno, os, signal, sys, threading
import tensorflow as tf
import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook._compat.tf_coordinator import connection as connecting
from tfd_notebook.net import ports as sockets

attach, attached, failures = sockets._attach, [], []


def attach_or_refuse(sock, program):
    attached.append(sock.getsockname()[1])
    if sys.argv[1] == "refuse":
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    attach(sock, program)


def connect():
    try:
        tf.distribute.ParameterServerStrategy(cluster.resolver)
    except tfd.errors.FilterFailed as error:
        failures.append(str(error))


with tfd.Cluster(workers=1, ps=1, name="waiting-kernel") as cluster:
    sockets._attach = attach_or_refuse
    worker = cluster.snapshot().task("worker:0").pid
    thread = threading.Thread(target=connect, daemon=True)
    os.kill(worker, signal.SIGSTOP)
    try:
        thread.start()
        port = until(connecting.server_port)
        until(lambda: port in attached)
        print(port, flush=True)
        sys.stdin.readline()
        print(thread.is_alive(), flush=True)
    finally:
        os.kill(worker, signal.SIGCONT)
    thread.join()
    print(*failures, flush=True)
"""


@pytest.mark.parametrize("kernel", ["attach", "refuse"])
def test_port_of_a_waiting_coordinator_is_closed(other_host: OtherHost, kernel: str) -> None:
    command = [sys.executable, "-c", WAITING_COORDINATOR, kernel]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as coordinator:
        assert coordinator.stdin
        assert coordinator.stdout
        port = int(coordinator.stdout.readline())
        for address in HERE:
            until(lambda address=address: not other_host.reaches(address, port))  # type: ignore[misc]
        until(lambda: (net_ports.listening_addresses(port) == []) is (kernel == "refuse"))
        coordinator.stdin.write("\n")
        coordinator.stdin.flush()
        assert coordinator.stdout.readline() == "True\n"
        error = coordinator.stdout.read()
    assert coordinator.returncode == 0
    assert ("The port was closed" in error) is (kernel == "refuse")


def ports_reached(other_host: OtherHost, cluster: tfd.Cluster) -> list[int]:
    """Return the ports of the cluster's tasks that the other host reaches."""
    ports = [int(row.address.rpartition(":")[2]) for row in cluster.snapshot().tasks]
    return [port for port in ports if other_host.reaches(HERE[0], port)]


def opened(cluster: tfd.Cluster) -> set[str]:
    return {row.open_to for row in cluster.snapshot().tasks}


#: A service on the other host, whose data worker accepts the networks of standard input.
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


def test_data_worker_behind_a_filter_is_named(other_host: OtherHost) -> None:
    OtherHost._ip("-n", other_host.name, "link", "set", "lo", "up")
    command = ["ip", "netns", "exec", other_host.name, sys.executable, "-c", SERVICE, THERE[0]]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other_process:
        assert other_process.stdin
        assert other_process.stdout

        def allow(networks: str) -> tuple[str, str]:
            assert other_process.stdin
            assert other_process.stdout
            other_process.stdin.write(f"{networks}\n")
            other_process.stdin.flush()
            dispatcher, worker, _ = other_process.stdout.readline().split(maxsplit=2)
            return f"{THERE[0]}:{dispatcher}", f"{THERE[0]}:{worker}"

        service, worker = allow("")
        (finding,) = tfd.doctor(service)
        assert finding.code == "TFD811"
        for words in (worker, "unreachable", "packet filter", HERE[0]):
            assert words in finding.what
        assert f"allow='{HERE[0]}'" in finding.fix
        cluster = tfd.attach(f"grpc://{service}", "filtered")
        try:
            with pytest.raises(tfd.errors.NoWorkers, match=worker) as caught:
                cluster.distribute("dynamic")(tf_range())
            assert HERE[0] in str(caught.value)
            assert "no data worker" not in str(caught.value)
            allow(HERE[0])  # follows the advice
            assert list(tfd.doctor(service)) == []
            until(lambda: cluster.snapshot().task("data_worker:0").state == "ready")  # type: ignore[union-attr]
            assert sorted(cluster.distribute("dynamic")(tf_range()).as_numpy_iterator()) == [0, 1]
        finally:
            cluster.stop()
            other_process.stdin.close()


def tf_range() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(2)
