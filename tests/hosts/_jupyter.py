"""Real Jupyter servers on hosts, behind TLS."""

from __future__ import annotations

import contextlib
import json
import ssl
import sys
import urllib.request
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.hosts._authority import Authority
from tests.hosts._hosts import Host, Hosts
from tests.hosts._services import Server, Servers

PORT = 8888
#: Server extensions that are unrelated to kernels.
_UNUSED = ("jupyter_lsp", "jupyter_server_terminals", "jupyterlab", "notebook", "notebook_shim")


class Jupyter(Server):
    """A Jupyter server on a host.

    Parameters
    ----------
    host : Host
    directory : Path
        Directory of the configuration, data, notebooks and log of this server.
    authority : Authority
    port : int, optional
    expired : bool, optional
        True if its certificate has expired.
    cull : int, optional
        Seconds after which the server ends an idle kernel, including connected kernels.

    Attributes
    ----------
    url : str
        URL without a slash at its end. It has the address, because home cannot resolve names.
    token : str
    ca : Path
        The certificate to trust.
    """

    start_seconds = 60.0

    def __init__(
        self,
        host: Host,
        directory: Path,
        authority: Authority,
        port: int = PORT,
        expired: bool = False,
        cull: int | None = None,
    ) -> None:
        settings = directory / "config" / "server.json"
        command = [sys.executable, "-m", "jupyter_server", f"--config={settings}"]
        env = {
            "JUPYTER_CONFIG_DIR": str(directory / "config"),
            "JUPYTER_DATA_DIR": str(directory / "data"),
            "JUPYTER_RUNTIME_DIR": str(directory / "runtime"),
            "IPYTHONDIR": str(directory / "ipython"),
        }
        super().__init__(host, command, directory / "log", env)
        self.port = port
        self.url = f"https://{host.address}:{port}"
        self.token = uuid.uuid4().hex
        self.ca = authority.path
        self._expired = expired
        for kind in ("config", "data", "runtime", "ipython", "notebooks"):
            (directory / kind).mkdir(parents=True)
        certificate, key = authority.issue(host, expired)
        config: dict[str, Any] = {
            "ServerApp": {
                "ip": host.address,
                "port": port,
                "port_retries": 0,
                "certfile": str(certificate),
                "keyfile": str(key),
                "allow_root": True,
                "allow_remote_access": True,
                "open_browser": False,
                "root_dir": str(directory / "notebooks"),
                "jpserver_extensions": dict.fromkeys(_UNUSED, False),
            },
            "IdentityProvider": {"token": self.token},
        }
        if cull is not None:
            config["MappingKernelManager"] = {
                "cull_idle_timeout": cull,
                "cull_interval": 1,
                "cull_connected": True,
            }
        settings.write_text(json.dumps(config))

    def get(self, path: str, **how: Any) -> Any:
        """Return the parsed JSON answer; see `open`."""
        with self.open(path, **how) as reply:
            return json.load(reply)

    def open(
        self,
        path: str,
        method: str = "GET",
        token: str | None = None,
        context: ssl.SSLContext | None = None,
        timeout: float = 10.0,
    ) -> Any:
        """Request a path, such as ``/api/kernels``.

        Parameters
        ----------
        path : str
        method : str, optional
        token : str, optional
            A wrong token, or ``""`` for no token. Default: the right token.
        context : ssl.SSLContext, optional
            Default: a context that trusts only the authority.
        timeout : float, optional
            Seconds.
        """
        token = self.token if token is None else token
        headers = {"Authorization": f"token {token}"} if token else {}
        request = urllib.request.Request(f"{self.url}{path}", headers=headers, method=method)
        context = context or ssl.create_default_context(cafile=str(self.ca))
        handlers = urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler({})
        return urllib.request.build_opener(*handlers).open(request, timeout=timeout)

    def answers(self) -> bool:
        """Return True if the server reports its status."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if self._expired:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        try:
            return bool(self.get("/api/status", context=context))
        except OSError:
            return False


def write_profile(directory: Path, servers: Iterable[Jupyter]) -> None:
    """Write a profile with the servers and their tokens below a new ``XDG_CONFIG_HOME``."""
    path = directory / "tfd_notebook" / "lab.toml"
    path.parent.mkdir(parents=True)
    urls = [f"{server.url}/lab?token={server.token}" for server in servers]
    path.write_text(f'launcher = "jupyter"\nservers = {json.dumps(urls)}\n')
    path.chmod(0o600)


class Jupyters(Servers[Jupyter]):
    """Servers on two hosts, by the names of the hosts. `started` starts additional ones.

    Attributes
    ----------
    authority : Authority
    """

    def __init__(self, hosts: Hosts, directory: Path, *names: str) -> None:
        self._directory = directory
        self.authority = Authority(directory / "authority")
        super().__init__(
            hosts,
            {name: Jupyter(hosts[name], directory / name, self.authority) for name in names},
        )

    @contextlib.contextmanager
    def started(self, host: Host, port: int = PORT + 1, **settings: Any) -> Iterator[Jupyter]:
        """Start another server; `settings` are `expired` and `cull` of `Jupyter`."""
        directory = self._directory / uuid.uuid4().hex[:8]
        server = Jupyter(host, directory, self.authority, port, **settings)
        server.launch()
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()
