"""``%tfd_resolve`` in an IPython shell, its form, and requests of a front end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import tfd_notebook as tfd
from tests._grpc import Server, status
from tests._waiting import until
from tests.unit.views.test_views import Comm
from tfd_notebook import errors
from tfd_notebook.bus import PROTOCOL
from tfd_notebook.cluster.commands import panel_requests
from tfd_notebook.model.resolution import COLUMNS
from tfd_notebook.resolvers.factory import CHOICES
from tfd_notebook.ui import magics, widgets

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("TFD_PRELOAD", "off")
    shell = InteractiveShell()
    magics.load_ipython_extension(shell)
    yield shell
    for cluster in tfd.clusters().values():
        cluster.stop()
    magics.unload_ipython_extension(shell)
    shell.history_manager.end_session()


@pytest.fixture
def worker() -> Iterator[Server]:
    with Server(status("worker:0", "CPU")) as server:
        yield server


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, worker: Server) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": [worker.address]}}))


def run(shell: InteractiveShell, line: str = "") -> Any:
    return shell.run_line_magic("tfd_resolve", line)


def test_magic_returns_a_resolution_or_a_frame(shell: Any, config: None, worker: Server) -> None:
    resolution = run(shell)
    assert (resolution.rule, resolution.last.counts) == ("tf_config", {"alive": 1})
    assert list(run(shell, "--frame").columns) == list(COLUMNS)
    assert run(shell, "tf_config").rule == "argument"
    shell.user_ns["mine"] = {"worker": [worker.address]}
    assert run(shell, "mine").last.counts == {"alive": 1}


def test_magic_accepts_a_file_and_arguments(shell: Any, tmp_path: Path, worker: Server) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"worker": [worker.address]}))
    for line in (str(path), f"file --set path={path}"):
        assert run(shell, line).cluster_spec().jobs == ["worker"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("slurmy", "no resolver 'slurmy'"),
        ("file --set path", "invalid option 'path'"),
        ("file", "the resolver 'file'"),
        ("--watch 0", "invalid seconds=0: expected more than 0"),
        ("--live --watch 3", "no effect with --live"),
        ("--wach 3", "no option '--wach'"),
    ],
)
def test_invalid_arguments_are_refused(shell: Any, config: None, line: str, what: str) -> None:
    with pytest.raises(errors.UsageError, match=what):
        run(shell, line)


def test_watching_shows_what_changes(
    shell: Any, config: None, worker: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    resolution = run(shell, "--watch 0.2")
    assert resolution.last.counts == {"alive": 1}
    text = capsys.readouterr().out
    assert "1 task: 1 alive" in text
    assert "watched; 0 changes" in text


def test_help_and_completion(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shell, "--help") is None
    assert "--watch SECONDS" in capsys.readouterr().out
    magic = shell.magics_manager.magics["line"]["tfd_resolve"]
    offered = {item.text for item in magic.complete("")["completions"]}
    assert set(CHOICES) <= offered
    assert [item.text for item in magic.complete("--wa")["completions"]] == ["--watch"]


def test_form_resolves_and_uses_a_cluster(
    shell: Any, config: None, worker: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widgets, "has_front_end", lambda: True)
    monkeypatch.setattr("comm.create_comm", Comm)
    form = run(shell, "--live")
    assert form.widget.view == "resolve"
    shown, _ = form._repr_mimebundle_()
    assert "1 alive" in shown["text/plain"]
    page = form.widget.comm
    page.deliver("hello", protocol=PROTOCOL, version="test", acks=False)

    def answered(request_id: str, **request: Any) -> Any:
        page.deliver("command", request_id=request_id, **request)
        return until(
            lambda: [item for item in page.received("reply") if item["request_id"] == request_id]
        )[0]

    choice = answered("1", command="resolvers")["value"]
    assert (choice["chosen"], choice["options"]) == ("auto", {})
    look = answered("2", command="resolve", resolver="auto")["value"]
    assert (look["resolved"], look["counts"]) == (True, {"alive": 1})
    error = answered("3", command="resolve", resolver="slurmy")["error"]
    assert error["code"] == "TFD101"
    error = answered("4", command="attach", resolver="auto", variable="a b")["error"]
    assert error["code"] == "TFD100"
    attached = answered("5", command="attach", resolver="auto")["value"]
    assert (attached["cluster"], attached["variable"]) == ("found", "cluster")
    assert shell.user_ns["cluster"] is tfd.clusters()["found"]
    until(lambda: any("found" in str(message) for message in page.received("state")))
    form.close()


def test_suggestion_is_json(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "mine")
    command = panel_requests(shell)["resolve"]
    look = json.loads(json.dumps(command({"resolver": "auto"})))
    assert (look["resolved"], look["tasks"], look["rule"]) == (False, [], "tpu")
    assert look["cell"] == 'tfd.resolve("tpu")'
