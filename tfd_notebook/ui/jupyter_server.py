"""An extension of Jupyter Server: the clusters that no kernel holds, for the panel.

``GET tfd-notebook/clusters`` lists them; ``POST tfd-notebook/clusters/NAME`` has one stopped or its
lease renewed, and answers with the list that is true then. What cannot be done is answered as
``{"what", "fix", "code"}``.

The work is done by the command ``tfd`` in a process of its own: the server's loop never waits, a
time limit is one, and the server itself neither holds a cluster nor imports what drives one.
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
from tfd_notebook.cluster import commands
from tfd_notebook.net import runtime_dir

__all__ = ["act", "tfd", "unattached_clusters"]

_LOOK_SECONDS = 20.0
#: Seconds for which a list answers requests that come after its end.
_SHARED_SECONDS = 1.0
_ACT_SECONDS = 90.0
_MOST_HOURS = 24.0 * 365
_FIELDS = ("name", "state", "launcher", "planned", "observed", "lease", "agent")
_STATUS = {
    errors.UnknownName: 404,
    errors.StateError: 409,
    errors.NameTaken: 409,
    errors.UsageError: 400,
    errors.TimeLimit: 504,
}
_SAID = re.compile(r"tfd: \[(?P<code>TFD\d+)\] (?P<what>.*?)(?:\nNext: (?P<fix>.*))?", re.DOTALL)


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
        """Answer with the clusters that `work` returns, or with why it could not."""
        try:
            said: Any = {"clusters": await work}
        except errors.TfdError as error:
            kinds = (status for kind, status in _STATUS.items() if isinstance(error, kind))
            self.set_status(next(kinds, 500))
            said = {"what": error.what, "fix": error.fix, "code": error.code}
        self.finish(json.dumps(said))


class ClustersHandler(_Handler):
    """Lists the clusters that no kernel holds."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        await self.answer(unattached_clusters())


class ClusterHandler(_Handler):
    """Does something with one of them."""

    @web.authenticated
    @authorized
    async def post(self, name: str) -> None:
        await self.answer(act(name, self.request.body))


async def unattached_clusters() -> list[dict[str, Any]]:
    """Return the detached clusters of this user that no process holds.

    Returns
    -------
    list of dict
        With ``name``, ``state``, ``launcher``, ``planned`` and ``observed`` (numbers of tasks),
        ``lease`` (until when it stays, in seconds since the epoch) and ``agent``, the process that
        looks after it.

    Raises
    ------
    TfdError
    """
    # Mostly there is none, which state files tell without asking anybody.
    if not await asyncio.to_thread(_any_detached):
        return []
    global _listing
    if _listing is None or not _listing.usable:
        _listing = _Listing()
    return await _listing.clusters()


class _Listing:
    """A ``tfd list`` that all requests share while it runs and for a second afterwards."""

    def __init__(self) -> None:
        self._running = asyncio.ensure_future(tfd("list", "--json", limit=_LOOK_SECONDS))
        self._ended: float | None = None
        self._failed = False
        self._running.add_done_callback(self._note_end)

    def _note_end(self, running: asyncio.Future[str]) -> None:
        self._ended = time.monotonic()
        self._failed = running.cancelled() or running.exception() is not None

    @property
    def usable(self) -> bool:
        """True if another request may share the answer."""
        if self._running.get_loop() is not asyncio.get_running_loop():
            return False
        if self._ended is None:
            return True
        return not self._failed and time.monotonic() - self._ended < _SHARED_SECONDS

    async def clusters(self) -> list[dict[str, Any]]:
        """Return the detached clusters that no process has attached."""
        # Cancelling one request must not cancel the listing that others share.
        known = json.loads(await asyncio.shield(self._running))
        return [{name: one[name] for name in _FIELDS} for one in known if one["pid"] is None]


_listing: _Listing | None = None


async def act(name: str, body: bytes) -> list[dict[str, Any]]:
    """Do what `body` asks with the cluster `name`; return `unheld` afterwards.

    Parameters
    ----------
    name : str
    body : bytes
        JSON: ``{"do": "stop"}`` or ``{"do": "renew", "hours": 8}``, and ``"agent"``, a number,
        where several have the name.

    Raises
    ------
    UsageError
        That cannot be meant.
    UnknownName
        No such cluster is without a process.
    TfdError
        It could not be done.
    """
    arguments, agent = _arguments(name, body)
    if not any(
        one["name"] == name and agent in (None, one["agent"]) for one in await unattached_clusters()
    ):
        raise errors.UnknownName(
            f"no detached cluster {name!r} is without a kernel",
            fix="it has ended, or a kernel has taken it up: look there",
        )
    await tfd(*arguments, limit=_ACT_SECONDS)
    global _listing
    _listing = None  # it is older than what was done
    return await unattached_clusters()


async def tfd(*arguments: str, limit: float) -> str:
    """Run the command ``tfd`` and return what it printed.

    Parameters
    ----------
    *arguments : str
    limit : float
        Seconds after which it is killed.

    Raises
    ------
    TimeLimit
        It took longer.
    TfdError
        What it said went wrong.
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
        said, complaint = await asyncio.wait_for(process.communicate(), limit)
    except asyncio.TimeoutError:
        raise errors.TimeLimit(
            f"tfd {' '.join(arguments)} did not end within {limit:g} s",
            fix="the host may be overloaded: look again, or try it in a terminal",
        ) from None
    finally:
        if process.returncode is None:  # the browser went away, or it took too long
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise _error(complaint.decode(errors="replace").strip())
    return said.decode()


def _any_detached() -> bool:
    from tfd_notebook.launchers.client.detached import detached

    return bool(detached())


def _arguments(name: str, body: bytes) -> tuple[tuple[str, ...], int | None]:
    """Return the words of the command ``tfd``, and the agent that is meant."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise errors.UsageError("the request is no JSON") from None
    if not isinstance(asked, Mapping) or asked.get("do") not in ("stop", "renew"):
        raise errors.UsageError(
            "the request says nothing that can be done", fix='use {"do": "stop"} or "renew"'
        )
    # Nothing that could be taken for an option.
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", name):
        raise errors.UnknownName(f"{name[:100]!r} is no name of a cluster")
    agent = asked.get("agent")
    if agent is not None and (isinstance(agent, bool) or not isinstance(agent, int)):
        raise errors.UsageError(f"agent={str(agent)[:100]!r} is no number")
    words = (name,) if agent is None else (name, f"--pid={agent}")
    if asked["do"] == "stop":
        return ("stop", *words), agent
    hours = asked.get("hours", 8.0)
    if isinstance(hours, bool) or not isinstance(hours, (int, float)):
        raise errors.UsageError(f"hours={str(hours)[:100]!r} is no number")
    if not 0 < hours <= _MOST_HOURS:
        raise errors.UsageError(
            f"hours={str(hours)[:20]} is out of range",
            fix=f"use more than 0 and up to {_MOST_HOURS:g}",
        )
    return ("renew", *words, f"--hours={hours:g}"), agent


def _error(complaint: str) -> errors.TfdError:
    found = _SAID.fullmatch(complaint)
    if found:
        return commands.error_from(found.groupdict())
    last = complaint.splitlines()[-1:] or ["tfd failed"]
    return errors.TfdError(last[0], fix="run tfd list in a terminal, which shows more")
