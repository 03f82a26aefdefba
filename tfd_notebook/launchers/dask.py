"""``launcher="dask"``: tasks next to the workers of a running Dask cluster."""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook.agent.bridges import engine_worker
from tfd_notebook.errors import LaunchError, StateError, UsageError
from tfd_notebook.launchers.base import OnEvent
from tfd_notebook.launchers.client.engine_workers import (
    HANDSHAKE_SECONDS,
    START_SECONDS,
    CallTimeout,
    EngineLauncher,
    Start,
    close_client,
    first_workers,
    hosts_of_workers,
    in_thread,
    source_address,
    start_error,
)
from tfd_notebook.launchers.remote import RemoteHost
from tfd_notebook.model.spec import ClusterConfig, check_count
from tfd_notebook.net import optional_packages

_CONNECT_SECONDS = 15


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
    workers : int, optional
        The number of workers to use, in the order of their addresses. Default: all.
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
        workers: int | None = None,
        address: str = "",
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        secure: bool = False,
        host: str | Mapping[str, str] = "",
        allow: Iterable[str] = (),
    ) -> None:
        super().__init__(
            address=address, grace=grace, place=place, secure=secure, host=host, allow=allow
        )
        if workers is not None:
            check_count("workers", workers, minimum=1)
        if not (client is None or isinstance(client, str) or hasattr(client, "nthreads")):
            raise UsageError(
                f"invalid client {client!r}: expected a distributed.Client, or the address of a "
                "scheduler"
            )
        self._client, self._workers = client, workers

    @property
    def options(self) -> dict[str, Any]:
        client = self._client if isinstance(self._client, str) else None
        options = {"client": client, "workers": self._workers}
        return {**super().options, **options}

    def start_workers(
        self, config: ClusterConfig, on_event: OnEvent, start: Start, opened: contextlib.ExitStack
    ) -> list[RemoteHost]:
        client = self._connected(start, opened)
        workers = _workers(client, start)
        workers = first_workers(workers, self._workers, "Dask", "workers")
        address = self._address or source_address(map(_host_of, workers))
        return hosts_of_workers(
            lambda arguments: _start(client, workers, arguments, start),
            bound=address,
            grace=self._grace,
            end_reason="its Dask worker has ended",
            release=opened.pop_all().close,
        )

    def _connected(self, start: Start, opened: contextlib.ExitStack) -> Any:
        """Return the client. Closing `opened` closes it if this launcher has opened it."""
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
            opened.callback(close_client, client)
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


def _workers(client: Any, start: Start) -> list[str]:
    """Return the addresses of all workers in order."""
    try:
        return sorted(in_thread(client.nthreads, "tfd-dask-workers", START_SECONDS, start.check))
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(
            f"listing the Dask workers failed: {str(error) or type(error).__name__}",
            fix="check that the scheduler is running",
        ) from error


def _start(
    client: Any, workers: list[str], arguments: dict[str, Any], start: Start
) -> Iterator[tuple[str, Any]]:
    """Start a bridge next to each worker."""

    def run() -> Any:
        # Unlike a task of Dask, it does not wait for a free thread.
        return client.run(
            engine_worker.start_bridge_in_thread,
            arguments,
            HANDSHAKE_SECONDS,
            workers=workers,
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
    for worker in workers:
        reply = replies.get(worker)
        if isinstance(reply, BaseException):
            raise start_error(worker, reply)
        yield worker.rpartition(":")[2], reply


def _host_of(worker: str) -> str:
    """Return the host in the address of a worker. Threads of this process have none."""
    parts = urllib.parse.urlsplit(worker)
    return "127.0.0.1" if parts.scheme == "inproc" else parts.hostname or "127.0.0.1"
