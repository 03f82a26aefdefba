"""Attacks by a remote kernel that states the addresses of its tasks."""

from __future__ import annotations

from typing import Any

import pytest

from tfd_notebook import errors
from tfd_notebook.remote_kernel.bus_client import BusClient
from tfd_notebook.remote_kernel.clusters import RemoteCluster
from tfd_notebook.resolvers import KernelResolver


class Kernel:
    """A kernel at a server, with one worker at the address that the kernel has sent."""

    state = "ready"

    def __init__(self, server: str, stated: str) -> None:
        self.label = server
        self._bus = BusClient(lambda message: None)
        task = {"role": "worker", "index": 0, "task": "worker:0", "address": stated}
        cluster = {
            **{"name": "c", "launcher": "local", "state": "ready", "order": ["worker:0"]},
            "tasks": {"worker:0": {**task, "name": "worker:0", "state": "ready"}},
        }
        state = {"kind": "state", "seq": 1, "full": True, "state": {"clusters": {"c": cluster}}}
        self._bus.handle_message(state, [])
        one: Any = self
        self.clusters = {"c": RemoteCluster(one, "c")}


def workers(*kernels: Kernel) -> list[str]:
    addresses: list[str] = KernelResolver(*kernels).cluster_spec().as_dict()["worker"]
    return addresses


@pytest.mark.parametrize(
    ("stated", "used"),
    [
        *(("localhost:7", "203.0.113.5:7"), ("[::1]:7", "203.0.113.5:7")),
        *(("203.0.113.5:7", "203.0.113.5:7"), ("10.253.9.7:7", "10.253.9.7:7")),
    ],
)
def test_task_is_at_its_server_or_a_private_address(stated: str, used: str) -> None:
    assert workers(Kernel("203.0.113.5:8888", stated)) == [used]


@pytest.mark.parametrize(
    "stated",
    [
        *(
            "203.0.113.9:7",
            "127.0.0.2:7",
            "0.0.0.0:7",
            "[::ffff:127.0.0.1]:7",
            "169.254.169.254:80",
        ),
        *("10.253.9.3:7", "missing.invalid:7"),
    ],
)
def test_kernel_cannot_state_other_addresses(stated: str) -> None:
    attacker, other = Kernel("203.0.113.5:8888", stated), Kernel("10.253.9.3:8888", "localhost:7")
    with pytest.raises(errors.Malformed, match=r"203\.0\.113\.5:8888 states the address") as caught:
        workers(attacker, other)
    assert "use a server" in str(caught.value)


def test_kernel_of_this_host_can_state_an_address_of_this_host() -> None:
    assert workers(Kernel("localhost:8888", "127.0.0.1:7")) == ["localhost:7"]
    assert workers(Kernel("127.0.0.2:8888", "127.0.0.2:7")) == ["127.0.0.2:7"]
