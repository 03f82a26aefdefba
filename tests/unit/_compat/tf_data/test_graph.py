"""One test per private name of TensorFlow that the doctor uses. Failures name the version.

tests/integration/diagnosis/test_datasets.py has the tests with real services and op libraries.
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tfd_notebook._compat.tf_coordinator import context as tfd_context
from tfd_notebook._compat.tf_data import graph

VERSION = f"TensorFlow {tf.__version__}"


#: Runs in a separate process, because it must not be connected to a cluster.
ALONE = """
import tensorflow as tf
from tensorflow.python.eager import context
from tfd_notebook._compat.tf_coordinator import context as tfd_context
tf.constant(1)
current = context.context_safe()
assert current is context.context()
assert current._initialized is True
assert current.get_server_def() is None
assert current._collective_ops_server_def is None
assert tfd_context.runs_alone()
"""


@pytest.mark.slow
def test_initialized_context_is_detected() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 0, f"{VERSION}: {completed.stderr[-2000:]}"


def test_missing_context_is_not_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_context", None)
    assert context.context_safe() is None, VERSION
    assert not tfd_context.runs_alone()
    monkeypatch.delattr(context, "context_safe")
    assert not tfd_context.runs_alone()


def test_modules_of_op_libraries_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    source = sys.modules[tf.load_op_library.__module__]
    with open(str(source.__file__)) as file:
        assert "_IS_TENSORFLOW_PLUGIN" in file.read(), VERSION
    before = graph.loaded_ops()  # of other tests in this process
    module = ModuleType("an_op_library")
    module._IS_TENSORFLOW_PLUGIN = True  # type: ignore[attr-defined]
    module.Zeros = lambda: None  # type: ignore[attr-defined]
    module.Any = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_op_library", module)
    assert graph.loaded_ops() - before == {"Zeros"}
