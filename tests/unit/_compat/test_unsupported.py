"""Tests of the private names of Python, IPython and ipykernel, present and missing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_dataset_ops, script_ops

from tfd_notebook._compat import asyncio_pipes, ipykernel
from tfd_notebook._compat.tf_coordinator import thread_parking
from tfd_notebook._compat.tf_data import iterator_cleanup, servers

VERSION = f"TensorFlow {tf.__version__}"


def test_ipykernel_has_what_the_panel_uses() -> None:
    from ipykernel.comm.manager import CommManager
    from ipykernel.kernelbase import Kernel

    assert {"iopub_socket", "session"} <= set(Kernel.class_trait_names())
    manager = CommManager()
    sent: list[tuple[Any, ...]] = []
    session = SimpleNamespace(send=lambda *args, **options: sent.append((args, options)))
    kernel = SimpleNamespace(comm_manager=manager, iopub_socket="iopub", session=session)
    assert ipykernel.comm_manager_of(SimpleNamespace(kernel=kernel)) is manager
    assert ipykernel.comm_manager_of(SimpleNamespace()) is None
    kernel.iopub_socket = None
    assert ipykernel.comm_manager_of(SimpleNamespace(kernel=kernel)) is None
    ipykernel.send_comm_message(kernel, "id", {"a": 1}, [b"b"])
    (((_, kind, content), options),) = sent
    assert (kind, content) == ("comm_msg", {"comm_id": "id", "data": {"a": 1}})
    assert options == {"ident": b"comm-id", "buffers": [b"b"]}


def test_ipython_has_its_own_variables() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    assert "user_ns_hidden" in InteractiveShell(user_ns={"own": 1}).__dict__
    assert ipykernel.hidden_names(SimpleNamespace()) == {}


@pytest.mark.parametrize("known", [True, False])
def test_a_pipe_is_written_with_flow_control(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        monkeypatch.delattr(asyncio.streams, "FlowControlMixin")

    async def drained() -> bool:
        protocol: Any = asyncio_pipes.flow_control()
        protocol.pause_writing()
        protocol.resume_writing()
        await protocol._drain_helper()
        return not protocol._paused

    assert asyncio.run(drained())


def test_condition_has_its_waiters() -> None:
    assert isinstance(threading.Condition()._waiters, deque)  # type: ignore[attr-defined]


def test_references_of_a_list_are_found() -> None:
    only = [object()]
    assert iterator_cleanup._references(only) == iterator_cleanup._SINGLE_REFERENCE
    another = only[0]
    assert iterator_cleanup._references(only) > iterator_cleanup._SINGLE_REFERENCE
    del another
    assert iterator_cleanup._references(only) == iterator_cleanup._SINGLE_REFERENCE


@pytest.mark.slow
def test_server_with_an_unknown_layout_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not servers.is_readable(object())
    assert servers.unlocked_stop(object()) is None
    dispatch_server = tf.data.experimental.service.DispatchServer(start=False)
    assert servers.is_readable(dispatch_server._server), VERSION
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1)
    assert not servers.is_readable(dispatch_server._server)
    monkeypatch.undo()
    servers.start(dispatch_server)
    servers.stop(dispatch_server)


def test_operations_use_the_entry_points() -> None:
    for name in thread_parking._ENTRY_POINTS:
        assert callable(getattr(pywrap_tfe, name)), (VERSION, name)
    copy = thread_parking.copy_to_device(tf.constant(1), "CPU:0")
    assert copy.numpy() == 1, VERSION
    assert "TFE_Py_FastPathExecute" in gen_dataset_ops.iterator_get_next.__code__.co_names, VERSION
    assert iterator_ops.OwnedIterator._next_internal.__name__ == thread_parking._READ
    assert script_ops.EagerFunc.__call__.__code__.co_filename == thread_parking._CALLBACKS, VERSION
    assert context.Context.set_server_def is thread_parking._set_server_def_parked


#: Deletes an internal of TensorFlow before tfd_notebook uses it, as if this version lacked it.
LACKING = """
import os
import tensorflow as tf
from tensorflow.python.eager import cancellation, context
import tfd_notebook as tfd

def check_without(owner, name):
    delattr(owner, name)
    cluster = tfd.Cluster(workers=1, ps=1, start=False)
    for use in (cluster.strategy, cluster.coordinator, lambda: cluster.resolver):
        try:
            use()
            raise AssertionError("it worked")
        except tfd.errors.Unsupported as error:
            assert "the coordinator does not support" in str(error), error
            assert name in str(error), error

for owner, name in ((cancellation, "context"), (context.Context, "set_server_def")):
    child = os.fork()
    if not child:
        check_without(owner, name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.mark.slow
def test_missing_tensorflow_internal_raises_unsupported() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", LACKING], capture_output=True, text=True, timeout=120
    )
    assert completed.returncode == 0, completed.stderr[-2_000:]
