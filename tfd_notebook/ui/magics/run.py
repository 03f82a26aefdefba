"""``%tfd_run`` and ``%%tfd_run``: functions that run next to all training workers."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from tfd_notebook.ui.magics import lookup
from tfd_notebook.ui.magics.schedule import called
from tfd_notebook.ui.widgets import has_front_end
from tfd_notebook.ui.widgets.rank_output import RankOutput


class RunMagic(lookup.ShellCommands):
    """``%tfd_run`` in a shell, or ``%%tfd_run`` over a cell."""

    def run(self, options: argparse.Namespace) -> list[Any]:
        function, args = called(self._shell, self._cell, options, "a function")
        cluster = lookup.pick_own(options.cluster)
        folded = options.fold and has_front_end()
        with RankOutput() if folded else contextlib.nullcontext() as output:
            return cluster.run(function, *args, timeout=options.timeout, output=output)
