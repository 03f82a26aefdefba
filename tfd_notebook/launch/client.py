"""The kernel's end of an agent: requests that wait for their reply, events that do not."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

from tfd_notebook.errors import AgentLost, LaunchError, TfdError, TimeLimit
from tfd_notebook.launch import protocol
from tfd_notebook.launch.base import Node, OnEvent
from tfd_notebook.spec import ClusterConfig
from tfd_notebook.version import VERSION


class AgentClient:
    """Talks to one agent over whatever channel its launcher has.

    Parameters
    ----------
    agent_id : str
    host : str
        Name or address of the agent's host, as its peers use it.
    send : callable
        Puts bytes on the channel; raises OSError when it is broken.
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
        self._send = send
        self._comes_back = comes_back
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._ids = itertools.count(1)
        self._replies: dict[int, concurrent.futures.Future[Any]] = {}
        #: What was sent and is not answered yet, where it may have to be sent again.
        self._unanswered: dict[int, bytes] = {}
        self._listeners: dict[str, OnEvent] = {}
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

    def submit(self, do: str, **arguments: Any) -> concurrent.futures.Future[Any]:
        """Send a request and return the future of its reply."""
        reply: concurrent.futures.Future[Any] = concurrent.futures.Future()
        # Under a lock of its own: a full channel must not keep what arrives from being read.
        with self._sending:
            with self._lock:
                if self._lost is not None:
                    raise AgentLost(self._lost, fix="start the cluster again")
                number = next(self._ids)
                self._replies[number] = reply
                body = {"id": number, "do": do, "arguments": arguments}
                line = protocol.encode(protocol.Frame(self.host, self.id, number, body))
                if self._comes_back:
                    self._unanswered[number] = line
            try:
                self._send(line)
            except (OSError, ValueError) as error:
                if not self._comes_back:
                    with self._lock:
                        self._replies.pop(number, None)
                    raise AgentLost(f"the agent's channel is broken: {error}") from None
        return reply

    def resume(self, send: Callable[[bytes], None]) -> None:
        """Go on over another channel, with all requests that were not answered over the last."""
        with self._sending:
            self._send = send
            with self._lock:
                lines = [self._unanswered[number] for number in sorted(self._unanswered)]
            # The agent does none of them twice.
            for line in lines:
                send(line)

    def tell_all(self, body: dict[str, Any]) -> None:
        """Give an event to all clusters, as if the agent had sent it."""
        with self._lock:
            listeners = dict(self._listeners)
        for name, listener in listeners.items():
            listener({**body, "cluster": name})

    def clusters(self) -> tuple[str, ...]:
        """Return the names of the clusters that listen."""
        with self._lock:
            return tuple(self._listeners)

    def request(self, do: str, timeout: float, **arguments: Any) -> Any:
        """Send a request and wait for its reply; see `Node.request`."""
        reply = self.submit(do, **arguments)
        try:
            return reply.result(timeout)
        except concurrent.futures.TimeoutError:
            if reply.done():
                raise
            raise TimeLimit(
                f"the agent did not answer {do!r} within {timeout:g} s",
                fix="the host may be overloaded; cluster.logs() and `tfd list` tell more",
            ) from None

    def listen(self, cluster: str, on_event: OnEvent | None) -> None:
        """Send the events of `cluster` to `on_event` from now on; None ends that."""
        with self._lock:
            if on_event is None:
                self._listeners.pop(cluster, None)
            else:
                self._listeners[cluster] = on_event

    def feed(self, line: bytes) -> None:
        """Take a line that arrived."""
        frame = protocol.decode(line)
        if frame is None:
            return
        body = frame.body
        self.seq = frame.seq or self.seq
        if "re" in body:
            with self._lock:
                reply = self._replies.pop(body["re"], None)
                self._unanswered.pop(body["re"], None)
            if reply is None:
                return
            if body["ok"]:
                reply.set_result(body["value"])
            else:
                reply.set_exception(protocol.unpack_error(body["error"]))
        elif body["event"] == "hello":
            if body["version"] != protocol.VERSION:
                self.lost(
                    f"the agent on {self.host} is of tfd_notebook {body.get('package', '?')} "
                    f"(protocol {body['version']}) and this kernel's is {VERSION} "
                    f"({protocol.VERSION}): both need the same"
                )
            elif not body["whole"]:
                self._hear_again()
            self.ready.set()
        elif body["event"] == "stays":
            self.stays = True
        else:
            with self._lock:
                listener = self._listeners.get(body["cluster"])
            if listener is not None:
                listener(body)

    def _hear_again(self) -> None:
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
                        tell(event)
                    tell({"event": "lease", "cluster": name, "until": found["lease"]})
                elif not isinstance(error, AgentLost):  # of that all are told
                    reason = "it ended while the way to its host was lost"
                    tell({"event": "ended", "cluster": name, "reason": reason})

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
        for reply in replies:
            reply.set_exception(AgentLost(reason, fix="start the cluster again"))
        for name, listener in listeners.items():
            listener({"event": "lost", "cluster": name, "reason": reason})
        self.ready.set()

    @property
    def why_lost(self) -> str:
        """Why the agent cannot be talked to any more; empty while it can."""
        return self._lost or ""


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
        try:
            if self._client.alive:
                self._client.request(do, timeout, cluster=self._cluster)
        except (TfdError, LaunchError):
            # Its channel ended meanwhile, and with it every task.
            pass
        finally:
            self._client.listen(self._cluster, None)
