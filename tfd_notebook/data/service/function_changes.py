"""The objects outside of a Python function that its calls change, by its source."""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
import re
import types
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
)
from typing import Any, NamedTuple

from tfd_notebook._compat.frames import without_collection
from tfd_notebook.data.service.py_functions import defaults_of, names_in

_CONTAINERS = (MutableMapping, MutableSequence, MutableSet)
#: Methods that add items to a container, or remove some, not by key.
_FILLING = re.compile(
    "add|append(left)?|clear|discard|extend(left)?|insert|move_to_end|pop(item|left)?|put|remove|"
    "reverse|rotate|sort|subtract|update"
)
#: Functions that do this to their first argument, and those that write its items.
_FILLERS = frozenset(("heapify", "heappop", "heappush", "heappushpop", "heapreplace", "insort"))
_WRITERS = frozenset(("copyto", "fill_diagonal", "place", "put", "putmask"))

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_ANY_KEY, _READ = "[...]", ast.Load()
#: In place of a path, for what the arguments of a call give.
_ARGUMENTS = "(arguments)"

#: The kinds of changes. A container is filled, without a use of its items. A counter depends on
#: the number of calls only.
FILLED, COUNTER, EARLIER = "container", "counter", "value of earlier elements"
_KINDS = (FILLED, COUNTER, EARLIER)


class _Test(NamedTuple):
    """One outcome of a test of objects outside of a function for a value, or of an exception."""

    number: int
    paths: frozenset[str]


class _Store(NamedTuple):
    """A value that an object outside of a function gets."""

    path: str
    read: frozenset[str]  # before it
    tests: tuple[_Test, ...]
    kind: str


def changed_by(function: types.FunctionType, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the objects outside of a function that its calls change, by their names.

    Omitted are variables that it only sets, or only in its first call, such as a model that it
    loads. Also omitted are caches, which it only fills by key, and memory for a result, which it
    only writes. Without its source, none is omitted.

    Parameters
    ----------
    function : function
    values : mapping of str to object
        The values of the variables outside of it, by name.

    Returns
    -------
    dict of str to str
        The kind of each change.
    """
    code = function.__code__
    arguments = {*code.co_varnames[: code.co_argcount]}
    shared = {*code.co_freevars, *defaults_of(function), *(arguments & {"self", "cls"})}
    examined = _nodes(code, function.__globals__)
    try:
        changes = [
            _Examination(each, _locals_of(code), shared, values).changed() for each in examined
        ]
    except RecursionError:  # in an expression with hundreds of levels
        changes = []
    if not changes:
        return dict.fromkeys(_stored_in(code, shared, values), EARLIER)
    found: dict[str, str] = {}
    for name, kind in itertools.chain.from_iterable(changes):
        found[name] = max(kind, found.get(name, FILLED), key=_KINDS.index)
    return found


def _nodes(code: types.CodeType, module: dict[str, Any]) -> Iterator[Any]:
    """Yield the functions in the file or cell of `code` that it can be. A line can have several."""
    linecache.checkcache(code.co_filename)
    names = {re.sub(r"^_[^_]+(?=__)", "", each) for each in names_in(code) if each[:1] != "@"}
    lines = tuple(linecache.getlines(code.co_filename, module))
    for node in _functions(lines).get((code.co_firstlineno, code.co_name), ()):
        if names.issubset(re.findall(r"\w+", "".join(lines[node.lineno - 1 : node.end_lineno]))):
            yield node


@functools.lru_cache(maxsize=32)
def _functions(lines: tuple[str, ...]) -> dict[tuple[int, str], list[Any]]:
    """Return the functions of a file or cell by first line and name."""
    found: dict[tuple[int, str], list[Any]] = {}
    try:
        with without_collection():  # which lets two threads parse at once, as Python 3.11 cannot
            tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            line = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
            found.setdefault((line, getattr(node, "name", "<lambda>")), []).append(node)
    return found


def _locals_of(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return {*code.co_varnames, *code.co_cellvars}.union(*map(_locals_of, inner))


def _stored_in(code: types.CodeType, shared: set[str], values: Mapping[str, Any]) -> Iterator[str]:
    operations = {each.opname for each in dis.get_instructions(code)}
    for each in dis.get_instructions(code):
        if each.opname == "STORE_GLOBAL" or (
            each.opname == "STORE_DEREF" and each.argval in shared
        ):
            yield each.argval
        elif each.opname == "STORE_ATTR" and "self" in shared:
            yield f"self.{each.argval}"
    if "STORE_SUBSCR" in operations or any(map(_FILLING.fullmatch, names_in(code))):
        used = names_in(code) | shared
        yield from (name for name in used if isinstance(values.get(name), _CONTAINERS))


class _Examination:
    """The statements of a function, in their order."""

    def __init__(
        self, node: Any, local: set[str], shared: set[str], values: Mapping[str, Any]
    ) -> None:
        self._local, self._unshared, self._values = local, local - shared, values
        #: Local variables, with their paths and those of the values that they are computed from.
        self._known: dict[str, tuple[str, frozenset[str]]] = {}
        for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if each.arg in self._unshared:
                self._known[each.arg] = ("", frozenset([_ARGUMENTS]))
        self._read: frozenset[str] = frozenset()
        self._searched: set[str] = set()  # by ``in``
        self._changed: set[tuple[str, str]] = set()  # names, and kinds
        self._filled: dict[str, str] = {}
        self._stores: list[_Store] = []
        self._tests: tuple[_Test, ...] = ()
        self._numbers = itertools.count()
        if isinstance(node, ast.Lambda):
            self._evaluate(node.body)
        else:
            self._visit_all(node.body)

    def changed(self) -> Iterator[tuple[str, str]]:
        """Yield the names of the changed objects, and the kinds of the changes."""
        yield from self._changed
        used = {_name(path) for path in self._read}
        for name, kind in self._filled.items():
            yield name, kind if name in self._searched or _has_part(used, name) else FILLED
        for store in self._stores:
            name = _name(store.path)
            if store.path.endswith(_ANY_KEY):  # a cache, unless the function only uses the keys
                is_changed = name in self._searched and not _has_part(used, name)
            else:
                is_changed = _has_part(store.read, store.path) and not self._is_first(store)
            if is_changed:
                yield name, store.kind

    def _is_first(self, store: _Store) -> bool:
        """Return True if only a first call stores it, after a test of what is stored there."""
        for test in store.tests:
            stores = [each for each in self._stores if each.path in test.paths]
            if not test.paths or (stores and all(test in each.tests for each in stores)):
                return True
        return False

    # ------------------------------------------------------------------ statements
    def _visit_all(self, statements: Iterable[Any], *tests: _Test) -> None:
        outer = self._tests
        self._tests += tests
        for each in statements:
            self._visit(each)
            if isinstance(each, ast.If) and isinstance(each.body[-1], _LEAVING):
                self._tests += (self._test(each.test),)
        self._tests = outer

    def _visit(self, statement: Any) -> None:
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.expr) and isinstance(getattr(child, "ctx", _READ), ast.Load):
                self._evaluate(child)
            elif isinstance(child, ast.ExceptHandler):
                self._visit_all(child.body, _Test(next(self._numbers), frozenset()))
            elif isinstance(child, (ast.withitem, ast.match_case)):
                self._visit(child)
        for target, value in _assignments_by(statement):
            self._assign(target, value, isinstance(statement, ast.AugAssign))
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(statement, field, None), list):
                is_test = isinstance(statement, ast.If)
                self._visit_all(statements, *([self._test(statement.test)] if is_test else []))

    def _test(self, test: Any) -> _Test:
        return _Test(next(self._numbers), frozenset(self._tested(test)))

    def _tested(self, test: Any) -> Iterator[str]:
        """Yield the objects that are tested to have a value."""
        if isinstance(test, ast.UnaryOp):
            yield from self._tested(test.operand)
        elif isinstance(test, ast.BoolOp):
            yield from itertools.chain.from_iterable(map(self._tested, test.values))
        elif isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
            yield self._path(test.left)
        else:
            yield self._path(test)

    def _assign(self, target: Any, value: Any, is_augmented: bool = False) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values: list[Any] = [_item_of(value)] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(values):
                values = value.elts
            for each in zip(target.elts, values, strict=True):
                self._assign(*each)
            return
        path, sources = self._path(target), frozenset(self._paths(value))
        if isinstance(target, ast.Name) and target.id in self._local:
            if not is_augmented:
                self._known[target.id] = (self._path(value), sources)
            elif _is_changed_in_place(self._values.get(path)):
                self._changed.add((path, self._kind(sources)))
            return
        if not isinstance(target, ast.Subscript):  # other variables may keep the value until now
            self._read |= {each for each, _ in self._known.values()}
        if not self._keeps(path, value):
            self._store(path, [*sources, *([path] if is_augmented else [])])

    def _keeps(self, path: str, value: Any) -> bool:
        """Return True if a value is that of `path`, if there is one, as in ``path or load()``."""
        if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.Or):
            return self._path(value.values[0]) == path
        is_choice = isinstance(value, ast.IfExp) and path in self._tested(value.test)
        return is_choice and path in (self._path(value.body), self._path(value.orelse))

    def _store(self, path: str, sources: Iterable[str]) -> None:
        sources = [*sources]
        kind = self._kind(sources)
        if path and _has_part(map(_name, sources), _name(path)):
            self._changed.add((_name(path), kind))
        elif path:
            self._stores.append(_Store(path, self._read, self._tests, kind))

    def _kind(self, sources: Iterable[str]) -> str:
        """Return the kind of a change to what `sources` give. A test may depend on an element."""
        return EARLIER if self._tests or _ARGUMENTS in sources else COUNTER

    # ------------------------------------------------------------------ expressions
    def _evaluate(self, expression: Any) -> None:
        for each in ast.walk(expression):
            if isinstance(each, ast.Call):
                self._call(each)
            elif isinstance(each, ast.NamedExpr):
                self._assign(each.target, each.value)
            elif isinstance(each, ast.comprehension):
                self._assign(each.target, _item_of(each.iter))
            elif isinstance(each, ast.Compare):
                self._searched |= {_name(self._path(other)) for other in _searched_by(each)}
        self._read |= {*self._paths(expression)}

    def _call(self, call: ast.Call) -> None:
        name = _called(call)
        first = self._path(call.args[0]) if call.args else ""
        if isinstance(call.func, ast.Attribute) and _FILLING.fullmatch(name):
            self._fill(self._path(call.func.value), call.args, name.startswith("pop"))
        if name in _FILLERS:
            self._fill(first, call.args[1:], name.startswith("heappop"))
        elif name in _WRITERS:
            self._store(first, self._paths(*call.args[1:]))
        elif name == "setattr" and len(call.args) == 3:
            self._store(self._path(call), self._paths(call.args[2]))
        for each in call.keywords:
            if each.arg == "out":
                self._store(self._path(each.value), self._paths(*call.args))

    def _fill(self, path: str, items: Iterable[Any], uses: bool) -> None:
        """Record that items are added to a container outside of the function, or removed."""
        root, *others = _name(path).split(".")
        value = self._values.get(root)
        if isinstance(value, _CONTAINERS) or (others and not isinstance(value, types.ModuleType)):
            kind = self._kind(self._paths(*items))
            self._filled[_name(path)] = max(kind, self._filled.get(_name(path), COUNTER))
            self._read |= {path} if uses else frozenset()

    def _paths(self, *nodes: Any, is_owner: bool = False) -> Iterator[str]:
        """Yield the paths of the objects outside of the function that expressions read."""
        for node in nodes:
            path = self._path(node)
            if path and not is_owner:
                yield path
            elif isinstance(node, ast.Name) and not is_owner:
                yield from self._known.get(node.id, ("", ()))[1]
            written = [*_written_by(node)]
            for child in ast.iter_child_nodes(node):
                owns = path and child in (getattr(node, "value", None), getattr(node, "func", None))
                yield from self._paths(child, is_owner=bool(owns or child in written))

    def _path(self, node: Any) -> str:
        """Return the path to an object outside of the function, as ``self.items[0]``, or ""."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id, ("" if node.id in self._unshared else node.id, ()))[0]
        if isinstance(node, ast.Attribute):
            return self._part(node.value, f".{node.attr}")
        if isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Slice):
                return self._path(node.value)
            is_known = isinstance(node.slice, ast.Constant)
            return self._part(node.value, f"[{ast.unparse(node.slice)}]" if is_known else _ANY_KEY)
        if isinstance(node, ast.Call) and _called(node) in ("get", "setdefault"):
            return self._part(getattr(node.func, "value", None), _ANY_KEY)
        if isinstance(node, ast.Call) and _called(node) in ("getattr", "hasattr", "setattr"):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant):
                return self._part(node.args[0], f".{name.value!s}")
        return ""

    def _part(self, owner: Any, part: str) -> str:
        path = self._path(owner)
        return path and path + part


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _item_of(value: Any) -> ast.Subscript:
    return ast.Subscript(value, ast.Name("", _READ), _READ)


def _assignments_by(statement: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(statement, ast.Assign):
        yield from ((target, statement.value) for target in statement.targets)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)) and statement.value:
        yield statement.target, statement.value
    elif isinstance(statement, (ast.For, ast.AsyncFor)):
        yield statement.target, _item_of(statement.iter)
    elif isinstance(statement, ast.withitem) and statement.optional_vars:
        yield statement.optional_vars, statement.context_expr


def _searched_by(node: ast.Compare) -> list[Any]:
    return [
        container
        for operator, container in zip(node.ops, node.comparators, strict=True)
        if isinstance(operator, (ast.In, ast.NotIn))
    ]


def _written_by(node: Any) -> Iterator[Any]:
    """Yield the parts of an expression whose objects it does not read."""
    if isinstance(node, ast.Compare):
        yield from _searched_by(node)
    elif isinstance(node, ast.Call):
        name = _called(node)
        if _FILLING.fullmatch(name):
            yield node.func
        if name in _FILLERS | _WRITERS:
            yield from node.args[:1]
        yield from (each for each in node.keywords if each.arg == "out")


def _name(path: str) -> str:
    """Return the path without the keys of items."""
    return path.partition("[")[0]


def _has_part(paths: Iterable[str], whole: str) -> bool:
    """Return True if one of the paths is that of an object, or of a part of it."""
    return any(each == whole or each.startswith((f"{whole}.", f"{whole}[")) for each in paths)


def _is_changed_in_place(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) or hasattr(value, "__array_interface__")
