"""Division of a pipeline between the data workers and the consumer, found in its graph."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfd_notebook import errors
from tfd_notebook.data.service import graph_inspection
from tfd_notebook.data.service.changes import reported
from tfd_notebook.data.service.division import Division, divide, keeping

D = tf.data.Dataset


def division(dataset: Any, mode: str = "DYNAMIC", in_process: bool = False) -> Division:
    divided = divide(dataset, mode, in_process)
    assert divided is not None
    return divided


def kinds(divided: Division, names: list[str]) -> list[str]:
    kinds = [divided.operations[name].kind for name in names]
    return [kind for kind in kinds if kind != "Options"]


def filtered() -> Any:
    """Return a dataset whose elements cannot be computed from their numbers."""
    return D.range(9).filter(lambda x: x != 3)


#: Generators of random numbers, which a graph has as variables.
DRAWN = itertools.repeat(tf.random.Generator.from_seed(1))


def increased(x: Any) -> Any:
    return x + 1


def named(x: Any) -> dict[str, Any]:
    return {"number": x, "text": tf.strings.as_string(x)}


def pairs() -> Any:
    return D.zip((D.range(9), D.range(20, 30)))


@pytest.mark.parametrize("mode", ["OFF", "DYNAMIC"])
def test_sound_pipeline_is_not_divided(mode: str) -> None:
    dataset = filtered().map(lambda x: x + 1).shuffle(5).repeat(2).prefetch(1)
    assert divide(dataset, mode, False) is None


@pytest.mark.parametrize(
    ("dataset", "numbered"),
    [
        (D.zip((D.range(9), D.from_tensor_slices(np.arange(9)))), ["Zip"]),
        (D.range(9).take(4), ["Take"]),
        (D.range(9).skip(4).map(lambda x: x + 1), ["Skip"]),
        (D.range(9).enumerate(3).batch(2).skip(1), ["Skip"]),
        (D.range(9).concatenate(D.range(4)).shard(2, 1), ["Shard"]),
        (D.range(9).batch(4, drop_remainder=True), ["Batch"]),
        (D.range(9).repeat(2).batch(2).take(3).repeat(), ["Take"]),
        (D.zip({"a": D.range(9).map(increased), "b": D.range(8).map(named).prefetch(1)}), ["Zip"]),
        (D.zip((pairs().map(lambda a, b: a + b), D.range(3, 12))).map(lambda a, b: b), ["Zip"]),
        (D.range(9).map(increased).skip(4).take(-1), ["Skip"]),
        (D.range(9).map(increased).shard(4, 1).skip(1), ["Skip"]),
        (D.range(9).batch(2).map(named).take(9), ["Take"]),
        (D.range(9).map(named).enumerate(5).skip(20), ["Skip"]),
        (D.range(9).map(named).enumerate(5).take(7).repeat(), ["Take"]),
    ],
)
def test_elements_with_numbers_stay_on_the_data_workers(dataset: Any, numbered: list[str]) -> None:
    divided = division(dataset)
    assert not divided.local
    assert divided.local_names() == ""
    assert kinds(divided, divided.sources()) == numbered
    parts: list[Any] = []
    divided.build(lambda part: parts.append(part) or part)
    (part,) = parts
    for _ in range(5):
        elements = zip(part, dataset, strict=False)
        assert all(str(a) == str(b) for a, b in itertools.islice(elements, 30))


def test_long_pipeline_is_computed_from_numbers_without_recursion() -> None:
    dataset = D.range(9).map(lambda x: 2 * x)
    for _ in range(500):
        dataset = dataset.prefetch(1)
    selected = D.zip((dataset.skip(1), dataset.shard(2, 1).skip(1))).take(2)
    divided = division(selected)
    assert not divided.local
    assert list(divided.build(lambda part: part).as_numpy_iterator()) == [(2, 6), (4, 10)]


def test_dataset_with_numbers_can_occur_twice() -> None:
    first = D.range(9).take(4)
    dataset = D.zip((first, D.range(20, 29))).map(lambda a, b: a + b).concatenate(first)
    divided = division(dataset)
    assert kinds(divided, divided.sources()) == ["Take", "Zip"]
    assert list(divided.build(lambda part: part)) == list(dataset)


def test_operations_from_the_first_change_run_here() -> None:
    mapped = filtered().map(lambda x: x * 2)
    divided = division(mapped.batch(4).map(lambda x: x + 1))
    assert kinds(divided, divided.local) == ["Batch", "Map"]
    assert kinds(divided, divided.boundary) == ["Map"]
    assert divided.local_names().startswith("batch(4)")


@pytest.mark.parametrize("mode", ["DYNAMIC", "DATA"])
def test_rest_has_the_elements_and_the_state_of_the_dataset(mode: str) -> None:
    variable = tf.Variable(0, dtype=tf.int64)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    dataset = filtered().map(lambda x: (x + variable, table.lookup(x))).shuffle(3, seed=4).batch(2)
    rest = division(dataset, mode).build(lambda part: part)
    assert rest.element_spec == dataset.element_spec
    for _ in range(2):
        got = sorted(x for batch in rest.as_numpy_iterator() for x in zip(*batch, strict=True))
        alone = dataset.as_numpy_iterator()
        assert got == sorted(x for batch in alone for x in zip(*batch, strict=True))
        variable.assign_add(1000)
        table.insert(tf.range(9, dtype=tf.int64), tf.range(9, dtype=tf.int64) * 7)


def test_generator_continues_in_each_epoch() -> None:
    generator = tf.random.Generator.from_seed(1)
    dataset = filtered().map(lambda _: generator.uniform((), maxval=10**9, dtype=tf.int32))
    rest = division(dataset).build(lambda part: part)
    drawn = [*rest.as_numpy_iterator(), *rest.as_numpy_iterator()]
    assert len(set(drawn)) == len(drawn) == 16


@pytest.mark.parametrize("mode", ["OFF", "DYNAMIC", "DATA", "FILE"])
@pytest.mark.parametrize("again", [None, False, True])
@pytest.mark.parametrize(
    "select",
    [
        lambda source: source.take(5),
        lambda source: source.skip(2).enumerate().take(5),
        lambda source: source.take(5).batch(2).repeat(2),
    ],
)
def test_seeded_source_runs_here_with_what_selects_from_it(
    mode: str, again: bool | None, select: Any
) -> None:
    first, second = (select(D.random(seed=1, rerandomize_each_iteration=again)) for _ in range(2))
    if mode == "DATA" and not again:
        assert divide(first, mode, False) is None  # each data worker draws the same numbers
        return
    divided = division(first, mode)
    assert not divided.boundary
    here = divided.build(lambda part: pytest.fail("a data worker runs a part"))
    for _ in range(3):
        epochs = zip(here.as_numpy_iterator(), second.as_numpy_iterator(), strict=True)
        assert all(str(a) == str(b) for a, b in epochs)


@pytest.mark.parametrize("mode", ["OFF", "DYNAMIC"])
def test_seeded_source_is_not_joined_with_elements_of_data_workers(mode: str) -> None:
    with pytest.raises(errors.DataChanged, match="zip"):
        divide(D.zip((D.random(seed=1), filtered())), mode, False)


def test_python_objects_are_shared_with_data_workers_in_this_process() -> None:
    numbers = random.Random(1)

    def draw(x: Any) -> Any:
        return x + numbers.randrange(9)

    dataset = D.range(3).map(lambda x: tf.numpy_function(draw, [x], tf.int64))
    assert divide(dataset, "DYNAMIC", in_process=True) is None
    assert kinds(division(dataset), division(dataset).local) == ["Map"]


def select_by(kind: str) -> Any:
    """Return a dataset that selects by numbers which depend on the order of the elements."""
    generator, numbers, count = tf.random.Generator.from_seed(1), random.Random(1), [0]

    def counted(x: Any) -> Any:
        count[0] += 1
        return np.bool_(count[0] % 2 == 0)

    if kind == "seed":
        drawn = D.range(40).map(lambda x: (x, tf.random.uniform((), seed=1)))
    elif kind == "generator":
        drawn = D.range(40).map(lambda x: (x, generator.uniform(())))
    else:
        function = counted if kind == "counter" else lambda x: np.bool_(numbers.random() < 0.5)
        return D.range(40).filter(lambda x: tf.numpy_function(function, [x], tf.bool))
    return drawn.filter(lambda x, number: number < 0.5)


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("kind", ["seed", "generator", "counter", "random"])
def test_selection_by_numbers_in_the_order_of_arrival_is_refused(
    kind: str, in_process: bool
) -> None:
    with pytest.raises(errors.DataChanged, match=r"filter.*in the order of arrival") as caught:
        divide(select_by(kind), "DYNAMIC", in_process)
    assert ('use processing_mode="data"' in str(caught.value.fix)) is (kind == "seed")


def test_selection_by_other_parts_is_not_refused() -> None:
    drawn = D.range(40).map(lambda x: (x, tf.random.uniform((), seed=1)))
    divided = division(drawn.filter(lambda x, number: x < 5))
    assert kinds(divided, divided.local) == ["Map", "Filter"]
    unseeded = filtered().map(lambda x: (x, tf.random.uniform(()))).batch(2).unbatch()
    assert division(unseeded.filter(lambda x, number: number < 0.5)).local


def test_mode_data_is_not_offered_for_too_few_elements() -> None:
    dataset = D.range(40).take(10).batch(32)
    semantics = graph_inspection.examine(dataset).semantics
    found = reported(semantics.changes("DYNAMIC", 3))
    for workers, offered in ((1, f"{SAME} or {DATA}"), (3, SAME)):
        assert keeping(semantics, found, "DYNAMIC", False, dataset, workers) == offered


@pytest.mark.parametrize(
    ("dataset", "operation"),
    [
        (filtered().take(4), r"take\(4\)"),
        (filtered().batch(2).skip(1), r"skip\(1\)"),
        (filtered().enumerate(), "enumerate"),
        (filtered().window(3).flat_map(lambda window: window.batch(3)), r"window\(3\)"),
        (filtered().batch(3).batch(2), r"batch\(3\)"),
        (filtered().repeat().window(3), r"window\(3\)"),
        (filtered().shuffle(9, reshuffle_each_iteration=False).take(4), r"take\(4\)"),
        (D.zip((filtered(), filtered())), "zip"),
        (D.range(9).batch(2, num_parallel_calls=2).take(2), r"take\(2\)"),
        (D.range(9).map(increased).batch(2).take(2), r"take\(2\)"),
        (filtered().shard(2, 0), r"shard\(\)"),
        (D.range(9).repeat().take(20), r"take\(20\)"),
        (filtered().shuffle(2).take(4), r"take\(4\)"),
        (D.range(9).shuffle(9).flat_map(D.range).take(4), r"take\(4\)"),
        (D.zip((D.range(0, (1 << 63) - 1, 2), filtered())), "zip"),
        (D.zip((D.range(9).repeat(), D.range(9).repeat())), "zip"),
        (D.choose_from_datasets([filtered(), filtered()], D.range(2).repeat(3)), "choose"),
    ],
)
def test_what_needs_the_order_is_refused(dataset: Any, operation: str) -> None:
    with pytest.raises(errors.DataChanged, match=f"(?s){operation}.*no fixed order.*Next: "):
        divide(dataset, "DYNAMIC", False)


SAME, DATA, DYNAMIC = 'semantics="same"', 'processing_mode="data"', 'processing_mode="dynamic"'


def split(**options: Any) -> Any:
    return D.range(9).shuffle(9, reshuffle_each_iteration=False, **options).take(4)


@pytest.mark.parametrize(
    ("dataset", "mode", "offered"),
    [
        (D.range(9).take(4), "DYNAMIC", f"{SAME} or {DATA}"),
        (D.range(9).map(increased).shard(2, 0), "DYNAMIC", f"{SAME} or {DATA}"),
        (filtered().take(4), "DYNAMIC", DATA),
        (filtered().take(4), "FILE", DATA),
        (split(seed=1), "DYNAMIC", DATA),
        (split(), "DYNAMIC", ""),
        (split(), "DATA", ""),
        (D.range(9).shuffle(9), "DATA", f"{SAME} or {DYNAMIC}"),
        (D.range(9).shuffle(9).take(4), "DATA", SAME),
        (D.range(9).shuffle(9, seed=1).take(4), "DYNAMIC", ""),
        (D.zip((filtered(), filtered().map(increased))), "DYNAMIC", DATA),
        (D.zip((filtered(), filtered().shuffle(9))), "DYNAMIC", ""),
        (D.zip((D.range(9), D.range(9))), "FILE_OR_DATA", ""),
    ],
)
def test_arguments_that_keep_the_elements_are_offered(
    dataset: Any, mode: str, offered: str
) -> None:
    semantics = graph_inspection.examine(dataset).semantics
    found = reported(semantics.changes(mode, 2))
    assert bool(found) is (mode != "FILE_OR_DATA")
    if found:
        assert keeping(semantics, found, mode, False, dataset) == offered
        assert keeping(semantics, found, mode, False) == offered.replace(SAME, "").lstrip(" or")


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (D.range(9).map(increased).batch(2), ("before it: then", DATA)),
        (filtered().map(lambda x: tf.random.uniform((), seed=1)), ("order of arrival", DATA)),
        (filtered().map(lambda x: next(DRAWN).uniform(())), ("order of arrival",)),
        (D.range(9).shuffle(9).take(4), ("this process runs take(4)",)),
    ],
)
def test_note_names_costs_and_choices(dataset: Any, words: tuple[str, ...]) -> None:
    note = division(dataset).note("DYNAMIC", False)
    assert all(each in note for each in words)
    for each in ("before it: then", "order of arrival", DATA):
        assert (each in note) is (each in words)


@pytest.mark.parametrize(
    ("other", "is_offered"), [(filtered(), True), (D.range(9).shuffle(9), False)]
)
def test_mode_without_a_change_is_offered(other: Any, is_offered: bool) -> None:
    with pytest.raises(errors.DataChanged) as caught:
        divide(D.zip((filtered(), other)), "DYNAMIC", False)
    assert ('processing_mode="data"' in str(caught.value.fix)) is is_offered


def test_state_of_a_function_is_not_shared_by_number() -> None:
    numbers = itertools.count()
    counted = D.range(9).map(lambda x: tf.numpy_function(lambda: next(numbers), [], tf.int64))
    with pytest.raises(errors.DataChanged, match="zip"):
        divide(D.zip((counted, D.range(9))), "DYNAMIC", in_process=True)


@pytest.mark.parametrize(
    ("dataset", "first"),
    [
        (filtered().batch(4).unbatch(), "batch(4)"),
        (filtered().ragged_batch(4), "ragged_batch()"),
        (filtered().batch(4).rebatch(2), "batch(4)"),
        (filtered().apply(tf.data.experimental.dense_to_ragged_batch(4)), "ragged_batch()"),
    ],
)
def test_stages_with_several_operations_are_separated(dataset: Any, first: str) -> None:
    divided = division(dataset)
    assert divided.local_names().startswith(first)
    assert sorted(map(str, divided.build(lambda part: part))) == sorted(map(str, dataset))


def test_keys_are_reduced_here() -> None:
    zero = tf.constant(0, tf.int64)
    reducer = tf.data.experimental.Reducer(lambda _: zero, tf.add, lambda total: total)
    sums = filtered().apply(tf.data.experimental.group_by_reducer(lambda x: x % 2, reducer))
    divided = division(sums)
    assert kinds(divided, divided.local) == ["GroupByReducer"]
    assert sorted(divided.build(lambda part: part).as_numpy_iterator()) == [13, 20]


def test_order_that_differs_in_each_epoch_is_not_needed() -> None:
    divided = division(D.range(9).shuffle(9).enumerate().take(4))
    assert kinds(divided, divided.local) == ["Zip", "Take"]
    rest = divided.build(lambda part: part)
    assert [number for number, _ in rest.as_numpy_iterator()] == [0, 1, 2, 3]


@pytest.mark.parametrize("mode", ["DYNAMIC", "DATA"])
def test_file_of_all_calls_of_a_function_runs_here_if_they_are_alike(mode: str) -> None:
    alike = filtered().flat_map(lambda _: D.range(3).cache("somewhere")).map(lambda x: x + 1)
    assert kinds(division(alike, mode), division(alike, mode).local) == ["FlatMap", "Map"]
    different = filtered().flat_map(lambda x: D.range(x).cache("somewhere"))
    with pytest.raises(errors.DataChanged, match=r"(?s)flat_map.*no fixed order"):
        divide(different, mode, False)


def test_mode_that_delivers_everything_several_times_is_refused() -> None:
    variable = tf.Variable(0, dtype=tf.int64)
    with pytest.raises(errors.DataChanged, match="deliver elements several times"):
        divide(filtered().map(lambda x: x + variable), "OFF", False)


def test_operation_that_is_not_covered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfd_notebook.data.service import operations

    known = {kind: effect for kind, effect in operations.OPERATIONS.items() if kind != "Filter"}
    monkeypatch.setattr(operations, "OPERATIONS", known)
    with pytest.raises(errors.DataChanged, match="FilterDataset is not covered"):
        divide(filtered(), "DYNAMIC", False)


@pytest.mark.parametrize("mode", ["FILE", "FILE_OR_DATA"])
def test_operation_before_the_readers_of_files_cannot_run_here(mode: str) -> None:
    names = D.from_tensor_slices(["a", "b", "c"])
    read = names.shuffle(3, seed=1).flat_map(tf.data.TextLineDataset)
    with pytest.raises(errors.DataChanged, match="precedes the readers") as caught:
        divide(read, mode, False)
    assert caught.value.fix == "omit its seed"
    read = names.shuffle(3).flat_map(tf.data.TextLineDataset)
    assert divide(read, mode, False) is None


def test_ragged_batch_runs_as_a_whole() -> None:
    ragged = filtered().map(lambda x: tf.range(x)).ragged_batch(2)
    found = division(ragged, "DYNAMIC")
    assert kinds(found, found.boundary) == ["Map"]
    assert kinds(found, found.local)[:2] == ["Map", "Batch"]


def test_step_for_a_selection_of_shuffled_elements_keeps_it_apart() -> None:
    with pytest.raises(errors.DataChanged, match="reshuffle_each_iteration=False"):
        divide(D.range(200).shuffle(200, seed=1).take(40), "DYNAMIC", False)
    step = D.range(200).shuffle(200, seed=1, reshuffle_each_iteration=False).take(40)
    assert divide(step, "DATA", False) is None


@pytest.mark.parametrize("mode", ["DYNAMIC", "DATA"])
def test_function_that_keeps_values_of_earlier_elements_is_refused(mode: str) -> None:
    total = 0

    def sum_of(x: Any) -> Any:
        nonlocal total
        total += x
        return total

    sums = filtered().map(lambda x: tf.numpy_function(sum_of, [x], tf.int64))
    with pytest.raises(errors.DataChanged, match="keeps values of earlier elements") as caught:
        divide(sums, mode, False)
    step = "data workers in other processes" if mode == "DYNAMIC" else 'semantics="checked"'
    assert step in str(caught.value)
    assert 'semantics="same"' not in keeping(
        graph_inspection.examine(sums).semantics, [], "DYNAMIC", False, sums
    )
