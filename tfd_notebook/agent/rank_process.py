"""The function of `Cluster.run` in the process of a rank."""

from __future__ import annotations

import base64
import inspect
import json
import linecache
import os
import sys
import threading
import time
import traceback
from typing import Any

from tfd_notebook._compat.keras import refuse_keras
from tfd_notebook.agent.rank_context import RankContext
from tfd_notebook.errors import Unsupported
from tfd_notebook.net import plain_values, ports

#: Limit of the message and of the traceback of an error, in characters.
_LONGEST_TEXT = 20_000
_POLL_SECONDS = 0.02


def call(
    function: str, job: str, index: int, cluster: dict[str, list[str]], host: str, allow: list[str]
) -> dict[str, Any]:
    """Call the function with TF_CONFIG set, and return its result or its error.

    Parameters
    ----------
    function : str
        The pickled function and its arguments, in base64.
    job : str
        The role of the rank's worker.
    index : int
        Index of the rank in its job.
    cluster : dict of str to list of str
        Addresses of all ranks by job.
    host : str
        Name or address under which other ranks reach this one.
    allow : list of str
        Networks that may connect, in CIDR form.

    Returns
    -------
    dict
        ``result``, or ``kind``, ``text`` and ``traceback`` of the error.
    """
    import cloudpickle

    config = {"cluster": cluster, "task": {"type": job, "index": index}}
    # The second variable lets TensorFlow's server share the port with the socket that reserves it.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    os.environ.update(TF_CONFIG=json.dumps(config), TF_GRPC_REUSE_PORT="1")
    port = int(cluster[job][index].rpartition(":")[2])
    threading.Thread(target=_restrict, args=(port, allow, host), daemon=True).start()
    try:
        _refuse_keras_3()
        target, args, sources = cloudpickle.loads(base64.b64decode(function))
        for name, lines in sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        options = {}
        if "ctx" in _missing(target, args):
            options["ctx"] = RankContext(index, job, index, cluster, working_dir=os.getcwd())
        return {"result": plain_values.pack(target(*args, **options))}
    except BaseException as error:
        # Without the frame of this function.
        trace = "".join(traceback.format_exception(error.with_traceback(_inner(error))))
        text = str(error)[:_LONGEST_TEXT]
        return {"kind": type(error).__name__, "text": text, "traceback": trace[-_LONGEST_TEXT:]}
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _refuse_keras_3() -> None:
    import tensorflow as tf

    refuse_keras(
        tf.distribute.MultiWorkerMirroredStrategy,
        lambda: Unsupported(
            "Keras 3 does not support MultiWorkerMirroredStrategy",
            fix='pip install tf-keras, and tfd.Cluster(..., env={"TF_USE_LEGACY_KERAS": "1"}); or '
            "write the loop with strategy.run",
        ),
    )


def _inner(error: BaseException) -> Any:
    trace = error.__traceback__
    return trace.tb_next if trace is not None and trace.tb_next is not None else trace


def _missing(function: Any, args: tuple[Any, ...]) -> list[str]:
    """Return the parameters that have no argument."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a built-in function
        return []
    return parameters[len(args) :]


def _restrict(port: int, allow: list[str], host: str) -> None:
    """Attach the packet filter to the port once the function's server listens at it."""
    try:
        while not ports.listening_fds(port):
            time.sleep(_POLL_SECONDS)
        ports.restrict_port(port, allow, host)
    except Exception as error:
        # Other hosts must not reach a server without a filter.
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)
