"""The results of the benchmarks: which rows are replaced, and which are old."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import run

#: A benchmark that prints one result.
SCRIPT = 'import _pairs\nprint("{}: ratio 0.5 (A 1, B 2, s)")\n'
PAGE = """
| file | measures |
|---|---|
| `one.py` | `cluster`, `views.py` |
| `two.py`, `three.py` | `net` |

| `two.py` | `views.py` |
"""


def row(claim: str, commit: str) -> run.Row:
    return run.Row(claim, "0.5", "A 1, B 2, s", commit, "2026-01-02")


def git(*arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=run.ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        (run.ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (run.ROOT / name).write_text(text)


@pytest.fixture
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files of three benchmarks, and what they measure."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    write(dict.fromkeys(("tfd_notebook/cluster/a.py", "tfd_notebook/net/b.py"), ""))
    write({"tfd_notebook/views.py": "", "docs/measuring.md": PAGE})
    write({f"benchmarks/{name}.py": SCRIPT.format(name) for name in ("one", "two", "three")})
    write({"benchmarks/two.py": f"import _side\n{SCRIPT.format('two')}"})
    write({"benchmarks/_side.py": "def f():\n    from _deep import x", "benchmarks/_deep.py": ""})
    write(dict.fromkeys(("benchmarks/_pairs.py", "benchmarks/_other.py"), ""))


@pytest.fixture
def commit(_files: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Commit the files, write rows for two of the benchmarks, and return the commit."""
    # A hook of git sets them for the repository of the hook.
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "Start")
    head = git("rev-parse", "--short", "HEAD")
    write({"benchmarks/results.md": run.report([row("one", head), row("two, CPU", f"{head}+")])})
    return head


@pytest.mark.slow
@pytest.mark.usefixtures("commit")
def test_each_result_of_a_benchmark_has_a_row() -> None:
    """The names of tasks contain a colon."""
    write({"benchmarks/one.py": f"{SCRIPT.format('one, worker:0')}\n{SCRIPT.format('one (x)')}"})
    assert run.main(["one"]) == 0
    rows = run.parse((run.ROOT / "benchmarks" / "results.md").read_text())
    assert [each.claim for each in rows] == ["one, worker:0", "one (x)", "two, CPU"]


def test_every_benchmark_names_existing_paths_that_it_measures() -> None:
    measured = run.measured()
    assert set(measured) == set(run.benchmarks())
    for name, paths in measured.items():
        assert paths, name
        assert [path for path in paths if not (run.ROOT / path).exists()] == [], name


def test_results_are_rows_of_benchmarks() -> None:
    text = (run.ROOT / "benchmarks" / "results.md").read_text()
    rows = run.parse(text)
    assert text.endswith(run.HEAD + "".join(f"{each}\n" for each in rows))
    assert {each.benchmark for each in rows} <= set(run.benchmarks())
    for each in rows:
        assert re.fullmatch(r"([0-9a-f]{7,}\+?|unknown) \d{4}-\d\d-\d\d", " ".join(each[3:])), each


def test_rows_of_other_benchmarks_stay() -> None:
    rows = [row("a", "1"), row("b (x)", "1"), row("b", "1"), row("bc", "1")]
    assert run.replace(rows, [row("b, y", "2")]) == [rows[0], row("b, y", "2"), rows[3]]
    assert run.parse(run.report(rows)) == rows


@pytest.mark.slow
def test_named_benchmarks_write_their_commit_and_day(commit: str) -> None:
    results = run.ROOT / "benchmarks" / "results.md"
    assert run.main(["one", "--quick"]) == 0
    assert run.parse(results.read_text())[0] == row("one", commit)
    git("add", "benchmarks/results.md")  # The results do not count as a change.
    assert run.main(["three"]) == 0
    write({"tfd_notebook/net/b.py": "1"})
    assert run.main(["one"]) == 0
    rows = run.parse(results.read_text())
    assert [each.commit for each in rows] == [f"{commit}+", commit, f"{commit}+"]
    assert [each.day > "2026-01-02" for each in rows] == [True, True, False]
    assert rows[2] == row("two, CPU", f"{commit}+")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tfd_notebook/cluster/a.py", {"one"}),
        ("tfd_notebook/views.py", {"one"}),
        ("tfd_notebook/net/b.py", {"two"}),
        ("benchmarks/one.py", {"one"}),
        ("benchmarks/_deep.py", {"two"}),
        ("benchmarks/_pairs.py", {"one", "two"}),
        ("benchmarks/_other.py", set()),
    ],
)
@pytest.mark.usefixtures("_files")
def test_changed_file_makes_exactly_its_rows_old(
    path: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(commit: str, paths: Sequence[str]) -> list[str]:
        return [path] if {path, *map(str, Path(path).parents)} & set(paths) else []

    monkeypatch.setattr(run, "changed", changed)
    assert set(run.old([row("one", "1"), row("two, CPU", "1")], ["one", "two"])) == expected


@pytest.mark.slow
def test_file_is_changed_before_and_after_the_commit_of_the_change(commit: str) -> None:
    paths = ["benchmarks/one.py", "tfd_notebook/cluster"]
    assert run.changed(commit, paths) == run.changed(f"{commit}+", paths) == []
    write({"tfd_notebook/cluster/a.py": "1", "benchmarks/two.py": "1"})
    assert run.changed(commit, paths) == ["tfd_notebook/cluster/a.py"]
    git("commit", "--all", "--quiet", "--message", "Change")
    assert run.changed(f"{commit}+", paths) == ["tfd_notebook/cluster/a.py"]


@pytest.mark.slow
def test_old_rows_are_listed_and_measured(commit: str, capfd: pytest.CaptureFixture[str]) -> None:
    results = run.ROOT / "benchmarks" / "results.md"
    write({"benchmarks/results.md": run.report([row("one", commit), row("two", "beef123")])})
    assert run.main(["--old"]) == 0
    assert capfd.readouterr().out == "three: no row\ntwo: since beef123: unknown commit\n"
    assert run.main(["--old", "--run"]) == 0
    assert re.findall("=== (.+)", capfd.readouterr().out) == ["three", "two"]
    rows = run.parse(results.read_text())
    assert [(each.benchmark, each.commit) for each in rows] == [
        (name, commit) for name in ("one", "three", "two")
    ]
