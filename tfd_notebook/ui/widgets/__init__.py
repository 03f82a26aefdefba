"""Widgets of the notebook: a live view of a cluster, and forms that start or find one.

They use the bus protocol of ``docs/bus.md`` over their own widget model. Their drawing code is in
``labextension/``. A front end without widgets shows the static fallback of the same objects, HTML
or text. So does a saved notebook that is opened again.
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
from tfd_notebook.cluster.registry import clusters
from tfd_notebook.errors import UsageError, one_of
from tfd_notebook.model.command_table import VIEWS
from tfd_notebook.ui import cleanup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tfd_notebook.cluster.view import ClusterView

__all__ = ["VIEWS", "Form", "Live", "close_all", "live"]

_ESM = Path(__file__).parent / "static" / "widget.js"
_open: weakref.WeakSet[_WidgetView] = weakref.WeakSet()
_known: weakref.WeakKeyDictionary[ClusterView, dict[str, Live]] = weakref.WeakKeyDictionary()


def live(cluster: ClusterView, view: str = "cluster") -> Live:
    """Return a live view of `cluster`. All cells share it while it is open.

    Parameters
    ----------
    cluster : ClusterView
    view : {"cluster", "throughput", "values", "timeline", "stepper"}
        The whole cluster (the default), or one part.

    Raises
    ------
    UsageError
        `view` is invalid.
    """
    if view not in VIEWS:
        raise UsageError(f"invalid view {view!r}", fix=one_of(view, VIEWS))
    known = _known.setdefault(cluster, {})
    if view not in known or known[view].closed:
        known[view] = Live(cluster, view)
    return known[view]


def close_all() -> None:
    """Close all open views. The last rendering stays visible."""
    for view in tuple(_open):
        view.close()


class _WidgetView:
    """A widget, if the front end can show one, with a static fallback in HTML and text.

    Parameters
    ----------
    view : str
        The name of the view.
    fallback : callable
        Returns the current static fallback by MIME type.
    cluster : ClusterView, optional
    extra : callable, optional
        More commands for the `Session`.

    Attributes
    ----------
    widget : anywidget.AnyWidget or None
        None if the front end cannot show widgets.
    closed : bool
        Whether the updates have stopped.
    """

    def __init__(
        self,
        view: str,
        fallback: Callable[[], Mapping[str, Any]],
        cluster: ClusterView | None = None,
        extra: Extra | None = None,
    ) -> None:
        self._fallback = fallback
        self.closed = False
        self.widget: Any = None
        if has_front_end() and _ESM.exists():
            name = cluster.name if cluster is not None else ""
            self.widget = widget = _widget_class()(view=view, cluster=name)
            self._session = Session(self._send, cluster, extra=extra)
            handle_messages_during_execution(widget.comm)
            widget.on_msg(self._receive)
            hub.join(self._session)
            _open.add(self)

    def close(self) -> None:
        """Stop updating. The last rendering stays visible."""
        if self.widget is not None and not self.closed:
            hub.leave(self._session)
            _open.discard(self)
        self.closed = True

    def _send(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        self.widget.send(message, buffers=buffers)

    def _receive(self, widget: Any, message: Any, buffers: Any) -> None:
        # ipykernel delivers messages to another thread if it handles them while a cell runs.
        concurrent = threading.current_thread() is not threading.main_thread()
        if widget.concurrent != concurrent:
            widget.concurrent = concurrent
        hub.receive(self._session, message)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        bundle = dict(self._fallback())
        if self.widget is not None:
            rendered = self.widget._repr_mimebundle_()
            data = rendered[0] if isinstance(rendered, tuple) else rendered
            bundle = {**(data or {}), **bundle}
        # This metadata marks outputs with a static fallback for the lab extension.
        return bundle, {"tfd_notebook": {}}


class Live(_WidgetView):
    """A view that follows a cluster until `close`, even after the cluster has ended.

    Parameters
    ----------
    cluster : ClusterView
    view : str
        One of `VIEWS`.
    """

    def __init__(self, cluster: ClusterView, view: str = "cluster") -> None:
        super().__init__(view, lambda: views.mimebundle(cluster.snapshot()), cluster)


class Form(_WidgetView):
    """A form that starts a cluster or attaches to one, and then follows it.

    Parameters
    ----------
    view : {"start", "resolve"}
        The fields of a new cluster, or the tasks that a resolver finds.
    requests : mapping of str to callable
        The result of `tfd_notebook.cluster.commands.panel_requests`.
    fallback : mapping of str to str
        The static fallback by MIME type.
    """

    def __init__(self, view: str, requests: Mapping[str, Any], fallback: Mapping[str, str]) -> None:
        known = {name: self._following(requests[name]) for name in ("start", "attach")}
        super().__init__(view, lambda: fallback, extra=lambda: {**requests, **known})

    def _following(self, perform: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def follow(request: Any) -> Any:
            answer = perform(request)
            self._session.cluster = clusters().get(answer["cluster"])
            return answer

        return follow


@functools.cache
def _widget_class() -> Any:
    """Return the widget's class. It is created on first use, because anywidget imports slowly."""
    import anywidget
    import traitlets

    class TfdWidget(anywidget.AnyWidget):
        """Model of a view in the browser."""

        _esm = _ESM
        view = traitlets.Unicode("cluster").tag(sync=True)
        cluster = traitlets.Unicode("").tag(sync=True)
        #: Whether messages are handled while a cell runs.
        concurrent = traitlets.Bool(handles_messages_during_execution()).tag(sync=True)
        version = traitlets.Unicode(VERSION).tag(sync=True)
        hint = traitlets.Unicode("tfd pause NAME, tfd resume NAME, tfd stop NAME").tag(sync=True)

    return TfdWidget


def has_front_end() -> bool:
    """Return True if this process is a kernel, to which a front end may connect."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")


cleanup.on_unload(close_all)
