"""The stepper: ``%tfd_pause``, ``resume``, ``step``, ``join``, ``cancel`` and ``values``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from tfd_notebook import views
from tfd_notebook.errors import UsageError
from tfd_notebook.ui.argparsing import Command, CommandLine, Parser, SingleCommand
from tfd_notebook.ui.magics import lookup
from tfd_notebook.ui.magics.cluster import report


def pause(shell: Any) -> CommandLine:
    """Return ``%tfd_pause``."""
    summary = "Hold queued closures back. Running closures continue."
    return _line("pause", summary, _control_command("pause", "paused"), _name, "training")


def resume(shell: Any) -> CommandLine:
    """Return ``%tfd_resume``."""
    summary = "Resume a paused coordinator."
    return _line("resume", summary, _control_command("resume", "resumed"), _name, "training")


def step(shell: Any) -> CommandLine:
    """Return ``%tfd_step``."""
    return _line("step", "Run the next closures of a paused coordinator.", _step, _step_args, "3")


def join(shell: Any) -> CommandLine:
    """Return ``%tfd_join``."""
    return _line("join", "Wait until all closures have ended.", _join, _join_args, "--timeout 60")


def cancel(shell: Any) -> CommandLine:
    """Return ``%tfd_cancel``."""
    summary = "Cancel a queued or running closure."
    return SingleCommand(Command("%tfd_cancel", summary, _cancel, _cancel_args, example="17"))


def values(shell: Any) -> CommandLine:
    """Return ``%tfd_values``."""
    summary = "Show the latest closures with their worker, state and times."
    return _line("values", summary, _values, _values_args, "--state failed")


def _line(
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], Any],
    prepare: Callable[[Parser], None],
    example: str,
) -> CommandLine:
    command = Command(f"%tfd_{name}", summary, run, prepare, example=example)
    return SingleCommand(command, bare=True)


def _name(parser: Parser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the cluster, if several run"
    )


def _control_command(method: str, state: str) -> Callable[[argparse.Namespace], None]:
    def run(options: argparse.Namespace) -> None:
        coordinator = lookup.pick_coordinator(options.name)
        getattr(coordinator, method)()
        report(f"{state}: {views.counted(coordinator.values.counts()) or 'nothing is queued'}")

    return run


def _step_args(parser: Parser) -> None:
    parser.add_argument(
        "number",
        nargs="*",
        metavar="[N] [NAME]",
        help="number of closures (default: 1); name of the cluster, if several run",
    )


def number_and_name(words: Sequence[str], usage: str) -> tuple[int | None, str | None]:
    """Return the number and the name of ``[N] [NAME]``, in any order.

    Raises
    ------
    UsageError
        Two numbers or two names are given. The error shows `usage`.
    """
    numbers = [word for word in words if word.removeprefix("-").isdecimal()]
    names = [word for word in words if word not in numbers]
    if len(numbers) > 1 or len(names) > 1:
        raise UsageError(
            f"invalid arguments {' '.join(words)!r}: expected one number and one name",
            fix=f"write {usage}",
        )
    return int(numbers[0]) if numbers else None, names[0] if names else None


def _step(options: argparse.Namespace) -> None:
    count, name = number_and_name(options.number, "[N] [NAME]")
    coordinator = lookup.pick_coordinator(name)
    ended = coordinator.step(1 if count is None else count)
    noun = "closure" if ended == 1 else "closures"
    report(f"{ended} {noun} ended: {views.counted(coordinator.values.counts())}")


def _join_args(parser: Parser) -> None:
    _name(parser)
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="maximum wait in seconds (default: no limit)"
    )
    parser.add_argument(
        "--background",
        action="store_true",
        help="wait in a thread, and return a BackgroundJoin",
    )


def _join(options: argparse.Namespace) -> Any:
    if options.background:
        own = lookup.pick_own(lookup.pick_coordinated(options.name).name)
        return own.current_coordinator().join_in_background(options.timeout)
    coordinator = lookup.pick_coordinator(options.name)
    coordinator.join(options.timeout)
    report(f"all closures ended: {views.counted(coordinator.values.counts()) or 'no closures'}")
    return None


def _cancel_args(parser: Parser) -> None:
    parser.add_argument("id", type=int, metavar="ID", help="id of the closure from %%tfd_values")
    _name(parser)


def _cancel(options: argparse.Namespace) -> None:
    cancelled = lookup.pick_coordinator(options.name).cancel(options.id)
    report(f"closure {options.id} " + ("is cancelled" if cancelled else "had already ended"))


def _values_args(parser: Parser) -> None:
    _name(parser)
    parser.add_argument(
        "--state", metavar="S", help="show only closures in this state, such as queued"
    )
    parser.add_argument("--worker", type=int, metavar="I", help="show only closures of this worker")
    parser.add_argument(
        "--rows", type=int, default=20, metavar="N", help="show the latest N (default: 20)"
    )


def _values(options: argparse.Namespace) -> views.Table:
    closures = lookup.pick_coordinator(options.name).values
    return closures.table(options.rows, options.state, options.worker)
