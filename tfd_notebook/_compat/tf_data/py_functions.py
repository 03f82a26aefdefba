"""TensorFlow's registry of the Python functions that run inside graphs.

``tf.numpy_function``, ``tf.py_function`` and ``Dataset.from_generator`` put a token into the
graph. A registry in each process maps the token to the function. TensorFlow counts the tokens from
zero in each process. This module makes them unique, so that a graph never runs an unrelated
function in another process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import pickle
import re
import sys
import types
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from tfd_notebook._compat import import_hooks
from tfd_notebook._compat.frames import stacks
from tfd_notebook.errors import NotSerializable

#: Ops whose attribute ``token`` identifies a Python function.
OPS = frozenset(("PyFunc", "PyFuncStateless", "EagerPyFunc"))

_MODULE = "tensorflow.python.ops.script_ops"
_AUTOGRAPH = "tensorflow.python.autograph.impl.api"
_UNIQUE = re.compile(r"pyfunc_\d+_[0-9a-f]{12}")

_enabled = False
# TensorFlow's registry has weak references only. This keeps functions from other processes alive.
_installed: dict[str, Any] = {}


def make_tokens_unique() -> None:
    """Make the tokens of all functions traced from now on unique among processes.

    Does not import TensorFlow. If it is not imported yet, its import applies the change.
    """
    global _enabled
    _enabled = True
    import_hooks.when_imported(_MODULE, _change)


def restore_tokens() -> None:
    """Restore TensorFlow's tokens. Functions that were traced before remain registered."""
    global _enabled
    _enabled = False
    if _MODULE in sys.modules:
        registry: Any = sys.modules[_MODULE].FuncRegistry
        original = getattr(registry._next_unique_token, "__wrapped__", None)
        if original is not None:
            registry._next_unique_token = original


def is_unique(token: str) -> bool:
    """Return True if `token` was created after `make_tokens_unique`."""
    return _UNIQUE.fullmatch(token) is not None


def lookup(token: str) -> Any:
    """Return the registered function of `token`, or None."""
    return import_module(_MODULE)._py_funcs.get(token)


def install(blob: bytes) -> tuple[str, ...]:
    """Register the functions in `blob`. Data workers call this.

    Parameters
    ----------
    blob : bytes
        From `tfd_notebook.data.service.py_functions.pack`.

    Returns
    -------
    tuple of str
        The registered tokens.

    Raises
    ------
    NotSerializable
        The functions cannot be unpickled in this process.
    """
    registry = import_module(_MODULE)._py_funcs
    try:
        functions = pickle.loads(blob)  # noqa: S301 - from the user's own kernel
    except Exception as error:
        raise NotSerializable(
            f"loading the dataset's Python functions failed in process {os.getpid()}: "
            f"{type(error).__name__}: {error}",
            fix="make their imports available there (preload=, or sys.path before the start)",
        ) from error
    _installed.update(functions)
    registry._funcs.update(functions)
    return tuple(functions)


def remove(tokens: Iterable[str]) -> None:
    """Remove functions that `install` registered and that no dataset uses any more."""
    freed = [_installed.pop(token, None) for token in tokens]
    if any(function is not None for function in freed):
        del freed
        # A function that was pickled by value refers to itself through its globals.
        gc.collect()


def user_function(registered: Any) -> Any:
    """Return the user's function inside TensorFlow's wrappers."""
    *_, innermost = unwrapped(registered)
    return innermost


def unwrapped(registered: Any) -> Iterator[Any]:
    """Yield `registered` and the functions inside its wrappers, outermost first.

    Wrappers are TensorFlow's, decorators and ``functools.partial``.
    """
    script_ops, generator_state = import_module(_MODULE), _generator_state()
    function = registered
    while True:
        yield function
        if isinstance(function, script_ops.EagerFunc):
            function = function._func
        elif isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(getattr(function, "__self__", None), generator_state):
            function = function.__self__._generator
        elif (getattr(function, "__module__", None) or "").startswith("tensorflow."):
            inner = closed_over(function)
            if isinstance(inner.get("generator_state"), generator_state):
                function = inner["generator_state"]._generator
            elif "func" in inner:
                function = inner["func"]
            else:
                return
        else:
            return


def is_debugged(registered: Any) -> bool:
    """Return True if ``tf.data.experimental.enable_debug_mode`` has registered the function."""
    return getattr(user_function(registered), "__name__", "") == "py_function_wrapper"


def running() -> Iterator[list[types.FrameType]]:
    """Yield the frames of each registered function that runs now, outermost first."""
    for stack in stacks().values():
        if frames := call_frames(stack):
            yield frames


def call_frames(stack: list[types.FrameType]) -> list[types.FrameType]:
    """Return the frames of the registered function that a thread runs, outermost first.

    Empty if the thread runs none. The frames of `stack` are innermost first.
    """
    file = getattr(sys.modules.get(_MODULE), "__file__", None)
    for number, frame in enumerate(stack):
        if frame.f_code.co_filename == file:
            return stack[:number][::-1]
    return []


def dumps(value: Any) -> bytes:
    """Pickle `value`, including functions that cannot be imported by name.

    This extends cloudpickle in four cases. The state of a generator in ``from_generator`` is
    rebuilt. Functions that AutoGraph converted refer to AutoGraph's operators of the worker. The
    placeholder that ``py_function`` has for a ragged or sparse argument becomes its TypeSpec. A
    function that is defined inside a function of an importable module uses that module's globals
    instead of copies. Copies may contain locks, caches, or TensorFlow's tape.
    """
    import cloudpickle

    generator_state = _generator_state()
    operators = autograph_operators()
    composite = import_module("tensorflow.python.framework.composite_tensor").CompositeTensor

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is generator_state:
                return generator_state, (obj._generator,)
            if obj is operators:
                return autograph_operators, ()
            if isinstance(obj, composite) and _is_symbolic(obj):
                return _identity, (obj._type_spec,)
            reduced = super().reducer_override(obj)
            if isinstance(obj, types.FunctionType) and isinstance(reduced, tuple):
                module = _module_of(obj, cloudpickle.list_registry_pickle_by_value())
                if module is not None:
                    code, _, name, defaults, closure = reduced[1]
                    attributes, slots = reduced[2]
                    slots = slots | {"__globals__": {}}
                    arguments = (module, code, name, defaults, closure)
                    return (_rebuild_function, arguments, (attributes, slots), *reduced[3:])
            return reduced

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def autograph_operators() -> Any:
    """Return the module ``ag__`` to which AutoGraph's generated code refers.

    It cannot be imported: TensorFlow creates it in each process under the name of another module.
    """
    return import_module(_AUTOGRAPH)._TRANSPILER.get_extra_locals()["ag__"]


def _change(script_ops: Any) -> None:
    registry = script_ops.FuncRegistry
    if not _enabled or hasattr(registry._next_unique_token, "__wrapped__"):
        return
    original = registry._next_unique_token

    @functools.wraps(original)
    def next_unique_token(self: Any) -> str:
        # Random numbers of the system, because a fork must not repeat its parent's numbers.
        return f"{original(self)}_{os.urandom(6).hex()}"

    registry._next_unique_token = next_unique_token


def _generator_state() -> Any:
    return import_module("tensorflow.python.data.ops.dataset_ops").DatasetV2._GeneratorState


def _is_symbolic(value: Any) -> bool:
    import tensorflow as tf

    return any(map(tf.is_symbolic_tensor, tf.nest.flatten(value, expand_composites=True)))


def _identity(value: Any) -> Any:
    return value


def closed_over(function: Any) -> dict[str, Any]:
    """Return the closure variables of `function` that have a value."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    variables = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):
            variables[name] = cell.cell_contents
    return variables


def _module_of(function: types.FunctionType, by_value: set[str]) -> str | None:
    """Return the importable module that defines `function`, or None."""
    name = function.__globals__.get("__name__", "__main__")
    module = sys.modules.get(name)
    if name == "__main__" or getattr(module, "__spec__", None) is None:
        return None
    if any(name == prefix or name.startswith(f"{prefix}.") for prefix in by_value):
        return None
    return name if vars(module) is function.__globals__ else None


def _rebuild_function(module: str, code: Any, name: Any, defaults: Any, closure: Any) -> Any:
    return types.FunctionType(code, vars(import_module(module)), name, defaults, closure)
