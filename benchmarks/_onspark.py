"""The two sides of a comparison with TensorFlowOnSpark, each with its own Spark."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

#: TensorFlowOnSpark imports a module of setuptools that later versions lack.
_PEER = ("tensorflowonspark==2.2.5", "setuptools==80.9.0")


def peer() -> Path:
    """Return the directory of TensorFlowOnSpark; install it outside site-packages if missing."""
    directory = Path(sys.prefix) / "tensorflowonspark-2.2.5"
    complete = directory / ".complete"
    if not complete.exists():
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"),
                *("--target", str(directory), *_PEER),
            ],
            check=True,
            stdout=sys.stderr,
        )
        complete.touch()
    return directory


@dataclass(frozen=True)
class Child:
    """The objects of a side: a Spark with two executors, and its ``TFCluster``."""

    session: Any
    TFCluster: Any
    answers: TextIO


@contextlib.contextmanager
def child(kind: str) -> Iterator[Child]:
    """Run the side `kind`, and end this process afterwards.

    The executors of ``"ours"`` import TensorFlow in the background, as `session` starts them. Those
    of ``"cold"``, also of tfd-notebook, and of ``"theirs"``, TensorFlowOnSpark, do not. Answers go
    to the original standard output. All other output goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    config: dict[str, object] = {}
    if kind == "theirs":
        sys.path.insert(0, str(peer()))
        config["spark.executorEnv.PYTHONPATH"] = str(peer())
        from tensorflowonspark import TFCluster
    else:
        from tfd_notebook.spark import TFCluster
    from tfd_notebook.spark.local_session import session as local_session_session

    session = local_session_session.session(
        executors=2, cores=1, memory="1536m", name=kind, config=config, warm=kind == "ours"
    )
    yield Child(session, TFCluster, answers)
    local_session_session.end()
    answers.flush()
    os._exit(0)
