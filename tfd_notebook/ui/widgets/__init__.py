"""Widgets of the notebook: a cluster that is followed, and a form that starts one.

They speak the bus's protocol over their own model, see ``docs/bus.md``; what they draw is in
``labextension/``. Where no front end can show widgets, the same objects show the HTML and the text
of the moment, which is also what a notebook that is opened again shows.
"""

from __future__ import annotations

import functools
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfd_notebook import views
from tfd_notebook._compat.ipykernel import (
    handle_messages_during_execution,
    handles_messages_during_execution,
)
from tfd_notebook._version import VERSION
from tfd_notebook.bus import hub
from tfd_notebook.bus.session import Extra, Session
from tfd_notebook.errors import UsageError
from tfd_notebook.ui import cleanup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tfd_notebook.cluster.cluster import Cluster

__all__ = ["VIEWS", "Live", "ResolveForm", "StartForm", "close_all", "live"]

#: What a widget can show of a cluster.
VIEWS = ("cluster", "throughput", "values", "timeline", "stepper")

_ESM = Path(__file__).parent / "static" / "widget.js"
_open: weakref.WeakSet[WidgetView] = weakref.WeakSet()
_known: weakref.WeakKeyDictionary[Cluster, dict[str, Live]] = weakref.WeakKeyDictionary()


def live(cluster: Cluster, view: str = "cluster") -> Live:
    """Return a live view of `cluster`; while one is open it is the same for all cells.

    Parameters
    ----------
    cluster : Cluster
    view : {"cluster", "throughput", "values", "timeline", "stepper"}
        All of it (the default), or one part.

    Raises
    ------
    UsageError
        There is no such view.
    """
    if view not in VIEWS:
        raise UsageError(f"there is no view {view!r}", fix=f"use {', '.join(VIEWS)}")
    known = _known.setdefault(cluster, {})
    if view not in known or known[view].closed:
        known[view] = Live(cluster, view)
    return known[view]


def close_all() -> None:
    """Close whatever is open; what was drawn last stays."""
    for shown in tuple(_open):
        shown.close()


class WidgetView:
    """What has a widget where one can be shown, and always its twins in HTML and text.

    Parameters
    ----------
    view : str
        What the widget shows.
    twins : callable
        Returns the twins as they are now, by MIME type.
    cluster : Cluster, optional
    extra : callable, optional
        More commands, as `Session` takes them.

    Attributes
    ----------
    widget : anywidget.AnyWidget or None
        None where widgets cannot be shown.
    closed : bool
        Whether it follows nothing any more.
    """

    def __init__(
        self,
        view: str,
        twins: Callable[[], Mapping[str, Any]],
        cluster: Cluster | None = None,
        extra: Extra | None = None,
    ) -> None:
        self._twins = twins
        self.closed = False
        self.widget: Any = None
        if _front_end() and _ESM.exists():
            name = cluster.name if cluster is not None else ""
            self.widget = widget = _widget_class()(view=view, cluster=name)
            self._session = Session(self._send, cluster, extra=extra)
            handle_messages_during_execution(widget.comm)
            widget.on_msg(self._receive)
            hub.join(self._session)
            _open.add(self)

    def close(self) -> None:
        """Follow nothing any longer; what was drawn last stays."""
        if self.widget is not None and not self.closed:
            hub.leave(self._session)
            _open.discard(self)
        self.closed = True

    def _send(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        self.widget.send(message, buffers=buffers)

    def _receive(self, widget: Any, message: Any, buffers: Any) -> None:
        beside = threading.current_thread() is not threading.main_thread()
        if widget.beside != beside:
            widget.beside = beside
        hub.receive(self._session, message)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        bundle = dict(self._twins())
        if self.widget is not None:
            shown = self.widget._repr_mimebundle_()
            data = shown[0] if isinstance(shown, tuple) else shown
            bundle = {**(data or {}), **bundle}
        # By which our extension knows the widgets that have a twin to fall back to.
        return bundle, {"tfd_notebook": {}}


class Live(WidgetView):
    """A view that follows a cluster until `close` is called, beyond its end.

    Parameters
    ----------
    cluster : Cluster
    view : str
        One of `VIEWS`.
    """

    def __init__(self, cluster: Cluster, view: str = "cluster") -> None:
        super().__init__(view, lambda: views.mimebundle(cluster.snapshot()), cluster)


class _Form(WidgetView):
    """A form of a few commands, one of which gets a cluster that is followed from then on."""

    #: What is shown, and the command that answers with a cluster.
    _view, _gets = "", ""

    def __init__(self, extra: Extra, twin: Mapping[str, str]) -> None:
        self._extra = extra
        super().__init__(self._view, lambda: twin, extra=self._commands)

    def _commands(self) -> Any:
        commands = self._extra()
        return {**commands, self._gets: lambda request: self._got(commands[self._gets](request))}

    def _got(self, answer: Any) -> Any:
        from tfd_notebook.cluster.registry import clusters

        self._session.cluster = clusters().get(answer["cluster"])
        return answer


class StartForm(_Form):
    """A form that starts a cluster in this kernel, and then follows it.

    Parameters
    ----------
    extra : callable
        Returns the commands ``kinds`` and ``start``.
    twin : mapping of str to str
        What is shown where no widget can be.
    """

    _view, _gets = "start", "start"


class ResolveForm(_Form):
    """A table of the tasks that a resolver finds, with a choice of resolvers.

    Parameters
    ----------
    extra : callable
        Returns the commands ``resolvers``, ``resolve`` and ``attach``.
    twin : mapping of str to str
        What is shown where no widget can be.
    """

    _view, _gets = "resolve", "attach"


@functools.cache
def _widget_class() -> Any:
    """Return the widget's class, made only where it is used: importing anywidget takes time."""
    import anywidget
    import traitlets

    class TfdWidget(anywidget.AnyWidget):
        """What the browser sees of a view."""

        _esm = _ESM
        view = traitlets.Unicode("cluster").tag(sync=True)
        cluster = traitlets.Unicode("").tag(sync=True)
        #: Whether clicks are taken while a cell runs.
        beside = traitlets.Bool(handles_messages_during_execution()).tag(sync=True)
        version = traitlets.Unicode(VERSION).tag(sync=True)
        hint = traitlets.Unicode("tfd pause NAME, tfd resume NAME, tfd stop NAME").tag(sync=True)

    return TfdWidget


def _front_end() -> bool:
    """Whether this process is a kernel, to which something that shows widgets may connect."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")


cleanup.on_unload(close_all)
