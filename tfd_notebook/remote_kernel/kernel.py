"""A kernel elsewhere that runs this notebook's source."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from typing import Any

from tfd_notebook.agent.bridges import kernel as bridges_kernel
from tfd_notebook.bus import comm
from tfd_notebook.cluster import control_socket, registry
from tfd_notebook.errors import (
    InvalidMessage,
    LaunchError,
    RemoteError,
    TfdError,
    TimeLimit,
    UsageError,
)
from tfd_notebook.launchers.client.jupyter_server import ENDING, JupyterServer, Message
from tfd_notebook.remote_kernel.bus_client import BusClient
from tfd_notebook.remote_kernel.clusters import Clusters, RemoteCluster
from tfd_notebook.remote_kernel.display import failure, show, show_plain, silent
from tfd_notebook.resolvers import providers

log = logging.getLogger("tfd_notebook")

_START_SECONDS = 60.0
_ASK_SECONDS = 30.0
_POLL_SECONDS = 0.2
_PING_SECONDS = 5.0
#: Pings after which this client also sends an acknowledgement to the bus.
_ACKNOWLEDGE_EVERY = 12
#: A kernel tells what there is within a tick of its bus, which it may be too busy for.
_TELL_SECONDS = 5.0
_INTERRUPT_SECONDS = 10.0
_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0)
#: Makes the other kernel tell of its clusters, and end when nobody has been heard for a while.
_PREPARE = """
try:
    import IPython
    IPython.get_ipython().run_line_magic("load_ext", "tfd_notebook")
    from tfd_notebook.agent.bridges import kernel as kernelend
    kernelend.lease({grace!r})
except ModuleNotFoundError as error:
    raise SystemExit("it has no tfd-notebook: " + str(error)) from None
"""

_kernels: weakref.WeakSet[RemoteKernel] = weakref.WeakSet()


class RemoteKernel:
    """A kernel of a Jupyter server elsewhere: source goes there, and what it makes is seen here.

    Its clusters are among those of this kernel in panel, widgets and ``tfd list``, and steered from
    there. Needs the extra ``jupyter``; a context manager, at whose end the kernel ends.

    Parameters
    ----------
    server : str
        Address, as Jupyter prints it: ``"https://host:8888/?token=..."``.
    token : str, optional
        Default: the one in the address, else what the variable ``TFD_JUPYTER_TOKEN`` says.
    ca : str, optional
        File with the certificates to trust, where the server has some of its own.
    kernel : str
        Kind of the kernel. Default ``"python3"``.
    grace : float
        Seconds for which it goes on when this process cannot reach it. Default 600.

    Raises
    ------
    LaunchError
        The server refuses, is none, or its kernel lacks what is needed.

    See Also
    --------
    tfd_notebook.launchers.Jupyter : runs a cluster's tasks there, with this kernel as its user.
    """

    def __init__(
        self,
        server: str,
        *,
        token: str | None = None,
        ca: str | None = None,
        kernel: str = "python3",
        grace: float = 600.0,
    ) -> None:
        if isinstance(grace, bool) or not isinstance(grace, (int, float)) or grace < 1:
            raise UsageError(f"grace={grace!r} must be a second or more")
        self._server = JupyterServer(server, token, ca)
        self.label = self._server.label
        self._grace = float(grace)
        self._closed = threading.Event()
        self._lost = ""
        self._runs: dict[str, queue.SimpleQueue[Message | None]] = {}
        self._running = threading.Lock()
        self._subshell: str | None = None
        self._lease = ""
        self._clusters: dict[str, RemoteCluster] = {}
        try:
            self._kernel = self._server.start_kernel(kernel)
            self._connection = self._server.connect(self._kernel)
        except OSError as error:
            raise LaunchError(
                f"{self.label} cannot be reached: {error}", fix="is it up, and its address right?"
            ) from None
        self._reader = BusClient(self._send)
        threading.Thread(target=self._serve, name="tfd-elsewhere", daemon=True).start()
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._ping, name="tfd-elsewhere-ping", daemon=True).start()
        _kernels.add(self)
        registry.register_provider("kernels", _clusters_elsewhere)
        control_socket.ensure_started()
        registry.notify_cluster_start()

    def _prepare(self) -> None:
        try:
            self._do(_PREPARE.format(grace=self._grace), _START_SECONDS, silent)
            self._open_subshell()
        except RemoteError as error:
            raise LaunchError(
                f"{self.label}: {error.what.splitlines()[0]}",
                fix='pip install "tfd-notebook[tensorflow]" there, or kernel= names another one',
            ) from None
        self._reader.greet()
        if not self._reader.ready.wait(_START_SECONDS):
            raise LaunchError(f"{self.label}: its kernel does not tell of its clusters")
        if self._reader.foreign:
            raise LaunchError(f"{self.label}: {self._reader.foreign}")

    def _open_subshell(self) -> None:
        """Have what is asked answered beside the running source, where the kernel can."""
        said = self._request("shell", "kernel_info_request")
        if "kernel subshells" in said.get("supported_features", ()):
            self._subshell = self._request("control", "create_subshell_request").get("subshell_id")
        self._reader.concurrent = self._subshell is not None

    def _request(self, channel: str, kind: str) -> dict[str, Any]:
        number, answers = self._expect()
        try:
            self._connection.send(channel, kind, {}, number=number)
            while (message := answers.get(timeout=_START_SECONDS)) is not None:
                if message["header"]["msg_type"] == kind.replace("request", "reply"):
                    return dict(message["content"])
        except queue.Empty:
            pass
        finally:
            del self._runs[number]
        raise RemoteError(f"its kernel did not answer {kind!r}")

    def _expect(self) -> tuple[str, queue.SimpleQueue[Message | None]]:
        """Return the id for a request that is not sent yet, and where its answers will be."""
        number = uuid.uuid4().hex
        answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._runs[number] = answers
        return number, answers

    # Source

    def run(self, source: str, timeout: float | None = None, *, plain: bool = False) -> None:
        """Run source there, and show here what it prints and displays, as it comes.

        Answers Ctrl-C, which interrupts it there, too.

        Parameters
        ----------
        source : str
            As in a cell; names that it assigns stay for the next one.
        timeout : float, optional
            Seconds, after which it is interrupted. Default: no limit.
        plain : bool
            Whether only text and images are shown, no HTML and no JavaScript. Default false.

        Raises
        ------
        RemoteError
            What it raised, with the traceback from there; or the kernel is gone.
        TimeLimit
        """
        if not isinstance(source, str):
            raise UsageError(f"source={source!r} is no text")
        try:
            self._do(source, timeout, show_plain if plain else show)
        except TfdError:
            self.catch_up()
            raise
        self.catch_up()

    def _do(self, source: str, timeout: float | None, show: Any) -> None:
        with self._running:
            self._check()
            deadline = None if timeout is None else time.monotonic() + timeout
            number, answers = self._expect()
            try:
                self._send_source(source, number)
                self._follow(answers, deadline, timeout, show)
            except KeyboardInterrupt:
                self.interrupt()
                raise
            finally:
                del self._runs[number]

    def _check(self) -> None:
        if self._lost or self._closed.is_set():
            raise RemoteError(self._lost or f"the kernel at {self.label} was closed")

    def _send_source(self, source: str, number: str) -> None:
        try:
            self._connection.execute(source, number)
        except OSError as error:
            raise RemoteError(f"{self.label} cannot be reached now: {error}") from None

    def _follow(
        self,
        answers: queue.SimpleQueue[Message | None],
        deadline: float | None,
        timeout: float | None,
        show: Any,
    ) -> None:
        failed: TfdError | None = None
        late: TimeLimit | None = None
        replied = idle = False
        while not (replied and idle):
            try:
                message = answers.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if deadline is None or time.monotonic() < deadline:
                    continue
                if late is not None:
                    raise late from None
                late = TimeLimit(
                    f"the source at {self.label} did not end within {timeout:g} s, and was "
                    "interrupted"
                )
                # Until it has ended: what is sent before would not be run.
                self.interrupt()
                failed, deadline = late, time.monotonic() + _INTERRUPT_SECONDS
                continue
            if message is None:
                raise RemoteError(self._lost or f"the kernel at {self.label} was closed")
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "error":
                failed = failed or failure(self.label, content)
            elif kind == "execute_reply":
                replied = True
                if content.get("status") == "aborted":
                    failed = failed or RemoteError(
                        f"{self.label} did not run it, because source before it failed",
                        fix="run it again",
                    )
            elif kind == "status":
                idle = content["execution_state"] == "idle"
            else:
                show(kind, content)
        if failed is not None:
            raise failed

    def interrupt(self) -> None:
        """Interrupt the source that runs there."""
        with contextlib.suppress(OSError):
            self._server.interrupt(self._kernel)

    # Clusters

    @property
    def clusters(self) -> Mapping[str, RemoteCluster]:
        """The clusters of that kernel, by name; those that ended too, as they were last."""
        for name in self._reader.names():
            self._clusters.setdefault(name, RemoteCluster(self, name))
        return Clusters(self._clusters, self._await_cluster)

    def _await_cluster(self, name: str) -> RemoteCluster:
        """Return one that is not known, if the kernel tells of it now; it may just have started."""
        self.catch_up()
        self._reader.snapshot(name)  # raises, and says which there are
        return self._clusters.setdefault(name, RemoteCluster(self, name))

    def catch_up(self) -> None:
        """Have what holds there now known here; a kernel that is too busy tells of it later."""
        if self.state == "ready":
            with contextlib.suppress(TfdError):
                self._reader.catch_up(_TELL_SECONDS)

    def ask(self, command: str, timeout: float = _ASK_SECONDS, **arguments: Any) -> Any:
        """Have that kernel perform a command upon its clusters; see `cluster.commands`."""
        self._check()
        return self._reader.ask(command, timeout, **arguments)

    # Life

    @property
    def state(self) -> str:
        """``"ready"``, ``"closed"``, or why it is lost."""
        return "closed" if self._closed.is_set() else self._lost or "ready"

    def close(self) -> None:
        """End the kernel, and all that runs in it."""
        if self._closed.is_set():
            return
        self._closed.set()
        _kernels.discard(self)
        self._reader.leave()
        self._connection.close()
        self._server.end_kernel(self._kernel)
        self._end_runs()
        if not registry.running_clusters() and not _kernels:
            control_socket.stop()

    def __enter__(self) -> RemoteKernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(self._reader.names()) or "none"
        return f"<RemoteKernel at {self.label}, {self.state}; clusters: {names}>"

    # How it is done

    def _send(self, data: dict[str, Any]) -> None:
        self._tell(comm.COMM_ID, data)

    def _tell(self, comm_id: str, data: dict[str, Any]) -> None:
        content = {"comm_id": comm_id, "data": data}
        self._connection.send("shell", "comm_msg", content, subshell=self._subshell)

    def _serve(self) -> None:
        try:
            self._listen()
        except BaseException as error:  # nobody would hear of anything any more
            self._lost = self._lost or f"{self.label}: {type(error).__name__}: {error}"
            raise
        finally:
            self._end_runs()
            self._connection.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                for message in self._connection.messages():
                    self._take(message)
            except InvalidMessage as error:
                self._lost = f"{self.label} sent a message that is not valid: {error.what}"
                return
            if self._closed.is_set() or self._lost or not self._come_back():
                return

    def _take(self, message: Message) -> None:
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] in ENDING:
            self._give_up(f"the kernel at {self.label} has ended: its process died")
        elif kind == "comm_msg" and content["comm_id"] == comm.COMM_ID:
            try:
                self._reader.handle_message(content["data"], message["buffers"])
            except OSError:
                pass  # the connection has just ended
            except InvalidMessage:
                raise
            except Exception as error:
                log.warning("what is shown of %s may be out of date: %r", self.label, error)
        elif kind == "comm_open" and content["target_name"] == bridges_kernel.LEASE:
            self._lease = content["comm_id"]
            farewell = self._server.farewell(self._kernel)
            with contextlib.suppress(OSError):
                self._tell(self._lease, {"farewell": farewell})
        else:
            answers = self._runs.get(message["parent_header"].get("msg_id", ""))
            if answers is not None:
                answers.put(message)

    def _give_up(self, why: str) -> None:
        """Have done with a kernel whose process died, and with what its server starts instead."""
        if self._closed.is_set():
            return
        self._lost = why
        self._connection.close()
        self._end_runs()
        for pause in _PAUSES:
            # While it starts another process the server ends none.
            self._server.end_kernel(self._kernel)
            if self._closed.wait(pause) or not self._server.has(self._kernel):
                return

    def _come_back(self) -> bool:
        """Connect to the same kernel again; return whether that worked."""
        since = time.monotonic()
        attempt = 0
        while time.monotonic() - since < self._grace:
            if self._closed.wait(_PAUSES[min(attempt, len(_PAUSES) - 1)]):
                return False
            attempt += 1
            try:
                if not self._server.has(self._kernel):
                    self._lost = f"the kernel at {self.label} has ended"
                    break
                # In the same session: the server hands over what came meanwhile.
                self._connection = self._server.connect(self._kernel, self._connection.session)
                self._reader.greet()
            except OSError:
                continue
            except TfdError as error:
                self._lost = error.what
                break
            return True
        self._lost = self._lost or f"{self.label} could not be reached for {self._grace:g} s"
        return False

    def _end_runs(self) -> None:
        for answers in list(self._runs.values()):
            answers.put(None)

    def _ping(self) -> None:
        """Show the kernel that somebody is here, and its server that it is used."""
        for count in itertools.count(1):
            if self._closed.wait(_PING_SECONDS) or self._lost:
                return
            with contextlib.suppress(OSError):
                if self._lease:
                    self._tell(self._lease, {"here": True})
                if count % _ACKNOWLEDGE_EVERY == 0:
                    self._reader.acknowledge()


def open_kernels() -> tuple[RemoteKernel, ...]:
    """Return the kernels elsewhere that this process has, and that are there."""
    return tuple(kernel for kernel in tuple(_kernels) if kernel.state == "ready")


def _clusters_elsewhere() -> dict[str, RemoteCluster]:
    """Return the clusters of all kernels elsewhere that have not ended."""
    found: dict[str, RemoteCluster] = {}
    for kernel in tuple(_kernels):
        for name, cluster in kernel.clusters.items():
            with contextlib.suppress(TfdError):
                if not cluster.ended:
                    found.setdefault(name, cluster)
    return found


def _after_fork() -> None:
    """Forget the parent's kernels: the end of a forked child does not end them."""
    global _kernels
    _kernels = weakref.WeakSet()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close_all() -> None:
    for kernel in tuple(_kernels):
        with contextlib.suppress(Exception):
            kernel.close()


providers.register_remote_kernels(open_kernels)
