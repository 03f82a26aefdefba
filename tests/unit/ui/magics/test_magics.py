"""The magics in an IPython shell, with clusters of the fake launcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

from tfd_notebook import errors, views
from tfd_notebook.cluster import data_service
from tfd_notebook.cluster.cluster import Cluster
from tfd_notebook.cluster.registry import clusters
from tfd_notebook.ui import magics
from tfd_notebook.ui.argparsing import read_gpus
from tfd_notebook.ui.magics.lookup import report

START = "start --launcher fake --data-workers 2"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    # No task runs here, so that the preload of TensorFlow is not needed.
    monkeypatch.setenv("TFD_PRELOAD", "off")
    shell = InteractiveShell()
    magics.load_ipython_extension(shell)
    yield shell
    for cluster in clusters().values():
        cluster.stop()
    magics.unload_ipython_extension(shell)
    shell.history_manager.end_session()


def tfd(shell: InteractiveShell, line: str, magic: str = "tfd_cluster") -> Any:
    return shell.run_line_magic(magic, line)


def offered(shell: InteractiveShell, line: str) -> set[str]:
    """Return the completions of a line."""
    with provisionalcompleter():
        offers = list(shell.Completer.completions(line, len(line)))
    return {line[: offer.start] + offer.text for offer in offers}


def completed(shell: InteractiveShell, line: str) -> list[str]:
    """Return the completions of a magic. IPython's old and new completer must agree."""
    with pytest.warns(PendingDeprecationWarning):
        text, matches = shell.complete(None, line)
    assert {line[: len(line) - len(text)] + match for match in matches} == offered(shell, line)
    return sorted(matches)


def test_start_assigns_and_prints_the_variable(shell: Any, capsys: Any) -> None:
    cluster = tfd(shell, START)
    assert shell.user_ns["cluster"] is cluster
    assert "started; it is in the variable 'cluster'" in capsys.readouterr().out
    assert [task.name for task in cluster.tasks] == [
        "dispatcher:0",
        "data_worker:0",
        "data_worker:1",
    ]


def test_a_cell_that_starts_a_cluster_can_be_run_again(shell: Any, capsys: Any) -> None:
    first = tfd(shell, START)
    assert tfd(shell, START) is first
    assert "is already running" in capsys.readouterr().out
    assert "cluster_2" not in shell.user_ns
    first.stop()
    second = tfd(shell, START)
    assert second is not first
    assert shell.user_ns["cluster"] is second


def test_start_does_not_overwrite_a_users_variable(shell: Any, capsys: Any) -> None:
    shell.user_ns.update(cluster=7, cluster_2="x")
    first = tfd(shell, START)
    assert (shell.user_ns["cluster"], shell.user_ns["cluster_2"]) == (7, "x")
    assert shell.user_ns["cluster_3"] is first
    assert "'cluster' holds another value" in capsys.readouterr().out
    second = tfd(shell, f"{START} --name other -o cluster_3")
    assert shell.user_ns["cluster_3"] is first
    assert shell.user_ns["cluster_3_2"] is second


def test_commands_call_the_methods(shell: Any, capsys: Any) -> None:
    cluster = tfd(shell, START)
    assert isinstance(tfd(shell, "status"), views.View)
    assert list(tfd(shell, "status --frame")["task"]) == [t.name for t in cluster.tasks]
    tfd(shell, "scale --data-workers 3")
    assert len(cluster.tasks) == 4
    assert "adapts 3 to 8 data workers" in repr(tfd(shell, "adapt --minimum 3 --maximum 8"))
    tfd(shell, "adapt --off")
    assert cluster.snapshot().adaptation is None
    before = cluster.tasks[1].pid
    tfd(shell, "kill data_worker:0")
    assert f"data_worker:0 (process {before}) was killed" in capsys.readouterr().out
    tfd(shell, "restart cluster data_worker:0")
    assert cluster.snapshot().task("data_worker:0").restarts == 2
    tfd(shell, "interrupt")
    tfd(shell, "logs data_worker:0 -n 5")
    assert "data_worker:0 has no output" in capsys.readouterr().out
    assert tfd(shell, "list").records()[0]["observed"] == 4
    tfd(shell, "stop")
    assert cluster.state == "stopped"
    assert len(tfd(shell, "list")) == 0
    assert "fake" in repr(tfd(shell, "kinds"))


def test_output_of_tasks_does_not_control_a_terminal(capsys: Any) -> None:
    report("\x1b]52;c;b25l\x07one \x1b[31mred\x1b[0m \x1b[2J")
    assert capsys.readouterr().out == "\ufffd]52;c;b25l\ufffdone \x1b[31mred\x1b[0m \ufffd[2J\n"


def test_magic_without_a_subcommand_shows_a_form(shell: Any) -> None:
    form = tfd(shell, "")
    assert form.widget is None  # without a front end
    twins, _ = form._repr_mimebundle_()
    assert "%tfd_cluster start --data-workers 2" in twins["text/plain"]
    assert "%tfd_cluster start --data-workers 2" in twins["text/html"]


def test_command_for_several_clusters_needs_a_name(shell: Any) -> None:
    for name in ("one", "two"):
        tfd(shell, f"{START} --name {name} -o {name}")
    with pytest.raises(errors.UsageError, match="one, two"):
        tfd(shell, "status")
    tfd(shell, "stop one")
    tfd(shell, "stop --all")
    assert not clusters()


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("strat", errors.UnknownName, "did you mean 'start'"),
        ("start --data-worker 2", errors.UnknownName, "did you mean '--data-workers'"),
        ("start --data-workers two", errors.UsageError, "invalid int"),
        ("start --data-workers -1", errors.UsageError, "expected 0 to"),
        ("start --data-workers 99999", errors.UsageError, "expected 0 to"),
        ("start --launcher lokal", errors.UnknownName, "did you mean 'local'"),
        ("start --launcher fake --allow 10.0.0.0/99", errors.UsageError, "invalid network"),
        ("start --launcher fake --time-limit 0", errors.UsageError, "more than 0"),
        ("start --name 'no name' --launcher fake", errors.UsageError, "invalid cluster name"),
        ("adapt --minimum 1", errors.UsageError, "minimum and a maximum, or --off"),
        ("adapt --off --maximum 3", errors.UsageError, "only --off"),
        ("adapt --minimum 0 --maximum 3", errors.UsageError, "invalid minimum=0"),
        ("start -o 2x", errors.UsageError, "invalid name of a variable"),
        ("start -o class", errors.UsageError, "invalid name of a variable"),
        ("start 'x", errors.UsageError, "quotation mark"),
        ("start surplus", errors.UsageError, "surplus"),
        ("start --launcher fake --workers -1", errors.UsageError, "invalid workers=-1"),
        ("start --launcher fake --gpus some", errors.UsageError, "invalid gpus 'some'"),
        ("start --launcher fake --evaluator 1", errors.UsageError, "unexpected argument '1'"),
        ("scale --ps 3", errors.Unsupported, "a new cluster with ps=3"),
        ("start --launcher fake --detach=-1", errors.UsageError, "invalid hours=-1"),
        ("start --launcher inprocess --detach", errors.Unsupported, "cannot outlive it"),
        ("attach", errors.UsageError, "no clusters are detached"),
        ("doctor nope:1 nope", errors.UsageError, "invalid expression 'nope:1 nope'"),
        ("attach training", errors.UnknownName, "no detached cluster is named 'training'"),
        ("renew", errors.StateError, "has no lease to renew"),
        ("detach --hours 0", errors.UsageError, "invalid hours=0"),
        ("status trainin", errors.UnknownName, "did you mean 'training'"),
        ("restart", errors.UsageError, "no task named"),
        ("restart data_worker:9", errors.UnknownName, "did you mean 'data_worker:0'"),
        (
            "kill training other data_worker:0",
            errors.UsageError,
            "expected one cluster and one task",
        ),
        ("logs -n 0", errors.UsageError, "invalid lines=0: expected 1 to 100000"),
        ("logs --follow", errors.UsageError, "no task named"),
        ("scale", errors.UsageError, "--data-workers N"),
        ("stop training --all", errors.UsageError, "NAME and --all are mutually exclusive"),
    ],
)
def test_bad_input_gets_a_clear_error_and_changes_nothing(
    shell: Any, line: str, kind: type[Exception], message: str
) -> None:
    cluster = tfd(shell, "start --launcher fake --data-workers 1 --name training")
    with pytest.raises(kind, match=message):
        tfd(shell, line)
    assert clusters() == {"training": cluster}
    assert cluster.state == "ready"


def test_an_error_is_shown_without_a_traceback(shell: Any, capsys: Any) -> None:
    result = shell.run_cell("%tfd_cluster strat")
    assert isinstance(result.error_in_exec, errors.UnknownName)
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == "UnknownName: [TFD101] %tfd_cluster has no command 'strat'"
    assert len(lines) == 2


@pytest.mark.parametrize(
    "magic",
    [
        "%tfd_cluster start",
        "%tfd_stream start",
        "%tfd_spark run",
        "%tfd_resolve",
        "%tfd_explain",
        "%tfd_schedule",
        "%tfd_run",
        "%tfd_join",
        "%tfd_kernel",
    ],
)
def test_help_has_an_example(shell: Any, capsys: Any, magic: str) -> None:
    assert shell.run_cell(f"{magic} --help").success
    assert f"\nexample: {magic} " in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["%tfd_cluster --help", "%tfd_cluster ?", "%tfd_cluster start ?", "%tfd_stream help"]
)
def test_help_lists_the_subcommands(shell: Any, capsys: Any, line: str) -> None:
    assert shell.run_cell(line).success
    assert "usage: " + line.split(" ")[0] in capsys.readouterr().out


def test_scale_help_offers_only_what_can_change(shell: Any, capsys: Any) -> None:
    tfd(shell, "scale --help")
    shown = capsys.readouterr().out
    assert "number of training workers (default: unchanged)" in shown
    assert "--ps" not in shown
    assert "--ps" not in completed(shell, "%tfd_cluster scale --")


@pytest.mark.parametrize("name", ["launchers", "kinds"])
def test_launchers_are_listed_by_both_names(shell: Any, name: str) -> None:
    assert "inprocess" in tfd(shell, name).text()


def test_question_mark_shows_the_help(shell: Any) -> None:
    shown = shell.object_inspect_mime("%tfd_cluster")
    assert "usage: %tfd_cluster" in shown["text/plain"]


def test_subcommands_and_names_are_completed(shell: Any) -> None:
    assert completed(shell, "%tfd_cluster st") == ["stacks", "start", "status", "stop"]
    assert completed(shell, "c = %tfd_cluster sta") == ["stacks", "start", "status"]
    assert completed(shell, "tfd_stream p") == ["pause"]
    assert completed(shell, "%tfd_cluster start --n") == ["--name"]
    assert completed(shell, "%tfd_cluster start --launcher in") == ["inprocess"]
    assert completed(shell, "%tfd_cluster start --launcher=in") == ["--launcher=inprocess"]
    assert completed(shell, "%tfd_spark run f --input-mode t") == ["tensorflow"]
    tfd(shell, f"{START} --name images")
    assert completed(shell, "%tfd_cluster stop im") == ["images"]
    assert completed(shell, "%tfd_cluster restart images data_worker:") == [
        "data_worker:0",
        "data_worker:1",
    ]
    assert "--help" in completed(shell, "%tfd_cluster stop images --")

    class Dataset:
        element_spec = None

    shell.user_ns.update(train_ds=Dataset(), train_x=7)
    assert completed(shell, "%tfd_stream start train") == ["train_ds"]


@pytest.mark.slow
def test_other_lines_are_completed_as_before(shell: Any) -> None:
    shell.user_ns["tfd_cluster_size"] = 3
    assert "tfd_cluster_size" in offered(shell, "tfd_cluster_s")
    assert "%tfd_cluster" in offered(shell, "%tfd_c")


def test_unloading_removes_magics_and_hooks(shell: Any) -> None:
    magics.unload_ipython_extension(shell)
    assert not shell.Completer.custom_matchers
    assert not {"tfd_cluster", "tfd_stream"} & shell.magics_manager.magics["line"].keys()
    magics.unload_ipython_extension(shell)
    magics.load_ipython_extension(shell)
    magics.load_ipython_extension(shell)
    assert len(shell.Completer.custom_matchers) == 1


def test_stream_commands_find_their_stream(shell: Any) -> None:
    with pytest.raises(errors.StateError, match="no running cluster"):
        tfd(shell, "start ds", "tfd_stream")
    tfd(shell, START)
    shell.user_ns["dataset"] = None
    with pytest.raises(errors.UnknownName, match="did you mean 'dataset'"):
        tfd(shell, "start dataste", "tfd_stream")
    with pytest.raises(errors.StateError, match="no running stream"):
        tfd(shell, "stop", "tfd_stream")
    with pytest.raises(errors.UnknownName, match="no stream 'x'"):
        tfd(shell, "pause x", "tfd_stream")
    assert len(tfd(shell, "status", "tfd_stream")) == 0


@pytest.mark.usefixtures("no_coordinator")
def test_training_tasks(shell: Any, capsys: Any) -> None:
    cluster = tfd(shell, "start --workers 2 --ps 1 --evaluator --launcher fake --name train")
    assert "no data worker" not in capsys.readouterr().out
    assert [task.name for task in cluster.tasks] == ["ps:0", "worker:0", "worker:1", "evaluator:0"]
    tfd(shell, "scale --workers 3 --data-workers 1")
    assert [task.role for task in cluster.tasks].count("worker") == 3
    assert cluster.tasks[0].name == "dispatcher:0"


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("auto", "auto"),
        ("0", 0),
        ("1", [1]),
        ("0,1", [0, 1]),
        ("0,", [0]),
        ("worker=1", {"worker": 1}),
        ("worker=2,evaluator=1", {"worker": 2, "evaluator": 1}),
        ("worker=x", "worker=x"),
    ],
)
def test_gpus_are_read(words: str, meaning: Any) -> None:
    assert read_gpus(words) == meaning


def test_a_cluster_made_in_python_can_be_handled_by_magics(shell: Any) -> None:
    with Cluster(launcher="fake", data_workers=1, name="mine") as cluster:
        tfd(shell, "scale mine --data-workers 2")
        assert len(data_service.of(cluster).data_workers()) == 2


STEPPER = ("tfd_pause", "tfd_resume", "tfd_step", "tfd_join", "tfd_cancel", "tfd_values")


@pytest.mark.parametrize("magic", STEPPER)
def test_stepper_needs_a_coordinator(shell: Any, magic: str) -> None:
    words = "3" if magic == "tfd_cancel" else ""
    with pytest.raises(errors.StateError, match="no running cluster"):
        tfd(shell, words, magic)
    tfd(shell, "start --launcher fake --workers 1 --ps 1 --name train")
    with pytest.raises(errors.StateError, match=r"'train' has no coordinator.*\s.*coordinator\(\)"):
        tfd(shell, words, magic)
    with pytest.raises(errors.UnknownName, match="did you mean 'train'"):
        tfd(shell, f"{words} trian", magic)


@pytest.mark.parametrize("magic", [*STEPPER, "tfd_schedule"])
def test_stepper_shows_its_help(shell: Any, capsys: Any, magic: str) -> None:
    for words in ("--help", "?"):
        tfd(shell, words, magic)
        assert f"usage: %{magic}" in capsys.readouterr().out
    assert f"usage: %{magic}" in shell.object_inspect_mime(f"%{magic}")["text/plain"]
    assert "--help" in completed(shell, f"%{magic} --")


@pytest.mark.parametrize(
    ("magic", "line", "kind", "message"),
    [
        ("tfd_schedule", "nothing", errors.UnknownName, "holds a tf.function"),
        ("tfd_schedule", "len --times 0", errors.UsageError, "invalid times=0: expected 1 or more"),
        ("tfd_schedule", "len --args nothing", errors.UnknownName, "no variable 'nothing'"),
        ("tfd_schedule", "len --time 3", errors.UnknownName, "did you mean '--times'"),
        ("tfd_step", "1 2", errors.UsageError, "expected one number and one name"),
        ("tfd_step", "a b", errors.UsageError, r"write \[N\] \[NAME\]"),
        ("tfd_join", "--timeout soon", errors.UsageError, "invalid float"),
        ("tfd_join", "--backgrund", errors.UnknownName, "did you mean '--background'"),
        ("tfd_cancel", "that", errors.UsageError, "invalid int"),
        ("tfd_values", "--worker x", errors.UsageError, "invalid int"),
        ("tfd_cluster", "recover --checkpoint x", errors.UsageError, "no checkpoint at 'x'"),
        ("tfd_cluster", "recover --build nothing", errors.UnknownName, "builds the model"),
    ],
)
def test_stepper_refuses_invalid_arguments(
    shell: Any, magic: str, line: str, kind: type[Exception], message: str
) -> None:
    tfd(shell, "start --launcher fake --workers 1 --ps 1")
    shell.user_ns["len"] = len
    with pytest.raises(kind, match=message):
        tfd(shell, line, magic)


def test_cell_magic_needs_a_cluster_and_a_body(shell: Any) -> None:
    with pytest.raises(errors.StateError, match="no running cluster"):
        shell.run_cell_magic("tfd_schedule", "--times 2", "1 + 1")
    with pytest.raises(errors.UsageError, match="the cell is empty"):
        shell.run_cell_magic("tfd_schedule", "", "# nothing")
    with pytest.raises(errors.UnknownName, match="no option '--args'"):
        shell.run_cell_magic("tfd_schedule", "--args 1", "1 + 1")


def test_the_stepper_is_completed(shell: Any) -> None:
    class Function:
        def get_concrete_function(self) -> None: ...

    shell.user_ns.update(train_step=Function(), train_x=7)
    assert completed(shell, "%tfd_schedule train") == ["train_step"]
    assert completed(shell, "%%tfd_schedule --ti") == ["--times"]
    assert "queued" in completed(shell, "%tfd_values --state ")
    tfd(shell, "start --launcher fake --workers 1 --name images")
    assert completed(shell, "%tfd_step im") == ["images"]
    assert "images" in completed(shell, "%tfd_pause ")
