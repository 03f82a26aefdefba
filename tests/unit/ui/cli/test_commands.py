"""The command ``tfd``, with clusters of this process, through its socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tfd_notebook import errors
from tfd_notebook._version import VERSION
from tfd_notebook.cluster import control_socket
from tfd_notebook.cluster.cluster import Cluster
from tfd_notebook.cluster.registry import clusters
from tfd_notebook.model import command_table
from tfd_notebook.net import control_calls
from tfd_notebook.ui.cli import lab, main

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path))
    control_socket.ensure_started()
    yield
    for cluster in clusters().values():
        cluster.stop()
    control_socket.stop()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(launcher="fake", data_workers=2, name="images")


def tfd(capsys: Any, *arguments: str) -> tuple[int, str]:
    status = main(arguments)
    return status, capsys.readouterr().out


def test_list(cluster: Cluster, capsys: Any) -> None:
    status, shown = tfd(capsys, "list")
    assert status == 0
    assert "images   ● ready  fake           3 of 3" in shown
    status, shown = tfd(capsys, "list", "--json")
    (record,) = json.loads(shown)
    assert (record["name"], record["observed"], record["pid"]) == ("images", 3, os.getpid())


def test_list_without_clusters(capsys: Any) -> None:
    assert tfd(capsys, "list") == (0, "no running cluster\n")
    assert tfd(capsys, "list", "--json") == (0, "[]\n")


def test_stop(cluster: Cluster, capsys: Any) -> None:
    assert tfd(capsys, "stop", "images") == (0, "cluster 'images' is stopped\n")
    assert cluster.state == "stopped"


def test_busy_process_is_named(
    cluster: Cluster, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_busy(pid: int, request: Any, timeout: float) -> Any:
        raise errors.TimeLimit(f"process {pid} is busy")

    monkeypatch.setattr(control_calls, "call", be_busy)
    for arguments in (["list"], ["list", "--json"], ["stop", "images"], ["stop"]):
        assert main(arguments) == 1
        shown = capsys.readouterr()
        assert f"process {os.getpid()} is busy" in shown.err
    assert cluster.state == "ready"


def test_logs(cluster: Cluster, capsys: Any) -> None:
    text = "data_worker:0 has no output\n"
    assert tfd(capsys, "logs", "images", "data_worker:0", "-n", "5") == (0, text)
    assert text in tfd(capsys, "logs")[1]


def test_watch(cluster: Cluster, capsys: Any) -> None:
    status, shown = tfd(capsys, "watch", "images", "--once")
    assert status == 0
    assert "data_worker:1" in shown
    status, shown = tfd(capsys, "watch", "--once", "--json")
    assert json.loads(shown)["observed"] == {"dispatcher": 1, "data_worker": 2}


def test_adapt(cluster: Cluster, capsys: Any) -> None:
    status, shown = tfd(capsys, "adapt", "images", "--minimum", "2", "--maximum", "4")
    assert (status, shown) == (
        0,
        "cluster 'images': the number of data workers adapts from 2 to 4\n",
    )
    assert cluster.snapshot().adaptation is not None
    assert tfd(capsys, "adapt", "--off")[0] == 0
    assert cluster.snapshot().adaptation is None


def test_attach_without_a_terminal_shows_the_state(cluster: Cluster, capsys: Any) -> None:
    status, shown = tfd(capsys, "attach", "images")
    assert status == 0
    assert "data_worker:1" in shown
    assert json.loads(tfd(capsys, "attach", "--json")[1])["name"] == "images"


def test_tutorials_are_copied_and_changed_ones_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "tutorials"
    count, kept = lab.copy_tutorials(directory)
    names = sorted(path.name for path in directory.iterdir())
    assert names == sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert (count, kept) == (len(names), [])
    (directory / names[0]).write_text("mine")
    (directory / names[1]).unlink()
    assert lab.copy_tutorials(directory) == (1, [names[0]])
    assert (directory / names[0]).read_text() == "mine"
    assert (directory / names[1]).read_bytes() == (ROOT / "notebooks" / names[1]).read_bytes()


def test_lab_needs_jupyterlab(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jupyterlab", None)
    assert main(["lab", str(tmp_path / "tutorials")]) == 1
    assert 'Next: pip install "tfd-notebook[lab]"' in capsys.readouterr().err
    assert not (tmp_path / "tutorials").exists()


def test_lab_needs_a_directory(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    assert main(["lab", str(tmp_path / "file")]) == 2
    assert "tfd lab DIRECTORY" in capsys.readouterr().err


def test_sweep(capsys: Any) -> None:
    assert tfd(capsys, "sweep") == (0, "no orphans\n")
    assert tfd(capsys, "sweep", "--dry-run", "--json") == (0, "[]\n")


def test_several_clusters_want_a_name(cluster: Cluster, capsys: Any) -> None:
    Cluster(launcher="fake", name="texts")
    assert main(["stop"]) == 2
    assert "images (process" in capsys.readouterr().err
    assert main(["stop", "texts", "--pid", str(os.getpid())]) == 0
    assert list(clusters()) == ["images"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["strat"], 2, "did you mean 'start'"),
        (["list", "--jsn"], 2, "did you mean '--json'"),
        (["start", "--data-workers", "two"], 2, "invalid int"),
        (["start", "--data-workers", "-1"], 2, "invalid data_workers=-1"),
        (
            ["start", "--launcher", "fake", "--port", "70000"],
            2,
            "invalid port=70000: expected 0 to 65535",
        ),
        (["start", "--launcher", "fake", "--detach", "0"], 2, "invalid hours=0"),
        (["stop", "image"], 2, "did you mean 'images'"),
        (["stop", "images", "--pid", "1"], 2, "no cluster 'images'"),
        (["logs", "images", "data_worker:7"], 2, "no task 'data_worker:7'"),
        (["logs", "images", "-f"], 2, "needs a task"),
        (["logs", "images", "-n", "0"], 2, "invalid lines=0"),
        (["watch", "images", "--interval", "0"], 2, "invalid interval=0"),
        (["adapt", "images"], 2, "a minimum and a maximum, or --off"),
        (["adapt", "images", "--minimum", "4", "--maximum", "2"], 2, "cluster.adapt(2, 4)"),
        (["attach", "image"], 2, "did you mean 'images'"),
        (["lab", "--port", "70000"], 2, "invalid port=70000"),
        (["renew", "images"], 2, "has no lease to renew"),
        (["detach", "images", "--hours", "-1"], 2, "invalid hours=-1"),
        (["pause", "images"], 2, "'images' has no coordinator"),
        (["resume"], 2, "'images' has no coordinator"),
        (["step", "2", "images"], 2, "'images' has no coordinator"),
        (["step", "image"], 2, "did you mean 'images'"),
        (["step", "1", "2"], 2, "write [N] [NAME]"),
        (["cancel", "images", "7"], 2, "'images' has no coordinator"),
        (["cancel", "images"], 2, "add its id"),
    ],
)
def test_bad_input_gets_two_lines_and_a_status(
    cluster: Cluster, capsys: Any, arguments: list[str], status: int, message: str
) -> None:
    assert main(arguments) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("tfd: [TFD")
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert cluster.state == "ready"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["watch", "--help"]])
def test_help(capsys: Any, arguments: list[str]) -> None:
    status, shown = tfd(capsys, *arguments)
    assert status == 0
    assert shown.startswith("usage: tfd")


def test_version(capsys: Any) -> None:
    assert tfd(capsys, "--version") == (0, f"tfd {VERSION}\n")


@pytest.mark.parametrize("name", command_table.commands("tfd"))
def test_the_help_of_each_command_has_an_example(capsys: Any, name: str) -> None:
    assert f"\nexample: tfd {name}" in tfd(capsys, name, "--help")[1]


def test_start_help_names_a_command_that_lists_the_launchers(capsys: Any) -> None:
    assert "the command launchers" in " ".join(tfd(capsys, "start", "--help")[1].split())
    status, shown = tfd(capsys, "launchers", "--json")
    assert status == 0
    assert "inprocess" in [row["launcher"] for row in json.loads(shown)]


@pytest.mark.slow
def test_a_pipe_that_closes_is_not_an_error() -> None:
    completed = subprocess.run(
        f"{sys.executable} -m tfd_notebook --help | true; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert completed.stdout.strip() == "0"
    assert completed.stderr == ""
