"""Python functions of a pipeline: search in its graph, pickling, and use in another process."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import debug_mode
from tensorflow.python.ops import script_ops

from tfd_notebook._compat.tf_data import py_functions
from tfd_notebook.data.service import graph_inspection
from tfd_notebook.data.service.py_functions import install, pack
from tfd_notebook.errors import NotSerializable

Range = tf.data.Dataset.range
_lock = threading.Lock()
_guarded: dict[str, int] = {}


@pytest.fixture(autouse=True, scope="module")
def _unique_tokens() -> None:
    py_functions.make_tokens_unique()


@contextlib.contextmanager
def tensorflow_counts() -> Iterator[None]:
    """Leave the tokens to TensorFlow, as before this package is imported."""
    py_functions.restore_tokens()
    try:
        yield
    finally:
        py_functions.make_tokens_unique()


def mapped(function: Callable[..., Any], **options: Any) -> Any:
    return Range(3).map(lambda x: tf.numpy_function(function, [x], tf.int64, **options))


def tokens(dataset: Any) -> tuple[str, ...]:
    return graph_inspection.examine(dataset).tokens


def sent(dataset: Any) -> dict[str, Any]:
    """Return the functions that a worker runs for the dataset's tokens, without the kernel's."""
    names, blob = pack(tokens(dataset))
    registry = script_ops._py_funcs
    own = {token: registry._funcs.pop(token) for token in names}
    try:
        assert install(blob) == tuple(names)
        copies = {token: registry.get(token) for token in names}
        assert not any(copies[token] is own[token] for token in names)
        return copies
    finally:
        registry._funcs.update(own)


def run(dataset: Any) -> list[int]:
    """Iterate `dataset` with the functions that a worker would have."""
    copies = sent(dataset)
    registry = script_ops._py_funcs
    own = {token: registry.get(token) for token in copies}
    try:
        registry._funcs.update(copies)
        return [int(x) for x in dataset.as_numpy_iterator()]
    finally:
        registry._funcs.update(own)


def double(x: Any) -> Any:
    return x * 2


def guarded(factor: int) -> Callable[[Any], Any]:
    def scale(x: Any) -> Any:
        with _lock:
            _guarded["calls"] = _guarded.get("calls", 0) + 1
            return x * factor

    return scale


class Shift:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, x: Any) -> Any:
        return x + self.by

    def twice(self, x: Any) -> Any:
        return x + 2 * self.by


class Held:
    __slots__ = ("by",)

    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, x: Any) -> Any:
        return x


def from_cell(source: str, name: str) -> Any:
    """Define a function as a notebook does: in a ``__main__`` that no worker can import."""
    namespace: dict[str, Any] = {"__name__": "__main__", "np": np}
    exec(source, namespace)
    return namespace[name]


class TestTokens:
    def test_all_functions_are_found_with_unique_tokens(self) -> None:
        first, second = tokens(mapped(double)), tokens(mapped(double, stateful=False))
        assert len({*first, *second}) == 2
        assert all(map(py_functions.is_unique, (*first, *second)))
        assert len(tokens(Range(3).map(lambda x: tf.py_function(double, [x], tf.int64)))) == 1

    def test_nested_functions_are_found(self) -> None:
        nested = Range(2).flat_map(lambda x: mapped(double).map(lambda y: y + x))
        assert len(tokens(nested)) == 1

    def test_unique_tokens_can_be_repeated_and_undone(self) -> None:
        py_functions.make_tokens_unique()
        (token,) = tokens(mapped(double))
        assert token.count("_") == 2
        with tensorflow_counts():
            (token,) = tokens(mapped(double))
        assert token.count("_") == 1
        assert all(map(py_functions.is_unique, tokens(mapped(double))))

    def test_function_traced_before_is_refused(self) -> None:
        with tensorflow_counts():
            dataset = mapped(double)
        with pytest.raises(NotSerializable, match=r"(?s)before the first use.*Next: create"):
            pack(tokens(dataset))

    def test_collected_function_is_refused(self) -> None:
        with pytest.raises(NotSerializable, match="no longer exists"):
            pack(["pyfunc_7_0123456789ab"])

    @pytest.mark.slow
    def test_tensorflow_is_patched_only_after_its_import(self) -> None:
        code = (
            "import sys; from tfd_notebook._compat.tf_data import py_functions as pyfunc\n"
            "pyfunc.make_tokens_unique()\n"
            "pyfunc.make_tokens_unique()\n"
            "assert not any(name.startswith('tensorflow') for name in sys.modules)\n"
            "from tensorflow.python.ops import script_ops\n"
            "tokens = {script_ops._py_funcs.insert(print) for _ in range(2)}\n"
            "assert len(tokens) == 2 and all(map(pyfunc.is_unique, tokens)), tokens\n"
            "pyfunc.restore_tokens()\n"
            "assert script_ops._py_funcs.insert(print) == 'pyfunc_2'\n"
        )
        completed = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60
        )
        assert completed.returncode == 0, completed.stderr


class TestTravel:
    def test_functions_of_a_notebook_are_sent(self) -> None:
        cell = "def helper(x): return np.int64(x + 1)\ndef augment(x): return helper(x) * 10"
        augment = from_cell(cell, "augment")
        dataset = mapped(augment)
        assert list(pack(tokens(dataset))[0].values()) == ["augment"]
        assert run(dataset) == [10, 20, 30]

    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            (double, [0, 2, 4]),
            (lambda x: x - 1, [-1, 0, 1]),
            (Shift(5), [5, 6, 7]),
            (Shift(5).twice, [10, 11, 12]),
            (functools.partial(np.add, 3), [3, 4, 5]),
        ],
        ids=["module", "lambda", "callable", "method", "partial"],
    )
    def test_every_kind_of_function_is_sent(self, function: Any, expected: list[int]) -> None:
        assert run(mapped(function)) == expected

    def test_closure_finds_the_globals_of_its_module(self) -> None:
        _guarded.clear()
        assert run(mapped(guarded(3))) == [0, 3, 6]
        assert _guarded == {"calls": 3}

    def test_generator_functions_share_their_state(self) -> None:
        base = 40

        def count() -> Iterator[int]:
            yield from (base, base + 1)

        dataset = tf.data.Dataset.from_generator(
            count, output_signature=tf.TensorSpec((), tf.int64)
        )
        list(dataset)  # an iteration in this process must not change the pickled dataset
        assert set(pack(tokens(dataset))[0].values()) == {"count"}
        assert run(dataset.repeat(2)) == [40, 41, 40, 41]

    def test_py_function_with_a_gradient(self) -> None:
        def gradient(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.py_function(lambda v: v**3, [x], tf.float32)
            return tape.gradient(y, x)

        dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0]).map(gradient)
        assert run(dataset) == [3, 12]

    def test_py_function_with_ragged_tensors(self) -> None:
        def longer(x: Any) -> Any:
            return tf.concat([x, x], axis=1)

        spec = tf.RaggedTensorSpec((2, None), tf.int64)
        ragged = tf.data.Dataset.from_tensors(tf.ragged.constant([[1], [2, 3]], dtype=tf.int64))
        dataset = ragged.map(lambda x: tf.py_function(longer, [x], spec)).map(
            lambda x: tf.size(x.flat_values, tf.int64)
        )
        assert list(pack(tokens(dataset))[0].values()) == ["longer"]
        assert run(dataset) == [6]


class TestRefusal:
    def test_object_that_cannot_be_pickled_is_named(self) -> None:
        cell = (
            "import threading\nlock = threading.Lock()\n"
            "def helper(x):\n    with lock:\n        return x\n"
            "def augment(x):\n    return helper(x)"
        )
        dataset = mapped(from_cell(cell, "augment"))
        with pytest.raises(NotSerializable) as caught:
            pack(tokens(dataset))
        assert "augment (<string>:6)" in caught.value.what
        assert "helper.lock (_thread.lock)" in caught.value.what
        assert caught.value.fix

    def test_function_inside_a_mapped_function_has_its_own_line(self) -> None:
        """AutoGraph writes such functions to another file."""
        lock = threading.Lock()
        dataset = tf.data.Dataset.range(3).map(
            lambda x: tf.numpy_function(lambda value: (lock, value)[1], [x], tf.int64)
        )
        with pytest.raises(NotSerializable, match=r"<lambda> \(.*test_py_functions\.py:\d+\) uses"):
            pack(tokens(dataset))

    def test_attributes_and_defaults_are_inspected(self) -> None:
        shift = Shift(1)
        shift.by = types.SimpleNamespace(handle=threading.Lock())  # type: ignore[assignment]
        with pytest.raises(NotSerializable, match=r"Shift\.twice .* uses self\.by\.handle "):
            pack(tokens(mapped(shift.twice)))
        with pytest.raises(NotSerializable, match=r"<lambda> .* uses guard "):
            pack(tokens(mapped(lambda x, guard=_lock: x)))

    @pytest.mark.parametrize(
        ("function", "path"),
        [
            (functools.partial(lambda guard, x: x, _lock), "guard"),
            (functools.partial(lambda guards, x: x, [1, {"a": _lock}]), r"guards\[1\]\['a'\]"),
            (Held([_lock]), r"by\[0\]"),
        ],
        ids=["argument", "container", "slot"],
    )
    def test_arguments_containers_and_slots_are_inspected(self, function: Any, path: str) -> None:
        with pytest.raises(NotSerializable, match=rf" uses {path} \(_thread\.lock\)"):
            pack(tokens(mapped(function)))

    def test_module_missing_on_the_worker_is_named(self) -> None:
        module = types.ModuleType("tfd_only_here")
        module.__spec__ = ModuleSpec("tfd_only_here", None)
        sys.modules["tfd_only_here"] = module
        exec("def augment(x): return x", vars(module))
        try:
            _, blob = pack(tokens(mapped(module.augment)))
        finally:
            del sys.modules["tfd_only_here"]
        with pytest.raises(NotSerializable, match="No module named 'tfd_only_here'"):
            install(blob)


def test_function_of_debug_mode_is_refused_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(debug_mode, "DEBUG_MODE", False)
    tf.data.experimental.enable_debug_mode()
    dataset = Range(3).map(lambda x: x + 1)
    with pytest.raises(NotSerializable, match="debug mode") as caught:
        pack(tokens(dataset))
    assert "restart the kernel" in str(caught.value.fix)
