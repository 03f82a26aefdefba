"""Speed of a relay in Python against stunnel, which encrypts between the hosts of a cluster.

Both ends of each tunnel are processes of this machine, and so is the source of the data. One
connection passes through a tunnel at a time. The relay uses Python's ``ssl`` with TLS 1.3, one
thread for each connection, and the same key as stunnel. It copies in one direction only, which a
relay in use cannot. ``stunnel`` must be installed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import _pairs

from tfd_notebook.net.certificates import CertificateAuthority

_CHUNK = 1 << 18
_STUNNEL = """\
foreground = yes
pid =
syslog = no
debug = emerg
sslVersionMin = TLSv1.3
CAfile = {pair}
cert = {pair}
verifyChain = yes
requireCert = yes
sessionResume = no
[tunnel]
client = {client}
accept = 127.0.0.1:{port}
connect = 127.0.0.1:{target}
"""


def relay(pair: str, end: str, port: int, target: int) -> None:
    """Forward connections to `target`. Only the end ``"yes"`` is a client of TLS."""
    purpose = ssl.Purpose.SERVER_AUTH if end == "yes" else ssl.Purpose.CLIENT_AUTH
    context = ssl.create_default_context(purpose, cafile=pair)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.load_cert_chain(pair)
    listener = socket.create_server(("127.0.0.1", port))
    while True:
        accepted, _ = listener.accept()
        threading.Thread(target=forward, args=(accepted, target, context, end), daemon=True).start()


def forward(accepted: socket.socket, target: int, context: ssl.SSLContext, end: str) -> None:
    """Copy the data of `target` to a connection, until either of them ends."""
    buffer = memoryview(bytearray(_CHUNK))
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        stack.enter_context(accepted)
        connected = stack.enter_context(socket.create_connection(("127.0.0.1", target)))
        if end == "yes":
            connected = stack.enter_context(context.wrap_socket(connected))
        else:
            accepted = stack.enter_context(context.wrap_socket(accepted, server_side=True))
        while received := connected.recv_into(buffer):
            accepted.sendall(buffer[:received])


def source(port: int) -> None:
    """Send the same bytes to each connection until it ends."""
    listener = socket.create_server(("127.0.0.1", port))
    data = os.urandom(_CHUNK)
    while True:
        accepted, _ = listener.accept()
        with contextlib.suppress(OSError), accepted:
            while True:
                accepted.sendall(data)


def free_ports(count: int) -> list[int]:
    """Return free ports of this machine."""
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]


def speed(port: int, size: int) -> Callable[[], float]:
    """Return a measurement of the MB/s of a connection to a port."""

    def measure() -> float:
        buffer = memoryview(bytearray(_CHUNK))
        with connection(port) as connected:
            began, received = time.perf_counter(), 0
            while received < size:
                count = connected.recv_into(buffer)
                if not count:
                    raise ConnectionError(f"the tunnel at port {port} ended its connection")
                received += count
            return received / 1e6 / (time.perf_counter() - began)

    return measure


def connection(port: int) -> socket.socket:
    """Connect to a tunnel that may not be ready yet, and receive its first byte."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            connected = socket.create_connection(("127.0.0.1", port), 20)
            if connected.recv(1):
                return connected
            connected.close()
        time.sleep(0.05)
    raise TimeoutError(f"the tunnel at port {port} forwards no data")


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    rounds, size = (5, 200_000_000) if quick else (15, 1_000_000_000)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pair = directory / "pair.pem"
        pair.touch(0o600)
        pair.write_bytes(CertificateAuthority().key_and_certificate())
        origin, *ports = free_ports(5)

        def start(*command: str) -> None:
            process = subprocess.Popen(command)
            stack.callback(process.wait)
            stack.callback(process.kill)

        def start_here(*arguments: object) -> None:
            start(sys.executable, __file__, *map(str, arguments))

        start_here("source", origin)
        for end, port, target in (("yes", *ports[:2]), ("no", ports[1], origin)):
            start_here("relay", pair, end, port, target)
        for end, port, target in (("yes", *ports[2:]), ("no", ports[3], origin)):
            config = directory / f"{end}.conf"
            config.write_text(_STUNNEL.format(pair=pair, client=end, port=port, target=target))
            start("stunnel", str(config))
        result = _pairs.measure(speed(ports[0], size), speed(ports[2], size), rounds)
        _pairs.report("tls_relay", result, "MB/s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["relay"]:
        relay(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
    elif sys.argv[1:2] == ["source"]:
        source(int(sys.argv[2]))
    else:
        main()
