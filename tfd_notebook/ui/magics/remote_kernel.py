"""``%tfd_kernel`` and ``%%tfd_kernel``: a remote kernel, and a cell that runs in it."""

from __future__ import annotations

import argparse
from typing import Any

from tfd_notebook.errors import UsageError
from tfd_notebook.ui.magics import lookup


class KernelMagic(lookup.ShellCommands):
    """``%tfd_kernel`` in a shell, or ``%%tfd_kernel`` over a cell."""

    def kernel(self, options: argparse.Namespace) -> Any:
        # Import time: help and completion do not need NumPy and grpc.
        from tfd_notebook.remote_kernel import RemoteKernel

        kernel = lookup.evaluate(self._shell, options.kernel, "a tfd.RemoteKernel")
        if not isinstance(kernel, RemoteKernel):
            raise UsageError(
                f"invalid kernel {options.kernel}: expected a tfd.RemoteKernel, "
                f"got {type(kernel).__name__}",
                fix='kernel = tfd.RemoteKernel("https://host:8888/?token=...")',
            )
        if self._cell is None:
            return kernel
        kernel.run(self._cell, options.timeout, plain=options.plain)
        return None
