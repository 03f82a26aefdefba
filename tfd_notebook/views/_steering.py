"""The controls of a coordinator in the live view."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from tfd_notebook.errors import TfdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tfd_notebook.cluster import Cluster
    from tfd_notebook.coordinate.coordinator import Coordinator
    from tfd_notebook.snapshot import CoordinatorRow


class Submit(Protocol):
    """Has the cluster's owner do something that a person asked for, named in words."""

    def __call__(self, what: str, work: Callable[[], Any]) -> None: ...


class Steering:
    """What the controls ask for; each goes to the cluster's own thread.

    Parameters
    ----------
    cluster : Cluster
    submit : Submit
    """

    def __init__(self, cluster: Cluster, submit: Submit) -> None:
        self._cluster = cluster
        self._submit = submit

    def _do(self, what: str, work: Callable[[Coordinator], Any]) -> None:
        self._submit(what, lambda: work(self._cluster.present_coordinator()))

    def pause(self) -> None:
        """Ask for a pause."""
        self._do("pause", lambda coordinator: coordinator.pause())

    def resume(self) -> None:
        """Ask for the end of it."""
        self._do("resume", lambda coordinator: coordinator.resume())

    def step(self, count: int) -> None:
        """Ask for so many closures to run; nobody waits for them."""
        self._do(f"step {count}", lambda coordinator: coordinator.step(count, timeout=0))

    def cancel(self, key: int) -> None:
        """Ask for the end of one closure."""
        self._do(f"cancel {key}", lambda coordinator: coordinator.cancel(key))

    def break_on_failure(self, wanted: bool) -> None:
        """Ask for a pause at failures, or for none; other breakpoints stay."""

        def work(coordinator: Coordinator) -> None:
            _, workers, functions = coordinator.breakpoints
            coordinator.break_on(wanted, workers, functions)

        self._do("break on failure" if wanted else "go on at failures", work)


class Presence:
    """Tells the coordinator of a cluster, whichever it is, that somebody can resume it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._held: Coordinator | None = None
        self._stack = contextlib.ExitStack()

    def renew(self) -> None:
        """Tell the one that there is now, and no longer the one before it."""
        cluster = self._cluster
        coordinator = None
        with contextlib.suppress(TfdError):
            coordinator = cluster.present_coordinator() if cluster.has_coordinator else None
        if coordinator is not self._held:
            self.end()
            if coordinator is not None:
                # One that is stopped by now, or cannot be paused at all, need not know.
                with contextlib.suppress(TfdError):
                    self._stack.enter_context(coordinator.control())
            self._held = coordinator

    def end(self) -> None:
        """Tell nobody any longer."""
        self._stack.close()
        self._held = None


class Controls:
    """The widgets; hidden while there is no coordinator that can be steered.

    Parameters
    ----------
    steering : Steering
    """

    def __init__(self, steering: Steering) -> None:
        import ipywidgets

        def button(words: str, does: str) -> Any:
            return ipywidgets.Button(description=words, tooltip=does, layout={"width": "80px"})

        def number(words: str, least: int, most: int) -> Any:
            return ipywidgets.BoundedIntText(
                value=least,
                min=least,
                max=most,
                description=words,
                style={"description_width": "initial"},
                layout={"width": "130px"},
            )

        self._pause = button("Pause", "give no closure to any worker")
        self._resume = button("Resume", "let a paused coordinator go on")
        self._count = number("closures", 1, 1_000_000)
        self._step = button("Step", "let this many closures run while paused")
        self._id = number("id", 0, 2**31 - 1)
        self._cancel = button("Cancel", "cancel the closure with this id")
        self._break = ipywidgets.ToggleButton(
            description="Break on failure",
            tooltip="pause when a closure fails",
            layout={"width": "130px"},
        )
        self.box = ipywidgets.HBox(
            [
                self._pause,
                self._resume,
                self._count,
                self._step,
                self._break,
                self._id,
                self._cancel,
            ],
            layout={"display": "none"},
        )
        self._pause.on_click(lambda _: steering.pause())
        self._resume.on_click(lambda _: steering.resume())
        self._step.on_click(lambda _: steering.step(self._count.value))
        self._cancel.on_click(lambda _: steering.cancel(self._id.value))
        self._seen = False
        self._break.observe(lambda change: self._toggled(steering, change["new"]), "value")

    @property
    def widgets(self) -> tuple[Any, ...]:
        """All of them."""
        return (self.box, *self.box.children)

    def _toggled(self, steering: Steering, wanted: bool) -> None:
        if wanted != self._seen:
            self._seen = wanted
            steering.break_on_failure(wanted)

    def show(self, row: CoordinatorRow | None) -> None:
        """Show what can be done now."""
        steered = row is not None and not row.reduced and row.state != "stopped"
        self.box.layout.display = "flex" if steered else "none"
        if row is None or not steered:
            return
        paused = row.state == "paused"
        self._pause.disabled, self._resume.disabled, self._step.disabled = (
            paused,
            not paused,
            not paused,
        )
        if row.break_on_failure != self._seen:
            self._seen = self._break.value = row.break_on_failure
