"""TensorBoard process of a node; it ends with the node."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

from tfd_notebook.agent import interpreter
from tfd_notebook.net.process_control import set_parent_death_signal

#: Number of output lines in the report of its end.
_LINES = 20

Report = Callable[[dict[str, Any]], None]


def start(request: Mapping[str, Any], temporary: Path, report: Report) -> Board | None:
    """Start TensorBoard if `request` has a directory for it; `Board` describes `report`."""
    directory = str(request.get("tensorboard") or "")
    if not directory:
        return None
    if "://" not in directory:
        directory = os.path.join(request["directory"], directory)
    return Board(directory, str(request["host"]), temporary, report)


class Board:
    """A running TensorBoard.

    Parameters
    ----------
    directory : str
        Directory of the event files.
    host : str
        Name or address to listen on, as Spark reports it for the executor.
    temporary : Path
        Directory for its temporary files, which the node removes.
    report : callable
        Called with address and process id when TensorBoard listens:
        ``{"board": ..., "board_pid": ...}``. Called with the cause when it has ended:
        ``{"board": "", "board_pid": 0, "board_error": ...}``.
    """

    def __init__(self, directory: str, host: str, temporary: Path, report: Report) -> None:
        arguments = [f"--logdir={directory}", "--host", host, "--port", "0", "--load_fast=false"]
        self._process = subprocess.Popen(
            interpreter.command("tensorboard.main", *arguments, function="run_main"),
            env={**interpreter.environment(), "TMPDIR": str(temporary)},
            cwd=temporary,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=functools.partial(set_parent_death_signal, signal.SIGKILL),
        )
        self._report = report
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        tail: collections.deque[str] = collections.deque(maxlen=_LINES)
        with cast("IO[str]", self._process.stdout) as output:
            for line in output:
                tail.append(line)
                match = re.search(r"TensorBoard .* at (http://\S+?)/? ", line)
                if match:
                    self._report({"board": match[1], "board_pid": self._process.pid})
        reason = f"has ended, with status {self._process.wait()}:\n{''.join(tail)}"
        self._report({"board": "", "board_pid": 0, "board_error": reason.rstrip(":\n")})

    def end(self) -> None:
        """Stop TensorBoard."""
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
