"""Hosts for the workers of an engine, on each of which a bridge to this process is started."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tfd_notebook._version import VERSION
from tfd_notebook.errors import LaunchError, UsageError
from tfd_notebook.launchers.client.handshake import read_handshake
from tfd_notebook.launchers.client.rendezvous import Rendezvous, RendezvousHost
from tfd_notebook.launchers.remote import RemoteHost
from tfd_notebook.net import validation
from tfd_notebook.net.host import address_towards

#: Seconds for the handshake of a bridge.
HANDSHAKE_SECONDS = 30.0
#: Seconds in which all workers must have started their bridges.
START_SECONDS = 45.0

_POLL_SECONDS = 0.5
_MAX_SHOWN = 500
_INSTALL = (
    f'pip install "tfd-notebook[tensorflow]=={VERSION}" in the Python of the workers, and restart '
    "them"
)
_REPLY = validation.record(
    {"host": validation.host, "line": validation.output, "process": validation.pid},
    executor=validation.text,
)

T = TypeVar("T")


def hosts_of_workers(
    start: Callable[[dict[str, Any]], Iterable[tuple[str, Any]]],
    *,
    bound: str,
    advertised: str = "",
    grace: float,
    end_reason: str,
    opened: contextlib.ExitStack | None = None,
) -> list[RemoteHost]:
    """Start a bridge next to each worker, and return the hosts to which they connect.

    Parameters
    ----------
    start : callable
        Starts the bridges with the given arguments. Returns the name of each worker on its host,
        and the result of `tfd_notebook.agent.bridges.engine_worker.start_bridge`, unchecked.
    bound : str
        Address of this host to listen on.
    advertised : str
        Address or name at which the workers reach it. Default: `bound`.
    grace : float
        See `RemoteLauncher`.
    end_reason : str
        Reason of the loss when a worker has ended, such as ``"its executor has ended"``.
    opened : ExitStack, optional
        Closed with the last of the hosts, or after an error.
    """
    rendezvous = Rendezvous(bound)
    if opened is not None:
        rendezvous.on_close = opened.pop_all().close
    try:
        arguments = {**rendezvous.arguments(grace, advertised), "end_reason": end_reason}
        hosts: dict[tuple[str, int], RendezvousHost] = {}
        labels: dict[tuple[str, int], str] = {}
        for name, reply in start(arguments):
            values = _REPLY(reply, f"reply of worker {name}")
            label = f"{values['host']}/{name}"
            host = RendezvousHost(label, rendezvous)
            lines = iter([values["line"].encode()])
            host.handshake = read_handshake(label, lines, fix=_INSTALL)
            process = host.handshake.identity, values["process"]
            if process in labels:
                raise LaunchError(
                    f"the workers {labels[process]} and {label} are one process",
                    fix="start each worker in a separate process, or use one of them",
                )
            labels[process] = label
            hosts[host.handshake.token, values["process"]] = host
        rendezvous.expect(hosts)
        return list(hosts.values())
    except BaseException:
        rendezvous.close()
        raise


def source_address(workers: Iterable[str]) -> str:
    """Return the address of this host for connections from all workers.

    Parameters
    ----------
    workers : iterable of str
        Their addresses or host names.

    Raises
    ------
    LaunchError
    """
    addresses = set()
    for worker in workers:
        try:
            addresses.add(address_towards(worker))
        except OSError as error:
            raise LaunchError(
                f"finding the address of this host for {worker} failed: {error}",
                fix="pass address= with an address of this host that the workers reach",
            ) from None
    remote = sorted(a for a in addresses if not a.startswith("127.") and a != "::1")
    if len(remote) > 1:
        raise LaunchError(
            f"the workers reach this host at different addresses: {', '.join(remote)}",
            fix="pass address= with one that all workers reach",
        )
    # A worker on this host reaches every address of it.
    return (remote or sorted(addresses))[0]


class CallTimeout(Exception):
    """Timeout of a call that continues in its thread."""


def check_resources(resources: object) -> dict[str, float]:
    """Return the amounts of resources by name, or raise UsageError."""
    if not isinstance(resources, Mapping):
        raise UsageError(f"invalid resources {resources!r}: expected amounts by name")
    for kind, amount in resources.items():
        if (
            not isinstance(kind, str)
            or isinstance(amount, bool)
            or not isinstance(amount, (int, float))
            or not 0 <= amount < float("inf")
        ):
            raise UsageError(
                f"invalid resources {kind!r}: {amount!r}: expected a name and an amount",
                fix='such as {"CPU": 4, "GPU": 1}',
            )
    return dict(resources)


def first_workers(
    workers: list[T], count: int | None, engine: str, kind: str, having: str = ""
) -> list[T]:
    """Return the first `count` workers, or all.

    Parameters
    ----------
    workers : list
    count : int or None
    engine, kind : str
        Names of the engine and of its workers, such as ``"Dask"`` and ``"workers"``.
    having : str
        A property of these workers, for the error.

    Raises
    ------
    LaunchError
        The engine has fewer workers, or none.
    """
    if len(workers) < (count or 1):
        expected = f"{kind}={count}" if count else "at least one is required"
        raise LaunchError(
            f"the {engine} cluster has {len(workers)} {kind}{having}, but {expected}",
            fix=f"start more {kind}, or wait for them with client.wait_for_{kind}(n)",
        )
    return workers[:count]


def close_client(client: Any) -> None:
    """Close a client, which may have lost its engine."""
    with contextlib.suppress(Exception):
        client.close()


def in_thread(
    work: Callable[[], T], name: str, seconds: float, check: Callable[[], None] = lambda: None
) -> T:
    """Return the result of `work`, which runs in a thread, so that waiting can be interrupted.

    Parameters
    ----------
    work : callable
    name : str
        Name of the thread.
    seconds : float
        Timeout.
    check : callable
        Called while waiting. It may raise.

    Raises
    ------
    CallTimeout
    """
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    deadline = time.monotonic() + seconds
    while not concurrent.futures.wait([result], _POLL_SECONDS).done:
        check()
        if time.monotonic() > deadline:
            raise CallTimeout(f"no reply within {seconds:g} s")
    return result.result()


def start_error(label: str, error: BaseException) -> LaunchError:
    """Return the error of a worker on which no bridge could be started."""
    whole = " ".join(f"{type(error).__name__}: {error}".split())
    text = whole if len(whole) <= _MAX_SHOWN else f"{whole[:150]} … {whole[150 - _MAX_SHOWN :]}"
    # An engine may wrap the error of the worker.
    missing = "ModuleNotFoundError" in whole or "ImportError" in whole
    fix = _INSTALL if missing else "see the log of that worker"
    return LaunchError(f"{label}: starting an agent failed: {text}", fix=fix)
