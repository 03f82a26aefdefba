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


def test_a_known_spark_has_every_name(spark: Any, sc: Any) -> None:
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


def test_spark_is_found_where_pyspark_is_installed() -> None:
    home = Path(private.spark_home())
    assert (home / "bin" / "spark-submit").exists(), VERSION


def test_a_struct_is_a_schema_of_arrow() -> None:
    from pyspark.sql.types import ArrayType, FloatType, LongType, StructType

    struct = StructType().add("n", LongType()).add("x", ArrayType(FloatType()))
    schema = private.arrow_schema(struct)
    assert schema.names == ["n", "x"], VERSION
    assert str(schema.field("n").type) == "int64", VERSION
    assert str(schema.field("x").type.value_type) == "float", VERSION


def test_rows_have_names() -> None:
    from pyspark.sql import Row

    made = private.named_row([1, "b"], ["n", "two words"])
    assert made.asDict() == {"n": 1, "two words": "b"}, VERSION
    assert made == Row(**{"n": 1, "two words": "b"}), VERSION
    assert private.row_fields([made, made]) == ["n", "two words"], VERSION
    assert private.row_fields([made, Row(n=1)]) is None, VERSION
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
def test_an_unknown_spark_is_unsupported(sc: Any, call: Callable[[Any], Any], name: str) -> None:
    """Java objects that have none of the methods: Py4J finds that out when they are called."""
    java = sc._jvm.java.lang.Object
    unknown = SimpleNamespace(_jsc=SimpleNamespace(sc=java, hadoopConfiguration=java))
    with pytest.raises(Unsupported, match=rf"{VERSION} has no .*{name}") as raised:
        call(unknown)
    assert "Next: " in str(raised.value)
    with pytest.raises(Unsupported, match=name):
        call(SimpleNamespace())


def test_a_spark_without_a_gateway_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pyspark.SparkContext, "_gateway")
    for call in (private.java_process, private.forget_java):
        with pytest.raises(Unsupported, match=r"SparkContext\._gateway"):
            call()
    with pytest.raises(Unsupported, match=r"SparkContext\._gateway"):
        session._start({"name": "never", "executors": 1, "cores": 1, "memory": "1g"}, 1.0)


def test_names_of_python_that_are_gone_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyspark.find_spark_home
    import pyspark.sql.pandas.types
    from pyspark.sql import types

    monkeypatch.delattr(pyspark.find_spark_home, "_find_spark_home")
    with pytest.raises(Unsupported, match="_find_spark_home"):
        private.spark_home()
    monkeypatch.delattr(pyspark.sql.pandas.types, "to_arrow_schema")
    with pytest.raises(Unsupported, match="to_arrow_schema"):
        private.arrow_schema(types.StructType())
