"""`saveAsTFRecords(overwrite=True)` when a rename or a removal fails."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tfd_notebook.errors import DataError, UsageError
from tfd_notebook.spark import dfutil

pytestmark = pytest.mark.integration

URIS = {"path": str, "uri": Path.as_uri}


@pytest.fixture
def out(spark: Any, tmp_path: Path) -> Path:
    """Return a directory that holds the record 1."""
    dfutil.saveAsTFRecords(frame(spark, 1), str(tmp_path / "out"))
    return tmp_path / "out"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Make directories mount points, which the kernel neither renames nor removes."""
    yield mount
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        if (point := line.split()[1]).startswith(f"{tmp_path}/"):
            subprocess.run(["umount", point], check=True)


def mount(directory: Path) -> None:
    subprocess.run(["mount", "--bind", str(directory), str(directory)], check=True)


def frame(spark: Any, *numbers: int) -> Any:
    return spark.createDataFrame([(number,) for number in numbers], "n int")


def numbers(spark: Any, directory: Path) -> list[int]:
    return sorted(row.n for row in dfutil.loadTFRecords(spark, str(directory)).collect())


def hidden(directory: Path) -> list[Path]:
    return sorted(directory.parent.glob(".*"))


@pytest.mark.root
@pytest.mark.parametrize("uri", URIS.values(), ids=URIS)
def test_the_old_data_is_put_back_if_the_new_cannot_be_renamed(
    spark: Any, out: Path, mounted: Any, uri: Callable[[Path], str]
) -> None:
    parent = str(out.parent)

    def mounting(rows: Iterator[Any]) -> Iterator[Any]:
        """Mount the directory that is being written, on the executor."""
        rows = list(rows)
        if rows:
            (written,) = Path(parent).glob(".out.*")
            subprocess.run(["mount", "--bind", str(written), str(written)], check=True)
        yield from rows

    df = frame(spark, 2).rdd.mapPartitions(mounting).toDF("n int")
    with pytest.raises(DataError, match="saveAsTFRecords failed") as caught:
        dfutil.saveAsTFRecords(df, uri(out), overwrite=True)
    assert numbers(spark, out) == [1]
    (new,) = hidden(out)
    assert str(new) in str(caught.value)
    assert (new / "_SUCCESS").exists()
    assert numbers(spark, new) == [2]


@pytest.mark.root
@pytest.mark.parametrize("uri", URIS.values(), ids=URIS)
def test_the_new_data_is_kept_if_the_old_cannot_be_renamed(
    spark: Any, out: Path, mounted: Any, uri: Callable[[Path], str]
) -> None:
    mounted(out)
    with pytest.raises(DataError, match="saveAsTFRecords failed") as caught:
        dfutil.saveAsTFRecords(frame(spark, 2), uri(out), overwrite=True)
    assert numbers(spark, out) == [1]
    (new,) = hidden(out)
    assert str(new) in str(caught.value)
    assert numbers(spark, new) == [2]


@pytest.mark.root
@pytest.mark.parametrize("uri", URIS.values(), ids=URIS)
def test_old_data_that_cannot_be_removed_is_named(
    spark: Any, out: Path, mounted: Any, uri: Callable[[Path], str]
) -> None:
    (out / "kept").mkdir()
    mounted(out / "kept")
    with pytest.warns(RuntimeWarning, match="could not be removed") as warned:
        dfutil.saveAsTFRecords(frame(spark, 2), uri(out), overwrite=True)
    assert numbers(spark, out) == [2]
    (old,) = hidden(out)
    assert str(old) in str(warned[0].message)


def test_both_are_kept_if_the_old_cannot_be_put_back(
    spark: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program creates the directory between the two renames."""
    import tensorflow as tf

    rename = tf.io.gfile.rename

    def interrupted(source: str, target: str, overwrite: bool = False) -> None:
        rename(source, target, overwrite)
        out.mkdir(exist_ok=True)
        (out / "other").touch()

    monkeypatch.setattr(tf.io.gfile, "rename", interrupted)
    with pytest.raises(DataError, match="saveAsTFRecords failed") as caught:
        dfutil.saveAsTFRecords(frame(spark, 2), str(out), overwrite=True)
    monkeypatch.undo()
    directories = {tuple(numbers(spark, directory)): directory for directory in hidden(out)}
    assert set(directories) == {(1,), (2,)}
    assert all(str(directory) in str(caught.value) for directory in directories.values())
    assert [file.name for file in out.iterdir()] == ["other"]


def test_rows_that_fail_leave_the_old_data_alone(spark: Any, out: Path) -> None:
    df = spark.createDataFrame([([1, None],)], "numbers array<int>")
    with pytest.raises(UsageError, match="null"):
        dfutil.saveAsTFRecords(df, str(out), overwrite=True)
    assert numbers(spark, out) == [1]
    assert not hidden(out)
