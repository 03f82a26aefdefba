"""Client of an agent: requests wait for their replies, events are passed to listeners."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, cast

from tfd_notebook._version import VERSION
from tfd_notebook.errors import (
    AgentLost,
    InvalidMessage,
    StateError,
    TimeLimit,
)
from tfd_notebook.launchers.base import AdoptedCluster, OnEvent
from tfd_notebook.model.events import (
    ClusterEnded,
    Event,
    LeaseChanged,
    Notice,
    TaskChanged,
    TasksLost,
    from_json,
)
from tfd_notebook.model.spec import Endpoint, TaskState
from tfd_notebook.net import agent_protocol, messages, validation

#: Seconds that a request waits for earlier requests to be sent.
_SUBMIT_SECONDS = 60.0

#: Returns the host and port of a task; None for a task of another client. Port 0 is unknown.
EndpointOf = Callable[[str], tuple[str, int] | None]

log = logging.getLogger("tfd_notebook")


class AgentClient:
    """Communicates with one agent over a channel of its launcher.

    Parameters
    ----------
    agent_id : str
    host : str
        Name or address of the agent's host, as its peers use it.
    send : callable
        Writes bytes to the channel. Raises TimeoutError if the other end does not read them, and
        OSError if the channel is broken.
    reconnects : bool
        True if a broken channel is replaced. Requests then wait for the next channel. Default
        false.

    Notes
    -----
    The launcher calls `handle_line` with each received line, and `lost` when the channel ends and
    is not replaced.
    """

    def __init__(
        self, agent_id: str, host: str, send: Callable[[bytes], None], reconnects: bool = False
    ) -> None:
        self.id = agent_id
        self.host = host
        #: Name of the host in messages. Unlike `host` it never changes.
        self.label = host
        self._send = send
        self._reconnects = reconnects
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        #: True if an error or Ctrl-C cut the last frame short.
        self._frame_incomplete = False
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        #: The requests without a reply, each with its name and arguments.
        self._replies: dict[int, tuple[str, dict[str, Any], concurrent.futures.Future[Any]]] = {}
        #: Frames without a reply, which are sent again over the next channel.
        self._unanswered: dict[int, bytes] = {}
        self._listeners: dict[str, OnEvent] = {}
        #: By cluster, the function that returns host and port of a task; see `listen`.
        self._endpoints: dict[str, EndpointOf] = {}
        #: Host and port of each task, by cluster and task. Port 0 is unknown.
        self._tasks: dict[str, dict[str, tuple[str, int]]] = {}
        #: The clusters to which only this client adds tasks.
        self._exclusive: set[str] = set()
        self._lost: str | None = None
        #: Number of the last received frame.
        self.seq = 0
        self.ready = threading.Event()
        #: True if the agent keeps running when its owner ends.
        self.agent_detached = False

    @property
    def alive(self) -> bool:
        """True if the agent can be reached."""
        return self._lost is None

    @property
    def is_forked(self) -> bool:
        """True if this process is a fork of the agent's owner."""
        return os.getpid() != self._pid

    def submit(self, method: str, **arguments: Any) -> concurrent.futures.Future[Any]:
        """Send a request and return the future of its reply.

        Raises
        ------
        AgentLost
            The agent has ended, or its channel is broken.
        StateError
            This process is a fork of the agent's owner.
        TimeLimit
            The agent does not read the request.
        UsageError
            The request is too large.
        """
        return self._submit(method, arguments, _SUBMIT_SECONDS)

    def _submit(
        self, method: str, arguments: dict[str, Any], timeout: float
    ) -> concurrent.futures.Future[Any]:
        if self.is_forked:
            raise StateError(
                f"the agent on {self.host} belongs to process {self._pid}, and process "
                f"{os.getpid()} is a fork of it",
                fix="use the cluster in the process that started it, or start another one",
            )
        reply: concurrent.futures.Future[Any] = concurrent.futures.Future()
        # A separate lock: a full channel must not block the thread that reads.
        if not self._sending.acquire(timeout=timeout):
            raise self._send_timeout(method, timeout)
        number = 0
        try:
            number = next(self._ids)
            body = {"id": number, "method": method, "arguments": arguments}
            line = agent_protocol.encode(body, number)
            with self._lock:
                if self._lost is not None:
                    raise AgentLost(self._lost, fix="start the cluster again")
                self._replies[number] = method, arguments, reply
                self._record_expected_tasks(method, arguments)
                if self._reconnects:
                    self._unanswered[number] = line
            self._write(line)
        except TimeoutError as error:
            if not self._reconnects:
                self._withdraw(number)
                raise self._send_timeout(method, None, str(error)) from None
        except OSError as error:
            if not self._reconnects:
                self._withdraw(number)
                raise AgentLost(f"the agent's channel is broken: {error}") from None
        except BaseException:
            self._withdraw(number)
            raise
        finally:
            self._sending.release()
        return reply

    def _write(self, line: bytes) -> None:
        """Send a frame, after a newline that ends an incomplete one."""
        # The agent ignores a line that is not a complete frame.
        line, self._frame_incomplete = b"\n" + line if self._frame_incomplete else line, True
        self._send(line)
        self._frame_incomplete = False

    def _withdraw(self, number: int) -> None:
        with self._lock:
            self._replies.pop(number, None)
            self._unanswered.pop(number, None)

    def _do_not_resend(self, reply: concurrent.futures.Future[Any]) -> None:
        """Do not send a request again after its caller stopped waiting."""
        with self._lock:
            for number in [n for n, (*_, waiting) in self._replies.items() if waiting is reply]:
                self._unanswered.pop(number, None)

    def _send_timeout(self, method: str, timeout: float | None, why: str = "") -> TimeLimit:
        why = why or f"other requests were being sent for {timeout:g} s"
        return TimeLimit(
            f"request {method!r} could not be sent to the agent on {self.host}: {why}",
            fix="the host may be overloaded or suspended; try again",
        )

    @property
    def last_request(self) -> int:
        """Number of the last request without a reply; 0 without one."""
        with self._lock:
            return max(self._unanswered, default=0)

    def resume(self, send: Callable[[bytes], None]) -> None:
        """Continue over another channel, with all requests that have no reply yet."""
        with self._sending:
            self._send = send
            with self._lock:
                lines = [self._unanswered[number] for number in sorted(self._unanswered)]
            # The agent runs none of them twice.
            for line in lines:
                self._write(line)

    def notify_all(self, event: Event) -> None:
        """Pass an event to the listeners of all clusters."""
        with self._lock:
            listeners = dict(self._listeners)
        for listener in listeners.values():
            _notify(listener, event)

    def request(self, method: str, timeout: float, **arguments: Any) -> Any:
        """Send a request and return the value of its reply, as `submit` or with its error.

        Raises
        ------
        TimeLimit
            No reply arrived within `timeout` seconds.
        """
        reply = self._submit(method, arguments, timeout)
        try:
            return reply.result(timeout)
        except concurrent.futures.TimeoutError:
            if reply.done():
                raise
            self._do_not_resend(reply)
            raise TimeLimit(
                f"the agent did not reply to {method!r} within {timeout:g} s",
                fix="the host may be overloaded; see cluster.logs() and `tfd list`",
            ) from None

    def listen(
        self, cluster: str, on_event: OnEvent | None, endpoint_of: EndpointOf | None = None
    ) -> None:
        """Pass the events of `cluster` to `on_event`; None removes the listener.

        The agent may name the tasks for which `endpoint_of` returns a host. Default: all tasks of
        the cluster, each at the host where it is first reported.
        """
        with self._lock:
            self._endpoints.pop(cluster, None)
            if endpoint_of is not None:
                self._endpoints[cluster] = endpoint_of
            if on_event is None:
                self._listeners.pop(cluster, None)
                self._tasks.pop(cluster, None)
                self._exclusive.discard(cluster)
            else:
                self._listeners[cluster] = on_event

    def handle_line(self, line: bytes) -> None:
        """Handle a received line. An invalid message ends the session.

        Never raises, since the agent may depend on the calling thread (parent-death signal).
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
        if "reply_to" in frame.body:
            self._handle_reply(frame.body)
        else:
            self._handle_event(frame.body)

    def refuse(self, error: InvalidMessage) -> None:
        """End the session, because the agent sent an invalid message."""
        self.lost(
            f"the session with {self.label} was ended, because its agent sent an invalid message: "
            f"{error.what}"
        )

    def _handle_reply(self, body: dict[str, Any]) -> None:
        number = validation.integer()(body["reply_to"], "reply_to")
        with self._lock:
            method, arguments, reply = self._replies.get(number, ("", {}, None))
        if reply is None:
            return
        failed = not validation.boolean(body.get("ok"), "ok")
        # Checked while the request is still pending, so that an invalid reply fails it, too.
        if failed:
            value = messages.error(body.get("error"), "error")
            self._check_error(method, arguments, value)
        else:
            value = messages.reply_value(method, body.get("value"))
            self._check_tasks(method, arguments, value)
            if method == "adopt":
                tasks = [cast(TaskChanged, from_json(event)) for event in value["tasks"]]
                value = AdoptedCluster(**{**value, "tasks": tasks})
        with self._lock:
            self._replies.pop(number, None)
            self._unanswered.pop(number, None)
        if failed:
            reply.set_exception(agent_protocol.unpack_error(value))
        else:
            reply.set_result(value)

    def _handle_event(self, body: dict[str, Any]) -> None:
        version = body.get("version")
        if body.get("event") == "hello" and version != agent_protocol.VERSION:
            self.lost(
                f"the agent on {self.label} has tfd_notebook "
                f"{validation.text(body.get('package', '?'), 'package')} (protocol "
                f"{validation.integer()(version, 'version')}), and this kernel has {VERSION} "
                f"({agent_protocol.VERSION}): install the same version on both"
            )
            return
        body = messages.event(body)
        if body["event"] == "hello":
            if not body["full"]:
                self._resync()
            self.ready.set()
        elif body["event"] == "agent_detached":
            self.agent_detached = True
        elif body["event"] == "failed":
            log.error("the agent on %s closed the connection: %s", self.host, body["reason"])
        else:
            with self._lock:
                listener = self._listeners.get(body["cluster"])
            if listener is not None:
                if body["event"] == "task":
                    self._check_state(body)
                for part in (body, *body.get("gpus", ())):
                    if part.get("task"):
                        self._check_task(body["cluster"], part["task"], "", body["event"])
                _notify(listener, from_json(body))

    def _record_expected_tasks(self, method: str, arguments: dict[str, Any]) -> None:
        """Record the tasks that the agent may report after a request. The caller holds the lock."""
        cluster = arguments.get("cluster", "")
        if method == "open":
            self._exclusive.add(cluster)
        elif method == "lease":
            # Other processes may attach to the cluster and add tasks.
            self._exclusive.discard(cluster)
        elif method == "reserve_ports":
            tasks = self._tasks.setdefault(cluster, {})
            for task in arguments.get("tasks", ()):
                tasks[f"{task['role']}:{task['index']}"] = task["host"], task["port"]
        elif method in ("stop", "release_ports"):
            # Another process may add the task again, at another port.
            tasks = self._tasks.setdefault(cluster, {})
            tasks.update(
                {name: (tasks[name][0], 0) for name in arguments["tasks"] if name in tasks}
            )

    def _check_tasks(self, method: str, arguments: dict[str, Any], value: Any) -> None:
        """Raise InvalidMessage if a reply names tasks that are not those of its request."""
        cluster, path = arguments.get("cluster", ""), f"reply to {method!r}"
        requested = _requested_tasks(arguments)
        if method in ("reserve_ports", "open_ranks") and value.keys() != requested:
            expected = ", ".join(sorted(requested)) or "no task"
            raise validation.invalid(path, list(value), expected)
        if method == "reserve_ports":
            for name, address in value.items():
                self._check_task(cluster, name, address, path)
                endpoint = Endpoint.parse(address)
                with self._lock:
                    self._tasks[cluster][name] = endpoint.host, endpoint.port
        elif method == "open_ranks":
            with self._lock:
                hosts = {name: host for name, (host, _) in self._tasks.get(cluster, {}).items()}
            for name, address in value.items():
                if Endpoint.parse(address).host != hosts.get(name):
                    raise validation.invalid(path, address, "its own host")
        elif method in ("stacks", "check_reachability"):
            for name in value.keys() - requested:
                raise validation.invalid(path, name, "the requested tasks")
        elif method == "inspect":
            for name in value:
                self._check_task(cluster, name, "", path)
        elif method == "adopt":
            for event in value["tasks"]:
                if event["cluster"] != cluster:
                    raise validation.invalid("task.cluster", event["cluster"], cluster)
                self._check_state(event)

    def _check_error(self, method: str, arguments: dict[str, Any], error: dict[str, Any]) -> None:
        """Raise InvalidMessage if an error names a task of another host."""
        named = _requested_tasks(arguments)
        if method == "run_rank":
            named.add(f"rank {arguments['task'].partition(':')[2]}")
        task = error.get("task")
        if task and task not in named:
            if "cluster" not in arguments:
                raise validation.invalid("error.task", task, "no task")
            task = validation.task_name(task, "error.task")
            self._check_task(arguments["cluster"], task, "", "error.task")

    def _check_task(self, cluster: str, name: str, address: str, path: str) -> None:
        """Raise InvalidMessage for a task that the agent may not name, or has another address.

        Each task in an event or a reply is checked here.
        """
        endpoint = Endpoint.parse(address) if address else None
        with self._lock:
            exclusive = cluster in self._exclusive
            endpoint_of = self._endpoints.get(cluster)
            tasks = self._tasks.setdefault(cluster, {})
            if name not in tasks:
                if exclusive:
                    raise validation.invalid(path, name, "a task requested with 'reserve_ports'")
                # Another process may have added it.
                expected_endpoint = None if endpoint_of is None else endpoint_of(name)
                if endpoint_of is not None and expected_endpoint is None:
                    raise validation.invalid(path, name, f"a task of {self.label}")
                if endpoint is not None:
                    tasks[name] = expected_endpoint or (endpoint.host, 0)
            if endpoint is not None:
                host, port = tasks[name]
                if endpoint.host != host or port not in (0, endpoint.port):
                    expected = f"{host}, port {port or 'any'}"
                    raise validation.invalid(f"{path}.address", address, expected)

    def _check_state(self, event: dict[str, Any]) -> None:
        """Raise InvalidMessage as `_check_task`, and record the port of a task that has started.

        It stays the same in each restart, until a process removes the task.
        """
        cluster, name, address = event["cluster"], event["task"], event["address"]
        self._check_task(cluster, name, address, "task")
        with self._lock:
            # The ports of other clusters are those of their reservations.
            if address and cluster not in self._exclusive:
                endpoint, state = Endpoint.parse(address), event["state"]
                if state == TaskState.STOPPED:
                    self._tasks[cluster][name] = endpoint.host, 0
                elif state != TaskState.PLANNED:  # a process may still reserve another port
                    self._tasks[cluster][name] = endpoint.host, endpoint.port

    def _resync(self) -> None:
        """Request the current state of all clusters, after the agent dropped missed events."""
        # Equals no session's number, so that the next hello is not full without a further frame.
        self.seq = -1
        with self._lock:
            listeners = dict(self._listeners)
        for name, listener in listeners.items():

            def publish(
                adopted: concurrent.futures.Future[AdoptedCluster],
                name: str = name,
                listener: OnEvent = listener,
            ) -> None:
                error = adopted.exception()
                if error is None:
                    for event in adopted.result().tasks:
                        _notify(listener, event)
                    _notify(listener, LeaseChanged(adopted.result().lease))
                # `lost` notifies of AgentLost. If the reply itself was dropped, a request follows.
                elif isinstance(error, StateError):
                    reason = "it ended while its host was disconnected"
                    _notify(listener, ClusterEnded(reason))

            with contextlib.suppress(AgentLost):
                self.submit("adopt", cluster=name).add_done_callback(publish)

    def lost(self, reason: str) -> None:
        """Fail all pending requests, and notify all clusters, after the channel has ended."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            replies, self._replies = list(self._replies.values()), {}
            self._unanswered.clear()
            listeners, self._listeners = dict(self._listeners), {}
        for *_, reply in replies:
            reply.set_exception(AgentLost(reason, fix="start the cluster again"))
        for listener in listeners.values():
            _notify(listener, TasksLost(reason))
        self.ready.set()

    @property
    def why_lost(self) -> str:
        """The reason for which the agent cannot be reached; empty while it can."""
        return self._lost or ""


def _requested_tasks(arguments: dict[str, Any]) -> set[str]:
    """Return the names of the tasks in the arguments of a request."""
    tasks = [arguments.get("task"), *arguments.get("tasks", ()), *arguments.get("addresses", ())]
    return {
        f"{task['role']}:{task['index']}" if isinstance(task, dict) else task
        for task in tasks
        if task
    }


def _notify(listener: OnEvent, event: Event) -> None:
    """Pass an event to a listener. If the listener raises, pass a notice instead."""
    try:
        listener(event)
    except Exception as error:
        log.exception("event %r was ignored", event)
        notice = Notice(
            "error",
            f"an event of the cluster was ignored: {type(error).__name__}: {error}; its state may "
            "be out of date",
            fix="report this, with the output of `tfd support`",
        )
        with contextlib.suppress(Exception):
            listener(notice)
