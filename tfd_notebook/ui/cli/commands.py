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
from tfd_notebook.model.resolution import as_json
from tfd_notebook.resolution import resolve
from tfd_notebook.resolution.resolution import check_seconds
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
from tfd_notebook.ui.cli import doctor
from tfd_notebook.ui.cli import targets as places
from tfd_notebook.ui.cli.screen import Screen
from tfd_notebook.ui.magics import resolve as resolving
from tfd_notebook.ui.magics.stepper import number_and_name

_STOP_SECONDS = 60.0
_FOLLOW_SECONDS = 0.5
#: Seconds for which a watcher that was not heard of is still taken for present.
_HOLD_SECONDS = 5.0


def command_line() -> CommandLine:
    """Return the subcommands of ``tfd``."""
    commands = (
        Command("demo", "train on a small cluster in this terminal", _demo),
        Command("start", "start a cluster and hold it until Ctrl-C", _start, _start_args),
        Command("list", "the clusters of this user", _list, _json_args),
        Command("stop", "stop a cluster", _stop, places.add_arguments),
        Command("detach", "let a cluster outlive its process", _lasting("detach"), _detach_args),
        Command("renew", "have a detached cluster stay longer", _lasting("renew"), _detach_args),
        Command("logs", "what the tasks of a cluster wrote", _logs, _logs_args),
        Command("watch", "follow a cluster", _watch, _watch_args),
        Command("pause", "give no closure to any worker", _pause, places.add_arguments),
        Command("resume", "let a paused coordinator go on", _resume, places.add_arguments),
        Command("step", "let the next closures run while paused", _step, _step_args),
        Command("cancel", "cancel a closure that is queued or runs", _cancel, _cancel_args),
        Command("launchers", "list the available launchers", _launchers, _json_args),
        Command("resolve", "find a cluster and look at its tasks", _resolve, _resolve_args),
        Command("doctor", "what is wrong, or will be", doctor.run, doctor.arguments),
        Command("why", "what a code means", doctor.why, doctor.why_arguments),
        Command("support", "write an archive for a ticket", doctor.support, doctor.file_argument),
        Command("sweep", "end what dead kernels left behind", _sweep, _sweep_args),
    )
    return CommandLine(
        "tfd",
        "Clusters of TensorFlow's tasks. list, stop, logs, watch and what steers a coordinator "
        "act on those of running notebooks too, also while a cell runs.",
        commands,
    )


def _demo(options: argparse.Namespace) -> int:
    from tfd_notebook.ui.cli import demo

    return int(demo.main() or 0)


# A cluster of our own


def _start_args(parser: Parser) -> None:
    add_start_options(parser)
    parser.add_argument(
        "--port", type=int, default=0, metavar="P", help="of the dispatcher (default: a free one)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--foreground", action="store_true", help="hold it until Ctrl-C or SIGTERM (the default)"
    )
    add_detach_option(how)


def _start(options: argparse.Namespace) -> int:
    if options.detach is not None:
        cluster = make_cluster(options, options.port)
        until = time.ctime(cluster.snapshot().lease)
        print(f"cluster {cluster.name!r} is {cluster.state} and stays until {until}")
        print(f'tfd.attach("{cluster.name}") in a notebook takes it up, tfd stop ends it')
        return 0
    with make_cluster(options, options.port) as cluster, Screen() as screen:
        while not cluster.ended and not screen.leaving:
            snapshot = cluster.snapshot()
            screen.show(views.text(snapshot, screen.width), screen.gist(snapshot))
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
    found = attach.everywhere()
    print(json.dumps(found) if options.json else views.clusters_table(found).text(Screen().width))
    return 0


def _launchers(options: argparse.Namespace) -> int:
    table = launchers_table()
    print(json.dumps(table.records()) if options.json else table.text(Screen().width))
    return 0


def _stop(options: argparse.Namespace) -> int:
    place = places.find(options)
    state = place.ask("stop", _STOP_SECONDS)
    print(f"cluster {place.name!r} is {state}")
    return 0


def _detach_args(parser: Parser) -> None:
    places.add_arguments(parser)
    add_hours_option(parser)


def _lasting(command: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        place = places.find(options)
        until = place.ask(command, hours=options.hours)
        print(f"cluster {place.name!r} stays until {time.ctime(until)}")
        return 0

    return run


def _logs_args(parser: Parser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="NAME [TASK]", help="one task (default: all of the cluster)"
    )
    places.add_pid(parser)
    parser.add_argument(
        "-n", "--lines", type=int, default=100, metavar="N", help="lines of each task (default 100)"
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with new lines until Ctrl-C"
    )


def _logs(options: argparse.Namespace) -> int:
    names = [word for word in options.words if ":" not in word]
    tasks = [word for word in options.words if ":" in word]
    if len(names) > 1 or len(tasks) > 1:
        raise UsageError(f"{' '.join(options.words)!r} names too much", fix="write NAME TASK")
    if options.follow and not tasks:
        raise UsageError("--follow needs a task", fix="add one, such as data_worker:0")
    options.name = names[0] if names else None
    place = places.find(options)
    request: dict[str, Any] = {"lines": options.lines, "task": tasks[0] if tasks else None}
    while True:
        try:
            said = place.ask("logs", **request)
        except (UnknownName, StateError):
            if request.get("offset") is None:
                raise
            return 0  # the cluster ended while it was followed
        if said["text"]:
            # Tasks write what they like; a file gets it as it is.
            to_terminal = sys.stdout.isatty()
            print(views.clean_lines(said["text"]) if to_terminal else said["text"], flush=True)
        if not options.follow:
            return 0
        if request.get("offset") == said["offset"]:
            time.sleep(_FOLLOW_SECONDS)
        request["offset"] = said["offset"]


def _watch_args(parser: Parser) -> None:
    places.add_arguments(parser)
    _json_args(parser)
    parser.add_argument("--once", action="store_true", help="show it once")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default 1)"
    )


def _watch(options: argparse.Namespace) -> int:
    if not 0.1 <= options.interval <= 3600:
        raise UsageError(f"--interval {options.interval:g} is out of range", fix="use 0.1 to 3600")
    place = places.find(options)
    with Screen(redraw=not (options.json or options.once)) as screen:
        while not screen.leaving:
            request: dict[str, Any] = {"width": screen.width}
            if not options.once:
                # Whoever watches can resume: a join may wait for that.
                request["hold"] = math.ceil(2 * options.interval + _HOLD_SECONDS)
            try:
                seen = place.ask("snapshot", **request)
            except UnknownName:
                print(f"cluster {place.name!r} has ended")
                return 0
            if options.json:
                print(json.dumps(seen["snapshot"]), flush=True)
            else:
                screen.show(seen["text"], screen.gist(seen["snapshot"]))
            if options.once:
                return 0
            screen.wait(options.interval)
    return 0


# Their coordinators


def _pause(options: argparse.Namespace) -> int:
    place = places.find(options)
    counts = place.ask("pause")
    print(f"cluster {place.name!r} is paused: {views.counted(counts) or 'nothing is queued'}")
    return 0


def _resume(options: argparse.Namespace) -> int:
    place = places.find(options)
    counts = place.ask("resume")
    print(f"cluster {place.name!r} goes on: {views.counted(counts) or 'nothing is queued'}")
    return 0


def _words_args(parser: Parser, metavar: str, words: str) -> None:
    parser.add_argument("words", nargs="*", metavar=metavar, help=words)
    places.add_pid(parser)


def _step_args(parser: Parser) -> None:
    _words_args(parser, "[NAME] [N]", "which cluster; how many closures (default 1)")


def _step(options: argparse.Namespace) -> int:
    count, options.name = number_and_name(options.words, "[NAME] [N]")
    said = places.find(options).ask("step", count=1 if count is None else count)
    print(f"{said['ended']} ended: {views.counted(said['counts'])}")
    return 0


def _cancel_args(parser: Parser) -> None:
    _words_args(parser, "[NAME] ID", "which cluster; which closure, as tfd watch shows it")


def _cancel(options: argparse.Namespace) -> int:
    key, options.name = number_and_name(options.words, "[NAME] ID")
    if key is None:
        raise UsageError("which closure?", fix="add its id, as tfd watch and %tfd_values show it")
    cancelled = places.find(options).ask("cancel", id=key)
    print(f"closure {key} " + ("is cancelled" if cancelled else "had ended before"))
    return 0


# Clusters that somebody else runs


def _resolve_args(parser: Parser) -> None:
    resolving.add_options(parser)
    _json_args(parser)


def _resolve(options: argparse.Namespace) -> int:
    found = resolve(options.resolver, **read_options(options.set))
    if options.watch is None:
        look = found.last
        told = json.dumps(as_json(look))
        print(told if options.json else views.look_text(look, Screen().width))
        return 0
    check_seconds(options.watch)
    end = time.monotonic() + options.watch
    with Screen(redraw=not options.json) as screen, contextlib.closing(found):
        gist = None
        while not screen.leaving:
            look, before = found.glance(), gist
            gist = views.look_gist(look)
            if not options.json:
                screen.show(views.look_text(look, screen.width), gist)
            elif gist != before:
                print(json.dumps(as_json(look)), flush=True)
            if (left := end - time.monotonic()) <= 0:
                break
            screen.wait(min(1.0, left))
    return 0


def _sweep_args(parser: Parser) -> None:
    _json_args(parser)
    parser.add_argument("--dry-run", action="store_true", help="only look")


def _sweep(options: argparse.Namespace) -> int:
    from tfd_notebook.launchers.client.orphans import sweep

    left = sweep(dry_run=options.dry_run)
    rows = [
        (
            views.Cell("directory" if one.pid is None else f"process {one.pid}"),
            views.Cell(one.what),
        )
        for one in left
    ]
    records = [{"agent": one.agent, "pid": one.pid, "what": one.what} for one in left]
    if options.json:
        print(json.dumps(records))
        return 0
    table = views.Table(
        (
            views.Column("would end" if options.dry_run else "ended"),
            views.Column("what", note=True),
        ),
        rows,
        label="leftovers",
        empty="nothing was left behind",
        records=records,
    )
    print(table.text(Screen().width))
    return 0
