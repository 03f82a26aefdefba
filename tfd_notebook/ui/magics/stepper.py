"""``%tfd_pause``, ``resume``, ``step``, ``join``, ``cancel``, ``values``: the stepper."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from tfd_notebook import views
from tfd_notebook.errors import UsageError
from tfd_notebook.ui.argparsing import Command, CommandLine, Parser, SingleCommand
from tfd_notebook.ui.magics import lookup
from tfd_notebook.ui.magics.cluster import say


def pause(shell: Any) -> CommandLine:
    """Return ``%tfd_pause``."""
    summary = "Give no closure to any worker; those that run go on."
    return _line("pause", summary, _does("pause", "paused"), _name)


def resume(shell: Any) -> CommandLine:
    """Return ``%tfd_resume``."""
    summary = "Let a paused coordinator go on."
    return _line("resume", summary, _does("resume", "it goes on"), _name)


def step(shell: Any) -> CommandLine:
    """Return ``%tfd_step``."""
    return _line("step", "Let the next closures of a paused coordinator run.", _step, _step_args)


def join(shell: Any) -> CommandLine:
    """Return ``%tfd_join``."""
    return _line("join", "Wait until all closures have ended.", _join, _join_args)


def cancel(shell: Any) -> CommandLine:
    """Return ``%tfd_cancel``."""
    command = Command("%tfd_cancel", "Cancel a closure that is queued or runs.", _cancel, _id)
    return SingleCommand(command)


def values(shell: Any) -> CommandLine:
    """Return ``%tfd_values``."""
    return _line("values", "The latest closures: where each is, what it took.", _values, _which)


def _line(
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], Any],
    prepare: Callable[[Parser], None],
) -> CommandLine:
    return SingleCommand(Command(f"%tfd_{name}", summary, run, prepare), bare=True)


def _name(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="which cluster, where several live")


def _does(verb: str, said: str) -> Callable[[argparse.Namespace], None]:
    def run(options: argparse.Namespace) -> None:
        coordinator = lookup.pick_coordinator(options.name)
        getattr(coordinator, verb)()
        say(f"{said}: {views.counted(coordinator.values.counts()) or 'nothing is queued'}")

    return run


def _step_args(parser: Parser) -> None:
    parser.add_argument(
        "number",
        nargs="*",
        metavar="[N] [NAME]",
        help="how many closures (default 1); which cluster, where several live",
    )


def number_and_name(words: Sequence[str], wanted: str) -> tuple[int | None, str | None]:
    """Read ``[N] [NAME]`` in any order: the number is the word of digits.

    Raises
    ------
    UsageError
        One word is too many.
    """
    numbers = [word for word in words if word.removeprefix("-").isdecimal()]
    names = [word for word in words if word not in numbers]
    if len(numbers) > 1 or len(names) > 1:
        raise UsageError(f"{' '.join(words)!r} says too much", fix=f"write {wanted}")
    return int(numbers[0]) if numbers else None, names[0] if names else None


def _step(options: argparse.Namespace) -> None:
    count, name = number_and_name(options.number, "[N] [NAME]")
    coordinator = lookup.pick_coordinator(name)
    done = coordinator.step(1 if count is None else count)
    say(f"{done} ended: {views.counted(coordinator.values.counts())}")


def _join_args(parser: Parser) -> None:
    _name(parser)
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="seconds to wait at most (default: no limit)"
    )
    parser.add_argument(
        "--background", action="store_true", help="wait in a thread; returns what tells the result"
    )


def _join(options: argparse.Namespace) -> Any:
    coordinator = lookup.pick_coordinator(options.name)
    if options.background:
        return coordinator.join_in_background(options.timeout)
    coordinator.join(options.timeout)
    say(f"all have ended: {views.counted(coordinator.values.counts()) or 'there was none'}")
    return None


def _id(parser: Parser) -> None:
    parser.add_argument("id", type=int, metavar="ID", help="as %%tfd_values shows it")
    _name(parser)


def _cancel(options: argparse.Namespace) -> None:
    cancelled = lookup.pick_coordinator(options.name).cancel(options.id)
    say(f"closure {options.id} " + ("is cancelled" if cancelled else "had ended before"))


def _which(parser: Parser) -> None:
    _name(parser)
    parser.add_argument("--state", metavar="S", help="only those in this state, such as queued")
    parser.add_argument("--worker", type=int, metavar="I", help="only those of this worker")
    parser.add_argument(
        "--rows", type=int, default=20, metavar="N", help="the latest so many (default 20)"
    )


def _values(options: argparse.Namespace) -> views.Table:
    known = lookup.pick_coordinator(options.name).values
    return known.table(options.rows, options.state, options.worker)
