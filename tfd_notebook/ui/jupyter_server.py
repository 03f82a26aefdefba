"""Extension of Jupyter Server that gives the panel the clusters that no kernel holds.

``GET tfd-notebook/clusters`` lists them. ``POST tfd-notebook/clusters/NAME`` stops one or renews
its lease, and responds with the new list. An error is the response ``{"what", "fix", "code"}``.

The command ``tfd`` does the work in a separate process. The server's loop therefore never blocks,
and a timeout can kill the process. The server holds no cluster and does not import the package's
cluster modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Awaitable, Mapping
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web

from tfd_notebook import errors
from tfd_notebook.agent import interpreter
from tfd_notebook.model.spec import CLUSTER_NAME, check_hours
from tfd_notebook.net import runtime_dir
from tfd_notebook.net.agent_protocol import pack_error, unpack_error

__all__ = ["act", "tfd", "unattached_clusters"]

_LIST_SECONDS = 20.0
#: Seconds for which later requests share a complete list.
_SHARED_SECONDS = 1.0
_ACT_SECONDS = 90.0
_FIELDS = ("name", "state", "launcher", "planned", "observed", "lease", "agent")
_STATUS = {
    errors.UnknownName: 404,
    errors.StateError: 409,
    errors.NameTaken: 409,
    errors.UsageError: 400,
    errors.TimeLimit: 504,
}
_ERROR = re.compile(r"tfd: \[(?P<code>TFD\d+)\] (?P<what>.*?)(?:\nNext: (?P<fix>.*))?", re.DOTALL)


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "tfd_notebook.ui.jupyter_server"}]


def _load_jupyter_server_extension(server: Any) -> None:
    settings = server.web_app.settings
    address = url_path_join(settings["base_url"], "tfd-notebook", "clusters")
    handlers = [(address, ClustersHandler), (address + "/([^/]+)", ClusterHandler)]
    server.web_app.add_handlers(".*$", handlers)


class _Handler(APIHandler):
    auth_resource = "tfd_notebook"

    async def answer(self, work: Awaitable[list[dict[str, Any]]]) -> None:
        """Respond with the clusters that `work` returns, or with its error."""
        try:
            response: Any = {"clusters": await work}
        except errors.TfdError as error:
            statuses = (status for kind, status in _STATUS.items() if isinstance(error, kind))
            self.set_status(next(statuses, 500))
            response = pack_error(error)
        self.finish(json.dumps(response))


class ClustersHandler(_Handler):
    """Handler that lists the clusters that no kernel holds."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        await self.answer(unattached_clusters())


class ClusterHandler(_Handler):
    """Handler that stops or renews such a cluster."""

    @web.authenticated
    @authorized
    async def post(self, name: str) -> None:
        await self.answer(act(name, self.request.body))


async def unattached_clusters() -> list[dict[str, Any]]:
    """Return the detached clusters of this user that no process holds.

    Returns
    -------
    list of dict
        The keys are ``name``, ``state``, ``launcher``, ``planned``, ``observed``, ``lease`` and
        ``agent``. ``planned`` and ``observed`` are numbers of tasks. ``lease`` is its end in
        seconds since the epoch. ``agent`` is the process that supervises the cluster.

    Raises
    ------
    TfdError
    """
    # Usually no cluster is detached. State files show that without starting ``tfd``.
    if not await asyncio.to_thread(_any_detached):
        return []
    global _listing
    if _listing is None or not _listing.usable:
        _listing = _Listing()
    return await _listing.clusters()


class _Listing:
    """A ``tfd list`` that all requests share while it runs and for a second afterwards."""

    def __init__(self) -> None:
        self._running = asyncio.ensure_future(tfd("list", "--json", limit=_LIST_SECONDS))
        self._ended: float | None = None
        self._failed = False
        self._running.add_done_callback(self._record_end)

    def _record_end(self, running: asyncio.Future[str]) -> None:
        self._ended = time.monotonic()
        self._failed = running.cancelled() or running.exception() is not None

    @property
    def usable(self) -> bool:
        """True if another request may share the list."""
        if self._running.get_loop() is not asyncio.get_running_loop():
            return False
        if self._ended is None:
            return True
        return not self._failed and time.monotonic() - self._ended < _SHARED_SECONDS

    async def clusters(self) -> list[dict[str, Any]]:
        """Return the detached clusters that no process has attached."""
        # Cancelling one request must not cancel the listing that others share.
        known = json.loads(await asyncio.shield(self._running))
        return [
            {name: record[name] for name in _FIELDS} for record in known if record["pid"] is None
        ]


_listing: _Listing | None = None


async def act(name: str, body: bytes) -> list[dict[str, Any]]:
    """Run the action of `body` on the cluster `name`, and return the new `unattached_clusters`.

    Parameters
    ----------
    name : str
    body : bytes
        JSON: ``{"action": "stop"}`` or ``{"action": "renew", "hours": 8}``. The number ``"agent"``
        selects one of several clusters with this name.

    Raises
    ------
    UsageError
        The body is invalid.
    UnknownName
        No cluster without a process has this name and agent.
    TfdError
        The action failed.
    """
    arguments, agent = _arguments(name, body)
    if not any(
        cluster["name"] == name and agent in (None, cluster["agent"])
        for cluster in await unattached_clusters()
    ):
        raise errors.UnknownName(
            f"no detached cluster {name!r} is without a kernel",
            fix="it has stopped, or a kernel has attached to it: use that kernel",
        )
    await tfd(*arguments, limit=_ACT_SECONDS)
    global _listing
    _listing = None  # It is older than the action.
    return await unattached_clusters()


async def tfd(*arguments: str, limit: float) -> str:
    """Run the command ``tfd`` and return its output.

    Parameters
    ----------
    *arguments : str
    limit : float
        Seconds after which it is killed.

    Raises
    ------
    TimeLimit
        It did not end within `limit`.
    TfdError
        The error that the command printed.
    """
    process = await asyncio.create_subprocess_exec(
        *interpreter.command("tfd_notebook.ui.cli", *arguments),
        env=interpreter.environment(),
        cwd=runtime_dir.runtime_dir(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, message = await asyncio.wait_for(process.communicate(), limit)
    except asyncio.TimeoutError:
        raise errors.TimeLimit(
            f"tfd {' '.join(arguments)} did not end within {limit:g} s",
            fix="the host may be overloaded: try again, or run it in a terminal",
        ) from None
    finally:
        if process.returncode is None:  # the browser closed the request, or the timeout passed
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise _error(message.decode(errors="replace").strip())
    return output.decode()


def _any_detached() -> bool:
    # Import time: the server starts without it.
    from tfd_notebook.launchers.client.detached import detached

    return bool(detached())


def _arguments(name: str, body: bytes) -> tuple[tuple[str, ...], int | None]:
    """Return the arguments of the command ``tfd``, and the agent that the request names."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise errors.UsageError("invalid request: expected JSON") from None
    if not isinstance(request, Mapping) or request.get("action") not in ("stop", "renew"):
        raise errors.UsageError(
            "invalid request: expected an action",
            fix='use {"action": "stop"} or {"action": "renew"}',
        )
    # The pattern excludes a name that ``tfd`` would parse as an option.
    if not CLUSTER_NAME.fullmatch(name):
        raise errors.UnknownName(f"invalid name of a cluster: {name[:100]!r}")
    agent = request.get("agent")
    if agent is not None and (isinstance(agent, bool) or not isinstance(agent, int)):
        raise errors.UsageError(f"invalid agent {str(agent)[:100]!r}: expected a number")
    words = (name,) if agent is None else (name, f"--pid={agent}")
    if request["action"] == "stop":
        return ("stop", *words), agent
    hours = request.get("hours", 8.0)
    check_hours(hours)
    return ("renew", *words, f"--hours={hours:g}"), agent


def _error(message: str) -> errors.TfdError:
    match = _ERROR.fullmatch(message)
    if match:
        return unpack_error(match.groupdict())
    last = message.splitlines()[-1:] or ["tfd failed"]
    return errors.TfdError(last[0], fix="run tfd list in a terminal for details")
