"""The stepper: ``%tfd_pause``, ``resume``, ``step``, ``join``, ``cancel`` and ``values``."""

from __future__ import annotations

import argparse
from typing import Any

from tfd_notebook import views
from tfd_notebook.ui.magics import lookup
from tfd_notebook.ui.magics.lookup import report


class StepperMagic(lookup.ShellCommands):
    """The magics that control a coordinator."""

    def pause(self, options: argparse.Namespace, command: str = "pause") -> None:
        coordinator = lookup.pick_coordinator(options.name)
        getattr(coordinator, command)()
        counts = views.counted(coordinator.values.counts())
        report(f"{command}d: {counts or 'nothing is queued'}")

    def resume(self, options: argparse.Namespace) -> None:
        self.pause(options, "resume")

    def step(self, options: argparse.Namespace) -> None:
        coordinator = lookup.pick_coordinator(options.name)
        ended = coordinator.step(1 if options.count is None else options.count)
        counts = views.counted(coordinator.values.counts())
        report(f"{ended} closure{'s' * (ended != 1)} ended: {counts}")

    def join(self, options: argparse.Namespace) -> Any:
        if options.background:
            own = lookup.pick_own(lookup.pick_coordinated(options.name).name)
            return own.current_coordinator().join_in_background(options.timeout)
        coordinator = lookup.pick_coordinator(options.name)
        coordinator.join(options.timeout)
        report(f"all closures ended: {views.counted(coordinator.values.counts()) or 'no closures'}")
        return None

    def cancel(self, options: argparse.Namespace) -> None:
        cancelled = lookup.pick_coordinator(options.name).cancel(options.id)
        report(f"closure {options.id} " + ("is cancelled" if cancelled else "had already ended"))

    def values(self, options: argparse.Namespace) -> views.Table:
        closures = lookup.pick_coordinator(options.name).values
        return closures.table(options.rows, options.state, options.worker)
