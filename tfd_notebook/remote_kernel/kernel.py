"""Remote kernel that runs code of this notebook."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import os
import queue
import threading
import time
import uuid
import warnings
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
from tfd_notebook.launchers.client.jupyter_server import (
    ENDING,
    Connection,
    JupyterServer,
    Message,
)
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.spec import check_seconds, check_timeout
from tfd_notebook.net import reconnect
from tfd_notebook.remote_kernel.bus_client import BusClient
from tfd_notebook.remote_kernel.clusters import Clusters, RemoteCluster
from tfd_notebook.remote_kernel.display import failure, show, show_plain, silent
from tfd_notebook.resolvers import providers

log = logging.getLogger("tfd_notebook")

_START_SECONDS = 60.0
_REQUEST_SECONDS = 30.0
_POLL_SECONDS = 0.2
#: Messages of a request that wait here. The others wait at the server.
_WAITING = 4
#: Heartbeats after which this client also sends an acknowledgement to the bus.
_ACKNOWLEDGE_EVERY = 12
#: Timeout for the current state. A kernel sends it within one tick of its bus, unless it is busy.
_CATCH_UP_SECONDS = 5.0
_INTERRUPT_SECONDS = 10.0
#: Timeout to end the replacement of a kernel that died.
_END_SECONDS = 10.0
#: Loads the bus in the other kernel, and starts the lease that ends the kernel without a client.
_PREPARE = """
try:
    import IPython
    IPython.get_ipython().run_line_magic("load_ext", "tfd_notebook")
    from tfd_notebook.agent.bridges import kernel as bridge
    bridge.lease({grace!r})
except ModuleNotFoundError as error:
    raise SystemExit("tfd-notebook is not installed: " + str(error)) from None
"""

_kernels: weakref.WeakSet[RemoteKernel] = weakref.WeakSet()


class RemoteKernel(Handle):
    """A kernel of a remote Jupyter server that runs code and shows its output here.

    The panel, widgets and ``tfd list`` show and control its clusters like those of this kernel. As
    a context manager, it shuts down the kernel at the end. Requires the extra ``jupyter``.

    Parameters
    ----------
    server : str
        Address, as Jupyter prints it: ``"https://host:8888/?token=..."``.
    token : str, optional
        Default: the token in the address, or the variable ``TFD_JUPYTER_TOKEN``.
    ca : str, optional
        File with trusted certificates, for a server with a private certificate.
    kernel : str
        Name of the kernel specification. Default ``"python3"``.
    grace : float
        The kernel shuts down after this time without a connection, unless code runs. In
        seconds; default 600.

    Raises
    ------
    LaunchError
        The server refuses the request or is not a Jupyter server, or tfd-notebook is not
        installed in its kernel.

    See Also
    --------
    tfd_notebook.launchers.Jupyter : Runs the tasks of a cluster of this kernel on the server.
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
        self._grace = float(check_seconds("grace", grace, 1))
        self._server = JupyterServer(server, token, ca)
        self.label = self._server.label
        self._closed, self._ended = threading.Event(), threading.Event()
        self._lost = ""
        self._runs: dict[str, queue.Queue[Message]] = {}
        self._running = threading.Lock()
        self._subshell: str | None = None
        self._lease = ""
        self._heartbeats = itertools.count(1)
        self._clusters: dict[str, RemoteCluster] = {}
        self._bus = BusClient(self._send)
        try:
            self._kernel = self._server.start_kernel(kernel)
            self._connection = self._server.connect(self._kernel)
        except OSError as error:
            self._lost = f"cannot be reached: {error}"
            raise LaunchError(
                f"{self.label} {self._lost}", fix="check that the server runs, and its address"
            ) from None
        threading.Thread(target=self._serve, name="tfd-remote-kernel", daemon=True).start()
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise
        reconnect.send_heartbeats(self._ping, self._ended)
        _kernels.add(self)
        providers.proxies["kernels"] = _remote_clusters
        control_socket.ensure_started()
        registry.notify_cluster_start()

    def _prepare(self) -> None:
        try:
            self._execute(_PREPARE.format(grace=self._grace), _START_SECONDS, silent)
            self._open_subshell()
        except RemoteError as error:
            raise LaunchError(
                f"{self.label}: {error.what.splitlines()[0]}",
                fix='run pip install "tfd-notebook[tensorflow]" there, or change kernel=',
            ) from None
        self._bus.greet()
        sent = self._bus.ready.wait(_START_SECONDS)
        if self._lost or not sent:
            reason = f"{self.label}: its kernel does not send the state of its clusters"
            raise LaunchError(self._lost or reason)
        if self._bus.incompatible:
            raise LaunchError(f"{self.label}: {self._bus.incompatible}")

    def _open_subshell(self) -> None:
        """Open a subshell if the kernel supports it, so that it answers while code runs."""
        info = self._request("shell", "kernel_info_request")
        if "kernel subshells" in info.get("supported_features", ()):
            self._subshell = self._request("control", "create_subshell_request").get("subshell_id")
        self._bus.concurrent = self._subshell is not None

    def _request(self, channel: str, kind: str) -> dict[str, Any]:
        number, answers = self._expect()
        deadline = time.monotonic() + _START_SECONDS
        try:
            self._connection.send(channel, kind, {}, number=number)
            while (message := self._receive(answers, deadline)) is not None:
                if message["header"]["msg_type"] == kind.replace("request", "reply"):
                    return dict(message["content"])
        finally:
            del self._runs[number]
        raise RemoteError(f"{kind!r} failed: the kernel did not answer")

    def _expect(self) -> tuple[str, queue.Queue[Message]]:
        """Return the id and the queue of answers for a new request."""
        number = uuid.uuid4().hex
        answers = self._runs[number] = queue.Queue(_WAITING)
        return number, answers

    def _receive(self, answers: queue.Queue[Message], deadline: float) -> Message | None:
        """Return the next answer, or None after the deadline. A lost kernel raises RemoteError."""
        while (left := deadline - time.monotonic()) > 0:
            try:
                return answers.get(timeout=min(left, _POLL_SECONDS))
            except queue.Empty:
                self._require_open()
        return None

    # Code

    def run(self, code: str, timeout: float | None = None, *, plain: bool = False) -> None:
        """Run code in the kernel, and show its output as it arrives.

        Ctrl-C interrupts the call and the code.

        Parameters
        ----------
        code : str
            Code as in a cell. Variables keep their values for the next call.
        timeout : float, optional
            Seconds after which the code is interrupted. Default: unlimited.
        plain : bool
            Show only text and images, but no HTML and no JavaScript. Default False.

        Raises
        ------
        RemoteError
            The code raised an error, which has the remote traceback; or the kernel is lost.
        TimeLimit
            The code did not end within `timeout` seconds.

        Warns
        -----
        RuntimeWarning
            The kernel did not send the state of its clusters after the code ended.
        """
        if not isinstance(code, str):
            raise UsageError(f"invalid code={code!r}: expected a str")
        check_timeout(timeout)
        try:
            self._execute(code, timeout, show_plain if plain else show)
        except TfdError:
            with contextlib.suppress(TfdError):
                self.catch_up()
            raise
        try:
            self.catch_up()
        except TfdError as error:
            message = f"the clusters of {self.label} are shown with an earlier state: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _execute(self, code: str, timeout: float | None, show: Any) -> None:
        with self._running:
            self._require_open()
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            number, answers = self._expect()
            try:
                self._send_code(code, number)
                self._await_end(answers, deadline, timeout, show)
            except KeyboardInterrupt:
                self._try_interrupt()
                raise
            finally:
                del self._runs[number]

    def _require_open(self) -> None:
        if self._lost or self._closed.is_set():
            raise RemoteError(self._lost or f"the kernel at {self.label} was closed")

    def _send_code(self, code: str, number: str) -> None:
        try:
            self._connection.execute(code, number)
        except OSError as error:
            raise RemoteError(f"{self.label} cannot be reached: {error}") from None

    def _await_end(
        self,
        answers: queue.Queue[Message],
        deadline: float,
        timeout: float | None,
        show: Any,
    ) -> None:
        failed: TfdError | None = None
        late: TimeLimit | None = None
        replied = idle = False
        while not (replied and idle):
            message = self._receive(answers, deadline)
            if message is None:
                if late is not None:
                    raise late
                # Wait for the end: the kernel aborts requests that arrive before.
                late = TimeLimit(
                    f"the code at {self.label} did not end within {timeout:g} s, and "
                    f"{self._try_interrupt()}"
                )
                failed, deadline = late, time.monotonic() + _INTERRUPT_SECONDS
                continue
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "error":
                failed = failed or failure(self.label, content)
            elif kind == "execute_reply":
                replied = True
                if content.get("status") == "aborted":
                    failed = failed or RemoteError(
                        f"{self.label} did not run the code, because earlier code failed",
                        fix="run it again",
                    )
            elif kind == "status":
                idle = content["execution_state"] == "idle"
            else:
                show(kind, content)
        if failed is not None:
            raise failed

    def interrupt(self) -> None:
        """Interrupt the running code."""
        with contextlib.suppress(OSError):
            self._server.interrupt(self._kernel)

    def _try_interrupt(self) -> str:
        """Interrupt the running code; return the result, as the end of a sentence."""
        try:
            self._server.interrupt(self._kernel)
        except TfdError as error:
            return f"the interrupt failed: {error.what}"
        except OSError as error:
            return f"the interrupt failed: {error}"
        return "was interrupted"

    # Clusters

    @property
    def clusters(self) -> Mapping[str, RemoteCluster]:
        """The clusters of the kernel by name, including the last state of ended ones."""
        for name in self._bus.names():
            self._clusters.setdefault(name, RemoteCluster(self, name))
        return Clusters(self._clusters, self._fetch)

    def _fetch(self, name: str) -> RemoteCluster:
        """Return a cluster that is not known yet, because it has just started."""
        self.catch_up()
        self._bus.snapshot(name)  # raises UnknownName with the known names
        return self._clusters.setdefault(name, RemoteCluster(self, name))

    def catch_up(self) -> None:
        """Fetch the current state of the kernel, unless it is lost.

        Raises
        ------
        TimeLimit
            No answer. A busy kernel sends its state later.
        RemoteError
            The kernel cannot be reached.
        """
        if self.state == "ready":
            self._bus.catch_up(_CATCH_UP_SECONDS)

    def perform(self, command: str, timeout: float = _REQUEST_SECONDS, **arguments: Any) -> Any:
        """Perform a command on the kernel's clusters; see `cluster.commands`."""
        self._require_open()
        return self._bus.perform(command, timeout, **arguments)

    # Lifecycle

    @property
    def state(self) -> str:
        """``"ready"``, ``"closed"``, or the reason of its loss."""
        return "closed" if self._closed.is_set() else self._lost or "ready"

    def close(self) -> None:
        """Shut down the kernel with its tasks and code."""
        if self._closed.is_set():
            return
        self._closed.set()
        _kernels.discard(self)
        self._bus.leave()
        self._connection.close()
        self._server.end_kernel(self._kernel)
        self._end_requests()
        control_socket.stop_if_unused()

    def __enter__(self) -> RemoteKernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(self._bus.names()) or "none"
        return f"<RemoteKernel at {self.label}, {self.state}; clusters: {names}>"

    # Connection

    def _send(self, data: dict[str, Any]) -> None:
        self._send_comm(comm.COMM_ID, data)

    def _send_comm(self, comm_id: str, data: dict[str, Any]) -> None:
        content = {"comm_id": comm_id, "data": data}
        self._connection.send("shell", "comm_msg", content, subshell=self._subshell)

    def _serve(self) -> None:
        try:
            self._listen()
        except BaseException as error:  # without this thread, no message is received
            self._lost = self._lost or f"{self.label}: {type(error).__name__}: {error}"
            raise
        finally:
            self._ended.set()
            self._end_requests()
            self._connection.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                for message in self._connection.messages():
                    self._handle_message(message)
            except InvalidMessage as error:
                self._lost = f"{self.label} sent an invalid message: {error.what}"
                return
            if self._closed.is_set() or self._lost or not self._reconnect():
                return

    def _handle_message(self, message: Message) -> None:
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] in ENDING:
            self._mark_lost(f"the kernel at {self.label} has ended: its process died")
        elif kind == "comm_msg" and content["comm_id"] == comm.COMM_ID:
            try:
                self._bus.handle_message(content["data"], message["buffers"])
                registry.notify_change()
            except OSError:
                pass  # the connection has just ended
            except InvalidMessage:
                raise
            except Exception as error:
                log.warning("updating the clusters of %s failed: %r", self.label, error)
        elif kind == "comm_open" and content["target_name"] == bridges_kernel.LEASE:
            self._lease = content["comm_id"]
            end_request = self._server.end_request(self._kernel)
            with contextlib.suppress(OSError):
                self._send_comm(self._lease, {"end_request": end_request})
        else:
            self._pass_on(message)

    def _pass_on(self, message: Message) -> None:
        """Pass a message to its request. If too many wait there, no other message is received."""
        number = message["parent_header"].get("msg_id", "")
        while (answers := self._runs.get(number)) is not None and not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                answers.put(message, timeout=_POLL_SECONDS)
                return

    def _end_requests(self) -> None:
        self._bus.end(RemoteError(self._lost or f"the kernel at {self.label} was closed"))
        registry.notify_change()

    def _mark_lost(self, reason: str) -> None:
        """Mark a kernel whose process died as lost, and end its replacement on the server."""
        if self._closed.is_set():
            return
        self._lost = reason
        self._connection.close()
        self._end_requests()
        end = time.monotonic() + _END_SECONDS
        with contextlib.suppress(OSError):
            reconnect.reconnect(
                self._end_kernel, self._closed, lambda: time.monotonic() < end, first_delay=0.0
            )

    def _end_kernel(self) -> None:
        self._server.end_kernel(self._kernel)
        if self._server.has(self._kernel):
            raise OSError("the server ignores the request while it starts another process")

    def _reconnect(self) -> bool:
        """Reconnect to the same kernel; return True on success."""
        end = time.monotonic() + self._grace
        try:
            connected = reconnect.reconnect(
                self._open_connection, self._closed, lambda: time.monotonic() < end
            )
        except OSError:
            self._lost = f"{self.label} could not be reached for {self._grace:g} s"
        except TfdError as error:
            self._lost = error.what
        else:
            return connected is not None
        return False

    def _open_connection(self) -> Connection:
        if not self._server.has(self._kernel):
            raise RemoteError(f"the kernel at {self.label} has ended")
        # In the same session, the server delivers the messages that were missed.
        self._connection = self._server.connect(self._kernel, self._connection.session)
        self._bus.greet()
        return self._connection

    def _ping(self) -> None:
        """Send a heartbeat to the kernel. It also shows its server that the kernel is in use."""
        if self._lease:
            self._send_comm(self._lease, {"here": True})
        if next(self._heartbeats) % _ACKNOWLEDGE_EVERY == 0:
            self._bus.acknowledge()


def open_kernels() -> tuple[RemoteKernel, ...]:
    """Return the connected remote kernels of this process."""
    return tuple(kernel for kernel in tuple(_kernels) if kernel.state == "ready")


def _remote_clusters() -> dict[str, RemoteCluster]:
    """Return the running clusters of all remote kernels by name."""
    running: dict[str, RemoteCluster] = {}
    for kernel in tuple(_kernels):
        for name, cluster in kernel.clusters.items():
            with contextlib.suppress(TfdError):
                if not cluster.ended:
                    running.setdefault(name, cluster)
    return running


def _after_fork() -> None:
    """Discard the parent's kernels, so that the end of a forked child does not end them."""
    global _kernels
    _kernels = weakref.WeakSet()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close_all() -> None:
    for kernel in tuple(_kernels):
        with contextlib.suppress(Exception):
            kernel.close()


providers.remote_kernels = open_kernels
