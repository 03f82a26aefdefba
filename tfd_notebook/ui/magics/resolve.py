"""``%tfd_resolve``: the cluster that this notebook belongs to, and the state of its tasks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tfd_notebook import views
from tfd_notebook.cluster.commands import panel_requests
from tfd_notebook.errors import UsageError
from tfd_notebook.resolvers import factory
from tfd_notebook.resolvers.forms import ResolveService, read_options
from tfd_notebook.resolvers.resolution import resolve
from tfd_notebook.ui import cleanup
from tfd_notebook.ui.magics import lookup

#: Shared by all forms of a kernel, so that they share resolutions and their history.
_service = ResolveService()


def close() -> None:
    """Discard the resolutions of forms."""
    _service.close()


class Requests(lookup.ShellCommands):
    """Requests of forms and panels about other clusters."""

    def resolvers(self) -> dict[str, Any]:
        return _service.choices()

    def resolve(self, **request: Any) -> dict[str, Any]:
        return _service.resolve(request)

    def attach(self, variable: str, **request: Any) -> dict[str, Any]:
        """Attach to the cluster of a resolution, and assign it to a variable."""
        lookup.check_variable(variable)
        # cluster.strategy() connects this kernel later, if the user calls it.
        cluster = _service.resolution(request).attach(connect=False)
        bound = lookup.bind(self._shell.user_ns, variable, cluster)
        message = f"attached to cluster {cluster.name!r}; it is in the variable {bound!r}"
        return {"cluster": cluster.name, "variable": bound, "message": message}


class ResolveMagic(lookup.ShellCommands):
    """``%tfd_resolve`` in a shell."""

    def resolve(self, options: argparse.Namespace) -> Any:
        arguments = read_options(options.set)
        if options.live:
            if options.watch is not None:
                raise UsageError("--watch has no effect with --live", fix="leave --watch out")
            return self._form(options.resolver, arguments)
        resolver = options.resolver
        if resolver not in factory.CHOICES:
            resolver = self._shell.user_ns.get(resolver, resolver)
        resolution = resolve(resolver, **arguments)
        if options.watch is not None:
            _follow(resolution, options.watch)
        return resolution.to_frame() if options.frame else resolution

    def _form(self, resolver: str, arguments: Mapping[str, Any]) -> Any:
        # Import time: panels import this module, and only the magic needs widgets.
        from tfd_notebook.ui.widgets import Form

        def preset(request: Mapping[str, Any]) -> Any:
            return {**_service.choices(), "chosen": resolver, "options": dict(arguments)}

        fallback = resolve(resolver, **arguments)._repr_mimebundle_()
        requests = {**panel_requests(self._shell), "resolvers": preset}
        return Form("resolve", requests, fallback)


def _follow(resolution: Any, seconds: float) -> None:
    """Update one display with each change, for `seconds` or until Ctrl-C."""
    from IPython.display import DisplayHandle

    handle: Any = DisplayHandle()  # type: ignore[no-untyped-call]
    show = handle.display
    try:
        for snapshot in resolution.watch(seconds):
            show(views.resolution_bundle(snapshot), raw=True)
            show = handle.update
    except KeyboardInterrupt:
        pass  # Ctrl-C ends the watch.
    finally:
        resolution.close()
    changed = len(resolution.last.changes)
    # The magic returns the last snapshot, so the display becomes one line.
    line = f"watched; {changed} {'change' if changed == 1 else 'changes'}"
    show({"text/plain": line}, raw=True)


cleanup.on_unload(close)
