"""One test per private name of TensorFlow that the doctor rests on; failures name the version.

How a dataset reads a service, and which modules are op libraries, is seen for real in
tests/integration/test_doctor_datasets.py.
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tfd_notebook._compat.tf_coordinator import context as ours
from tfd_notebook._compat.tf_data import graph

VERSION = f"TensorFlow {tf.__version__}"


#: In a process of its own, since no other test may have connected it to a cluster.
ALONE = """
import tensorflow as tf
from tensorflow.python.eager import context
from tfd_notebook._compat.tf_coordinator import context as ours
tf.constant(1)
found = context.context_safe()
assert found is context.context()
assert found._initialized is True
assert found.get_server_def() is None
assert found._collective_ops_server_def is None
assert ours.runs_alone()
"""


def test_a_context_that_was_set_up_tells_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{VERSION}: {done.stderr[-2000:]}"


def test_without_a_context_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_context", None)
    assert context.context_safe() is None, VERSION
    assert not ours.runs_alone()
    monkeypatch.delattr(context, "context_safe")
    assert not ours.runs_alone()


def test_modules_of_op_libraries_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    source = sys.modules[tf.load_op_library.__module__]
    with open(str(source.__file__)) as file:
        assert "_IS_TENSORFLOW_PLUGIN" in file.read(), VERSION
    before = graph.loaded_ops()  # of other tests in this process
    made = ModuleType("an_op_library")
    made._IS_TENSORFLOW_PLUGIN = True  # type: ignore[attr-defined]
    made.Zeros = lambda: None  # type: ignore[attr-defined]
    made.Any = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_op_library", made)
    assert graph.loaded_ops() - before == {"Zeros"}
