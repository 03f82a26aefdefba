"""``launcher="ipyparallel"``: tasks next to the engines of a running ipyparallel cluster."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook.agent.bridges import engine_worker
from tfd_notebook.errors import LaunchError, TfdError, UsageError
from tfd_notebook.launchers.client.engine_workers import (
    HANDSHAKE_SECONDS,
    START_SECONDS,
    close_client,
    first_workers,
    hosts_of_workers,
    source_address,
    start_error,
)
from tfd_notebook.launchers.engine import EngineLauncher, Start
from tfd_notebook.launchers.remote import RemoteHost
from tfd_notebook.model.spec import check_count, check_text
from tfd_notebook.net import optional_packages, validation

_CONNECT_SECONDS = 15
_POLL_SECONDS = 0.2


class IPyParallel(EngineLauncher):
    """Engines of ipyparallel: each starts an agent, which connects back to this process.

    The agents do not occupy the engines, which run other code at the same time. An agent ends with
    its engine, with the cluster, or after the grace time without a connection to this process.
    Agents and this process communicate over an encrypted channel. Needs the extra ``ipyparallel``.

    Parameters
    ----------
    client : ipyparallel.Client, optional
        Default: a new client of the running cluster that `profile` and `cluster_id` name.
    profile : str
        Profile of the cluster. Default ``"default"``.
    cluster_id : str
        Id of the cluster. Default: the one without an id.
    engines : int, optional
        The number of engines to use, in the order of their ids. Default: all.
    address : str, optional
        Address of this host at which the engines reach it. Default: the source address of
        connections to them.
    grace, place, secure, host, allow
        See `RemoteLauncher` and `Launcher`.
    """

    name: ClassVar[str] = "ipyparallel"
    summary: ClassVar[str] = "next to the engines of an ipyparallel cluster (extra: ipyparallel)"
    ends_with: ClassVar[str] = "its kernel or its engines"

    def __init__(
        self,
        client: Any = None,
        *,
        profile: str = "default",
        cluster_id: str = "",
        engines: int | None = None,
        address: str = "",
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        secure: bool = False,
        host: str | Mapping[str, str] = "",
        allow: Iterable[str] = (),
    ) -> None:
        if engines is not None:
            check_count("engines", engines, minimum=1)
        if not (client is None or hasattr(client, "direct_view")):
            raise UsageError(f"invalid client {client!r}: expected an ipyparallel.Client")
        texts = {"profile": profile, "cluster_id": cluster_id}
        for option, text in texts.items():
            check_text(option, text)
        self._client, self._engines = client, engines
        self._profile, self._cluster_id = profile, cluster_id
        own = {**texts, "engines": engines, "address": address}
        check_text("address", address)
        super().__init__(own, grace=grace, place=place, secure=secure, host=host, allow=allow)

    def start_hosts(self, start: Start) -> list[RemoteHost]:
        client = self._connected(start)
        engines = sorted(client.ids)
        engines = first_workers(engines, self._engines, "ipyparallel", "engines")

        def run(function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
            return _on_each(client, engines, start, function, *arguments)

        def start_bridges(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
            replies = run(engine_worker.start_bridge, arguments, HANDSHAKE_SECONDS)
            for engine, reply in replies.items():
                yield str(engine), reply

        address = self._own["address"]
        if not address:
            here = socket.gethostname()
            names = [validation.host(name, "host") for name in run(socket.gethostname).values()]
            address = source_address("127.0.0.1" if n == here else n for n in names)
        return hosts_of_workers(
            start_bridges,
            bound=address,
            grace=self._grace,
            end_reason="its engine has ended",
            opened=start.opened,
        )

    def _connected(self, start: Start) -> Any:
        """Return the client. `start.opened` closes it if this launcher has opened it."""
        ipyparallel = optional_packages.load("ipyparallel", 'launcher "ipyparallel"', "ipyparallel")
        if self._client is not None:
            return self._client
        try:
            client = ipyparallel.Client(
                profile=self._profile, cluster_id=self._cluster_id, timeout=_CONNECT_SECONDS
            )
        except Exception as error:
            # The rest of the error is advice for several lines.
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise LaunchError(
                f"connecting to the ipyparallel cluster of profile {self._profile!r} failed: "
                f"{reason}",
                fix="start it with ipcluster start, or pass client=",
            ) from error
        start.opened.callback(close_client, client)
        start.check()
        return client


def _on_each(
    client: Any, engines: list[int], start: Start, function: Callable[..., Any], *arguments: Any
) -> dict[int, Any]:
    """Return the results of a function on each engine.

    Raises
    ------
    LaunchError
        It failed on an engine, or not all of them replied in time.
    """
    results: dict[int, Any] = {}
    deadline = time.monotonic() + START_SECONDS
    try:
        for engine in engines:
            results[engine] = client.direct_view(engine).apply_async(function, *arguments)
        for engine, result in results.items():
            while not result.ready():
                start.check()
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"engine {engine} is busy or cannot be reached: it did not reply within "
                        f"{START_SECONDS:g} s",
                        fix="wait until its cell has ended, or interrupt it",
                    )
                result.wait(_POLL_SECONDS)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the controller may have ended
            client.abort(list(results.values()), block=False)
        if isinstance(error, Exception) and not isinstance(error, TfdError):
            raise start_error("ipyparallel", error) from error
        raise
    replies = {}
    for engine, result in results.items():
        try:
            replies[engine] = result.get(0)
        except Exception as error:
            raise start_error(f"engine {engine}", error) from error
    return replies
