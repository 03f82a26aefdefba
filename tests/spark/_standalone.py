"""A standalone Spark on this host: a master and two workers with a shared secret."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tests._ports import free_port
from tests._waiting import until
from tests.hosts._spark import server, settings, state

_START_SECONDS = 150.0
_END_SECONDS = 60.0


class Standalone:
    """A context manager. `master` is the value for ``spark.master``.

    Parameters
    ----------
    directory : Path
        Directory for all files of Spark.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.secret = os.urandom(16).hex()
        self._ports = [free_port(), free_port()]
        self.master = f"spark://127.0.0.1:{self._ports[0]}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Standalone:
        try:
            master = ["--host", "127.0.0.1", "--port", str(self._ports[0])]
            self._start("master", [*master, "--webui-port", str(self._ports[1])])
            until(self._state, _START_SECONDS)
            worker = ["--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0"]
            for name in ("one", "two"):
                self._start("worker", [*worker, self.master], name)
            until(lambda: self._state().get("aliveworkers") == 2, _START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a process of this Spark, with separate files."""
        return settings(self.directory / name, "127.0.0.1", self.secret)

    def config(self) -> dict[str, str]:
        """Return the settings of an application with an executor at each worker."""
        return {
            "spark.master": self.master,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": "-XX:-UsePerfData",
            "spark.ui.enabled": "false",
            "spark.sql.catalogImplementation": "in-memory",
        }

    def files(self) -> list[Path]:
        """Return all written files except those in which Spark itself stores the secret."""
        files = [path for path in self.directory.rglob("*") if path.is_file()]
        return [path for path in files if path.name != "spark-defaults.conf"]

    def _start(self, kind: str, arguments: list[str], name: str = "") -> None:
        name = name or kind
        environment = self.environment(name)
        with (self.directory / name / "log").open("ab") as log:
            process = subprocess.Popen(
                server(kind, *arguments),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)

    def _state(self) -> dict[str, Any]:
        return state(f"127.0.0.1:{self._ports[1]}")
