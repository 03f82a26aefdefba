"""``launcher="jupyter"``: tasks on other hosts, started through the kernels of Jupyter servers."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook.agent.bridges import kernel as bridges_kernel
from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import InvalidMessage, UsageError
from tfd_notebook.launchers import profiles
from tfd_notebook.launchers.client.handshake import read_handshake
from tfd_notebook.launchers.client.jupyter_server import (
    ENDING,
    TOKEN,
    Connection,
    JupyterServer,
    split,
)
from tfd_notebook.launchers.client.session import Channel
from tfd_notebook.launchers.remote import RemoteHost, RemoteLauncher
from tfd_notebook.model.spec import check_count
from tfd_notebook.net import limited_http, validation
from tfd_notebook.net.host import address_towards, addresses_of

_HANDSHAKE_SECONDS = 60.0
#: Seconds to resolve the name of a server, before and after its requests.
_NAME_SECONDS = 10.0
#: Maximum number of characters in a line of its output before the handshake.
_MAX_LINE = 1_000_000
#: A comma between addresses. A password may contain commas, too.
_BETWEEN = re.compile(r",\s*(?=https?://)")
#: Characters of a message: Tornado's server closes the websocket for one above 10 MiB.
_CHUNK_CHARACTERS = 1_000_000


class Jupyter(RemoteLauncher):
    """Kernels of Jupyter servers or gateways: each starts an agent, which outlives the kernel.

    The agent and this process communicate over the channels of the kernel, without another port.
    Needs the extra ``jupyter``.

    Parameters
    ----------
    servers : str or sequence of str
        Addresses as Jupyter prints them: ``"https://host:8888/?token=..."``.
    token : str or mapping of str to str or None, optional
        A token for all servers, or tokens by address. None stands for the environment variable
        ``TFD_JUPYTER_TOKEN``. Default: the token in the address. The variable is also used for a
        single server, and if no address has a token. Otherwise the user's profiles are searched
        for a token of the server.
    ca : str, optional
        File with the certificates to trust, for servers with certificates of a private CA.
    kernel : str
        Name of a kernel that has tfd-notebook and TensorFlow. Default ``"python3"``.
    kernels : int
        The number of kernels on each server. Use more than one for a gateway that starts each
        kernel on another host. Default 1.
    grace, place, secure, host, allow
        See `RemoteLauncher` and `Launcher`.
    """

    name: ClassVar[str] = "jupyter"
    summary: ClassVar[str] = "kernels of Jupyter servers on other hosts (extra: jupyter)"

    def __init__(
        self,
        servers: str | Sequence[str] = (),
        *,
        token: str | Mapping[str, str] | None = None,
        ca: str | None = None,
        kernel: str = "python3",
        kernels: int = 1,
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        secure: bool = False,
        host: str | Mapping[str, str] = "",
        allow: Iterable[str] = (),
    ) -> None:
        super().__init__(grace=grace, place=place, secure=secure, host=host, allow=allow)
        self._servers = tuple(_BETWEEN.split(servers) if isinstance(servers, str) else servers)
        if not self._servers or not all(self._servers):
            raise UsageError(
                'launcher "jupyter" needs servers',
                fix='tfd.launchers.Jupyter(["https://host:8888/?token=..."])',
            )
        in_addresses = dict(split(server) for server in self._servers)
        addresses = [split(server)[0] for server in self._servers]
        if len(set(addresses)) < len(addresses):
            raise UsageError(
                f"invalid servers {addresses!r}: duplicate entries",
                fix="list each server once; kernels=2 starts two on each server",
            )
        check_count("kernels", kernels, None, 1)
        self._servers = tuple(addresses)
        #: Tokens by address, None for the variable's. They are never written or sent to agents.
        self._tokens: dict[str, str | None] = {a: t for a, t in in_addresses.items() if t}
        if isinstance(token, Mapping):
            self._tokens.update({split(server)[0]: known for server, known in token.items()})
        elif token is not None or not self._tokens:
            self._tokens = dict.fromkeys(addresses, token)
        if len(addresses) == 1:
            self._tokens.setdefault(addresses[0], None)
        self._ca = ca
        self._kernel = kernel
        self._kernels = kernels

    @property
    def options(self) -> dict[str, Any]:
        # Without tokens: options are sent to agents, written to files, and shown.
        single = len(self._servers) == 1
        by_variable = [a for a in self._servers if single or self._tokens.get(a, "") is None]
        return {
            **super().options,
            "servers": list(self._servers),
            "token": dict.fromkeys(by_variable),
            "ca": self._ca,
            "kernel": self._kernel,
            "kernels": self._kernels,
        }

    def hosts(self) -> list[RemoteHost]:
        servers = [JupyterServer(a, self.token_of(a), self._ca) for a in self._servers]
        for server in servers:
            if self._secure and server.is_open:
                raise UsageError(
                    f"secure=True needs https, and {server.url} does not use it: the environment "
                    "and the functions of the tasks would be sent unencrypted",
                    fix="start that server with a certificate, or connect through an ssh tunnel",
                )
        return [
            JupyterHost(server, self._kernel, f"#{number}" if number > 1 else "")
            for server in servers
            for number in range(1, self._kernels + 1)
        ]

    def address_of(self, host: RemoteHost) -> str:
        assert isinstance(host, JupyterHost)
        return host.address or host.server.host

    def token_of(self, address: str) -> str:
        """Return the token for the server at `address`, empty if none is configured."""
        token = self._tokens.get(address)
        if token is None:
            token = _token_in_profiles(address)
        if token is None and address in self._tokens:
            token = os.environ.get(TOKEN)
        return token or ""


def _token_in_profiles(address: str) -> str | None:
    """Return the token from a profile with exactly this address."""
    for profile in profiles.profiles().values():
        if isinstance(profile, profiles.Profile) and profile.launcher == Jupyter.name:
            with contextlib.suppress(UsageError, TypeError, AttributeError):
                token = Jupyter(**profile.options)._tokens.get(address)
                if token is not None:
                    return token
    return None


class JupyterHost(RemoteHost):
    """A kernel of a server. Each channel starts a new kernel.

    Parameters
    ----------
    server : JupyterServer
    kernel : str
        Name of the kernel specification.
    number : str
        Suffix of the label that distinguishes kernels of one server.
    """

    def __init__(self, server: JupyterServer, kernel: str, number: str = "") -> None:
        super().__init__(server.label + number)
        self.server = server
        self._kind = kernel
        self._kernels: list[str] = []

    def connect(self, agent: str, start: bool) -> Channel:
        host = self.server.host
        here = limited_http.within(_NAME_SECONDS, lambda: address_towards(host))
        kernel = self.server.start_kernel(self._kind)
        self._kernels.append(kernel)
        try:
            channel = KernelChannel(self.server.connect(kernel))
        except BaseException:
            self._end(kernel)
            raise
        # Close the channel of a kernel that sends no handshake.
        watch = threading.Timer(_HANDSHAKE_SECONDS, channel.close)
        watch.start()
        try:
            code = stdio.bootstrap("kernel", agent, "start" if start else "reconnect", here)
            self.handshake = read_handshake(self.label, channel.execute(code), reconnect=not start)
            # A gateway or a proxy may run the kernel on another host than the server's.
            self.own_address, stated = here, self.handshake.connection.split()[2:3]
            known = limited_http.within(_NAME_SECONDS, lambda: addresses_of(host))
            if stated and stated[0] in known:
                self.peer_address = stated[0]
            channel.join(self.server.end_request(kernel))
        except BaseException:
            channel.close()
            self._end(kernel)
            raise
        finally:
            watch.cancel()
        return channel

    def warnings(self, grace: float) -> list[str]:
        assert self.handshake is not None
        warnings = [
            f"the connection to {self.label} is unencrypted (http): others on the network can read "
            "its token and all data between this kernel and its agent. Start the server with a "
            "certificate to use https://"
            for _ in range(self.server.is_open)
        ]
        if self.handshake.cull_seconds is None:
            return warnings
        return [
            *warnings,
            f"{self.label} ends kernels that are idle for {self.handshake.cull_seconds:g} s. This "
            "cluster keeps its kernel active. After a longer disconnection a new kernel replaces "
            f"it; until then the tasks keep running, for up to {grace:g} s",
        ]

    def _end(self, kernel: str) -> None:
        if self.server.end_kernel(kernel):
            self._kernels.remove(kernel)

    def close(self) -> None:
        # A kernel ends itself with its agent's session. This ends the kernels that could not.
        for kernel in self._kernels:
            self.server.end_kernel(kernel)
        self._kernels.clear()


class KernelChannel:
    """A channel to an agent, over the comm channel of a kernel."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._comm = ""
        self._unread = 0
        self._messages = connection.messages()

    def execute(self, code: str) -> Iterator[bytes]:
        """Yield the lines that `code` prints in the kernel, until the code has ended."""
        request_id = self._connection.execute(code)
        text = ""
        for message in self._messages:
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "comm_open" and content.get("target_name") == bridges_kernel.TARGET:
                self._comm = content["comm_id"]
            if message["parent_header"].get("msg_id") != request_id:
                continue
            if kind == "stream":
                *lines, text = (text + content["text"]).split("\n")
                if len(text) > _MAX_LINE:
                    raise InvalidMessage(
                        f"its kernel printed a line of over {_MAX_LINE} characters"
                    )
                yield from (line.encode() for line in lines)
            elif kind == "error":
                yield f"{content.get('ename')}: {content.get('evalue')}".encode()
            elif content.get("execution_state") == "idle":
                return  # unlike the reply, this status arrives after all output
        raise OSError("its kernel ended before it answered")

    def join(self, end_request: dict[str, Any]) -> None:
        """Start the data phase: send the kernel the request with which it can end itself."""
        if not self._comm:
            raise OSError("its kernel opened no comm")
        self._send_comm({"end_request": end_request})

    def send(self, data: bytes) -> None:
        text = data.decode()
        with self._sending:
            for start in range(0, len(text), _CHUNK_CHARACTERS):
                self._send_comm({"text": text[start : start + _CHUNK_CHARACTERS]})

    def lines(self) -> Iterator[bytes]:
        for message in self._messages:
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "shutdown_reply" or content.get("execution_state") in ENDING:
                return
            if content.get("comm_id") != self._comm:
                continue
            if kind == "comm_close":
                return
            text = validation.output(content["data"].get("text", ""), "text")
            yield from text.encode().splitlines(keepends=True)
            self._acknowledge(len(text))

    def close(self) -> None:
        self._connection.close()

    def _acknowledge(self, size: int) -> None:
        """Acknowledge the received bytes once a quarter of the window is used."""
        self._unread += size
        if self._unread > bridges_kernel.WINDOW_BYTES // 4:
            with contextlib.suppress(OSError):  # the reader of `lines` notices a broken connection
                self._send_comm({"acknowledged": self._unread})
            self._unread = 0

    def _send_comm(self, data: dict[str, Any]) -> None:
        self._connection.send("shell", "comm_msg", {"comm_id": self._comm, "data": data})
