"""``%tfd_cluster``: start, look at and end clusters."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from tfd_notebook import views
from tfd_notebook.cluster import attach
from tfd_notebook.errors import UsageError
from tfd_notebook.launchers.client import detached
from tfd_notebook.model.spec import Role
from tfd_notebook.ui.argparsing import (
    Command,
    CommandLine,
    Parser,
    add_hours_option,
    add_scale_options,
    launchers_table,
    requested_counts,
)
from tfd_notebook.ui.magics import lookup, start_form
from tfd_notebook.ui.widgets import VIEWS

#: As in host:port, grpc://host:port and [::1]:port.
_ADDRESS = re.compile(r"(?:grpc://)?(?:\[[^\]]+\]|[\w.-]+):\d+")


def command_line(shell: Any) -> CommandLine:
    """Return the subcommands of ``%tfd_cluster`` for `shell`."""
    commands = (
        Command(
            "start",
            "start a cluster, or use the one that lives",
            _Start(shell),
            start_form.add_options,
        ),
        Command("list", "your clusters: of this kernel, of others, and detached ones", _list),
        Command("status", "one cluster: tasks, streams, notices", _status, _status_args),
        Command("scale", "have another number of tasks", _scale, _scale_args),
        Command("jobs", "what is read through a cluster, by job and pass", _jobs, _name_args),
        Command("what-if", "estimate the rate with more data workers", _what_if, _what_if_args),
        Command("logs", "what tasks wrote", _logs, _logs_args),
        Command("restart", "start a fresh process for a task", _restart, _task_args),
        Command("kill", "kill a task's process as a crash would", _kill, _task_args),
        Command("interrupt", "cancel every read from a cluster", _interrupt, _name_args),
        Command("recover", "bring back what a lost ps took along", _Recover(shell), _recover_args),
        Command("attach", "take up a cluster that outlives kernels", _Attach(shell), _attach_args),
        Command("detach", "let a cluster outlive this kernel", _lasting("detach"), _lasting_args),
        Command("renew", "have a detached cluster stay longer", _lasting("renew"), _lasting_args),
        Command("doctor", "what is wrong, or will be", _Doctor(shell), _doctor_args),
        Command("stop", "stop a cluster and all its tasks", _stop, _stop_args),
        Command("launchers", "list the available launchers", _launchers, aliases=("kinds",)),
    )
    return _ClusterLine(shell, commands)


class _ClusterLine(CommandLine):
    """Without a command a form that starts a cluster."""

    def __init__(self, shell: Any, commands: Iterable[Command]) -> None:
        super().__init__("%tfd_cluster", "Clusters of tasks, in this kernel's care.", commands)
        self._shell = shell

    def run(self, tokens: Any) -> Any:
        if tokens:
            return super().run(tokens)
        from tfd_notebook.ui.widgets import StartForm

        words = "%tfd_cluster start --data-workers 2  starts a cluster, %tfd_cluster? tells more"
        table = _list(argparse.Namespace())
        twin = {
            "text/plain": f"{words}\n{table.text()}",
            "text/html": f"<p><code>{words}</code></p>{table.html()}",
        }
        return StartForm(lambda: start_form.commands(self._shell), twin)


def say(words: str) -> None:
    """Tell the reader of the cell what was done."""
    print(words)  # noqa: T201


class _Start:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        started = start_form.start(self._shell, options)
        cluster = started.cluster
        say(started.said)
        if Role.DISPATCHER in cluster.snapshot().observed and not cluster.data_workers():
            say("it has no data worker yet: %tfd_cluster scale --data-workers 2")
        return cluster


def _list(options: argparse.Namespace) -> views.Table:
    return views.clusters_table(attach.everywhere())


def _name_args(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="which cluster, where several live")


def _status_args(parser: Parser) -> None:
    _name_args(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--live", action="store_true", help="a widget that follows the cluster")
    how.add_argument(
        "--view", choices=VIEWS, help=f"one part of that widget: {', '.join(VIEWS)}", metavar="VIEW"
    )
    how.add_argument("--frame", action="store_true", help="the tasks as a DataFrame")


def _status(options: argparse.Namespace) -> Any:
    cluster = lookup.pick(options.name)
    if options.live or options.view:
        from tfd_notebook.ui.widgets import live

        return live(cluster, options.view or "cluster")
    return cluster.to_frame() if options.frame else views.View(cluster.snapshot())


def _scale_args(parser: Parser) -> None:
    _name_args(parser)
    add_scale_options(parser)


def _scale(options: argparse.Namespace) -> views.View:
    wishes = requested_counts(options)
    if not wishes:
        raise UsageError("scale to how many?", fix="add --data-workers N or --workers N")
    cluster = lookup.pick(options.name)
    cluster.scale(**wishes)
    return views.View(cluster.snapshot())


def _task_args(parser: Parser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="[NAME] TASK", help="the task, such as data_worker:0"
    )


def _jobs(options: argparse.Namespace) -> views.Table:
    return lookup.pick(options.name).jobs()


def _what_if_args(parser: Parser) -> None:
    _name_args(parser)
    parser.add_argument(
        "--data-workers",
        type=int,
        nargs="+",
        default=[2, 4, 8],
        metavar="N",
        help="how many to estimate for (default 2 4 8)",
    )


def _what_if(options: argparse.Namespace) -> views.Table:
    return lookup.pick(options.name).what_if(*options.data_workers)


def _logs_args(parser: Parser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="[NAME] [TASK]", help="one task (default: all of the cluster)"
    )
    parser.add_argument(
        "-n", "--lines", type=int, default=100, metavar="N", help="lines of each task (default 100)"
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with new lines until Ctrl-C"
    )


def _logs(options: argparse.Namespace) -> None:
    if options.lines < 1:
        raise UsageError(f"--lines {options.lines} is no number of lines", fix="use 1 or more")
    cluster, task = lookup.pick_task(options.words, need_task=options.follow)
    if not options.follow:
        say(str(cluster.logs(task, options.lines)))
        return
    try:
        for line in cluster.logs(task, options.lines, follow=True):
            say(line)
    except KeyboardInterrupt:
        say(f"({task} is no longer followed)")


def _restart(options: argparse.Namespace) -> views.View:
    cluster, task = lookup.pick_task(options.words, need_task=True)
    assert task is not None
    cluster.restart(task)
    return views.View(cluster.snapshot())


def _kill(options: argparse.Namespace) -> None:
    cluster, task = lookup.pick_task(options.words, need_task=True)
    assert task is not None
    pid = cluster.kill(task)
    say(f"{task} had no process" if pid is None else f"{task} killed, it was process {pid}")


def _interrupt(options: argparse.Namespace) -> None:
    cluster = lookup.pick(options.name)
    cluster.interrupt()
    say(f"every read from cluster {cluster.name!r} is cancelled")


def _recover_args(parser: Parser) -> None:
    _name_args(parser)
    parser.add_argument(
        "--checkpoint", metavar="PATH", help="a checkpoint, or a directory of them: the latest"
    )
    parser.add_argument(
        "--build",
        dest="function",
        metavar="FUNCTION",
        help="builds the model again; takes the coordinator, returns its tf.train.Checkpoint",
    )


class _Recover:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        cluster = lookup.pick(options.name)
        build = options.function
        if build is not None:
            build = lookup.evaluate(self._shell, build, "a function that builds the model")
        coordinator = cluster.recover(options.checkpoint, build)
        say(f"cluster {cluster.name!r} has a new strategy and a new coordinator")
        if options.checkpoint is not None and not cluster.can_build:
            say(f"build the model again, then restore it from {options.checkpoint}")
        return coordinator


class _Attach:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        variable = lookup.check_variable(options.output)
        cluster = attach.attach(options.name or _only_detached())
        bound = lookup.bind(self._shell.user_ns, variable, cluster)
        say(f"cluster {cluster.name!r} is taken up; it is in the variable {bound!r}")
        return cluster


def _only_detached() -> str:
    names = sorted({one.name for one in detached.detached()})
    if len(names) != 1:
        raise UsageError(
            f"{len(names) or 'no'} clusters are detached, and none is named",
            fix=f"add one of these names: {', '.join(names)}" if names else None,
        )
    return names[0]


def _attach_args(parser: Parser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="which cluster, where several are detached"
    )
    start_form.add_output_option(parser)


def _lasting_args(parser: Parser) -> None:
    _name_args(parser)
    add_hours_option(parser)


def _lasting(command: str) -> Callable[[argparse.Namespace], None]:
    def run(options: argparse.Namespace) -> None:
        cluster = lookup.pick(options.name)
        until = getattr(cluster, command)(options.hours)
        say(f"cluster {cluster.name!r} stays until {time.ctime(until)}, whatever this kernel does")

    return run


def _doctor_args(parser: Parser) -> None:
    parser.add_argument(
        "cluster",
        nargs="*",
        metavar="TARGET",
        help="a cluster's name, HOST:PORT, or a dataset or resolver of the notebook "
        "(default: all of this kernel)",
    )


class _Doctor:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        from tfd_notebook.diagnosis import doctor

        words = " ".join(options.cluster)
        if not words:
            return doctor()
        if words in lookup.running_clusters() or _ADDRESS.fullmatch(words):
            return doctor(words)
        kind = "a dataset, a resolver or a cluster"
        return doctor(lookup.evaluate(self._shell, words, kind))


def _stop_args(parser: Parser) -> None:
    _name_args(parser)
    parser.add_argument("--all", action="store_true", help="stop every cluster of this kernel")


def _stop(options: argparse.Namespace) -> None:
    if options.all and options.name:
        raise UsageError("stop one cluster or all?", fix="leave out the name or --all")
    chosen = (
        list(lookup.running_clusters().values()) if options.all else [lookup.pick(options.name)]
    )
    for cluster in chosen:
        cluster.stop()
        say(f"cluster {cluster.name!r} is {cluster.state}")


def _launchers(options: argparse.Namespace) -> views.Table:
    return launchers_table()
