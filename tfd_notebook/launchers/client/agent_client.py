"""The kernel's end of an agent: requests that wait for their reply, events that do not."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from tfd_notebook._version import VERSION
from tfd_notebook.errors import (
    AgentLost,
    InvalidMessage,
    LaunchError,
    StateError,
    TfdError,
    TimeLimit,
)
from tfd_notebook.launchers.base import Node, OnEvent
from tfd_notebook.model.spec import ClusterConfig, Endpoint
from tfd_notebook.net import agent_protocol, messages, validation

#: Seconds that a request waits for those that are being sent before it.
_SUBMIT_SECONDS = 60.0

log = logging.getLogger("tfd_notebook")


class AgentClient:
    """Talks to one agent over whatever channel its launcher has.

    Parameters
    ----------
    agent_id : str
    host : str
        Name or address of the agent's host, as its peers use it.
    send : callable
        Writes bytes to the channel; raises TimeoutError if the other end does not read them and
        OSError if the channel is broken.
    comes_back : bool
        Whether a channel that broke is replaced: then requests wait for the next one. Default
        false.

    Notes
    -----
    The launcher calls `feed` with each line that arrives and `lost` when the channel ends for good.
    """

    def __init__(
        self, agent_id: str, host: str, send: Callable[[bytes], None], comes_back: bool = False
    ) -> None:
        self.id = agent_id
        self.host = host
        #: How messages name the host; unlike `host` it never changes.
        self.label = host
        self._send = send
        self._comes_back = comes_back
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        #: Whether the last frame was sent in part, by an error or by Ctrl-C.
        self._torn = False
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        #: The requests that wait for a reply, each with its name and arguments.
        self._replies: dict[int, tuple[str, dict[str, Any], concurrent.futures.Future[Any]]] = {}
        #: What was sent and is not answered yet, where it may have to be sent again.
        self._unanswered: dict[int, bytes] = {}
        self._listeners: dict[str, OnEvent] = {}
        #: Host and port of each task, by cluster and task; port 0 is not known yet.
        self._tasks: dict[str, dict[str, tuple[str, int]]] = {}
        #: The clusters whose tasks only this client adds.
        self._exclusive: set[str] = set()
        self._lost: str | None = None
        #: Number of the last frame that arrived.
        self.seq = 0
        self.ready = threading.Event()
        #: Whether the agent lives on when its owner ends.
        self.stays = False

    @property
    def alive(self) -> bool:
        """Whether the agent can still be talked to."""
        return self._lost is None

    @property
    def is_forked(self) -> bool:
        """True if this process is a fork of the one that the agent works for."""
        return os.getpid() != self._pid

    def submit(self, do: str, **arguments: Any) -> concurrent.futures.Future[Any]:
        """Send a request and return the future of its reply.

        Raises
        ------
        AgentLost
            The agent has ended, or its channel is broken.
        StateError
            This process is a fork of the one that the agent works for.
        TimeLimit
            The agent does not read what it is sent.
        UsageError
            The request is too large.
        """
        return self._submit(do, arguments, _SUBMIT_SECONDS)

    def _submit(
        self, do: str, arguments: dict[str, Any], timeout: float
    ) -> concurrent.futures.Future[Any]:
        if self.is_forked:
            raise StateError(
                f"the agent on {self.host} works for process {self._pid}, and process "
                f"{os.getpid()} is a fork of it",
                fix="use the cluster in the process that started it, or start another one here",
            )
        reply: concurrent.futures.Future[Any] = concurrent.futures.Future()
        # Under a lock of its own: a full channel must not keep what arrives from being read.
        if not self._sending.acquire(timeout=timeout):
            raise self._unread(do, timeout)
        number = 0
        try:
            number = next(self._ids)
            body = {"id": number, "do": do, "arguments": arguments}
            line = agent_protocol.encode(agent_protocol.Frame(self.host, self.id, number, body))
            with self._lock:
                if self._lost is not None:
                    raise AgentLost(self._lost, fix="start the cluster again")
                self._replies[number] = do, arguments, reply
                self._expect(do, arguments)
                if self._comes_back:
                    self._unanswered[number] = line
            self._write(line)
        except TimeoutError as error:
            if not self._comes_back:
                self._withdraw(number)
                raise self._unread(do, None, str(error)) from None
        except OSError as error:
            if not self._comes_back:
                self._withdraw(number)
                raise AgentLost(f"the agent's channel is broken: {error}") from None
        except BaseException:
            self._withdraw(number)
            raise
        finally:
            self._sending.release()
        return reply

    def _write(self, line: bytes) -> None:
        """Send a frame, after the end of one that was sent in part."""
        # The start of a frame, ended by a newline, is not a frame: the agent ignores it.
        line, self._torn = b"\n" + line if self._torn else line, True
        self._send(line)
        self._torn = False

    def _withdraw(self, number: int) -> None:
        with self._lock:
            self._replies.pop(number, None)
            self._unanswered.pop(number, None)

    def _abandon(self, reply: concurrent.futures.Future[Any]) -> None:
        """Do not send a request again that its caller does not wait for any more."""
        with self._lock:
            for number in [n for n, (*_, waiting) in self._replies.items() if waiting is reply]:
                self._unanswered.pop(number, None)

    def _unread(self, do: str, timeout: float | None, why: str = "") -> TimeLimit:
        why = why or f"others were being sent for {timeout:g} s"
        return TimeLimit(
            f"request {do!r} could not be sent to the agent on {self.host}: {why}",
            fix="the host may be overloaded or suspended; try again",
        )

    def resume(self, send: Callable[[bytes], None]) -> None:
        """Go on over another channel, with all requests that were not answered over the last."""
        with self._sending:
            self._send = send
            with self._lock:
                lines = [self._unanswered[number] for number in sorted(self._unanswered)]
            # The agent does none of them twice.
            for line in lines:
                self._write(line)

    def tell_all(self, body: dict[str, Any]) -> None:
        """Give an event to all clusters, as if the agent had sent it."""
        with self._lock:
            listeners = dict(self._listeners)
        for name, listener in listeners.items():
            _notify(listener, {**body, "cluster": name})

    def clusters(self) -> tuple[str, ...]:
        """Return the names of the clusters that listen."""
        with self._lock:
            return tuple(self._listeners)

    def request(self, do: str, timeout: float, **arguments: Any) -> Any:
        """Send a request and wait for its reply; see `Node.request`."""
        reply = self._submit(do, arguments, timeout)
        try:
            return reply.result(timeout)
        except concurrent.futures.TimeoutError:
            if reply.done():
                raise
            self._abandon(reply)
            raise TimeLimit(
                f"the agent did not answer {do!r} within {timeout:g} s",
                fix="the host may be overloaded; cluster.logs() and `tfd list` tell more",
            ) from None

    def listen(self, cluster: str, on_event: OnEvent | None) -> None:
        """Send the events of `cluster` to `on_event` from now on; None ends that."""
        with self._lock:
            if on_event is None:
                self._listeners.pop(cluster, None)
                self._tasks.pop(cluster, None)
                self._exclusive.discard(cluster)
            else:
                self._listeners[cluster] = on_event

    def handle_line(self, line: bytes) -> None:
        """Handle a line that arrived; one that is not valid ends the session.

        Never raises, since an agent may depend on the thread.
        """
        try:
            self._handle(line)
        except InvalidMessage as error:
            self.refuse(error)
        except Exception:
            log.exception("a message of the agent on %s was ignored", self.label)

    def _handle(self, line: bytes) -> None:
        frame = agent_protocol.decode(line)
        if frame is None:
            return
        self.seq = frame.seq or self.seq
        if "re" in frame.body:
            self._take_reply(frame.body)
        else:
            self._take_event(frame.body)

    def refuse(self, error: InvalidMessage) -> None:
        """End the session, because the agent sent a message that is not valid."""
        self.lost(
            f"the session with {self.label} was ended, because its agent sent a message that is "
            f"not valid: {error.what}"
        )

    def _take_reply(self, body: dict[str, Any]) -> None:
        number = validation.integer()(body["re"], "re")
        with self._lock:
            do, arguments, reply = self._replies.get(number, ("", {}, None))
        if reply is None:
            return
        failed = not validation.boolean(body.get("ok"), "ok")
        # Checked before the request is forgotten: what is not valid fails it with all others.
        if failed:
            value = messages.error(body.get("error"), "error")
        else:
            value = messages.reply_value(do, body.get("value"))
            self._check_tasks(do, arguments, value)
        with self._lock:
            self._replies.pop(number, None)
            self._unanswered.pop(number, None)
        if failed:
            reply.set_exception(agent_protocol.unpack_error(value))
        else:
            reply.set_result(value)

    def _take_event(self, body: dict[str, Any]) -> None:
        version = body.get("version")
        if body.get("event") == "hello" and version != agent_protocol.VERSION:
            self.lost(
                f"the agent on {self.label} is of tfd_notebook "
                f"{validation.text(body.get('package', '?'), 'package')} (protocol "
                f"{validation.integer()(version, 'version')}) and this kernel's is {VERSION} "
                f"({agent_protocol.VERSION}): both need the same"
            )
            return
        body = messages.event(body)
        if body["event"] == "hello":
            if not body["whole"]:
                self._resync()
            self.ready.set()
        elif body["event"] == "stays":
            self.stays = True
        elif body["event"] == "failed":
            log.error("the agent on %s closed the connection: %s", self.host, body["reason"])
        else:
            with self._lock:
                listener = self._listeners.get(body["cluster"])
            if listener is not None:
                if body["event"] == "task":
                    self._check_task(body, "task")
                _notify(listener, body)

    def _expect(self, do: str, arguments: dict[str, Any]) -> None:
        """Note which tasks the agent may report after a request; the caller holds the lock."""
        cluster = arguments.get("cluster", "")
        if do == "open":
            self._exclusive.add(cluster)
        elif do == "lease":
            # Other processes may attach to the cluster and add tasks.
            self._exclusive.discard(cluster)
        elif do == "hold":
            tasks = self._tasks.setdefault(cluster, {})
            for one in arguments.get("tasks", ()):
                tasks[f"{one['role']}:{one['index']}"] = one["host"], one["port"]

    def _check_tasks(self, do: str, arguments: dict[str, Any], value: Any) -> None:
        """Raise InvalidMessage if a reply is about tasks that the agent was not asked for."""
        cluster = arguments.get("cluster", "")
        if do == "hold":
            asked = {f"{one['role']}:{one['index']}" for one in arguments.get("tasks", ())}
            if value.keys() != asked:
                expected = ", ".join(sorted(asked)) or "no task"
                raise validation.invalid("reply to 'hold'", list(value), expected)
            for name, address in value.items():
                event = {"cluster": cluster, "task": name, "address": address}
                self._check_task(event, "reply to 'hold'")
                at = Endpoint.parse(address)
                with self._lock:
                    self._tasks[cluster][name] = at.host, at.port
        elif do == "adopt":
            for event in value["tasks"]:
                if event["cluster"] != cluster:
                    raise validation.invalid("task.cluster", event["cluster"], cluster)
                self._check_task(event, "task")

    def _check_task(self, event: dict[str, Any], path: str) -> None:
        """Raise InvalidMessage for a task that was not asked for, or one at another address."""
        cluster, name = event["cluster"], event["task"]
        at = Endpoint.parse(event["address"]) if event["address"] else None
        with self._lock:
            exclusive = cluster in self._exclusive
            tasks = self._tasks.setdefault(cluster, {})
            if name not in tasks:
                if exclusive:
                    raise validation.invalid(path, name, "a task that the agent was asked to hold")
                if at is not None:
                    tasks[name] = at.host, 0
            elif at is not None:
                host, port = tasks[name]
                # Another process may have removed the task and added it again.
                same_port = at.port == port or not port or not exclusive
                if at.host != host or not same_port:
                    expected = f"{host}, port {port or 'any'}"
                    raise validation.invalid(f"{path}.address", event["address"], expected)

    def _resync(self) -> None:
        """Learn how all is now, since the agent does not know any more what was missed."""
        self.seq = 0
        with self._lock:
            listeners = dict(self._listeners)
        for name, listener in listeners.items():

            def heard(
                asked: concurrent.futures.Future[Any], name: str = name, tell: OnEvent = listener
            ) -> None:
                error = asked.exception()
                if error is None:
                    found = asked.result()
                    for event in found["tasks"]:
                        _notify(tell, event)
                    _notify(tell, {"event": "lease", "cluster": name, "left": found["lease"]})
                elif not isinstance(error, AgentLost):  # of that all are told
                    reason = "it ended while the way to its host was lost"
                    _notify(tell, {"event": "ended", "cluster": name, "reason": reason})

            with contextlib.suppress(AgentLost):
                self.submit("adopt", cluster=name).add_done_callback(heard)

    def lost(self, reason: str) -> None:
        """Note that the channel ended: every waiting request fails, every cluster is told."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            replies, self._replies = list(self._replies.values()), {}
            self._unanswered.clear()
            listeners, self._listeners = dict(self._listeners), {}
        for *_, reply in replies:
            reply.set_exception(AgentLost(reason, fix="start the cluster again"))
        for name, listener in listeners.items():
            _notify(listener, {"event": "lost", "cluster": name, "reason": reason})
        self.ready.set()

    @property
    def why_lost(self) -> str:
        """Why the agent cannot be talked to any more; empty while it can."""
        return self._lost or ""


def _notify(listener: OnEvent, body: dict[str, Any]) -> None:
    """Pass an event to a listener; one that raises gets a notice instead."""
    try:
        listener(body)
    except Exception as error:
        log.exception("event %r of cluster %r was ignored", body["event"], body["cluster"])
        notice = {
            "event": "notice",
            "cluster": body["cluster"],
            "severity": "error",
            "what": f"an event of the cluster was ignored: {type(error).__name__}: {error}; its "
            "state may be out of date",
            "task": None,
            "fix": "please report this, with the output of `tfd support`",
        }
        with contextlib.suppress(Exception):
            listener(notice)


class AgentNode(Node):
    """A cluster's part on one agent.

    Parameters
    ----------
    client : AgentClient
    cluster : str
    directory : str
        Of the cluster, on the agent's host.

    See Also
    --------
    AgentNode.open : has an agent take in a new cluster.
    """

    def __init__(self, client: AgentClient, cluster: str, directory: str) -> None:
        self.host = client.host
        self.directory = directory
        self._client = client
        self._cluster = cluster

    @classmethod
    def open(
        cls,
        client: AgentClient,
        config: ClusterConfig,
        on_event: OnEvent,
        surroundings: dict[str, Any],
    ) -> AgentNode:
        """Have an agent take in a new cluster.

        Parameters
        ----------
        client : AgentClient
        config : ClusterConfig
        on_event : callable
        surroundings : dict
            ``environment``, ``directory`` and ``path`` that the tasks shall have.
        """
        client.listen(config.name, on_event)
        try:
            directory = client.request(
                "open",
                30.0,
                cluster=config.name,
                policy=vars(config.policy),
                preload=list(config.preload),
                allow=list(config.allow),
                about={},
                **surroundings,
            )
        except BaseException:
            client.listen(config.name, None)
            raise
        return cls(client, config.name, directory)

    def request(self, do: str, *, timeout: float = 30.0, **arguments: Any) -> Any:
        return self._client.request(do, timeout, cluster=self._cluster, **arguments)

    def close(self, timeout: float = 10.0) -> None:
        self._last("close", timeout)

    def leave(self) -> None:
        self._last("leave", 5.0)

    def _last(self, do: str, timeout: float) -> None:
        if self._client.is_forked:
            return  # the cluster belongs to the parent process
        try:
            if self._client.alive:
                self._client.request(do, timeout, cluster=self._cluster)
        except (TfdError, LaunchError):
            # Its channel ended meanwhile, and with it every task.
            pass
        finally:
            self._client.listen(self._cluster, None)
