"""The subcommands of ``tfd``."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from tfd_notebook import views
from tfd_notebook.cluster import attach
from tfd_notebook.errors import StateError, TfdError, UnknownName, UsageError
from tfd_notebook.launchers.client.orphans import Orphan, sweep
from tfd_notebook.model.resolution import as_json
from tfd_notebook.model.spec import check_seconds
from tfd_notebook.resolvers.forms import read_options
from tfd_notebook.resolvers.resolution import resolve
from tfd_notebook.ui.argparsing import adaptation_range, launchers_table, make_cluster
from tfd_notebook.ui.cli import demo, lab, targets
from tfd_notebook.ui.cli.doctor import DoctorCommands
from tfd_notebook.ui.cli.screen import Screen

_STOP_SECONDS = 60.0
_STACKS_SECONDS = 30.0
_FOLLOW_SECONDS = 0.5
#: Seconds for which a watcher still counts as present after its last request.
_HOLD_SECONDS = 5.0


class Tfd(DoctorCommands):
    """The subcommands of ``tfd``. Each prints its result, and returns an exit status or None."""

    def demo(self, options: argparse.Namespace) -> int:
        return int(demo.main() or 0)

    def lab(self, options: argparse.Namespace) -> None:
        lab.require_lab()
        directory = Path(options.directory).expanduser().absolute()
        copied, kept = lab.copy_tutorials(directory)
        print(f"{copied} tutorials copied to {directory}")
        if kept:
            print(f"kept, because they differ from the tutorials: {', '.join(kept)}")
        lab.run_lab(directory, not options.no_browser, options.port)

    # A cluster of this process

    def start(self, options: argparse.Namespace) -> None:
        if options.detach is not None:
            cluster = make_cluster(options)
            until = time.ctime(cluster.snapshot().lease)
            print(f"cluster {cluster.name!r} is {cluster.state} and detached until {until}")
            print(f'attach to it with tfd.attach("{cluster.name}"), or stop it with tfd stop')
            return
        with make_cluster(options) as cluster, Screen() as screen:
            while not cluster.ended and not screen.leaving:
                snapshot = cluster.snapshot()
                screen.show(views.text(snapshot, screen.width), screen.change_key(snapshot))
                screen.wait(1.0)
        ended = cluster.snapshot()
        if ended.state in ("failed", "lost"):
            raise StateError(f"cluster {ended.name!r} {ended.state}", fix="see the notices above")
        print(f"cluster {ended.name!r} stopped")

    # Clusters of any process of this user

    def list(self, options: argparse.Namespace) -> int:
        unanswered: builtins.list[TfdError] = []
        records = attach.all_clusters(unanswered)
        _print_table(options, views.clusters_table(records), records)
        for error in unanswered:
            print(f"tfd: {error}", file=sys.stderr)
        return 1 if unanswered else 0

    def launchers(self, options: argparse.Namespace) -> None:
        table = launchers_table()
        _print_table(options, table, table.records())

    def stop(self, options: argparse.Namespace) -> None:
        target = targets.find(options)
        print(f"cluster {target.name!r} is {target.call('stop', _STOP_SECONDS)}")

    def adapt(self, options: argparse.Namespace) -> None:
        minimum, maximum = adaptation_range(options)
        target = targets.find(options)
        if target.pid is None:
            raise StateError(
                f"cluster {target.name!r} is detached, and no process reads from it",
                fix=f"attach to it where the data is read: tfd.attach({target.name!r})",
            )
        target.call("adapt", minimum=minimum, maximum=maximum)
        to = "stays" if minimum is None else f"adapts from {minimum} to {maximum}"
        print(f"cluster {target.name!r}: the number of data workers {to}")

    def detach(self, options: argparse.Namespace, command: str = "detach") -> None:
        target = targets.find(options)
        until = target.call(command, hours=options.hours)
        print(f"cluster {target.name!r} is detached until {time.ctime(until)}")

    def renew(self, options: argparse.Namespace) -> None:
        self.detach(options, "renew")

    def logs(self, options: argparse.Namespace) -> None:
        if options.follow and options.task is None:
            raise UsageError("--follow needs a task", fix="add one, such as data_worker:0")
        target = targets.find(options)
        request: dict[str, Any] = {"lines": options.lines, "task": options.task}
        while True:
            try:
                log = target.call("logs", **request)
            except (UnknownName, StateError):
                if request.get("offset") is None:
                    raise
                return  # the cluster ended while it was followed
            if log["text"]:
                # A task can write control sequences of the terminal. A file gets the text
                # unchanged.
                to_terminal = sys.stdout.isatty()
                print(views.clean_lines(log["text"]) if to_terminal else log["text"], flush=True)
            if not options.follow:
                return
            if request.get("offset") == log["offset"]:
                time.sleep(_FOLLOW_SECONDS)
            request["offset"] = log["offset"]

    def stacks(self, options: argparse.Namespace) -> None:
        records = targets.find(options).call("stacks", _STACKS_SECONDS, task=options.task)
        _print_table(options, views.stacks_table(records), records)

    def watch(self, options: argparse.Namespace) -> None:
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
                    return
                if options.json:
                    print(json.dumps(answer["snapshot"]), flush=True)
                else:
                    screen.show(answer["text"], screen.change_key(answer["snapshot"]))
                if options.once:
                    return
                screen.wait(options.interval)

    def attach(self, options: argparse.Namespace) -> None:
        target = targets.find(options)
        if options.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            answer = target.call("snapshot", width=Screen().width)
            print(json.dumps(answer["snapshot"]) if options.json else answer["text"])
        elif target.pid is None:
            lab.interact(target.name, target.agent)
        else:
            # Only the process that holds a cluster can run code with it.
            watched = {"name": target.name, "pid": target.pid, "json": False}
            self.watch(argparse.Namespace(**watched, once=False, interval=1.0))

    # Coordinators of these clusters

    def pause(self, options: argparse.Namespace, command: str = "pause") -> None:
        target = targets.find(options)
        counts = views.counted(target.call(command)) or "nothing is queued"
        print(f"cluster {target.name!r} is {command}d: {counts}")

    def resume(self, options: argparse.Namespace) -> None:
        self.pause(options, "resume")

    def step(self, options: argparse.Namespace) -> None:
        count = 1 if options.count is None else options.count
        answer = targets.find(options).call("step", count=count)
        counts = views.counted(answer["counts"])
        print(f"{answer['ended']} closure{'s' * (answer['ended'] != 1)} ended: {counts}")

    def cancel(self, options: argparse.Namespace) -> None:
        if options.id is None:
            fix = "add its id: tfd watch and %tfd_values show it"
            raise UsageError("no closure named", fix=fix)
        cancelled = targets.find(options).call("cancel", id=options.id)
        print(f"closure {options.id} " + ("is cancelled" if cancelled else "had already ended"))

    # External clusters

    def resolve(self, options: argparse.Namespace) -> None:
        resolution = resolve(options.resolver, **read_options(options.set))
        if options.watch is None:
            snapshot = resolution.last
            if options.json:
                print(json.dumps(as_json(snapshot)))
            else:
                print(views.resolution_text(snapshot, Screen().width))
            return
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

    def sweep(self, options: argparse.Namespace) -> None:
        orphans = sweep(dry_run=options.dry_run)
        records = [
            {"agent": orphan.agent, "pid": orphan.pid, "what": orphan.what} for orphan in orphans
        ]
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
        _print_table(options, table, records)


def _orphan(orphan: Orphan) -> str:
    return "directory" if orphan.pid is None else f"process {orphan.pid}"


def _print_table(options: argparse.Namespace, table: views.Table, records: Any) -> None:
    print(json.dumps(records) if options.json else table.text(Screen().width))
