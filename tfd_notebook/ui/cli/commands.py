"""The subcommands of ``tfd``."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from tfd_notebook import views
from tfd_notebook.cluster import attach
from tfd_notebook.errors import StateError, UnknownName, UsageError
from tfd_notebook.launchers.client.orphans import Orphan, sweep
from tfd_notebook.model.resolution import as_json
from tfd_notebook.model.spec import check_seconds
from tfd_notebook.resolution import resolve
from tfd_notebook.resolution.service import read_options
from tfd_notebook.ui.argparsing import (
    Command,
    CommandLine,
    Parser,
    add_detach_option,
    add_hours_option,
    add_start_options,
    launchers_table,
    make_cluster,
)
from tfd_notebook.ui.cli import demo, doctor, targets
from tfd_notebook.ui.cli.screen import Screen
from tfd_notebook.ui.magics import resolve as resolve_magic
from tfd_notebook.ui.magics.stepper import number_and_name

_STOP_SECONDS = 60.0
_FOLLOW_SECONDS = 0.5
#: Seconds for which a watcher still counts as present after its last request.
_HOLD_SECONDS = 5.0


def command_line() -> CommandLine:
    """Return the subcommands of ``tfd``."""
    commands = (
        Command("demo", "train on a small cluster in this terminal", _demo),
        Command(
            "start",
            "start a cluster and run it until Ctrl-C",
            _start,
            _start_args,
            example="--data-workers 2",
        ),
        Command("list", "list your clusters", _list, _json_args, example="--json"),
        Command("stop", "stop a cluster", _stop, targets.add_arguments, example="images"),
        Command(
            "detach",
            "keep a cluster running after its process ends",
            _lease_command("detach"),
            _detach_args,
            example="images --hours 12",
        ),
        Command(
            "renew",
            "extend the time of a detached cluster",
            _lease_command("renew"),
            _detach_args,
            example="images --hours 12",
        ),
        Command(
            "logs",
            "show the output of a cluster's tasks",
            _logs,
            _logs_args,
            example="images data_worker:0 --follow",
        ),
        Command("watch", "follow a cluster", _watch, _watch_args, example="images --interval 5"),
        Command(
            "pause",
            "hold queued closures back",
            _pause,
            targets.add_arguments,
            example="training",
        ),
        Command(
            "resume",
            "resume a paused coordinator",
            _resume,
            targets.add_arguments,
            example="training",
        ),
        Command(
            "step", "run the next closures while paused", _step, _step_args, example="training 3"
        ),
        Command(
            "cancel",
            "cancel a queued or running closure",
            _cancel,
            _cancel_args,
            example="training 17",
        ),
        Command(
            "launchers", "list the available launchers", _launchers, _json_args, example="--json"
        ),
        Command(
            "resolve",
            "find a cluster and show its tasks",
            _resolve,
            _resolve_args,
            example="slurm --set job=1234 --watch 60",
        ),
        Command("doctor", "diagnose problems", doctor.run, doctor.arguments, example="images"),
        Command("why", "explain a code", doctor.why, doctor.why_arguments, example="TFD811"),
        Command(
            "support",
            "write an archive for a support ticket",
            doctor.support,
            doctor.file_argument,
            example="ticket.tar.gz",
        ),
        Command(
            "sweep",
            "end orphaned processes",
            _sweep,
            _sweep_args,
            example="--dry-run",
        ),
    )
    return CommandLine(
        "tfd",
        "Start, watch and control TensorFlow clusters. The commands also apply to the clusters of "
        "running notebooks, even while a cell runs.",
        commands,
    )


def _demo(options: argparse.Namespace) -> int:
    return int(demo.main() or 0)


# A cluster of this process


def _start_args(parser: Parser) -> None:
    add_start_options(parser)
    parser.add_argument(
        "--port", type=int, default=0, metavar="P", help="port of the dispatcher (default: free)"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--foreground", action="store_true", help="run it until Ctrl-C or SIGTERM (the default)"
    )
    add_detach_option(mode)


def _start(options: argparse.Namespace) -> int:
    if options.detach is not None:
        cluster = make_cluster(options, options.port)
        until = time.ctime(cluster.snapshot().lease)
        print(f"cluster {cluster.name!r} is {cluster.state} and detached until {until}")
        print(f'attach to it with tfd.attach("{cluster.name}"), or stop it with tfd stop')
        return 0
    with make_cluster(options, options.port) as cluster, Screen() as screen:
        while not cluster.ended and not screen.leaving:
            snapshot = cluster.snapshot()
            screen.show(views.text(snapshot, screen.width), screen.change_key(snapshot))
            screen.wait(1.0)
    ended = cluster.snapshot()
    if ended.state in ("failed", "lost"):
        raise StateError(f"cluster {ended.name!r} {ended.state}", fix="see the notices above")
    print(f"cluster {ended.name!r} stopped")
    return 0


# Clusters of any process of this user


def _json_args(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _list(options: argparse.Namespace) -> int:
    records = attach.all_clusters()
    table = views.clusters_table(records)
    print(json.dumps(records) if options.json else table.text(Screen().width))
    return 0


def _launchers(options: argparse.Namespace) -> int:
    table = launchers_table()
    print(json.dumps(table.records()) if options.json else table.text(Screen().width))
    return 0


def _stop(options: argparse.Namespace) -> int:
    target = targets.find(options)
    state = target.call("stop", _STOP_SECONDS)
    print(f"cluster {target.name!r} is {state}")
    return 0


def _detach_args(parser: Parser) -> None:
    targets.add_arguments(parser)
    add_hours_option(parser)


def _lease_command(command: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        target = targets.find(options)
        until = target.call(command, hours=options.hours)
        print(f"cluster {target.name!r} is detached until {time.ctime(until)}")
        return 0

    return run


def _logs_args(parser: Parser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="NAME [TASK]", help="name and task (default: all tasks)"
    )
    targets.add_pid(parser)
    parser.add_argument(
        "-n", "--lines", type=int, default=100, metavar="N", help="lines per task (default: 100)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="show new lines until Ctrl-C")


def _logs(options: argparse.Namespace) -> int:
    names = [word for word in options.words if ":" not in word]
    tasks = [word for word in options.words if ":" in word]
    if len(names) > 1 or len(tasks) > 1:
        raise UsageError(
            f"invalid arguments {' '.join(options.words)!r}: expected one cluster and one task",
            fix="write NAME TASK",
        )
    if options.follow and not tasks:
        raise UsageError("--follow needs a task", fix="add one, such as data_worker:0")
    options.name = names[0] if names else None
    target = targets.find(options)
    request: dict[str, Any] = {"lines": options.lines, "task": tasks[0] if tasks else None}
    while True:
        try:
            log = target.call("logs", **request)
        except (UnknownName, StateError):
            if request.get("offset") is None:
                raise
            return 0  # the cluster ended while it was followed
        if log["text"]:
            # A task can write control sequences of the terminal. A file gets the text unchanged.
            to_terminal = sys.stdout.isatty()
            print(views.clean_lines(log["text"]) if to_terminal else log["text"], flush=True)
        if not options.follow:
            return 0
        if request.get("offset") == log["offset"]:
            time.sleep(_FOLLOW_SECONDS)
        request["offset"] = log["offset"]


def _watch_args(parser: Parser) -> None:
    targets.add_arguments(parser)
    _json_args(parser)
    parser.add_argument("--once", action="store_true", help="show the current state and exit")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between updates (default: 1)",
    )


def _watch(options: argparse.Namespace) -> int:
    if not 0.1 <= options.interval <= 3600:
        raise UsageError(f"invalid --interval {options.interval:g}: expected 0.1 to 3600")
    target = targets.find(options)
    with Screen(redraw=not (options.json or options.once)) as screen:
        while not screen.leaving:
            request: dict[str, Any] = {"width": screen.width}
            if not options.once:
                # A user who watches can resume a coordinator, so a join waits for that.
                request["hold"] = math.ceil(2 * options.interval + _HOLD_SECONDS)
            try:
                answer = target.call("snapshot", **request)
            except UnknownName:
                print(f"cluster {target.name!r} has ended")
                return 0
            if options.json:
                print(json.dumps(answer["snapshot"]), flush=True)
            else:
                screen.show(answer["text"], screen.change_key(answer["snapshot"]))
            if options.once:
                return 0
            screen.wait(options.interval)
    return 0


# Coordinators of these clusters


def _pause(options: argparse.Namespace) -> int:
    target = targets.find(options)
    counts = target.call("pause")
    print(f"cluster {target.name!r} is paused: {views.counted(counts) or 'nothing is queued'}")
    return 0


def _resume(options: argparse.Namespace) -> int:
    target = targets.find(options)
    counts = target.call("resume")
    print(f"cluster {target.name!r} is resumed: {views.counted(counts) or 'nothing is queued'}")
    return 0


def _words_args(parser: Parser, metavar: str, words: str) -> None:
    parser.add_argument("words", nargs="*", metavar=metavar, help=words)
    targets.add_pid(parser)


def _step_args(parser: Parser) -> None:
    _words_args(parser, "[NAME] [N]", "name of the cluster; number of closures (default: 1)")


def _step(options: argparse.Namespace) -> int:
    count, options.name = number_and_name(options.words, "[NAME] [N]")
    answer = targets.find(options).call("step", count=1 if count is None else count)
    noun = "closure" if answer["ended"] == 1 else "closures"
    print(f"{answer['ended']} {noun} ended: {views.counted(answer['counts'])}")
    return 0


def _cancel_args(parser: Parser) -> None:
    _words_args(parser, "[NAME] ID", "name of the cluster; id of the closure from tfd watch")


def _cancel(options: argparse.Namespace) -> int:
    key, options.name = number_and_name(options.words, "[NAME] ID")
    if key is None:
        raise UsageError("no closure named", fix="add its id: tfd watch and %tfd_values show it")
    cancelled = targets.find(options).call("cancel", id=key)
    print(f"closure {key} " + ("is cancelled" if cancelled else "had already ended"))
    return 0


# External clusters


def _resolve_args(parser: Parser) -> None:
    resolve_magic.add_options(parser)
    _json_args(parser)


def _resolve(options: argparse.Namespace) -> int:
    resolution = resolve(options.resolver, **read_options(options.set))
    if options.watch is None:
        snapshot = resolution.last
        if options.json:
            print(json.dumps(as_json(snapshot)))
        else:
            print(views.resolution_text(snapshot, Screen().width))
        return 0
    check_seconds("seconds", options.watch)
    end = time.monotonic() + options.watch
    with Screen(redraw=not options.json) as screen, contextlib.closing(resolution):
        key = None
        while not screen.leaving:
            snapshot, previous_key = resolution.probe(raises=False), key
            key = views.resolution_change_key(snapshot)
            if not options.json:
                screen.show(views.resolution_text(snapshot, screen.width), key)
            elif key != previous_key:
                print(json.dumps(as_json(snapshot)), flush=True)
            if (left := end - time.monotonic()) <= 0:
                break
            screen.wait(min(1.0, left))
    return 0


def _sweep_args(parser: Parser) -> None:
    _json_args(parser)
    parser.add_argument("--dry-run", action="store_true", help="list them, but end nothing")


def _orphan(orphan: Orphan) -> str:
    return "directory" if orphan.pid is None else f"process {orphan.pid}"


def _sweep(options: argparse.Namespace) -> int:
    orphans = sweep(dry_run=options.dry_run)
    records = [
        {"agent": orphan.agent, "pid": orphan.pid, "what": orphan.what} for orphan in orphans
    ]
    if options.json:
        print(json.dumps(records))
        return 0
    table = views.Table(
        (
            views.Column("would end" if options.dry_run else "ended", _orphan),
            views.Column("what", note=True),
        ),
        orphans,
        label="orphans",
        empty="no orphans",
        records=records,
    )
    print(table.text(Screen().width))
    return 0
