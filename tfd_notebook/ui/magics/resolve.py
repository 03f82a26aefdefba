"""``%tfd_resolve``: the cluster that this notebook belongs to, and how its tasks are."""

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

#: All forms of a kernel ask here, so that they share what was found and its history.
_desk = ResolveService()


def close() -> None:
    """Forget what forms found."""
    _desk.close()


def command_line(shell: Any) -> CommandLine:
    """Return ``%tfd_resolve`` for `shell`."""
    about = (
        "Find the cluster that this notebook belongs to, and show its tasks. Without a resolver "
        "rules look at where the notebook runs, and the first that fits decides."
    )
    return SingleCommand(Command("%tfd_resolve", about, _Resolve(shell), _arguments), bare=True)


def add_options(parser: Parser) -> None:
    """Add what says which resolver is meant, for how long, and what it is given."""
    parser.add_argument(
        "resolver",
        nargs="?",
        default="auto",
        metavar="RESOLVER",
        help=f"{', '.join(factory.CHOICES)} (default: auto), or a .json or .toml file",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help='argument of the resolver, such as port=8470 or jobs={"worker":2}; may be repeated',
    )
    parser.add_argument(
        "--watch", type=float, metavar="SECONDS", help="follow changes for so long, or to Ctrl-C"
    )


def _arguments(parser: Parser) -> None:
    add_options(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--live", action="store_true", help="a widget in which to choose and watch")
    how.add_argument("--frame", action="store_true", help="the tasks as a DataFrame")


def commands(shell: Any) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
    """Return what forms can ask: ``resolvers``, ``resolve`` and ``attach``."""
    return {
        "resolvers": _desk.choices,
        "resolve": _desk.resolve,
        "attach": lambda request: _attach(shell, request),
    }


def _attach(shell: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Use what was found, as a cluster in a variable."""
    name = request.get("variable", "cluster")
    if not isinstance(name, str):
        raise UsageError(f"variable={name!r} is no name")
    variable = lookup.check_variable(name)
    # Connecting would join this kernel to it, which is for its owner to say: cluster.strategy().
    cluster = _desk.found(request).attach(connect=False)
    bound = lookup.bind(shell.user_ns, variable, cluster)
    said = f"cluster {cluster.name!r} is used; it is in the variable {bound!r}"
    return {"cluster": cluster.name, "variable": bound, "said": said}


class _Resolve:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        given = read_options(options.set)
        if options.live:
            if options.watch is not None:
                raise UsageError("--live watches anyway", fix="leave --watch out")
            return self._form(options.resolver, given)
        named = self._shell.user_ns.get(options.resolver, options.resolver)
        found = resolve(options.resolver if options.resolver in factory.CHOICES else named, **given)
        if options.watch is not None:
            _follow(found, options.watch)
        return found.to_frame() if options.frame else found

    def _form(self, resolver: str, given: Mapping[str, Any]) -> Any:
        from tfd_notebook.ui.widgets import ResolveForm

        asks = commands(self._shell)
        choices = asks["resolvers"]

        def chosen(request: Mapping[str, Any]) -> Any:
            return {**choices(request), "chosen": resolver, "options": dict(given)}

        twin = resolve(resolver, **given)._repr_mimebundle_()
        return ResolveForm(lambda: {**asks, "resolvers": chosen}, twin)


def _follow(found: Any, seconds: float) -> None:
    """Show what is seen in one place, until the time is over or somebody interrupts."""
    from IPython.display import DisplayHandle

    place: Any = DisplayHandle()  # type: ignore[no-untyped-call]
    show = place.display
    try:
        for look in found.watch(seconds):
            show(_Shown(look))
            show = place.update
    except KeyboardInterrupt:
        pass  # that is how watching ends
    finally:
        found.close()
    changed = len(found.last.changes)
    # What was seen last is what the magic returns.
    show(_Said(f"watched; {changed} {'change' if changed == 1 else 'changes'}"))


class _Said:
    """Words in the place of what was shown."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __repr__(self) -> str:
        return self._words


class _Shown:
    """A look as it is displayed."""

    def __init__(self, look: ResolutionSnapshot) -> None:
        self._look = look

    def __repr__(self) -> str:
        return views.look_text(self._look)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return views.look_bundle(self._look)


cleanup.on_unload(close)
