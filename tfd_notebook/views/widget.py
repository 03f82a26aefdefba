"""A widget that follows a cluster, with buttons to stop and to scale it, and to steer closures.

While it is open and shown, a ``join`` waits for a paused coordinator, which it can resume.

Without ipywidgets, or where no front end can show widgets, the same object shows the HTML and
the text of the moment.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from tfd_notebook import views
from tfd_notebook._compat.ipykernel import answer_beside_cells
from tfd_notebook.errors import TfdError
from tfd_notebook.spec import MAX_TASKS_PER_ROLE, Role
from tfd_notebook.views._steering import Controls, Presence, Steering

if TYPE_CHECKING:
    from collections.abc import Callable

    from tfd_notebook.cluster import Cluster
    from tfd_notebook.snapshot import Snapshot

__all__ = ["Live", "live"]

_ENDED = ("stopped", "failed", "lost")
_known: weakref.WeakKeyDictionary[Cluster, Live] = weakref.WeakKeyDictionary()


def live(cluster: Cluster, hz: float = 1.0) -> Live:
    """Return the live view of `cluster`; while one is open it is the same for all cells.

    Parameters
    ----------
    cluster : Cluster
    hz : float
        How often it is drawn anew, per second; at most 10. Default 1.
    """
    known = _known.get(cluster)
    if known is None or known.closed:
        known = _known[cluster] = Live(cluster, hz)
    return known


class Live:
    """A view that follows a cluster until the cluster ends or `close` is called.

    Parameters
    ----------
    cluster : Cluster
    hz : float
        How often it is drawn anew, per second; at most 10. Default 1.

    Attributes
    ----------
    widget : ipywidgets.VBox or None
        None where widgets cannot be shown.
    steering : Steering
        What can be asked of the coordinator.
    """

    def __init__(self, cluster: Cluster, hz: float = 1.0) -> None:
        self._cluster = cluster
        self._pause = 1.0 / min(max(hz, 0.1), 10.0)
        self._wake = threading.Event()
        self._closed = False
        self._said = ""
        self.steering = Steering(cluster, self._submit)
        self._presence = Presence(cluster)
        self._panel = _panel(self) if _front_end() else None
        self.widget: Any = self._panel.box if self._panel else None
        if self._panel:
            self._draw()
            self._unsubscribe = cluster.subscribe(self._notice_end)
            threading.Thread(target=self._follow, name="tfd-live", daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether it no longer follows the cluster."""
        return self._closed

    def close(self) -> None:
        """Follow no longer; what was drawn last stays."""
        self._closed = True
        self._wake.set()

    def stop(self) -> None:
        """Ask the cluster's owner to stop it; returns at once."""
        self._submit("stop", self._cluster.stop)

    def scale(self, data_workers: int) -> None:
        """Ask the cluster's owner to scale it; returns at once."""
        self._submit(
            f"scale to {data_workers}", lambda: self._cluster.scale(data_workers=data_workers)
        )

    def _submit(self, what: str, work: Callable[[], Any]) -> None:
        self._say(f"{what}: queued")

        def attempt() -> None:
            try:
                work()
                self._say(f"{what}: done")
            except TfdError as error:
                self._say(f"{what}: {error}")

        self._cluster.command(attempt)

    def _say(self, words: str) -> None:
        self._said = words
        self._wake.set()

    def _notice_end(self, snapshot: Snapshot) -> None:
        if snapshot.state in _ENDED:
            self._wake.set()

    def _follow(self) -> None:
        while not self._closed and self._draw() not in _ENDED:
            self._wake.wait(self._pause)
            self._wake.clear()
        self._closed = True
        self._presence.end()
        self._unsubscribe()
        if self._panel:
            self._panel.end()

    def _draw(self) -> str:
        snapshot = self._cluster.snapshot()
        if self._panel:
            self._presence.renew()
            self._panel.show(views.html(snapshot), self._said, snapshot)
        return snapshot.state

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        # The twins in HTML and text are what a saved notebook shows, where no widget lives.
        bundle: dict[str, Any] = dict(views.mimebundle(self._cluster.snapshot()))
        if self.widget is not None:
            shown = self.widget._repr_mimebundle_()
            data = shown[0] if isinstance(shown, tuple) else shown
            bundle = {**data, **bundle}
        return bundle


class _Panel:
    """The widgets of a live view."""

    def __init__(self, owner: Live) -> None:
        import ipywidgets

        self._html = ipywidgets.HTML()
        self._said = ipywidgets.Label()
        self._count = ipywidgets.BoundedIntText(
            min=0,
            max=MAX_TASKS_PER_ROLE,
            description="data workers",
            style={"description_width": "initial"},
            layout={"width": "170px"},
        )
        self._scale = ipywidgets.Button(description="Scale", tooltip="have this many data workers")
        self._stop = ipywidgets.Button(description="Stop", tooltip="stop the cluster")
        for button in (self._scale, self._stop):
            button.layout.width = "80px"
        self._controls = ipywidgets.HBox([self._count, self._scale, self._stop, self._said])
        self._steering = Controls(owner.steering)
        self.box = ipywidgets.VBox([self._html, self._controls, self._steering.box])
        self._planned: int | None = None
        self._scale.on_click(lambda _: owner.scale(self._count.value))
        self._stop.on_click(lambda _: owner.stop())
        steering = self._steering.widgets
        for widget in (self.box, self._html, *self._controls.children, *steering):
            answer_beside_cells(widget.comm)

    def show(self, html: str, said: str, snapshot: Snapshot) -> None:
        """Show this; a trait that does not change sends nothing to the browser."""
        self._html.value = html
        self._said.value = said
        self._steering.show(snapshot.coordinator)
        planned = snapshot.planned.get(Role.DATA_WORKER, 0)
        if planned != self._planned:
            # Only news, so that a number being typed is left alone.
            self._planned = self._count.value = planned

    def end(self) -> None:
        """Take the controls away."""
        self._controls.layout.display = "none"
        self._steering.box.layout.display = "none"


def _panel(owner: Live) -> _Panel | None:
    try:
        return _Panel(owner)
    except ImportError:
        return None


def _front_end() -> bool:
    """Whether this process is a kernel, to which something that shows widgets may connect."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")
