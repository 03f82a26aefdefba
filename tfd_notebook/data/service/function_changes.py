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
from tfd_notebook._compat.tf_data.py_functions import closed_over
from tfd_notebook.data.service.py_functions import defaults_of, is_users, names_in

_CONTAINERS = (MutableMapping, MutableSequence, MutableSet)
#: Methods that add items to a container, or remove some, not by key.
_FILLING = re.compile(
    "add|append(left)?|clear|discard|extend(left)?|insert|move_to_end|pop(item|left)?|put|remove|"
    "reverse|rotate|sort|subtract|update"
)
_REMOVING = re.compile("clear|discard|move_to_end|pop(item|left)?|remove")
#: Functions that do this to their first argument, and those that write its items.
_FILLERS = frozenset(("heapify", "heappop", "heappush", "heappushpop", "heapreplace", "insort"))
_WRITERS = frozenset(("copyto", "fill_diagonal", "place", "put", "putmask"))

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_ANY_KEY, _READ = "[...]", ast.Load()
#: Number of functions that call each other.
_DEPTH = 4
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
    before: int  # number of reads before it
    tests: tuple[_Test, ...]
    kind: str
    is_given: bool  # by the arguments


def changed_by(
    function: types.FunctionType,
    values: Mapping[str, Any],
    bound: Iterable[str] = (),
    callers: tuple[types.CodeType, ...] = (),
) -> dict[str, str]:
    """Return the objects outside of a function that its calls change, by their names.

    Omitted are variables that it only sets, or only in its first call, such as a model that it
    loads. Also omitted are caches, which it only fills by key, and memory for a result, which it
    only writes. Without its source, none is omitted.

    Parameters
    ----------
    function : function
    values : mapping of str to object
        The values of the variables outside of it, by name.
    bound : iterable of str
        The names of arguments that have one value in all calls.
    callers : tuple of code
        The functions that call it.

    Returns
    -------
    dict of str to str
        The kind of each change.
    """
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    examined = [*_nodes(code, function.__globals__)]
    is_method = function.__qualname__.rpartition(".")[0][-1:] not in ("", ">")
    owner = arguments[:1] if is_method and not any(map(_is_static, examined)) else ()
    shared = {*code.co_freevars, *defaults_of(function), *owner}
    shared |= {*arguments} & {*bound, "self", "cls"}
    try:
        changes = [
            _Examination(each, _locals_of(code), shared, values, (*callers, code)).changed()
            for each in examined
        ]
    except RecursionError:  # in an expression with hundreds of levels
        changes = []
    if not changes:
        return dict.fromkeys(_stored_in(code, shared, values), EARLIER)
    found: dict[str, str] = {}
    for name, kind in itertools.chain.from_iterable(changes):
        if owner and name.startswith(f"{owner[0]}."):
            name = f"self{name[len(owner[0]) :]}"
        found[name] = max(kind, found.get(name, FILLED), key=_KINDS.index)
    return found


def _is_static(function: Any) -> bool:
    decorators = getattr(function, "decorator_list", ())
    return any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in decorators)


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
        self,
        node: Any,
        local: set[str],
        shared: set[str],
        values: Mapping[str, Any],
        callers: tuple[types.CodeType, ...],
    ) -> None:
        self._callers = callers
        self._local, self._unshared, self._values = local, local - shared, values
        #: Local variables, with their paths and those of the values that they are computed from.
        self._known: dict[str, tuple[str, frozenset[str]]] = {}
        for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if each.arg in self._unshared:
                self._known[each.arg] = ("", frozenset([_ARGUMENTS]))
        self._read: list[tuple[str, tuple[_Test, ...]]] = []
        self._searched: set[str] = set()  # by ``in``
        self._changed: set[tuple[str, str]] = set()  # names, and kinds
        self._filled: dict[str, str] = {}
        self._added: set[str] = set()  # those of which not only items are removed
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
        used = {_name(path) for path, _ in self._read}
        keyed = {_name(each.path) for each in self._stores if each.path.endswith(_ANY_KEY)}
        for name, kind in self._filled.items():
            if name in self._added or name not in keyed:  # else a cache of limited size
                yield name, kind if name in self._searched or _has_part(used, name) else FILLED
        for store in self._stores:
            name = _name(store.path)
            if store.path.endswith(_ANY_KEY):  # a cache, unless the function only uses the keys
                is_changed = name in self._searched and not _has_part(used, name)
            else:
                is_changed = self._is_read_later(store)
                is_changed = is_changed and (store.is_given or not self._is_first(store))
            if is_changed:
                yield name, store.kind

    def _is_read_later(self, store: _Store) -> bool:
        """Return True if a call can read the value of an earlier call."""
        return any(
            _has_part([path], store.path)
            and (number < store.before or not {*store.tests} <= {*tests})
            for number, (path, tests) in enumerate(self._read)
        )

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
            elif isinstance(child, ast.match_case):
                self._visit_all(child.body, self._test(None))
            elif isinstance(child, ast.withitem):
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
        if test is None:  # of a pattern
            yield ""
        elif isinstance(test, ast.UnaryOp):
            yield from self._tested(test.operand)
        elif isinstance(test, ast.BoolOp):
            yield from itertools.chain.from_iterable(map(self._tested, test.values))
        elif isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
            yield self._path(test.left)
        elif isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.In, ast.NotIn)):
            yield self._part(test.comparators[0], _key(test.left))
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
            self._reads(each for each, _ in self._known.values())
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
            given = _ARGUMENTS in sources
            self._stores.append(_Store(path, len(self._read), self._tests, kind, given))

    def _reads(self, paths: Iterable[str]) -> None:
        self._read += [(path, self._tests) for path in paths if path]

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
        self._reads(self._paths(expression))

    def _call(self, call: ast.Call) -> None:
        name = _called(call)
        first = self._path(call.args[0]) if call.args else ""
        if isinstance(call.func, ast.Attribute) and _FILLING.fullmatch(name):
            removes = _REMOVING.fullmatch(name) is not None
            uses = name.startswith("pop")
            self._fill(self._path(call.func.value), call.args, uses, not removes)
        if name in _FILLERS and self._is_of_module(call.func):
            self._fill(first, call.args[1:], name.startswith("heappop"), True)
        elif name in _WRITERS and self._is_of_module(call.func):
            self._store(first, self._paths(*call.args[1:]))
        elif len(call.args) == {"setattr": 3, "setdefault": 2}.get(name):
            self._store(self._path(call), self._paths(call.args[-1]))
        self._call_of_user(call)
        for each in call.keywords:
            if each.arg == "out":
                self._store(self._path(each.value), self._paths(*call.args))

    def _is_of_module(self, function: Any) -> bool:
        """Return True if a function is imported, and not a method or a function of the user."""
        if isinstance(function, ast.Name):
            value = self._values.get(self._path(function))
            return not (isinstance(value, types.FunctionType) and is_users(value))
        while isinstance(function, ast.Attribute):
            function = function.value
        if not isinstance(function, ast.Name):
            return False
        is_imported_here = function.id in self._unshared and function.id not in self._known
        return is_imported_here or isinstance(self._values.get(function.id), types.ModuleType)

    def _call_of_user(self, call: ast.Call) -> None:
        """Record what a function changes that gets objects as its arguments."""
        function = self._values.get(self._path(call.func))
        if not isinstance(function, types.FunctionType) or not is_users(function):
            return
        names = function.__code__.co_varnames
        given = {
            n: path for n, each in zip(names, call.args, strict=False) if (path := self._path(each))
        }
        given |= {e.arg: path for e in call.keywords if e.arg and (path := self._path(e.value))}
        if given and len(self._callers) < _DEPTH:
            values = {**function.__globals__, **closed_over(function)}
            values |= {name: self._values.get(path) for name, path in given.items()}
            for name, kind in changed_by(function, values, given, self._callers).items():
                root, dot, rest = name.partition(".")
                if root in given:
                    self._changed.add((_name(given[root]) + dot + rest, kind))

    def _fill(self, path: str, items: Iterable[Any], uses: bool, adds: bool) -> None:
        """Record that items are added to a container outside of the function, or removed."""
        root, *others = _name(path).split(".")
        value = self._values.get(root)
        if isinstance(value, _CONTAINERS) or (others and not isinstance(value, types.ModuleType)):
            kind = self._kind(self._paths(*items))
            self._filled[_name(path)] = max(kind, self._filled.get(_name(path), COUNTER))
            self._added |= {_name(path)} if adds else set()
            self._reads([path] if uses else [])

    def _paths(self, *nodes: Any, is_owner: bool = False) -> Iterator[str]:
        """Yield the paths of the objects outside of the function that expressions read."""
        for node in nodes:
            path = self._path(node)
            if path and not is_owner:
                yield path
            elif isinstance(node, ast.Name) and not is_owner:
                yield from self._known.get(node.id, ("", ()))[1]
            written = [*self._written_by(node)]
            for child in ast.iter_child_nodes(node):
                owns = path and child in (getattr(node, "value", None), getattr(node, "func", None))
                yield from self._paths(child, is_owner=bool(owns or child in written))

    def _written_by(self, node: Any) -> Iterator[Any]:
        """Yield the parts of an expression whose objects it does not read."""
        if isinstance(node, ast.Compare):
            yield from _searched_by(node)
        elif isinstance(node, ast.Call):
            name = _called(node)
            if _FILLING.fullmatch(name):
                yield node.func
            if name in _FILLERS | _WRITERS and self._is_of_module(node.func):
                yield from node.args[:1]
            yield from (each for each in node.keywords if each.arg == "out")

    def _path(self, node: Any) -> str:
        """Return the path to an object outside of the function, as ``self.items[0]``, or ""."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id, ("" if node.id in self._unshared else node.id, ()))[0]
        if isinstance(node, ast.Attribute):
            return self._part(node.value, f".{node.attr}")
        if isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Slice):
                return self._path(node.value)
            return self._part(node.value, _key(node.slice))
        if not isinstance(node, ast.Call) or not node.args:
            return ""
        name, (first, *others) = _called(node), node.args
        if name == "type":
            return self._part(first, ".__class__")
        if name in ("get", "setdefault") and isinstance(node.func, ast.Attribute):
            return self._part(node.func.value, _key(first))
        if name in ("getattr", "hasattr", "setattr") and isinstance(others[0], ast.Constant):
            return self._part(first, f".{others[0].value!s}")
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


def _key(key: ast.expr) -> str:
    return f"[{ast.unparse(key)}]" if isinstance(key, ast.Constant) else _ANY_KEY


def _name(path: str) -> str:
    """Return the path without the keys of items."""
    return path.partition("[")[0]


def _has_part(paths: Iterable[str], whole: str) -> bool:
    """Return True if one of the paths is that of an object, or of a part of it."""
    return any(each == whole or each.startswith((f"{whole}.", f"{whole}[")) for each in paths)


def _is_changed_in_place(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) or hasattr(value, "__array_interface__")
