"""Serialization of the Python functions of a pipeline for the data workers.

A dataset's graph identifies its Python functions by tokens. `pack` pickles the functions in the
process that defines the dataset, and `install` registers them in a data worker.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import inspect
import itertools
import logging
import reprlib
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from tfd_notebook._compat.tf_data import autograph, py_functions
from tfd_notebook._compat.tf_data.py_functions import install
from tfd_notebook.errors import NotSerializable

__all__ = ["FunctionWatch", "find_functions", "install", "pack"]

#: Bytes of pickled functions that can be sent to the agents at a time. Base64 adds a third, and
#: an agent accepts 2**28 bytes (`tfd_notebook.net.agent_protocol.LARGEST`).
LARGEST = 200_000_000

#: Bytes above which garbage is collected before functions are sent.
_LARGE = 1_000_000

#: Depth to which the objects that a function refers to are examined for the cause of an error.
_DEPTH = 6
#: Number of items of a container, and of objects of a function, that are examined.
_ITEMS, _OBJECTS = 1_000, 10_000
#: Values without state. Lists of them are often long.
_PLAIN = (str, bytes, int, float, complex, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
#: Packages whose functions use no state of the user.
_LIBRARIES = {"keras", "numpy", "tensorflow", "tf_keras"} | sys.stdlib_module_names


def find_functions(graph_def: Any) -> list[str]:
    """Return the tokens of the Python functions in a graph and its function library.

    Parameters
    ----------
    graph_def : tf.compat.v1.GraphDef

    Returns
    -------
    list of str
        Each token once, in the order of the graph.
    """
    bodies = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    callers = (node for body in bodies for node in body if node.op in py_functions.OPS)
    return list(dict.fromkeys(node.attr["token"].s.decode() for node in callers))


def pack(tokens: Iterable[str]) -> tuple[dict[str, str], bytes]:
    """Pickle the functions of `tokens`, in this process, as one blob.

    Functions of importable modules are pickled by name. All others (notebook cells, lambdas,
    closures) are pickled by value, with the objects that they refer to. Functions that share an
    object, such as the three of ``from_generator``, also share it in the worker.

    Parameters
    ----------
    tokens : iterable of str

    Returns
    -------
    names : dict of str to str
        The user's name of the function of each token.
    blob : bytes
        The argument of `install`.

    Raises
    ------
    NotSerializable
        A function cannot be pickled, no longer exists, or was traced before the first
        use of tfd_notebook. Also raised if the blob is larger than `LARGEST`.
    """
    functions: dict[str, Any] = {}
    for token in tokens:
        function = py_functions.lookup(token)
        if function is None:
            raise NotSerializable(
                f"the Python function {token} of the dataset no longer exists",
                fix="create the dataset again",
            )
        if py_functions.is_debugged(function):
            raise NotSerializable(
                "the dataset was created in the debug mode of tf.data, whose functions can only "
                "run in this process",
                fix="restart the kernel, and create the dataset without "
                "tf.data.experimental.enable_debug_mode(), which cannot be turned off",
            )
        if not py_functions.is_unique(token):
            raise NotSerializable(
                f"{_location(py_functions.user_function(function))} was traced before the "
                "first use of tfd_notebook, so a worker could confuse it with another function",
                fix="create the dataset after the first use of tfd_notebook, such as "
                "tfd.Cluster(...) in a script or %load_ext tfd_notebook in a notebook",
            )
        functions[token] = function
    names = {
        token: _name(py_functions.user_function(function)) for token, function in functions.items()
    }
    try:
        blob = py_functions.dumps(functions)
    except Exception as error:
        raise _pickle_error(functions, error) from error
    if len(blob) > LARGEST:
        listed = ", ".join(dict.fromkeys(names.values()))
        raise NotSerializable(
            f"the dataset's Python functions ({listed}) and their data have "
            f"{len(blob) / 1e6:.0f} MB, and at most {LARGEST / 1e6:.0f} MB can be sent to data "
            "workers",
            fix="save the data to a file and load it inside the function (np.load), or add it to "
            "the dataset (tf.data.TFRecordDataset, Dataset.load)",
        )
    return names, blob


def reachable(token: str, depth: int, leaves: tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function refers to, and the function, with their paths.

    Objects of the types `leaves` are yielded without those that they refer to.
    """
    registered = py_functions.lookup(token)
    if registered is None:
        return
    visited: set[int] = set()
    todo = [("", value, depth) for value in _layers(registered)]
    for path, value, depth in todo:  # grows meanwhile: the nearest objects first
        if id(value) in visited or isinstance(value, _PLAIN):
            continue
        visited.add(id(value))
        yield path, value
        if depth and len(todo) < _OBJECTS and not isinstance(value, (*leaves, types.ModuleType)):
            inner_depth = depth if isinstance(value, _CONTAINERS) else depth - 1
            for name, inner in _referenced_objects(value):
                if not isinstance(inner, _PLAIN):
                    todo.append((joined(path, name), inner, inner_depth))


def _layers(registered: Any) -> list[Any]:
    """Return the user's function, then its decorators and partials, without TensorFlow's."""
    *wrappers, function = py_functions.unwrapped(registered)
    users = [
        each
        for each in wrappers
        if isinstance(each, functools.partial) or not _is_library(getattr(each, "__module__", ""))
    ]
    return [function, *reversed(users)]


class FunctionWatch:
    """Tracks which functions on the data workers are no longer used by any dataset.

    Datasets are tracked instead of functions, because TensorFlow's global graph refers to each
    function until the process ends. A distributed dataset refers to its original dataset, and an
    iterator to its dataset.
    """

    def __init__(self) -> None:
        self._permanent: set[str] = set()
        self._users: dict[int, tuple[weakref.ref[Any], tuple[str, ...]]] = {}
        # The garbage collector fills it, in any thread.
        self._ended: collections.deque[tuple[str, ...]] = collections.deque()

    def watch(self, tokens: Iterable[str], dataset: Any) -> None:
        """Record that `dataset` uses functions. With None, they are never released."""
        if dataset is None:
            self._permanent.update(tokens)
            return
        key, used = id(dataset), tuple(tokens)

        def end(_: object) -> None:
            self._users.pop(key, None)
            self._ended.append(used)

        self._users[key] = weakref.ref(dataset, end), used

    def unused(self, size: int) -> list[str]:
        """Return the tokens that have become unused since the previous call.

        Parameters
        ----------
        size : int
            Bytes to be sent next. If this is large, garbage is collected first.
        """
        if size > _LARGE:
            gc.collect()
        ended: set[str] = set()
        while self._ended:
            ended.update(self._ended.popleft())
        for _, tokens in tuple(self._users.values()):
            ended.difference_update(tokens)
        return sorted(ended - self._permanent)

    def restore_unused(self, tokens: Iterable[str]) -> None:
        """Take back tokens that could not be sent to the workers."""
        self._ended.append(tuple(tokens))


def _pickle_error(functions: dict[str, Any], error: Exception) -> NotSerializable:
    for registered in functions.values():
        if _failure(registered) is not None:
            function = py_functions.user_function(registered)
            layers = _layers(registered)
            failing = next((layer for layer in layers if _failure(layer) is not None), function)
            path, thing = _find_unpicklable(failing)
            kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
            uses = f"uses {path} ({kind})" if path else f"({kind})"
            return NotSerializable(
                f"{_location(function)} {uses}, which cannot be sent to a data worker: "
                f"{_failure(thing) or error}",
                fix="create it inside the function, or import it from a module",
            )
    return NotSerializable(f"the dataset's Python functions cannot be pickled: {error}")


def _failure(value: Any) -> Exception | None:
    try:
        py_functions.dumps(value)
    except Exception as error:
        return error
    return None


def _find_unpicklable(value: Any, depth: int = _DEPTH) -> tuple[str, Any]:
    """Return the path from `value` to the innermost object that cannot be pickled, and it."""
    if depth:
        for name, inner in _referenced_objects(value):
            if _failure(inner) is not None:
                further, innermost = _find_unpicklable(inner, depth - 1)
                return joined(name, further), innermost
    return "", value


def joined(path: str, name: str) -> str:
    """Return the path of an attribute, or of an item, of the object at `path`."""
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name


def _referenced_objects(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that `value` refers to, with their names or positions."""
    if inspect.ismethod(value):
        yield "self", value.__self__
        yield "", value.__func__
    elif inspect.isfunction(value):
        if _is_library(value.__globals__.get("__name__")):
            return
        yield from py_functions.closed_over(value).items()
        used = names_in(value.__code__)
        for name in used & value.__globals__.keys():
            yield name, (found := value.__globals__[name])
            if inspect.ismodule(found) and not _is_installed(found):
                parts = used & vars(found).keys()
                yield from ((f"{name}.{part}", vars(found)[part]) for part in parts)
        yield from defaults_of(value).items()
    elif isinstance(value, functools.partial):
        names = _arguments(value.func) if inspect.isfunction(value.func) else ()
        for number, argument in enumerate(value.args):
            yield names[number] if number < len(names) else f"[{number}]", argument
        yield from value.keywords.items()
        yield "", value.func
    elif issubclass(type(value), _CONTAINERS):
        yield from _items(value)
    elif isinstance(value, type) and _is_users_class(value):
        for name, member in [*vars(value).items()]:
            if isinstance(member, property):
                member = member.fget
            elif isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            yield name, member
    elif not isinstance(value, (type, logging.Logger)):  # which is sent by its name
        yield from _attributes(value)
        yield from (("", kind) for kind in type(value).__mro__ if _is_users_class(kind))


def is_users(function: types.FunctionType) -> bool:
    """Return True for a function that the user has defined, not an installed package."""
    module = function.__globals__.get("__name__")
    return not _is_library(module) and "-packages" not in function.__code__.co_filename


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _is_users_class(kind: type) -> bool:
    """Return True for a class that the user has defined, not an installed package."""
    module = sys.modules.get(kind.__module__)
    return not (_is_library(kind.__module__) or _is_installed(module))


def _is_installed(module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None) or ""
    return "-packages" in file or _is_library(getattr(module, "__name__", None))


def _items(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield the first items of a container, with their positions. Sets have none."""
    if isinstance(container, dict):
        # Not the methods of a subclass, which may load data.
        for key, item in [*itertools.islice(dict.items(container), _ITEMS)]:
            yield f"[{reprlib.repr(key)}]", item
    else:
        ordered = not isinstance(container, (set, frozenset))
        for number, item in enumerate([*itertools.islice(iter(container), _ITEMS)]):
            yield f"[{number}]" if ordered else "", item


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an instance, also those in slots."""
    if isinstance(value, (dict, list, tuple)):  # a proxy, as a tf.Module has for its containers
        yield "", getattr(value, "__wrapped__", None)
    yield from [*getattr(value, "__dict__", {}).items()]
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            for name, member in vars(kind).items():
                if isinstance(member, types.MemberDescriptorType):
                    with contextlib.suppress(AttributeError):  # no value yet
                        yield name, member.__get__(value)


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in a function's code."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the defaults of a function's arguments, which all calls share, by name."""
    defaults = reversed(function.__defaults__ or ())
    named = dict(zip(reversed(_arguments(function)), defaults, strict=False))
    return named | (function.__kwdefaults__ or {})


def _arguments(function: Any) -> tuple[str, ...]:
    return tuple(function.__code__.co_varnames[: function.__code__.co_argcount])


def _name(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _location(function: Any) -> str:
    called = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
    code = getattr(called, "__code__", None)
    place = ""
    if code is not None:
        file, line, _ = autograph.definition(code)
        place = f" ({file}:{line})"
    return f"the Python function {_name(function)}{place}"
