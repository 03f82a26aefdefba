"""`BackgroundJoin`: a coordinator's ``join`` in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tfd_notebook import views
from tfd_notebook.errors import TimeLimit
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.spec import check_timeout

if TYPE_CHECKING:
    from tfd_notebook.coordinator.coordinator import Coordinator


class BackgroundJoin(Handle):
    """The result of a ``join`` in the background, from ``coordinator.join_in_background()``.

    Parameters
    ----------
    coordinator : Coordinator
    timeout : float, optional
        Timeout of the join in seconds.
    notify : callable
        Takes the severity and text of a notice about the outcome.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        timeout: float | None,
        notify: Callable[[str, str], None],
    ) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(
            target=self._join, args=(coordinator, timeout, notify), name="tfd-join", daemon=True
        ).start()

    @property
    def state(self) -> str:
        """One of ``waiting``, ``done`` and ``failed``."""
        return "waiting" if not self._ended.is_set() else "failed" if self._error else "done"

    @property
    def error(self) -> BaseException | None:
        """The error that ``join`` raised, or None."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the join has ended. Ctrl-C interrupts the wait.

        Raises
        ------
        TimeLimit
            The join still runs after `timeout` seconds. It continues in the background.
        Exception
            The error that ``join`` raised, such as the error of a closure.
        """
        check_timeout(timeout)
        if not self._ended.wait(timeout):
            raise TimeLimit(f"the closures have not ended after {timeout:g} s", fix="wait longer")
        if self._error is not None:
            raise self._error

    def _join(
        self,
        coordinator: Coordinator,
        timeout: float | None,
        notify: Callable[[str, str], None],
    ) -> None:
        try:
            # The cell has returned, so the user can resume the coordinator.
            with coordinator.control():
                coordinator.join(timeout)
        except BaseException as error:
            self._error = error
            notify("error", f"the background join failed: {_describe(error)}")
        else:
            notify("info", f"the background join is done: {coordinator.values!r}")
        finally:
            self._ended.set()

    def __repr__(self) -> str:
        error = f": {_describe(self._error)}" if self._error else ""
        return f"<BackgroundJoin {self.state}{error}>"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {views.short_error(str(error))}"
