"""TensorBoard beside a node, for as long as the node lives."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

from tfd_notebook.agent import interpreter

_PR_SET_PDEATHSIG = 1
#: Lines of its output that are told when it ends.
_LINES = 20

Say = Callable[[dict[str, Any]], None]


def start(request: Mapping[str, Any], temporary: Path, say: Say) -> Board | None:
    """Start it where `request` has a directory for it; see `Board` for what `say` gets."""
    directory = str(request.get("tensorboard") or "")
    if not directory:
        return None
    if "://" not in directory:
        directory = os.path.join(request["directory"], directory)
    return Board(directory, str(request["host"]), temporary, say)


class Board:
    """A running TensorBoard.

    Parameters
    ----------
    directory : str
        Where the event files are.
    host : str
        Name or address to listen at: that of the executor, as Spark knows it.
    temporary : Path
        For its files, which are not its own to remove when it is killed.
    say : callable
        Called with its address and process, ``{"board": ..., "board_pid": ...}``, once it listens.
        When it has ended, called with the cause, and without address and process:
        ``{"board": "", "board_pid": 0, "no_board": ...}``.
    """

    def __init__(self, directory: str, host: str, temporary: Path, say: Say) -> None:
        arguments = [f"--logdir={directory}", "--host", host, "--port", "0", "--load_fast=false"]
        self._process = subprocess.Popen(
            interpreter.command("tensorboard.main", *arguments, function="run_main"),
            env={**interpreter.environment(), "TMPDIR": str(temporary)},
            cwd=temporary,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_end_with_parent,
        )
        self._say = say
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        last: collections.deque[str] = collections.deque(maxlen=_LINES)
        with cast("IO[str]", self._process.stdout) as output:
            for line in output:
                last.append(line)
                found = re.search(r"TensorBoard .* at (http://\S+?)/? ", line)
                if found:
                    self._say({"board": found[1], "board_pid": self._process.pid})
        why = f"has ended, with status {self._process.wait()}:\n{''.join(last)}"
        self._say({"board": "", "board_pid": 0, "no_board": why.rstrip(":\n")})

    def end(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
