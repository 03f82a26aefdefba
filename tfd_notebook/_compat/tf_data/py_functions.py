"""TensorFlow's registry of the Python functions that run inside graphs.

``tf.numpy_function``, ``tf.py_function`` and ``Dataset.from_generator`` leave a token in the graph,
and a registry of the process maps the token to the function. TensorFlow counts the tokens from
zero in each process; here they are made unique, so that a graph that reaches another process can
never name a function of that process by accident.
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
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from tfd_notebook._compat import import_hooks
from tfd_notebook.errors import NotSerializable

#: Ops whose attribute ``token`` names a Python function.
OPS = frozenset(("PyFunc", "PyFuncStateless", "EagerPyFunc"))

_MODULE = "tensorflow.python.ops.script_ops"
_AUTOGRAPH = "tensorflow.python.autograph.impl.api"
_UNIQUE = re.compile(r"pyfunc_\d+_[0-9a-f]{12}")

_wanted = False
# TensorFlow's registry refers to functions weakly; what came from another process stays.
_installed: dict[str, Any] = {}


def make_tokens_unique() -> None:
    """Make the tokens of all functions traced from now on unique among processes.

    Does not import TensorFlow: where it is not imported yet, the change is made when it is.
    """
    global _wanted
    _wanted = True
    import_hooks.when_imported(_MODULE, _change)


def restore_tokens() -> None:
    """Let TensorFlow count its tokens again; functions traced before stay known."""
    global _wanted
    _wanted = False
    if _MODULE in sys.modules:
        registry: Any = sys.modules[_MODULE].FuncRegistry
        original = getattr(registry._next_unique_token, "__wrapped__", None)
        if original is not None:
            registry._next_unique_token = original


def is_unique(token: str) -> bool:
    """Whether `token` was made after `make_tokens_unique`."""
    return _UNIQUE.fullmatch(token) is not None


def lookup(token: str) -> Any:
    """Return what this process runs for `token`, or None."""
    return import_module(_MODULE)._py_funcs.get(token)


def install(blob: bytes) -> tuple[str, ...]:
    """Have this process run the functions in `blob`; for the processes of data workers.

    Parameters
    ----------
    blob : bytes
        From `tfd_notebook.data.service.py_functions.pack`.

    Returns
    -------
    tuple of str
        The tokens that this process knows now.

    Raises
    ------
    NotSerializable
        They cannot be unpickled here.
    """
    registry = import_module(_MODULE)._py_funcs
    try:
        functions = pickle.loads(blob)  # noqa: S301 - from the user's own kernel
    except Exception as error:
        raise NotSerializable(
            f"the dataset's Python functions cannot be loaded in process {os.getpid()}: "
            f"{type(error).__name__}: {error}",
            fix="make what they import importable there (preload=, or sys.path before the start)",
        ) from error
    _installed.update(functions)
    registry._funcs.update(functions)
    return tuple(functions)


def forget(tokens: Iterable[str]) -> None:
    """Free functions that `install` made known, which no dataset uses any more."""
    freed = [_installed.pop(token, None) for token in tokens]
    if any(function is not None for function in freed):
        del freed
        # A function that was sent by value refers to itself through its globals.
        gc.collect()


def user_function(registered: Any) -> Any:
    """Return the function that the user wrote, out of TensorFlow's wrappers around it."""
    script_ops, generator_state = import_module(_MODULE), _generator_state()
    found = registered
    while True:
        if isinstance(found, script_ops.EagerFunc):
            found = found._func
        elif isinstance(found, functools.partial):
            found = found.func
        elif hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        elif isinstance(getattr(found, "__self__", None), generator_state):
            found = found.__self__._generator
        elif (getattr(found, "__module__", None) or "").startswith("tensorflow."):
            inner = closed_over(found)
            if isinstance(inner.get("generator_state"), generator_state):
                found = inner["generator_state"]._generator
            elif "func" in inner:
                found = inner["func"]
            else:
                return found
        else:
            return found


def dumps(value: Any) -> bytes:
    """Pickle `value`, functions that cannot be imported by name included.

    More than plain cloudpickle: a generator's state in ``from_generator`` is rebuilt; functions
    that AutoGraph converted find its module of operators in the worker, too; the placeholder that
    ``py_function`` keeps of a ragged or sparse argument becomes its TypeSpec; and a function that
    is defined inside a function of an importable module finds that module's globals again instead
    of copies of them (which may hold locks, caches, or TensorFlow's tape).
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
                return _unchanged, (obj._type_spec,)
            reduced = super().reducer_override(obj)
            if isinstance(obj, types.FunctionType) and isinstance(reduced, tuple):
                module = _home(obj, cloudpickle.list_registry_pickle_by_value())
                if module is not None:
                    code, _, name, defaults, closure = reduced[1]
                    attributes, slots = reduced[2]
                    slots = slots | {"__globals__": {}}
                    arguments = (module, code, name, defaults, closure)
                    return (_remake, arguments, (attributes, slots), *reduced[3:])
            return reduced

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def autograph_operators() -> Any:
    """Return the module ``ag__`` that the code which AutoGraph generates refers to.

    It is not importable: TensorFlow makes it in each process, and it has the name of another one.
    """
    return import_module(_AUTOGRAPH)._TRANSPILER.get_extra_locals()["ag__"]


def _change(script_ops: Any) -> None:
    registry = script_ops.FuncRegistry
    if not _wanted or hasattr(registry._next_unique_token, "__wrapped__"):
        return
    original = registry._next_unique_token

    @functools.wraps(original)
    def next_unique_token(self: Any) -> str:
        # From the system's random numbers: a fork must not repeat its parent's.
        return f"{original(self)}_{os.urandom(6).hex()}"

    registry._next_unique_token = next_unique_token


def _generator_state() -> Any:
    return import_module("tensorflow.python.data.ops.dataset_ops").DatasetV2._GeneratorState


def _is_symbolic(value: Any) -> bool:
    import tensorflow as tf

    return any(map(tf.is_symbolic_tensor, tf.nest.flatten(value, expand_composites=True)))


def _unchanged(value: Any) -> Any:
    return value


def closed_over(function: Any) -> dict[str, Any]:
    """Return the variables of its surroundings that `function` uses, as far as they are set."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    found = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _home(function: types.FunctionType, by_value: set[str]) -> str | None:
    """Return the importable module that `function` was defined in."""
    name = function.__globals__.get("__name__", "__main__")
    module = sys.modules.get(name)
    if name == "__main__" or getattr(module, "__spec__", None) is None:
        return None
    if any(name == prefix or name.startswith(f"{prefix}.") for prefix in by_value):
        return None
    return name if vars(module) is function.__globals__ else None


def _remake(module: str, code: Any, name: Any, defaults: Any, closure: Any) -> Any:
    return types.FunctionType(code, vars(import_module(module)), name, defaults, closure)
