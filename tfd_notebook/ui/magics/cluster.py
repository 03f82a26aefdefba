"""``%tfd_cluster``: start, inspect and stop clusters."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from tfd_notebook import views
from tfd_notebook.cluster import attach, data_service, registry
from tfd_notebook.diagnosis import doctor
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
from tfd_notebook.ui.widgets import VIEWS, StartForm, live

#: Matches host:port, grpc://host:port and [::1]:port.
_ADDRESS = re.compile(r"(?:grpc://)?(?:\[[^\]]+\]|[\w.-]+):\d+")


def command_line(shell: Any) -> CommandLine:
    """Return the subcommands of ``%tfd_cluster`` for `shell`."""
    commands = (
        Command(
            "start",
            "start a cluster, or reuse the running one",
            _Start(shell),
            start_form.add_options,
            example="--data-workers 2",
        ),
        Command("list", "list the clusters of all your kernels, and detached ones", _list),
        Command(
            "status",
            "show the tasks, streams and notices of a cluster",
            _status,
            _status_args,
            example="images --live",
        ),
        Command(
            "scale",
            "change the number of tasks",
            _scale,
            _scale_args,
            example="images --data-workers 4",
        ),
        Command(
            "jobs",
            "show the data jobs of a cluster and their passes",
            _jobs,
            _name_args,
            example="images",
        ),
        Command(
            "what-if",
            "estimate the rate with more data workers",
            _what_if,
            _what_if_args,
            example="--data-workers 4 8",
        ),
        Command(
            "logs",
            "show the output of tasks",
            _logs,
            _logs_args,
            example="data_worker:0 --lines 50",
        ),
        Command(
            "restart",
            "replace the process of a task",
            _restart,
            _task_args,
            example="data_worker:0",
        ),
        Command(
            "kill",
            "kill the process of a task, to simulate a crash",
            _kill,
            _task_args,
            example="data_worker:0",
        ),
        Command(
            "interrupt",
            "cancel every read from a cluster",
            _interrupt,
            _name_args,
            example="images",
        ),
        Command(
            "recover",
            "restore training after losing a parameter server",
            _Recover(shell),
            _recover_args,
            example="--checkpoint checkpoints --build build",
        ),
        Command(
            "attach",
            "attach to a detached cluster",
            _Attach(shell),
            _attach_args,
            example="images",
        ),
        Command(
            "detach",
            "keep a cluster running after this kernel ends",
            _lease_command("detach"),
            _lease_args,
            example="images --hours 12",
        ),
        Command(
            "renew",
            "extend the time of a detached cluster",
            _lease_command("renew"),
            _lease_args,
            example="images --hours 12",
        ),
        Command("doctor", "diagnose problems", _Doctor(shell), _doctor_args, example="images"),
        Command("stop", "stop a cluster and all its tasks", _stop, _stop_args, example="images"),
        Command("launchers", "list the available launchers", _launchers, aliases=("kinds",)),
    )
    return _ClusterLine(shell, commands)


class _ClusterLine(CommandLine):
    """Subcommands of ``%tfd_cluster``. Without one, a form that starts a cluster."""

    def __init__(self, shell: Any, commands: Iterable[Command]) -> None:
        super().__init__("%tfd_cluster", "Start, inspect and stop clusters.", commands)
        self._shell = shell

    def run(self, tokens: Any) -> Any:
        if tokens:
            return super().run(tokens)

        hint = "%tfd_cluster start --data-workers 2  starts a cluster, %tfd_cluster? shows the help"
        table = _list(argparse.Namespace())
        fallback = {
            "text/plain": f"{hint}\n{table.text()}",
            "text/html": f"<p><code>{hint}</code></p>{table.html()}",
        }
        return StartForm(lambda: start_form.commands(self._shell), fallback)


def report(text: str) -> None:
    """Print a message as output of the cell."""
    print(text)  # noqa: T201


class _Start:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        started = start_form.start(self._shell, options)
        cluster = started.cluster
        report(started.message)
        if (
            Role.DISPATCHER in cluster.snapshot().observed
            and not data_service.of(cluster).data_workers()
        ):
            report("the cluster has no data worker yet: %tfd_cluster scale --data-workers 2")
        return cluster


def _list(options: argparse.Namespace) -> views.Table:
    return views.clusters_table(attach.all_clusters())


def _name_args(parser: Parser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the cluster, if several run"
    )


def _status_args(parser: Parser) -> None:
    _name_args(parser)
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--live", action="store_true", help="show a widget that updates itself")
    view.add_argument(
        "--view",
        choices=VIEWS,
        help=f"show one part of that widget: {', '.join(VIEWS)}",
        metavar="VIEW",
    )
    view.add_argument("--frame", action="store_true", help="return the tasks as a DataFrame")


def _status(options: argparse.Namespace) -> Any:
    cluster = lookup.pick(options.name)
    if options.live or options.view:
        return live(cluster, options.view or "cluster")
    return cluster.to_frame() if options.frame else views.View(cluster.snapshot())


def _scale_args(parser: Parser) -> None:
    _name_args(parser)
    add_scale_options(parser)


def _scale(options: argparse.Namespace) -> views.View:
    counts = requested_counts(options)
    if not counts:
        raise UsageError("no number of tasks given", fix="add --data-workers N or --workers N")
    cluster = lookup.pick(options.name)
    cluster.scale(**counts)
    return views.View(cluster.snapshot())


def _task_args(parser: Parser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="[NAME] TASK", help="cluster and task, such as data_worker:0"
    )


def _jobs(options: argparse.Namespace) -> views.Table:
    return lookup.pick_own(options.name).jobs()


def _what_if_args(parser: Parser) -> None:
    _name_args(parser)
    parser.add_argument(
        "--data-workers",
        type=int,
        nargs="+",
        default=[2, 4, 8],
        metavar="N",
        help="numbers of data workers to estimate for (default: 2 4 8)",
    )


def _what_if(options: argparse.Namespace) -> views.Table:
    return lookup.pick_own(options.name).what_if(*options.data_workers)


def _logs_args(parser: Parser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[NAME] [TASK]",
        help="name and task (default: all tasks)",
    )
    parser.add_argument(
        "-n", "--lines", type=int, default=100, metavar="N", help="lines per task (default: 100)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="show new lines until Ctrl-C")


def _logs(options: argparse.Namespace) -> None:
    if options.lines < 1:
        raise UsageError(
            f"--lines {options.lines} is not a valid number of lines", fix="use 1 or more"
        )
    cluster, task = lookup.pick_task(options.words, need_task=options.follow)
    if not options.follow:
        report(str(cluster.logs(task, options.lines)))
        return
    try:
        for line in lookup.pick_own(cluster.name).logs(task, options.lines, follow=True):
            report(line)
    except KeyboardInterrupt:
        report(f"(stopped following {task})")


def _restart(options: argparse.Namespace) -> views.View:
    cluster, task = lookup.pick_task(options.words, need_task=True)
    assert task is not None
    cluster.restart(task)
    return views.View(cluster.snapshot())


def _kill(options: argparse.Namespace) -> None:
    cluster, task = lookup.pick_task(options.words, need_task=True)
    assert task is not None
    pid = cluster.kill(task)
    report(f"{task} had no process" if pid is None else f"{task} (process {pid}) was killed")


def _interrupt(options: argparse.Namespace) -> None:
    cluster = lookup.pick(options.name)
    cluster.interrupt()
    report(f"cancelled every read from cluster {cluster.name!r}")


def _recover_args(parser: Parser) -> None:
    _name_args(parser)
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="checkpoint, or a directory of which the latest checkpoint is used",
    )
    parser.add_argument(
        "--build",
        dest="function",
        metavar="FUNCTION",
        help="function that builds the model again: takes the coordinator, returns its "
        "tf.train.Checkpoint",
    )


class _Recover:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        cluster = lookup.pick_own(options.name)
        build = options.function
        if build is not None:
            build = lookup.evaluate(self._shell, build, "a function that builds the model")
        coordinator = cluster.recover(options.checkpoint, build)
        report(f"cluster {cluster.name!r} has a new strategy and a new coordinator")
        if options.checkpoint is not None and coordinator.build is None:
            report(f"build the model again, then restore it from {options.checkpoint}")
        return coordinator


class _Attach:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        variable = lookup.check_variable(options.output)
        cluster = attach.attach(options.name or _only_detached())
        bound = lookup.bind(self._shell.user_ns, variable, cluster)
        report(f"attached to cluster {cluster.name!r}; it is in the variable {bound!r}")
        return cluster


def _only_detached() -> str:
    names = sorted({record.name for record in detached.detached()})
    if not names:
        raise UsageError("no clusters are detached", fix="%tfd_cluster list shows all clusters")
    if len(names) > 1:
        raise UsageError(
            f"{len(names)} clusters are detached; name one of them",
            fix=f"add one of these names: {', '.join(names)}",
        )
    return names[0]


def _attach_args(parser: Parser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the cluster, if several are detached"
    )
    start_form.add_output_option(parser)


def _lease_args(parser: Parser) -> None:
    _name_args(parser)
    add_hours_option(parser)


def _lease_command(command: str) -> Callable[[argparse.Namespace], None]:
    def run(options: argparse.Namespace) -> None:
        cluster = lookup.pick_own(options.name)
        until = getattr(cluster, command)(options.hours)
        report(
            f"cluster {cluster.name!r} is detached until {time.ctime(until)}: it keeps running "
            "after this kernel ends"
        )

    return run


def _doctor_args(parser: Parser) -> None:
    parser.add_argument(
        "cluster",
        nargs="*",
        metavar="TARGET",
        help="name of a cluster, HOST:PORT, or a dataset or resolver of the notebook "
        "(default: everything in this kernel)",
    )


class _Doctor:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        target = " ".join(options.cluster)
        if not target:
            return doctor()
        if target in registry.running_clusters() or _ADDRESS.fullmatch(target):
            return doctor(target)
        kind = "a dataset, a resolver or a cluster"
        return doctor(lookup.evaluate(self._shell, target, kind))


def _stop_args(parser: Parser) -> None:
    _name_args(parser)
    parser.add_argument("--all", action="store_true", help="stop every cluster of this kernel")


def _stop(options: argparse.Namespace) -> None:
    if options.all and options.name:
        raise UsageError("NAME and --all are mutually exclusive", fix="omit NAME or --all")
    clusters = (
        list(registry.running_clusters().values()) if options.all else [lookup.pick(options.name)]
    )
    for cluster in clusters:
        cluster.stop()
        report(f"cluster {cluster.name!r} is {cluster.state}")


def _launchers(options: argparse.Namespace) -> views.Table:
    return launchers_table()
