"""Conversion between DataFrames and TFRecord files, on real executors."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import pytest

from tfd_notebook.errors import DataError, UsageError
from tfd_notebook.spark import dfutil

StructType = pytest.importorskip("pyspark.sql.types").StructType

pytestmark = pytest.mark.integration

#: Timeout in seconds of steps that take 1 s on an idle machine.
SOON = 60.0

EVERYTHING = (
    "flag boolean, tiny tinyint, small smallint, number int, big bigint, single float, "
    "twice double, word string, raw binary, flags array<boolean>, numbers array<bigint>, "
    "singles array<float>, words array<string>, raws array<binary>"
)
ROWS = [
    (
        *(True, 1, -2, 3, 2**62, 1.5, -0.25, "grün", b"\xff\x00"),
        *([True, False], [1, 2, 3], [0.5, 1.0], ["a", ""], [b"\xfe", b""]),
    ),
    (False, 0, 0, 0, 0, 0.0, 0.0, "", b"", [], [], [], [], []),
    (None,) * 14,
    (
        *(True, 127, 32767, -(2**31), -1, math.inf, 1e10, "x" * 100, b"y"),
        *([True], [7], [2.0], ["one"], [b"one"]),
    ),
]


def write(spark: Any, directory: Path, rows: Any, schema: str, parts: int = 2) -> Any:
    df = spark.createDataFrame(spark.sparkContext.parallelize(rows, parts), schema)
    dfutil.saveAsTFRecords(df, str(directory))
    return df


def examples(directory: Path, *features: dict[str, Any]) -> None:
    """Write records like another program, without a schema file of this package."""
    import tensorflow as tf

    directory.mkdir(exist_ok=True)
    number = len(list(directory.iterdir()))
    with tf.io.TFRecordWriter(str(directory / f"part-r-{number:05d}")) as writer:
        for features_of_row in features:
            example = tf.train.Example()
            for name, values in features_of_row.items():
                kind = {int: "int64_list", float: "float_list", bytes: "bytes_list"}[
                    type(values[0]) if values else bytes
                ]
                getattr(example.features.feature[name], kind).value.extend(values)
            writer.write(example.SerializeToString())


def test_each_type_is_restored(spark: Any, tmp_path: Path) -> None:
    df = write(spark, tmp_path / "out", ROWS, EVERYTHING)
    loaded = dfutil.loadTFRecords(spark.sparkContext, str(tmp_path / "out"))
    assert loaded.dtypes == df.dtypes
    assert [tuple(row) for row in loaded.collect()] == ROWS


def test_files_have_the_expected_names_and_load_in_tensorflow(spark: Any, tmp_path: Path) -> None:
    import tensorflow as tf

    write(
        spark, tmp_path / "out", [(n, [float(n)] * 3) for n in range(10)], "n int, x array<float>"
    )
    files = sorted(tf.io.gfile.glob(str(tmp_path / "out" / "part-*")))
    assert [Path(file).name for file in files] == ["part-r-00000", "part-r-00001"]
    shape = {"n": tf.io.FixedLenFeature([], tf.int64), "x": tf.io.FixedLenFeature([3], tf.float32)}
    numbers = [
        tf.io.parse_single_example(record, shape)["n"].numpy()
        for record in tf.data.TFRecordDataset(files)
    ]
    assert numbers == list(range(10))


def test_an_empty_partition_gives_an_empty_file(spark: Any, tmp_path: Path) -> None:
    write(spark, tmp_path / "out", [(1,)], "n int", parts=2)
    loaded = dfutil.loadTFRecords(spark, str(tmp_path / "out"))
    assert [row.n for row in loaded.collect()] == [1]
    assert loaded.rdd.getNumPartitions() == 2


def test_an_existing_directory_is_kept_without_overwrite(spark: Any, tmp_path: Path) -> None:
    df = write(spark, tmp_path / "out", [(1,)], "n int")
    with pytest.raises(UsageError, match=r"(?s)exists.*overwrite=True"):
        dfutil.saveAsTFRecords(df, str(tmp_path / "out"))
    dfutil.saveAsTFRecords(df.selectExpr("n + 1 as n"), str(tmp_path / "out"), overwrite=True)
    assert [row.n for row in dfutil.loadTFRecords(spark, str(tmp_path / "out")).collect()] == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_unsupported_value_is_named_and_leaves_no_files(spark: Any, tmp_path: Path) -> None:
    df = spark.createDataFrame([([1, None],)], "numbers array<int>")
    with pytest.raises(UsageError, match=r"(?s)invalid value .1, None.*'numbers'.*null"):
        dfutil.saveAsTFRecords(df, str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_all_unsupported_columns_are_named_before_the_job(spark: Any, tmp_path: Path) -> None:
    df = spark.sql("select 1 as good, current_date() as day, named_struct('a', 1) as inner")
    with pytest.raises(UsageError, match=r"'day' \(date\), 'inner' \(struct<a:int>\)"):
        dfutil.saveAsTFRecords(df, str(tmp_path / "out"))
    with pytest.raises(UsageError, match="vector_to_array"):
        dfutil.toTFExample([("features", "vector")])
    with pytest.raises(UsageError, match=r'column.cast\("string"\)'):  # a double may change it
        dfutil.toTFExample([("price", "decimal(10,2)")])


@pytest.mark.parametrize("element", ["double", "float"])
@pytest.mark.parametrize("value", [1e300, -1e39, 10**400])
def test_a_number_beyond_float32_is_refused(element: str, value: Any) -> None:
    for kind, row in ((element, (1.5, value)), (f"array<{element}>", ([1.5], [2.5, value]))):
        convert = dfutil.toTFExample([("x", kind), ("y", kind)])
        with pytest.raises(UsageError, match=r"in column 'y': .* beyond the range of float32"):
            list(convert([row]))


def test_numbers_that_float32_rounds_are_reported_once_for_each_column() -> None:
    rows: list[Any] = [(0.5, [1.5], 0.1), (16777217.0, [0.1], 0.1), (0.1, [2**24 + 1], 0.1)] * 2
    convert = dfutil.toTFExample([("x", "double"), ("y", "array<double>"), ("z", "float")])
    with pytest.warns(RuntimeWarning, match="float32 for the columns x, y") as caught:
        assert len(list(convert(rows))) == 6
    assert len(caught) == 1


def test_numbers_that_float32_holds_are_kept() -> None:
    values = [math.inf, -math.inf, 16777216.0, -0.0, 3.4028234663852886e38, math.nan]
    ((serialized, _),) = dfutil.toTFExample([("x", "array<double>")])([(values,)])
    (row,) = dfutil.fromTFExample([serialized])
    assert str(row.x) == str(values)


def test_rounded_columns_of_all_partitions_are_in_one_warning(spark: Any, tmp_path: Path) -> None:
    rows = [(0.1, 0.5, 1), (0.5, 0.5, 2), (0.5, 0.1, 3)]
    with pytest.warns(RuntimeWarning, match="float32 for the columns x, y") as caught:
        write(spark, tmp_path / "out", rows, "x double, y double, n int", parts=3)
    assert len(caught) == 1
    assert dfutil.loadTFRecords(spark, str(tmp_path / "out")).count() == 3
    with pytest.raises(UsageError, match=r"1e\+300 in column 'y'"):
        write(spark, tmp_path / "other", [(0.5, 1e300)], "x double, y double")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_numbers_do_not_become_booleans(spark: Any, tmp_path: Path) -> None:
    examples(tmp_path / "in", {"flag": [1]}, {"flag": [2]})
    schema = StructType.fromDDL("flag boolean")
    df = dfutil.loadTFRecords(spark, str(tmp_path / "in"), schema=schema)
    with pytest.raises(Exception, match=r"column 'flag' is boolean, but record 1 of .* has 2 in"):
        df.collect()


def test_types_of_files_without_a_schema_come_from_all_records(spark: Any, tmp_path: Path) -> None:
    directory = tmp_path / "external"
    examples(directory, {"b": [1.5], "a": [1], "word": [b"text"], "raw": [b"text"], "never": []})
    examples(directory, {"a": [1, 2], "word": [b"more"], "raw": [b"\xff"], "late": [2.0]})
    loaded = dfutil.loadTFRecords(spark, str(directory))
    assert loaded.dtypes == [
        ("a", "array<bigint>"),
        ("b", "double"),
        ("late", "double"),
        ("never", "string"),
        ("raw", "binary"),
        ("word", "string"),
    ]
    assert [row.asDict() for row in loaded.collect()] == [
        {"a": [1], "b": 1.5, "late": None, "never": None, "raw": b"text", "word": "text"},
        {"a": [1, 2], "b": None, "late": 2.0, "never": None, "raw": b"\xff", "word": "more"},
    ]


def test_binary_features_are_bytes_even_if_they_look_like_text(spark: Any, tmp_path: Path) -> None:
    examples(tmp_path / "external", {"image": [b"abc"], "tags": [b"a", b"b"], "n": [1]})
    loaded = dfutil.loadTFRecords(spark, str(tmp_path / "external"), ["image", "tags"])
    assert loaded.first().asDict() == {"image": b"abc", "n": 1, "tags": [b"a", b"b"]}
    with pytest.raises(UsageError, match=r"(?s)invalid column 'imgae'.*image, n, tags"):
        dfutil.loadTFRecords(spark, str(tmp_path / "external"), ["imgae"])
    with pytest.raises(UsageError, match="'n' in binary_features: it holds whole numbers"):
        dfutil.loadTFRecords(spark, str(tmp_path / "external"), ["n"])


def test_records_with_different_types_are_refused(spark: Any, tmp_path: Path) -> None:
    examples(tmp_path / "external", {"a": [1]}, {"a": [1.5]})
    with pytest.raises(DataError, match="'a' holds whole numbers in some records and numbers in"):
        dfutil.loadTFRecords(spark, str(tmp_path / "external"))


def test_a_record_that_does_not_fit_the_schema_is_named(spark: Any, tmp_path: Path) -> None:
    from pyspark.errors import PythonException
    from pyspark.sql.types import LongType, StructType

    examples(tmp_path / "external", {"a": [1]}, {"a": [1, 2]})
    schema = StructType().add("a", LongType())
    df = dfutil.loadTFRecords(spark, str(tmp_path / "external"), schema=schema)
    with pytest.raises(PythonException, match=r"record 1 of .*part-r-00000 has 2 values"):
        df.collect()


def test_missing_and_damaged_files_are_errors(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no TFRecord file found"):
        dfutil.loadTFRecords(spark, str(tmp_path / "missing"))
    (tmp_path / "part-r-00000").write_bytes(b"this is text, not a TFRecord file at all")
    with pytest.raises(
        DataError, match="part-r-00000 is damaged, or not a TFRecord file, at record 0"
    ):
        dfutil.loadTFRecords(spark, str(tmp_path))


def test_compressed_files_and_patterns(spark: Any, tmp_path: Path) -> None:
    examples(tmp_path / "external", {"a": [1]})
    plain = tmp_path / "external" / "part-r-00000"
    (tmp_path / "external" / "more-1.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert dfutil.loadTFRecords(spark, str(tmp_path / "external")).count() == 2
    assert dfutil.loadTFRecords(spark, str(tmp_path / "external" / "more-*")).count() == 1


def test_saving_and_loading_can_return_futures(spark: Any, tmp_path: Path) -> None:
    df = spark.createDataFrame([(1,), (2,)], "n int")
    out = str(tmp_path / "out")
    assert dfutil.saveAsTFRecords(df, out, wait=False).result(SOON) is None
    loaded = dfutil.loadTFRecords(spark, out, wait=False).result(SOON)
    assert sorted(row.n for row in loaded.collect()) == [1, 2]
    assert dfutil.isLoadedDF(loaded)
    with pytest.raises(UsageError, match="exists"):
        dfutil.saveAsTFRecords(df, out, wait=False).result(SOON)
    with pytest.raises(UsageError, match="no TFRecord file"):
        dfutil.loadTFRecords(spark, str(tmp_path / "missing"), wait=False).result(SOON)


def test_a_loaded_dataframe_is_recognized(spark: Any, tmp_path: Path) -> None:
    df = write(spark, tmp_path / "out", [(1,)], "n int")
    loaded = dfutil.loadTFRecords(spark, str(tmp_path / "out"))
    assert dfutil.isLoadedDF(loaded)
    assert dfutil.loadedDF[loaded] == str(tmp_path / "out")
    assert not dfutil.isLoadedDF(loaded.filter("n > 0"))
    assert not dfutil.isLoadedDF(df)


def test_rows_of_an_rdd_become_examples_and_rows_again(spark: Any) -> None:
    df = spark.createDataFrame(
        [("a", 1, [1.0, 2.0]), ("b", 2, [3.0, 4.0])], "w string, n int, x array<float>"
    )
    pairs = df.rdd.mapPartitions(dfutil.toTFExample(df.dtypes))
    assert isinstance(pairs.first()[0], bytearray)
    restored = pairs.mapPartitions(dfutil.fromTFExample).collect()
    assert [row.asDict() for row in restored] == [
        {"n": 1, "w": "a", "x": [1.0, 2.0]},
        {"n": 2, "w": "b", "x": [3.0, 4.0]},
    ]


def test_a_schema_is_inferred_from_one_example() -> None:
    import tensorflow as tf

    example = tf.train.Example()
    example.features.feature["n"].int64_list.value.extend([1])
    example.features.feature["x"].float_list.value.extend([1.0, 2.0])
    example.features.feature["w"].bytes_list.value.extend([b"word"])
    expected = "struct<n:bigint,w:string,x:array<double>>"
    assert dfutil.infer_schema(example).simpleString() == expected
    assert dfutil.infer_schema(example.SerializeToString(), ["w"]).simpleString() == (
        "struct<n:bigint,w:binary,x:array<double>>"
    )
    with pytest.raises(UsageError, match=r"expected a tf.train.Example, got int"):
        dfutil.infer_schema(3)
