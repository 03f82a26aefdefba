"""``launcher="dask"``: tasks next to the workers of a running Dask cluster."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook.agent.bridges import engine_worker
from tfd_notebook.errors import LaunchError, StateError, UsageError
from tfd_notebook.launchers.client.engine_workers import (
    HANDSHAKE_SECONDS,
    START_SECONDS,
    CallTimeout,
    check_resources,
    close_client,
    first_workers,
    hosts_of_workers,
    in_thread,
    source_address,
    start_error,
)
from tfd_notebook.launchers.engine import EngineLauncher, Start
from tfd_notebook.launchers.remote import RemoteHost
from tfd_notebook.model.spec import check_count, check_text
from tfd_notebook.net import optional_packages

_CONNECT_SECONDS = 15
#: Names of workers in labels. Others are replaced by the port.
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


class Dask(EngineLauncher):
    """Workers of Dask: each starts an agent, which connects back to this process.

    The agents take no thread of the workers. An agent ends with its worker, with the cluster, or
    after the grace time without a connection to this process. Agents and this process communicate
    over an encrypted channel. Needs the extra ``dask``.

    Parameters
    ----------
    client : distributed.Client or str, optional
        A client, or the address of a scheduler, such as ``"tcp://one:8786"``. Default: the current
        client of this process.
    workers : int, str or sequence of str, optional
        The number of workers to use, in the order of their addresses, or the names or addresses of
        the workers. Default: all.
    resources : mapping of str to float, optional
        Use only workers with at least these resources, which ``dask worker --resources`` sets, such
        as ``{"GPU": 1}``. They are not reserved.
    address : str, optional
        Address of this host at which the workers reach it. Default: the source address of
        connections to them.
    grace, place, secure, host, allow
        See `RemoteLauncher` and `Launcher`.
    """

    name: ClassVar[str] = "dask"
    summary: ClassVar[str] = "next to the workers of a Dask cluster (extra: dask)"
    ends_with: ClassVar[str] = "its kernel or its Dask workers"

    def __init__(
        self,
        client: Any = None,
        *,
        workers: int | str | Sequence[str] | None = None,
        resources: Mapping[str, float] | None = None,
        address: str = "",
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        secure: bool = False,
        host: str | Mapping[str, str] = "",
        allow: Iterable[str] = (),
    ) -> None:
        if isinstance(workers, int):
            check_count("workers", workers, minimum=1)
        elif workers is not None:
            workers = [workers] if isinstance(workers, str) else list(workers)
            if not workers or len(set(workers)) < len(workers):
                raise UsageError(f"invalid workers {workers!r}: expected different names")
            for name in workers:
                check_text("workers", name)
        if not (client is None or isinstance(client, str) or hasattr(client, "nthreads")):
            raise UsageError(
                f"invalid client {client!r}: expected a distributed.Client, or the address of a "
                "scheduler"
            )
        self._client, self._workers = client, workers
        self._resources = check_resources(resources or {})
        scheduler = client if isinstance(client, str) else None
        own = {
            "client": scheduler,
            "workers": workers,
            "resources": self._resources,
            "address": address,
        }
        check_text("address", address)
        super().__init__(own, grace=grace, place=place, secure=secure, host=host, allow=allow)

    def start_hosts(self, start: Start) -> list[RemoteHost]:
        client = self._connected(start)
        workers = self._chosen(_workers(client, start))
        address = self._own["address"] or source_address(map(_host_of, workers))
        return hosts_of_workers(
            lambda arguments: _start(client, workers, arguments, start),
            bound=address,
            grace=self._grace,
            end_reason="its Dask worker has ended",
            opened=start.opened,
        )

    def _connected(self, start: Start) -> Any:
        """Return the client. `start.opened` closes it if this launcher has opened it."""
        distributed = optional_packages.load("distributed", 'launcher "dask"', "dask")
        if isinstance(self._client, str):
            address = self._client
            try:
                client = distributed.Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
            except Exception as error:
                raise LaunchError(
                    f"connecting to the Dask scheduler {address} failed: "
                    f"{str(error) or type(error).__name__}",
                    fix="check its address, and that it runs; for tls://, pass a client",
                ) from error
            start.opened.callback(close_client, client)
            start.check()
            return client
        client = self._client
        if client is None:
            try:
                client = distributed.default_client()
            except ValueError:
                raise StateError(
                    "no client of Dask in this process",
                    fix="create a distributed.Client, or pass client=",
                ) from None
        if client.asynchronous:
            raise UsageError("client is asynchronous: expected a client with blocking methods")
        if client.status != "running":
            raise StateError(
                f"the client of Dask is {client.status}", fix="create another one, or wait"
            )
        return client

    def _chosen(self, workers: Mapping[str, dict[str, Any]]) -> dict[str, str]:
        """Return the names of the workers to use, by address."""
        names = {
            address: str(description["name"])
            for address, description in workers.items()
            if all(
                description["resources"].get(kind, 0) >= amount
                for kind, amount in self._resources.items()
            )
        }
        lacks = f" with resources={self._resources}" if self._resources else ""
        if not isinstance(self._workers, list):
            chosen = first_workers(list(names), self._workers, "Dask", "workers", lacks)
            return {address: names[address] for address in chosen}
        addresses = {name: address for address, name in names.items()} | {a: a for a in names}
        for name in self._workers:
            if name not in addresses:
                raise LaunchError(
                    f"the Dask cluster has no worker {name!r}{lacks}",
                    fix=f"choose from {', '.join(names.values()) or 'other resources='}",
                )
        return {addresses[name]: names[addresses[name]] for name in self._workers}


def _workers(client: Any, start: Start) -> dict[str, dict[str, Any]]:
    """Return the scheduler's descriptions of all workers by address, in order."""

    def describe() -> Any:
        return client.sync(client.scheduler.identity)

    try:
        reply = in_thread(describe, "tfd-dask-workers", START_SECONDS, start.check)
        return dict(sorted(reply["workers"].items()))
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(
            f"listing the Dask workers failed: {str(error) or type(error).__name__}",
            fix="check that the scheduler is running",
        ) from error


def _start(
    client: Any, workers: Mapping[str, str], arguments: dict[str, Any], start: Start
) -> Iterator[tuple[str, Any]]:
    """Start a bridge next to each worker."""

    def run() -> Any:
        # Unlike a task of Dask, it does not wait for a free thread.
        return client.run(
            engine_worker.start_bridge_in_thread,
            arguments,
            HANDSHAKE_SECONDS,
            workers=list(workers),
            on_error="return",
        )

    try:
        replies = in_thread(run, "tfd-dask-launch", START_SECONDS, start.check)
    except CallTimeout:
        raise LaunchError(
            f"not all Dask workers replied within {START_SECONDS:g} s",
            fix="check that all workers are running, and see their logs",
        ) from None
    except LaunchError:
        raise
    except Exception as error:
        raise start_error("Dask", error) from error
    for worker, name in workers.items():
        reply = replies.get(worker)
        if isinstance(reply, BaseException):
            raise start_error(worker, reply)
        # Without a name, Dask uses the address.
        yield name if _NAME.fullmatch(name) else worker.rpartition(":")[2], reply


def _host_of(worker: str) -> str:
    """Return the host in the address of a worker. Threads of this process have none."""
    parts = urllib.parse.urlsplit(worker)
    return "127.0.0.1" if parts.scheme == "inproc" else parts.hostname or "127.0.0.1"
