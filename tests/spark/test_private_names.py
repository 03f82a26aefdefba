"""Tests of the private names of pyspark, and of the errors with an unknown version of Spark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest

from tfd_notebook._compat import pyspark as private
from tfd_notebook.errors import Unsupported
from tfd_notebook.spark.local_session import session

pytestmark = pytest.mark.integration

VERSION = f"pyspark {pyspark.__version__}"


def test_this_version_of_spark_has_every_private_name(spark: Any, sc: Any) -> None:
    assert private.active_context() is sc, VERSION
    assert private.active_session() is spark, VERSION
    assert private.session_key(spark) is not spark, VERSION
    assert not private.is_stopped(sc), VERSION
    assert private.slots(sc) == 2, VERSION
    slots = private.executor_slots(sc)
    assert [slots[executor][1] for executor in private.executors(sc)] == [1, 1], VERSION
    process = private.java_process()
    assert process is not None, VERSION
    assert process.poll() is None, VERSION
    assert private.default_fs(sc).startswith("file:"), VERSION


def test_the_spark_home_of_pyspark_is_found() -> None:
    home = Path(private.spark_home())
    assert (home / "bin" / "spark-submit").exists(), VERSION


def test_a_struct_type_becomes_an_arrow_schema() -> None:
    from pyspark.sql.types import ArrayType, FloatType, LongType, StructType

    struct = StructType().add("n", LongType()).add("x", ArrayType(FloatType()))
    schema = private.arrow_schema(struct)
    assert schema.names == ["n", "x"], VERSION
    assert str(schema.field("n").type) == "int64", VERSION
    assert str(schema.field("x").type.value_type) == "float", VERSION


def test_rows_have_the_names_of_their_fields() -> None:
    from pyspark.sql import Row

    row = private.named_row([1, "b"], ["n", "two words"])
    assert row.asDict() == {"n": 1, "two words": "b"}, VERSION
    assert row == Row(**{"n": 1, "two words": "b"}), VERSION
    assert private.row_fields([row, row]) == ["n", "two words"], VERSION
    assert private.row_fields([row, Row(n=1)]) is None, VERSION
    assert private.row_fields([(1, 2)]) is None, VERSION


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (private.slots, "maxNumConcurrentTasks"),
        (private.executor_slots, "statusStore"),
        (private.executors, "getExecutorIds"),
        (private.default_fs, "hadoopConfiguration"),
        (lambda context: private.cancel_stage(context, 0, ""), "cancelStage"),
    ],
)
def test_missing_names_of_java_are_unsupported(
    sc: Any, call: Callable[[Any], Any], name: str
) -> None:
    """The Java objects lack the methods. Py4J detects it at the call."""
    java = sc._jvm.java.lang.Object
    unknown = SimpleNamespace(_jsc=SimpleNamespace(sc=java, hadoopConfiguration=java))
    with pytest.raises(Unsupported, match=rf"{VERSION} has no .*{name}") as caught:
        call(unknown)
    assert "Next: " in str(caught.value)
    with pytest.raises(Unsupported, match=name):
        call(SimpleNamespace())


def test_a_missing_gateway_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pyspark.SparkContext, "_gateway")
    for call in (private.java_process, private.close_java):
        with pytest.raises(Unsupported, match=r"SparkContext\._gateway"):
            call()
    with pytest.raises(Unsupported, match=r"SparkContext\._gateway"):
        session._start({"name": "never", "executors": 1, "cores": 1, "memory": "1g"}, 1.0)


def test_missing_names_of_pyspark_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyspark.find_spark_home
    import pyspark.sql.pandas.types
    from pyspark.sql import types

    monkeypatch.delattr(pyspark.find_spark_home, "_find_spark_home")
    with pytest.raises(Unsupported, match="_find_spark_home"):
        private.spark_home()
    monkeypatch.delattr(pyspark.sql.pandas.types, "to_arrow_schema")
    with pytest.raises(Unsupported, match="to_arrow_schema"):
        private.arrow_schema(types.StructType())
