"""Objects with changing state that the Python functions of a pipeline refer to."""

from __future__ import annotations

import collections
import functools
import heapq
import importlib
import inspect
import itertools
import logging
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfd_notebook.data.service.function_changes import COUNTER, EARLIER, FILLED
from tfd_notebook.data.service.graph_inspection import examine
from tfd_notebook.data.service.python_state import copied_state, counters, names_random

Range = tf.data.Dataset.range


def found(function: Any) -> tuple[str, ...]:
    """Return the state of a function of a pipeline."""
    dataset = Range(3).map(lambda x: tf.numpy_function(function, [x], tf.int64))
    (token,) = examine(dataset).tokens
    return tuple(state.name for state in copied_state(token))


def generator() -> np.random.Generator:
    return np.random.default_rng(1)


class Slotted:
    __slots__ = ("__hidden", "empty", "inner")

    def __init__(self, **values: Any) -> None:
        self.__hidden = values.pop("hidden", None)
        for name, value in values.items():
            setattr(self, name, value)


class InClass:
    shared = random.Random(1)

    def __call__(self, x: Any) -> Any:
        return x


class Drawing:
    """A class whose methods use a generator of the module."""

    def __call__(self, x: Any) -> Any:
        return self._draw(x)

    def method(self, x: Any) -> Any:
        return self._draw(x)

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return cls()(x)

    @property
    def drawn(self) -> Any:
        return of_module

    def _draw(self, x: Any) -> Any:
        return x + of_module.integers(9)


of_module = generator()


def module() -> Any:
    """Return a ``tf.Module``, which replaces containers by proxies."""
    result = tf.Module()
    result.kept = {"a": generator()}
    return result


def table() -> Any:
    return tf.lookup.experimental.DenseHashTable(
        tf.int64, tf.int64, default_value=-1, empty_key=-2, deleted_key=-3
    )


HELD: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: [1, generator()], "held[1] (Generator)"),
    "dict": (lambda: {"a": generator()}, "held['a'] (Generator)"),
    "tuple": (lambda: (generator(),), "held[0] (Generator)"),
    "set": (lambda: {generator()}, "held (Generator)"),
    "deque": (lambda: collections.deque([generator()]), "held[0] (Generator)"),
    "defaultdict": (
        lambda: collections.defaultdict(list, {1: [generator()]}),
        "held[1][0] (Generator)",
    ),
    "nested": (lambda: [[[[[[[[generator()]]]]]]]], f"held{'[0]' * 8} (Generator)"),
    "slots": (lambda: Slotted(inner=generator()), "held.inner (Generator)"),
    "hidden slot": (lambda: Slotted(hidden=[generator()]), "__hidden[0] (Generator)"),
    "class": (InClass, "held.shared (Random)"),
    "partial": (lambda: functools.partial(max, generator()), "held[0] (Generator)"),
    "module": (module, "held.kept['a'] (Generator)"),
    "bits": (lambda: np.random.PCG64(1), "held (PCG64)"),
    "dense table": (table, "held (DenseHashTable)"),
    "layer": (lambda: keras.layers.RandomFlip(seed=1), "held.generator (SeedGenerator)"),
    "layers": (lambda: [keras.layers.RandomFlip(seed=1)], "held[0].generator (SeedGenerator)"),
}


@pytest.mark.parametrize("name", HELD)
def test_state_inside_an_object_is_found(name: str) -> None:
    create, expected = HELD[name]
    held = create()
    (state,) = found(lambda x: x + len([held]))
    assert state.endswith(expected)


def counts_in_default(x: Any, count: list[int] = [0]) -> Any:  # noqa: B006 - the case
    count[0] += 1
    return x + count[0]


def fills_default(x: Any, *, seen: list[Any] = []) -> Any:  # noqa: B006 - the case
    seen.append(x)
    return x + len(seen)


def only_local(x: Any, scale: int = 2) -> Any:
    scale += 1
    parts = [x]
    parts.append(x)
    parts[0] += scale
    return parts[0]


counted = np.zeros(1, np.int64)


def counts_in_slice(x: Any) -> Any:
    counted[:] += 1
    return x + counted[0]


def counts_in_place(x: Any) -> Any:
    np.add(counted, 1, out=counted)
    return x + counted[0]


def writes_into(x: Any) -> Any:
    return int(np.multiply([x], 2, out=counted)[0])


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (counts_in_place, ("counted (which it changes)",)),
        (writes_into, ()),
        (counts_in_default, ("count (which it changes)",)),
        (fills_default, ("seen (which it changes)",)),
        (counts_in_slice, ("counted (which it changes)",)),
        (only_local, ()),
    ],
)
def test_arguments_with_defaults_are_shared_by_calls(function: Any, names: tuple[str, ...]) -> None:
    assert found(function) == names


totals, nested = [0, 0, 0], {"a": {"n": 0}}


def writes_by_computed_key(x: Any) -> Any:
    totals[int(x) % 2 + 1] = x
    local = [0] * 9
    local[x // 2] = 1
    return local[0]


def counts_by_computed_key(x: Any) -> Any:
    totals[int(x) % 3] += 1
    return x


def counts_in_nested(x: Any) -> Any:
    nested["a"]["n"] += 1
    return x


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (writes_by_computed_key, ()),
        (counts_by_computed_key, ("totals (which it changes)",)),
        (counts_in_nested, ("nested (which it changes)",)),
    ],
)
def test_arithmetic_in_a_key_is_no_change(function: Any, names: tuple[str, ...]) -> None:
    assert found(function) == names


def test_code_of_any_function_is_examined() -> None:
    from tfd_notebook.data.service.function_changes import changed_by

    modules = [*map(importlib.import_module, MODULES.split()), *vars(np).values()]
    functions = {
        function
        for each in modules
        if inspect.ismodule(each)
        for owner in (each, *filter(inspect.isclass, vars(each).values()))
        for function in vars(owner).values()
        if inspect.isfunction(function)
    }
    assert len(functions) > 3_000
    for function in sorted(functions, key=lambda each: each.__code__.co_filename)[::3]:
        changed_by(function, function.__globals__)


def test_threads_can_examine_functions_at_once() -> None:
    from tfd_notebook.data.service import function_changes

    class Garbage:
        """Its collection lets other threads run."""

        def __init__(self) -> None:
            self.self = self

        def __del__(self) -> None:
            sum(range(100))

    def examine_one(module: str) -> dict[str, bool]:
        Garbage()
        function = next(filter(inspect.isfunction, vars(importlib.import_module(module)).values()))
        function_changes._functions.cache_clear()
        return function_changes.changed_by(function, function.__globals__)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            [*threads.map(examine_one, ["argparse", "ast", "inspect", "pickle"] * 8)]
    finally:
        sys.setswitchinterval(interval)


MODULES = (
    "argparse asyncio ast base64 calendar codecs collections concurrent.futures configparser "
    "copy csv ctypes dataclasses datetime decimal difflib dis doctest email.message enum fractions "
    "ftplib functools gettext gzip heapq html.parser http.client http.cookiejar imaplib inspect "
    "ipaddress json.decoder logging mailbox multiprocessing.pool numpy.ma.core optparse "
    "os pathlib pdb pickle pickletools platform plistlib pprint pydoc random re shutil smtplib "
    "socket sqlite3 ssl statistics string subprocess tarfile tempfile textwrap threading "
    "tokenize traceback types typing unittest.case unittest.mock urllib.parse "
    "urllib.request uuid warnings weakref xml.dom.minidom zipfile"
)


def shifted(rng: Any, x: Any, *, scale: Any = None) -> Any:
    return x + rng.integers(9)


def decorated(rng: Any) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        return x

    @functools.wraps(function)
    def wrapper(x: Any) -> Any:
        return function(x) + rng.integers(9)

    return wrapper


def with_default(x: Any, *, rng: Any = of_module) -> Any:
    return x + rng.integers(9)


FUNCTIONS: dict[str, tuple[Any, str]] = {
    "partial": (functools.partial(shifted, generator()), "rng (Generator)"),
    "list in a partial": (functools.partial(shifted, [generator()]), "rng[0] (Generator)"),
    "keyword": (functools.partial(shifted, 1, scale=generator()), "scale (Generator)"),
    "partial of a partial": (
        functools.partial(functools.partial(shifted, generator()), scale=1),
        "rng (Generator)",
    ),
    "partial of a builtin": (functools.partial(max, generator()), "[0] (Generator)"),
    "decorator": (decorated(generator()), "rng (Generator)"),
    "default": (with_default, "rng (Generator)"),
    "callable": (Drawing(), "of_module (Generator)"),
    "method": (Drawing().method, "of_module (Generator)"),
    "class method": (Drawing.of_class, "of_module (Generator)"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_state_of_each_kind_of_function_is_found(name: str) -> None:
    function, expected = FUNCTIONS[name]
    (state,) = found(function)
    assert state.split(".")[-1] == expected


total, limit = 0, [3]


class Counting:
    def __init__(self) -> None:
        self.count, self.sums, self.loaded = 0, {"a": 0}, None

    def __call__(self, x: Any) -> Any:
        self.count += 1
        return x

    def method(self, x: Any) -> Any:
        self.count = self.count + int(x)
        self.sums["a"] += int(x)
        return x

    def load(self, x: Any) -> Any:
        if self.loaded is None:
            self.loaded = limit
        result = Counting()
        result.count += 1
        result.sums["a"] += 1
        return x


def count_globally(x: Any) -> Any:
    global total
    total = total + 1
    return x


def load_globally(x: Any) -> Any:
    global total
    total = limit[0]
    sums = {"a": 1}
    sums["a"] += 1
    return x + sums["a"]


def counting() -> Callable[[Any], Any]:
    count = 0
    sums = {"a": 0}

    def function(x: Any) -> Any:
        nonlocal count
        count -= 1
        sums["a"] += count
        return x

    return function


class Collecting:
    def __init__(self) -> None:
        self.items: list[Any] = []

    def __call__(self, x: Any) -> Any:
        self.items.append(x)
        return len(self.items)


def filling() -> dict[str, Callable[[Any], Any]]:
    """Return functions that use containers outside of them."""
    counts: dict[Any, int] = {}
    known: set[Any] = set()
    items: list[Any] = []
    cached: dict[Any, Any] = {}

    def count(x: Any) -> Any:
        counts[x] = counts.get(x, 0) + 1
        return counts[x]

    def select(x: Any) -> Any:
        if x in known:
            return 0
        known.add(x)
        return 1

    def append(x: Any) -> Any:
        items.append(x)
        return len(items)

    def cache(x: Any) -> Any:
        if x not in cached:
            cached[x] = x * 2 + 1
        own = [x]
        own.append(cached[x])
        return np.append(own, items)

    return {"count": count, "select": select, "append": append, "cache": cache}


FILLING, FILLING_USED = filling(), ("append", "select", "count")
COUNTERS: dict[str, tuple[Any, set[str]]] = {
    "nonlocal": (counting(), {"count", "sums"}),
    "global": (count_globally, {"total"}),
    "callable": (Counting(), {"self.count"}),
    "method": (Counting().method, {"self.count", "self.sums"}),
    "inner function": (lambda x: count_globally(x), {"count_globally.total"}),
    "counts by key": (FILLING["count"], {"counts"}),
    "known elements": (FILLING["select"], {"known"}),
    "list of elements": (FILLING["append"], {"items"}),
    "list of an object": (Collecting(), {"self.items"}),
    "cache by key": (FILLING["cache"], set()),
    "loaded once": (Counting().load, set()),
    "set": (load_globally, set()),
}


class Tracking:
    """A class whose methods change it, or keep what a first call creates."""

    def __init__(self) -> None:
        self.mean, self.last, self.count, self.loaded = 0.0, None, 0, None
        self.ready = False
        self.results: dict[Any, Any] = {}

    def average(self, x: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x
        return x

    def difference(self, x: Any) -> Any:
        result = 0 if self.last is None else x - self.last
        self.last = x
        return result

    def tick(self) -> None:
        self.count += 1

    def unused(self) -> None:
        self.ready = not self.ready

    def __call__(self, x: Any) -> Any:
        self.tick()
        return x

    def process(self, x: Any) -> Any:
        self.tick()
        return x

    def set(self, x: Any) -> Any:
        setattr(self, "count", self.count + 1)  # noqa: B010 - the case
        return x

    def load(self, x: Any) -> Any:
        if not self.ready:
            self.loaded = limit
            self.ready = True
        if not hasattr(self, "model"):
            self.model = limit
        self.model = self.model or limit
        self.model = limit if self.model is None else self.model
        return x + self.model[0] + self.loaded[0]

    def load_early(self, x: Any) -> Any:
        if self.loaded is not None:
            return self.loaded
        self.loaded = x
        return self.loaded

    def result(self, x: Any) -> Any:
        if x not in self.results:
            self.results[x] = x * 2
        return self.results[x]


tracking, last, history, ordered = Tracking(), [0], np.zeros(5), collections.OrderedDict()
groups: dict[Any, list[Any]] = {}
known: dict[Any, Any] = {}
largest = 0
scratch = np.zeros(9)


def keep_largest(x: Any) -> Any:
    global largest
    largest = max(largest, x)
    return largest


def count_in_attribute(x: Any) -> Any:
    count_in_attribute.n = count_in_attribute.n + 1  # type: ignore[attr-defined]
    return x


def difference(x: Any) -> Any:
    result = x - last[0]
    last[0] = x
    return result


def append_by_alias(x: Any) -> Any:
    alias = last
    alias.append(x)
    return len(alias)


def add_by_alias(x: Any) -> Any:
    alias = history
    alias += x
    return alias.sum()


def shift(x: Any) -> Any:
    history[1:] = history[:-1]
    history[0] = x
    return history.sum()


def group(x: Any) -> Any:
    groups.setdefault(x, []).append(x)
    return len(groups[x])


def heap(x: Any) -> Any:
    heapq.heappush(last, x)
    return last[0]


def copy_to(x: Any) -> Any:
    result = x - history
    np.copyto(history, x)
    return result.sum()


def copy_with_own_import(x: Any) -> Any:
    import numpy

    result = x - history
    numpy.copyto(history, x)
    return result.sum()


class Board:
    """Its methods have the names of functions that write their argument."""

    def place(self, at: Any) -> Any:
        return limit[0] + len(at)

    def heapify(self, at: Any) -> Any:
        return limit[0] - len(at)


board = Board()


def place_on_board(x: Any, path: tuple[int, ...] = ()) -> Any:
    number = x + len(path) + len(history)
    return number + board.place(path) + board.heapify(history) + board.place(history)


def order(x: Any) -> Any:
    ordered.move_to_end(x)
    return x


def is_new(x: Any) -> Any:
    if x in known:
        return False
    known[x] = True
    return True


def cache_early(x: Any) -> Any:
    value = known.get(x)
    if value is None:
        value = known[x] = x * 2
    return value


def cache_by_error(x: Any) -> Any:
    try:
        return known[x]
    except KeyError:
        known[x] = x * 2
    return known[x]


def cache_by_default(x: Any) -> Any:
    return known.setdefault(x, x * 2)


def write_scratch(x: Any) -> Any:
    for number in range(len(scratch)):
        scratch[number] = x
    return (scratch * 2).sum()


COUNTERS |= {
    "average": (tracking.average, {"self.mean"}),
    "difference to the last": (tracking.difference, {"self.last"}),
    "helper method": (tracking, {"self.count"}),
    "called method": (lambda x: tracking.process(x), {"tracking.count"}),
    "called object": (lambda x: tracking(x), {"tracking.count"}),
    "setattr": (tracking.set, {"self.count"}),
    "loaded by a flag": (tracking.load, set()),
    "first element": (tracking.load_early, {"self.loaded"}),
    "cache of an object": (tracking.result, set()),
    "largest": (keep_largest, {"largest"}),
    "attribute of a function": (count_in_attribute, {"count_in_attribute.n"}),
    "item": (difference, {"last"}),
    "alias": (append_by_alias, {"last"}),
    "alias of an array": (add_by_alias, {"history"}),
    "shift": (shift, {"history"}),
    "setdefault": (group, {"groups"}),
    "heap": (heap, {"last"}),
    "copyto": (copy_to, {"history"}),
    "own import": (copy_with_own_import, {"history"}),
    "method with the name of a writer": (place_on_board, set()),
    "move_to_end": (order, {"ordered"}),
    "membership": (is_new, {"known"}),
    "cache with get": (cache_early, set()),
    "cache by error": (cache_by_error, set()),
    "cache by default": (cache_by_default, set()),
    "scratch": (write_scratch, set()),
}


def push(items: list[Any], x: Any) -> int:
    items.append(x)
    return len(items)


class Other:
    """A class whose methods do not name their object ``self``."""

    def __init__(this) -> None:  # noqa: N805 - the case
        this.count = 0

    def __call__(this, x: Any) -> Any:  # noqa: N805 - the case
        this.count += 1
        return x

    def of_class(this, x: Any) -> Any:  # noqa: N805 - the case
        type(this).total = type(this).total + x
        return x

    @staticmethod
    def static(given: Any) -> Any:
        given.count = given.count + 1
        return given.count

    total = 0


def closure_of_closures() -> Callable[[Any], Any]:
    tracked = Tracking()

    def number(x: Any) -> Any:
        tracked.tick()
        return x + tracked.count

    return lambda x: number(x)


def previous_by_key(x: Any) -> Any:
    result = x - known.get("last", 0)
    known["last"] = x
    return result


def last_even(x: Any) -> Any:
    match int(x) % 2:
        case 0:
            last[0] = x
    return last[0]


def number_of_word(x: Any) -> Any:
    return known.setdefault(x, len(known))


def cache_of_some(x: Any) -> Any:
    if x not in ordered:
        ordered[x] = x * 2
        if len(ordered) > 9:
            ordered.popitem(last=False)
    ordered.move_to_end(x)
    return ordered[x]


def of_a_local_object(x: Any) -> Any:
    tracked = Tracking()
    tracked.tick()
    return x + tracked.count


def load_by_key(x: Any) -> Any:
    if "model" not in known:
        known["model"] = limit
    return known["model"][0] + x


COUNTERS |= {
    "changed argument": (lambda x: push(last, x), {"last"}),
    "bound argument": (functools.partial(push, last), {"items"}),
    "other name of self": (Other(), {"self.count"}),
    "argument of a static method": (Other().static, set()),
    "attribute of a class": (Other().of_class, {"self.__class__.total"}),
    "closure of closures": (closure_of_closures(), {"number.tracked.count"}),
    "previous by key": (previous_by_key, {"known"}),
    "set in a case": (last_even, {"last"}),
    "number of a word": (number_of_word, {"known"}),
    "cache of limited size": (cache_of_some, set()),
    "local object": (of_a_local_object, set()),
    "loaded by key": (load_by_key, set()),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_variable_that_a_function_changes_is_found(name: str) -> None:
    function, expected = COUNTERS[name]
    assert {each.partition(" (")[0] for each in found(function)} == expected


def collect(x: Any) -> Any:
    last.append(x)
    return x


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (collect, FILLED),
        (heap, EARLIER),
        *((FILLING[each], EARLIER) for each in FILLING_USED),
        (Counting(), COUNTER),
        (count_globally, COUNTER),
        (tracking.average, EARLIER),
        (difference, EARLIER),
        (keep_largest, EARLIER),
    ],
)
def test_changed_object_has_a_kind(function: Any, kind: str) -> None:
    dataset = Range(3).map(lambda x: tf.numpy_function(function, [x], tf.int64))
    (token,) = examine(dataset).tokens
    assert {state.kind for state in copied_state(token)} == {kind}


def test_function_without_source_has_all_that_it_stores() -> None:
    code = """
class Tracking:
    def __call__(self, x):
        global total
        self.loaded, total, items[0] = 1, 2, x
        return x
"""
    module: dict[str, Any] = {"items": [1], "__name__": "any"}
    exec(code, module)
    names = {each.partition(" (")[0] for each in found(module["Tracking"]())}
    assert names == {"self.loaded", "total", "items"}


def test_expression_of_many_levels_is_examined(tmp_path: Path, monkeypatch: Any) -> None:
    text = (
        f"total = 0\n\ndef add(x):\n    global total\n    total = x{' + x' * 2_000}\n    return x\n"
    )
    (tmp_path / "of_many_levels.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = found(importlib.import_module("of_many_levels").add)
    assert names == ("total (which it changes)",)


@pytest.mark.parametrize("assigns", [True, False])
def test_variable_that_a_function_assigns_is_no_constant(assigns: bool) -> None:
    number = tf.Variable(0, dtype=tf.int64)

    def read(x: Any) -> Any:
        return x + number.numpy()

    def count(x: Any) -> Any:
        return x + number.assign_add(1).numpy()

    dataset = Range(3).map(lambda x: tf.numpy_function(count if assigns else read, [x], tf.int64))
    (token,) = examine(dataset).tokens
    (state,) = copied_state(token)
    assert state.name == "number (ResourceVariable)"
    assert counters([state]) == (state.name if assigns else "")


def test_iterator_is_state() -> None:
    numbers = {"next": itertools.count()}
    assert found(lambda x: next(numbers["next"])) == ("numbers['next'] (count)",)


def test_generator_function_has_no_state_of_its_dataset() -> None:
    def count() -> Any:
        yield from range(3)

    dataset = tf.data.Dataset.from_generator(count, output_signature=tf.TensorSpec((), tf.int64))
    list(dataset)
    assert [copied_state(token) for token in examine(dataset).tokens] == [()] * 3


def test_libraries_have_no_state_of_the_user() -> None:
    log, flip = logging.getLogger("any"), tf.image.random_flip_left_right
    items = {"a": [1, "b", np.zeros(3)], "path": __file__, "tensor": tf.zeros([2])}
    # An object that random numbers of the system belong to.
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile():
        pass

    def function(x: Any) -> Any:
        log.info("%s %s", flip, items)
        return x, NamedTemporaryFile, keras.layers.Dense

    assert found(function) == ()


def test_only_the_first_items_of_a_container_are_examined() -> None:
    many = [object() for _ in range(5_000)]
    assert found(lambda x: [x, many, {"many": many}]) == ()
    many[5] = generator()
    assert found(lambda x: [x, many]) == ("many[5] (Generator)",)
    many[5], many[-1] = None, generator()
    assert found(lambda x: [x, many]) == ()


def test_containers_that_contain_themselves_are_examined() -> None:
    first: list[Any] = []
    first += [{"first": first}, generator()]
    assert found(lambda x: [x, first]) == ("first[1] (Generator)",)


def test_message_names_a_few_objects() -> None:
    generators = [generator() for _ in range(9)]
    assert found(lambda x: [x, generators]) == (
        *(f"generators[{number}] (Generator)" for number in range(3)),
        "6 other objects",
    )


def test_functions_of_numpy_that_are_imported_by_name_are_found() -> None:
    from numpy.random import normal

    assert found(lambda x: normal(x)) == ("normal.self (RandomState)",)
    assert found(lambda x: np.random.normal(x)) == ()


def kinds(dataset: Any) -> set[str]:
    return {change.kind for change in examine(dataset).semantics.changes("DYNAMIC", 2)}


def test_layers_of_keras_in_a_map_are_examined() -> None:
    images, words = Range(3).map(lambda x: tf.zeros([4, 4, 3])), Range(3).map(tf.as_string)
    flip = keras.layers.RandomFlip(seed=1)
    assert kinds(images.map(flip)) == {"random"}
    model = keras.Sequential([flip])
    assert kinds(images.batch(1).map(lambda x: model(x, training=True))) == {"random"}
    assert kinds(words.map(keras.layers.StringLookup(vocabulary=["1", "2"]))) == set()
    adapted = keras.layers.StringLookup()
    adapted.adapt(words.batch(3))
    assert kinds(words.map(adapted)) == set()


def test_file_that_is_only_written_has_no_state(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, (tmp_path / "log").open() as read:

        def write(x: Any) -> Any:
            log.write("called")
            return x

        assert found(write) == ()
        assert found(lambda x: x + len(next(read))) == ("read (TextIOWrapper)",)


@pytest.mark.parametrize("name", ["as_completed", "imap_unordered"])
def test_order_of_parallel_calls_is_random(name: str) -> None:
    dataset = Range(3).map(lambda x: tf.numpy_function(PARALLEL[name], [x], tf.int64))
    (token,) = examine(dataset).tokens
    assert names_random(token)


PARALLEL: dict[str, Any] = {
    "as_completed": lambda x: next(x.as_completed(x)),
    "imap_unordered": lambda x: next(x.imap_unordered(abs, x)),
}
