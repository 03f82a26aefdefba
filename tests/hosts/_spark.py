"""A real standalone Spark: its master on home, and Spark workers on ``north`` and ``east``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests._waiting import until
from tests.hosts._hosts import Host, Hosts
from tests.hosts._services import Server, Servers

_START_SECONDS = 120.0
_QUIET = """\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


def spark_class() -> str:
    """Return the command that starts Spark's servers."""
    import pyspark

    return str(Path(pyspark.__file__).parent / "bin" / "spark-class")


def settings(directory: Path, address: str, secret: str) -> dict[str, str]:
    """Return the environment of a Spark server that clients can join only with `secret`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "log4j2.properties").write_text(_QUIET)
    lines = {"spark.authenticate": "true", "spark.authenticate.secret": secret}
    (directory / "spark-defaults.conf").write_text(
        "".join(f"{name} {value}\n" for name, value in lines.items())
    )
    return {
        "SPARK_CONF_DIR": str(directory),
        "SPARK_LOCAL_IP": address,
        "SPARK_LOCAL_DIRS": str(directory / "local"),
        "SPARK_WORKER_DIR": str(directory / "work"),
        "SPARK_DAEMON_JAVA_OPTS": "-XX:-UsePerfData",
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
    }


def server(kind: str, *words: str) -> list[str]:
    """Return the command line of a ``"master"`` or a ``"worker"``."""
    return [spark_class(), f"org.apache.spark.deploy.{kind}.{kind.capitalize()}", *words]


def state(address: str) -> dict[str, Any]:
    """Return the status page of a master at ``"host:port"``; empty before it answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/json/", timeout=5) as reply:
            reported: dict[str, Any] = json.load(reply)
            return reported
    except (OSError, ValueError):
        return {}


def _worker(host: Host, directory: Path, master: str, secret: str) -> Server:
    words = ["--host", host.address, "--cores", "4", "--memory", "4g", "--webui-port", "0", master]
    env = settings(directory, host.address, secret)
    return Server(host, server("worker", *words), directory / "log", env)


class Standalone(Servers[Server]):
    """A Spark master at home, and Spark workers on ``north`` and ``east``.

    Attributes
    ----------
    master : str
        Its address, ``"spark://..."``.
    secret : str
        Secret that a client needs to join.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.directory = directory
        self.secret = os.urandom(16).hex()
        self.home = hosts.home.address
        self.master = f"spark://{self.home}:7077"
        self.environment = settings(directory / "home", self.home, self.secret)
        self._log = directory / "home" / "log"
        self._process: subprocess.Popen[bytes] | None = None
        super().__init__(
            hosts,
            {
                name: _worker(hosts[name], directory / name, self.master, self.secret)
                for name in ("north", "east")
            },
        )

    def __enter__(self) -> Standalone:
        words = ["--host", self.home, "--port", "7077", "--webui-port", "7080"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                server("master", *words),
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            until(lambda: "aliveworkers" in self._state(), _START_SECONDS)
            super().__enter__()
            until(lambda: self._state().get("aliveworkers") == 2, _START_SECONDS)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)

    def _state(self) -> dict[str, Any]:
        return state(f"{self.home}:7080")

    def session(self) -> str:
        """Return an expression for a session with an executor on each host."""
        config = {
            "spark.driver.host": self.home,
            "spark.driver.bindAddress": self.home,
            "spark.cores.max": "2",
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            # A remaining worker would count as a leftover of the first test.
            "spark.python.worker.reuse": "false",
            "spark.executor.extraJavaOptions": "-XX:-UsePerfData",
            "spark.sql.catalogImplementation": "in-memory",
        }
        options = "".join(f".config({name!r}, {value!r})" for name, value in config.items())
        return (
            "__import__('pyspark.sql').sql.SparkSession.builder"
            f".master({self.master!r}){options}.getOrCreate()"
        )
