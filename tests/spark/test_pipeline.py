"""An estimator and a model of pyspark.ml, on clusters that they start."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfd_notebook.errors import TfdError, UnknownName, UsageError
from tfd_notebook.spark import dfutil, pipeline
from tfd_notebook.spark.pipeline import Namespace, TFEstimator, TFModel

pytestmark = pytest.mark.integration


#: Types of outputs that become columns of numbers.
NUMBERS = ("bfloat16", "float16", "float32", "float64", "bool", "int8", "int16", "int32", "int64")
NUMBERS += ("uint8", "uint16", "uint32")


def export(directory: Path) -> str:
    """Write a SavedModel with several signatures. This process imports TensorFlow anyway."""
    import tensorflow as tf

    class Scale(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = tf.Variable(2.0)

        @tf.function(input_signature=[tf.TensorSpec([None, 2, 2], tf.float32, name="image")])
        def scaled(self, image: Any) -> Any:
            return {
                "twice": image * self.factor,
                "sum": tf.reduce_sum(image, [1, 2]),
                "whole": tf.cast(tf.reduce_sum(image, [1, 2]), tf.int32),
                "large": tf.reduce_sum(image, [1, 2]) > 10.0,
                "word": tf.strings.as_string(tf.cast(image[:, 0, 0], tf.int32)),
            }

        @tf.function(
            input_signature=[
                tf.TensorSpec([None], tf.int32, name="a"),
                tf.TensorSpec([None], tf.string, name="b"),
            ]
        )
        def two(self, a: Any, b: Any) -> Any:
            return {"joined": tf.strings.join([b, tf.strings.as_string(a)])}

        @tf.function(input_signature=[tf.TensorSpec([4], tf.float32, name="x")])
        def four(self, x: Any) -> Any:
            return {"y": x + 1.0}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="x")])
        def scalar(self, x: Any) -> Any:
            return {"mean": tf.reduce_mean(x), "y": x}

        @tf.function(input_signature=[tf.TensorSpec([None, None, None], tf.float32, name="x")])
        def any_size(self, x: Any) -> Any:
            return {"sum": tf.reduce_sum(x, [1, 2])}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="x")])
        def every_type(self, x: Any) -> Any:
            return {name: tf.cast(tf.stack([x, x], 1), name) for name in NUMBERS}

    model = Scale()
    signatures = {
        "serving_default": model.scaled.get_concrete_function(),
        "two": model.two.get_concrete_function(),
        "four": model.four.get_concrete_function(),
        "scalar": model.scalar.get_concrete_function(),
        "any_size": model.any_size.get_concrete_function(),
        "every_type": model.every_type.get_concrete_function(),
    }
    tf.saved_model.save(model, str(directory), signatures)
    return str(directory)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    return export(tmp_path_factory.mktemp("model") / "export")


def images(spark: Any, count: int = 25) -> Any:
    rows = [(n, [float(n), 1.0, 2.0, 3.0]) for n in range(count)]
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, 3), "n int, x array<float>")


def test_a_signature_is_applied_to_every_row_in_order(spark: Any, exported: str) -> None:
    model = (
        TFModel({"batch_size": 4, "export_dir": exported})
        .setInputMapping({"x": "image"})
        .setOutputMapping(
            {"whole": "c", "twice": "b", "sum": "a", "word": "e", "large": "d"},
        )
    )
    out = model.transform_async(images(spark)).result(120)
    # In the order of the tensors' names: large, sum, twice, whole, word.
    assert out.dtypes == [
        ("d", "boolean"),
        ("a", "double"),
        ("b", "array<array<double>>"),
        ("c", "bigint"),
        ("e", "binary"),
    ]
    rows = out.collect()
    assert [row.a for row in rows] == [n + 6.0 for n in range(25)]
    assert [row.c for row in rows] == [n + 6 for n in range(25)]
    assert rows[3].b == [[6.0, 2.0], [4.0, 6.0]]
    assert [row.d for row in rows] == [n + 6 > 10 for n in range(25)]
    assert bytes(rows[7].e) == b"7"


def test_inputs_are_assigned_by_column_name(spark: Any, exported: str) -> None:
    df = spark.createDataFrame(
        [(b"z", 1, "u"), (b"y", 2, "v")], "other binary, zahl bigint, art string"
    )
    model = (
        TFModel({})
        .setExportDir(exported)
        .setSignatureDefKey("two")
        .setInputMapping({"zahl": "a", "art": "b"})
        .setOutputMapping({"joined": "out"})
    )
    assert [bytes(row.out) for row in model.transform(df).collect()] == [b"u1", b"v2"]


def test_a_fixed_batch_size_gets_full_batches(spark: Any, exported: str) -> None:
    df = spark.createDataFrame([(float(n),) for n in range(6)], "v double").coalesce(1)
    model = TFModel(argparse.Namespace(export_dir=exported, signature_def_key="four"))
    model.setInputMapping({"v": "x"}).setOutputMapping({"y": "y"})
    assert [row.y for row in model.transform(df).collect()] == [n + 1.0 for n in range(6)]


def test_a_signature_can_have_unknown_sizes(spark: Any, exported: str) -> None:
    schema = "x array<array<float>>"
    df = spark.createDataFrame([([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],)], schema)
    model = TFModel({"export_dir": exported}).setSignatureDefKey("any_size")
    model.setInputMapping({"x": "x"}).setOutputMapping({"sum": "sum"})
    assert [row.sum for row in model.transform(df).collect()] == [21.0]


def test_outputs_of_every_type_become_columns(spark: Any, exported: str) -> None:
    df = spark.createDataFrame([(0.0,), (1.0,), (96.0,)], "v double").coalesce(1)
    model = TFModel({"export_dir": exported}).setSignatureDefKey("every_type")
    model.setInputMapping({"v": "x"}).setOutputMapping({name: name for name in NUMBERS})
    for row in model.transform(df).collect():
        value = row.float64[0]
        expected = {name: [value, value] for name in NUMBERS} | {"bool": [value != 0] * 2}
        assert row.asDict() == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": "nothing"}, r"(?s)no signature 'nothing'.*serving_default, two"),
        ({"inputs": {"x": "picture"}}, r"(?s)no input 'picture'.*it has image"),
        ({"inputs": {"y": "image"}}, r"(?s)invalid column 'y'.*n, x"),
        ({"outputs": {"thrice": "b"}}, r"(?s)no output 'thrice'.*large, sum, twice"),
        ({"outputs": {}}, "the output mapping is empty"),
        (
            {"key": "two", "inputs": {"n": "a"}, "outputs": {"joined": "o"}},
            "also requires the input b",
        ),
        (
            {"key": "scalar", "inputs": {"n": "x"}, "outputs": {"mean": "m"}},
            "first dimension is the ba",
        ),
        ({"directory": "nowhere"}, "no SavedModel found in .*nowhere"),
        ({"tags": "train"}, "with the tags train failed"),
    ],
)
def test_invalid_mappings_are_errors_before_the_job(
    spark: Any, exported: str, change: dict[str, Any], message: str
) -> None:
    model = (
        TFModel({})
        .setExportDir(change.get("directory", exported))
        .setSignatureDefKey(change.get("key", "serving_default"))
        .setTagSet(change.get("tags"))
        .setInputMapping(change.get("inputs", {"x": "image"}))
        .setOutputMapping(change.get("outputs", {"twice": "b"}))
    )
    with pytest.raises(UsageError, match=message):
        model.transform(images(spark))


@pytest.mark.parametrize(
    ("rows", "schema", "message"),
    [
        (
            [([1.0, 2.0, 3.0],)],
            "x array<float>",
            r"rows of shape \(3,\).*'image' requires \(2, 2\)",
        ),
        ([([1.0],), ([1.0, 2.0],)], "x array<float>", "arrays of 1 to 2 values"),
        ([(None,)], "x array<float>", "'x' has a null"),
    ],
)
def test_columns_with_values_that_do_not_fit_are_named(
    spark: Any, exported: str, rows: Any, schema: str, message: str
) -> None:
    from pyspark.errors import PythonException

    model = TFModel({"export_dir": exported})
    model.setInputMapping({"x": "image"}).setOutputMapping({"sum": "s"})
    df = spark.createDataFrame(spark.sparkContext.parallelize(rows, 1), schema)
    with pytest.raises(PythonException, match=message):
        model.transform(df).collect()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            ["if(id = 15000, 1099511627776, id) as n", "string(id) as s"],
            r"row 15000, column n: 1099511627776 \(int64\) does not fit int32, the type of",
        ),
        (
            ["1 as n", "id as s"],
            r"row 0, column s: 0 \(int64\) does not fit string, the type of input 'b'",
        ),
        (
            ["string(id) as n", "'x' as s"],
            r"row 0, column n: '0' \(str\) does not fit int32, the type of input 'a'",
        ),
        (
            ["cast(id as decimal(9, 1)) as n", "'x' as s"],
            r"row 0, column n: Decimal\('0.0'\) \(Decimal\) does not fit int32",
        ),
    ],
)
def test_a_value_that_an_input_cannot_hold_is_named(
    spark: Any, exported: str, columns: list[str], message: str
) -> None:
    from pyspark.errors import PythonException

    model = TFModel({"export_dir": exported, "batch_size": 8192}).setSignatureDefKey("two")
    model.setInputMapping({"n": "a", "s": "b"}).setOutputMapping({"joined": "o"})
    df = spark.range(0, 20_000, 1, 1).selectExpr(*columns)
    with pytest.raises(PythonException, match=message):
        model.transform(df).collect()


def test_kinds_of_arguments_and_their_precedence() -> None:
    assert (
        Namespace({"a": 1}) == Namespace(argparse.Namespace(a=1)) == Namespace(Namespace({"a": 1}))
    )
    assert Namespace(["--x", "1"]).argv == ["--x", "1"]
    assert list(Namespace({"a": 1, "b": 2})) == ["a", "b"]
    with pytest.raises(UsageError, match="int"):
        Namespace(3)
    estimator = TFEstimator(train, {"epochs": 3, "steps": 7, "mine": "x", "export_dir": None})
    estimator.setEpochs(5).setClusterSize(2)
    merged = estimator.merge_args_params()
    assert (merged.epochs, merged.steps, merged.mine, merged.cluster_size) == (5, 7, "x", 2)
    assert (merged.batch_size, merged.export_dir, merged.master_node) == (100, None, "chief")
    assert not hasattr(estimator.args, "cluster_size")
    with pytest.raises(TypeError, match="InputMode"):
        estimator.setInputMode(7)
    with pytest.raises(TypeError, match="invalid name"):
        estimator.setInputMapping({"a": 1})


@pytest.mark.parametrize("name", [name for name in pipeline.__all__ if name.startswith("Has")])
def test_each_parameter_can_be_set_and_read(name: str) -> None:
    kind = getattr(pipeline, name)
    (param,) = (p for p in vars(kind) if not p.startswith(("_", "set", "get")))
    suffix = name.removeprefix("Has")
    holder = kind()
    for value in ({"a": "b"}, 1, True, "chief"):
        try:
            getattr(holder, f"set{suffix}")(value)
        except TypeError:
            continue
        assert getattr(holder, f"get{suffix}")() == value
        assert holder.getOrDefault(param) == value
        return
    raise AssertionError(f"{name} accepts no value")


def train(args: Any, ctx: Any) -> None:
    """Learn y = 3 a + b from fed rows, in the style of TensorFlowOnSpark."""
    import tensorflow as tf

    from tfd_notebook.spark import TFNode, compat

    feed = TFNode.DataFeed(ctx.mgr, True, input_mapping=args.input_mapping)
    model = tf.keras.Sequential(
        [tf.keras.layers.Input([2], name="features"), tf.keras.layers.Dense(1, name="dense")]
    )
    model.compile(tf.keras.optimizers.Adam(0.2), "mse")
    count = 0
    while not feed.should_stop():
        batch = feed.next_batch(args.batch_size)
        if len(batch["y"]):
            count += len(batch["y"])
            a, b = (np.array(batch[name], np.float32) for name in ("a", "b"))
            model.train_on_batch(np.stack([a, b], 1), np.array(batch["y"], np.float32))
    (Path(args.notes) / f"{ctx.job_name}-{ctx.task_index}").write_text(str(count))
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")


def test_fit_trains_on_a_dataframe_and_the_model_infers(spark: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    generator = np.random.default_rng(0)
    rows = [
        (float(3 * a + b), "not fed", float(b), float(a))
        for a, b in generator.uniform(-1, 1, (512, 2))
    ]
    df = spark.createDataFrame(
        spark.sparkContext.parallelize(rows, 4),
        "label double, other string, second double, first double",
    )
    estimator = (
        TFEstimator(train, argparse.Namespace(notes=str(notes)))
        # In the order of the columns' names first, label, second, the function gets a, y, b.
        .setInputMapping({"first": "a", "second": "b", "label": "y"})
        .setClusterSize(1)
        .setEpochs(4)
        .setBatchSize(32)
        .setGraceSecs(5)
        .setExportDir(str(tmp_path / "export"))
    )
    model = estimator.fit(df)
    assert isinstance(model, TFModel)
    assert (notes / "chief-0").read_text() == str(4 * 512)
    # The model takes export_dir and batch_size from the estimator.
    frame = df.selectExpr("array(first, second) as both", "label")
    (tensor,) = inputs(str(tmp_path / "export"))
    (output,) = outputs(str(tmp_path / "export"))
    model.setInputMapping({"both": tensor}).setOutputMapping({output: "guess"})
    guesses = [row.guess[0] for row in model.transform(frame).collect()]
    labels = [row.label for row in frame.collect()]
    assert np.mean(np.abs(np.array(guesses) - labels)) < 0.3


def inputs(directory: str) -> list[str]:
    import tensorflow as tf

    signature = tf.saved_model.load(directory).signatures["serving_default"]
    return list(signature.structured_input_signature[1])


def outputs(directory: str) -> list[str]:
    import tensorflow as tf

    return list(tf.saved_model.load(directory).signatures["serving_default"].structured_outputs)


def count_files(args: Any, ctx: Any) -> None:
    import tensorflow as tf

    files = tf.io.gfile.glob(f"{args.tfrecord_dir}/part-*")
    rows = sum(1 for _ in tf.data.TFRecordDataset(files))
    (Path(args.notes) / f"{ctx.job_name}-{ctx.task_index}").write_text(str(rows))


@pytest.mark.parametrize("loaded", [False, True])
def test_a_function_that_reads_gets_the_dataframe_as_files(
    spark: Any, tmp_path: Path, loaded: bool
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    df = images(spark, 10)
    estimator = TFEstimator(count_files, {"notes": str(notes)}, export_fn=write_note)
    estimator.setInputMode(0).setClusterSize(2).setGraceSecs(0)
    if loaded:
        dfutil.saveAsTFRecords(df, str(tmp_path / "before"))
        df = dfutil.loadTFRecords(spark, str(tmp_path / "before"))
    else:
        with pytest.raises(UsageError, match="setTFRecordDir"):
            estimator.fit(df)
        estimator.setTFRecordDir(str(tmp_path / "written"))
    estimator.fit(df)
    assert sorted((file.name, file.read_text()) for file in notes.iterdir()) == [
        ("chief-0", "10"),
        ("exported", "2"),
        ("worker-0", "10"),
    ]


def write_note(args: Any) -> None:
    (Path(args.notes) / "exported").write_text(str(args.cluster_size))


def fail(args: Any, ctx: Any) -> None:
    raise ValueError("no layer of that name")


def test_an_error_of_the_function_is_raised_by_fit(spark: Any) -> None:
    estimator = TFEstimator(fail, {}).setInputMapping({"n": "n"})
    with pytest.raises(TfdError, match="no layer of that name"):
        estimator.fit_async(images(spark)).result(timeout=120)
    with pytest.raises(UnknownName, match="invalid column 'm'"):
        TFEstimator(fail, {}).setInputMapping({"m": "n"}).fit(images(spark))
    with pytest.raises(UsageError, match="input mapping is empty"):
        TFEstimator(fail, {}).fit(images(spark))
