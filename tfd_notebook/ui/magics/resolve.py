"""``%tfd_resolve``: the cluster that this notebook belongs to, and the state of its tasks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook import views
from tfd_notebook.errors import UsageError
from tfd_notebook.model.resolution import ResolutionSnapshot
from tfd_notebook.resolution import factory, resolve
from tfd_notebook.resolution.service import ResolveService, read_options
from tfd_notebook.ui import cleanup
from tfd_notebook.ui.argparsing import Command, CommandLine, Parser, SingleCommand
from tfd_notebook.ui.magics import lookup

#: Shared by all forms of a kernel, so that they share resolutions and their history.
_service = ResolveService()


def close() -> None:
    """Discard the resolutions of forms."""
    _service.close()


def command_line(shell: Any) -> CommandLine:
    """Return ``%tfd_resolve`` for `shell`."""
    summary = (
        "Find the cluster that this notebook belongs to, and show its tasks. Without RESOLVER, "
        "rules check the notebook's environment, and the first match decides."
    )
    command = Command(
        "%tfd_resolve", summary, _Resolve(shell), _arguments, example="slurm --set job=1234"
    )
    return SingleCommand(command, bare=True)


def add_options(parser: Parser) -> None:
    """Add the arguments for the resolver, its options and the duration."""
    parser.add_argument(
        "resolver",
        nargs="?",
        default="auto",
        metavar="RESOLVER",
        help=f"{', '.join(factory.CHOICES)}, or a .json or .toml file (default: auto)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help='argument of the resolver, such as port=8470 or jobs={"worker":2}; may be repeated',
    )
    parser.add_argument(
        "--watch", type=float, metavar="SECONDS", help="show changes for SECONDS, or until Ctrl-C"
    )


def _arguments(parser: Parser) -> None:
    add_options(parser)
    view = parser.add_mutually_exclusive_group()
    view.add_argument(
        "--live", action="store_true", help="show a widget with a choice of resolvers"
    )
    view.add_argument("--frame", action="store_true", help="return the tasks as a DataFrame")


def commands(shell: Any) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
    """Return the commands of forms: ``resolvers``, ``resolve`` and ``attach``."""
    return {
        "resolvers": _service.choices,
        "resolve": _service.resolve,
        "attach": lambda request: _attach(shell, request),
    }


def _attach(shell: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Attach to the cluster of a resolution, and assign it to a variable."""
    name = request.get("variable", "cluster")
    if not isinstance(name, str):
        raise UsageError(f"invalid variable {name!r}: expected a name")
    variable = lookup.check_variable(name)
    # cluster.strategy() connects this kernel later, if the user calls it.
    cluster = _service.resolution(request).attach(connect=False)
    bound = lookup.bind(shell.user_ns, variable, cluster)
    message = f"attached to cluster {cluster.name!r}; it is in the variable {bound!r}"
    return {"cluster": cluster.name, "variable": bound, "message": message}


class _Resolve:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
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
        from tfd_notebook.ui.widgets import ResolveForm

        extra = commands(self._shell)
        choices = extra["resolvers"]

        def preset(request: Mapping[str, Any]) -> Any:
            return {**choices(request), "chosen": resolver, "options": dict(arguments)}

        fallback = resolve(resolver, **arguments)._repr_mimebundle_()
        return ResolveForm(lambda: {**extra, "resolvers": preset}, fallback)


def _follow(resolution: Any, seconds: float) -> None:
    """Update one display with each change, for `seconds` or until Ctrl-C."""
    from IPython.display import DisplayHandle

    handle: Any = DisplayHandle()  # type: ignore[no-untyped-call]
    show = handle.display
    try:
        for snapshot in resolution.watch(seconds):
            show(_SnapshotView(snapshot))
            show = handle.update
    except KeyboardInterrupt:
        pass  # Ctrl-C ends the watch.
    finally:
        resolution.close()
    changed = len(resolution.last.changes)
    # The magic returns the last snapshot, so the display becomes one line.
    show(_Line(f"watched; {changed} {'change' if changed == 1 else 'changes'}"))


class _Line:
    """A line that replaces the displayed snapshot."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class _SnapshotView:
    """A snapshot as the cell displays it."""

    def __init__(self, snapshot: ResolutionSnapshot) -> None:
        self._snapshot = snapshot

    def __repr__(self) -> str:
        return views.resolution_text(self._snapshot)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return views.resolution_bundle(self._snapshot)


cleanup.on_unload(close)
