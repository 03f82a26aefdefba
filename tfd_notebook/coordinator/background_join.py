"""`BackgroundJoin`: a thread that joins, while the notebook goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tfd_notebook import views
from tfd_notebook.errors import TimeLimit

if TYPE_CHECKING:
    from tfd_notebook.coordinator.coordinator import Coordinator


class BackgroundJoin:
    """What comes of a ``join`` in the background; made by ``coordinator.join_in_background()``.

    Parameters
    ----------
    coordinator : Coordinator
    timeout : float, optional
        Of the join, in seconds.
    tell : callable
        Takes the severity and the words of what came of it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        timeout: float | None,
        tell: Callable[[str, str], None],
    ) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(
            target=self._join, args=(coordinator, timeout, tell), name="tfd-join", daemon=True
        ).start()

    @property
    def state(self) -> str:
        """One of ``waiting``, ``done`` and ``failed``."""
        return "waiting" if not self._ended.is_set() else "failed" if self._error else "done"

    @property
    def error(self) -> BaseException | None:
        """What ``join`` raised, None where it did not."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the join has ended; answers Ctrl-C.

        Raises
        ------
        TimeLimit
            It has not after `timeout` seconds; it goes on.
        Exception
            What ``join`` raised, the error of a closure.
        """
        if not self._ended.wait(timeout):
            raise TimeLimit(f"the closures have not ended after {timeout:g} s", fix="wait longer")
        if self._error is not None:
            raise self._error

    def _join(
        self,
        coordinator: Coordinator,
        timeout: float | None,
        tell: Callable[[str, str], None],
    ) -> None:
        try:
            # Whoever has the notebook can resume.
            with coordinator.control():
                coordinator.join(timeout)
        except BaseException as error:
            self._error = error
            tell("error", f"the join in the background ended with {_words(error)}")
        else:
            tell("info", f"the join in the background is done: {coordinator.values!r}")
        finally:
            self._ended.set()

    def __repr__(self) -> str:
        said = f": {_words(self._error)}" if self._error else ""
        return f"<Joining {self.state}{said}>"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {views.gist(str(error))}"
