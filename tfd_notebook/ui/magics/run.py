"""``%tfd_run`` and ``%%tfd_run``: functions that run next to all training workers."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from tfd_notebook.ui.magics import lookup
from tfd_notebook.ui.magics.schedule import as_function
from tfd_notebook.ui.widgets import has_front_end
from tfd_notebook.ui.widgets.rank_output import RankOutput


class RunMagic(lookup.ShellCommands):
    """``%tfd_run`` in a shell, or ``%%tfd_run`` over a cell."""

    def run(self, options: argparse.Namespace) -> list[Any]:
        args: Any = ()
        if self._cell is None:
            function = lookup.evaluate(self._shell, options.function, "a function")
            if options.args is not None:
                args = lookup.evaluate(self._shell, " ".join(options.args), "the arguments")
        else:
            name = f"cell_{self._shell.execution_count}"
            function = as_function(self._cell, name, self._shell.user_ns)
        args = args if isinstance(args, tuple) else (args,)
        cluster = lookup.pick_own(options.cluster)
        folded = options.fold and has_front_end()
        with RankOutput() if folded else contextlib.nullcontext() as output:
            return cluster.run(function, *args, timeout=options.timeout, output=output)
