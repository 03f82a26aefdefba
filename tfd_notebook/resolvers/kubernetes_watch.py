"""Notification about changes of Kubernetes resources, by the watch API."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfd_notebook.errors import InvalidMessage

#: Seconds after which a watch without events is renewed: the connection may be lost.
_WATCH_SECONDS = 30
#: Seconds between two attempts while the watch fails.
_PAUSE_SECONDS = 1.0
#: Timeout for the end of a watch, in seconds.
_JOIN_SECONDS = 5.0
#: HTTP status: the resource version has expired.
_HTTP_GONE = 410


#: Errors of the client when it reads an invalid reply.
_INVALID = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


def read_list(list_function: Callable[..., Any], **options: Any) -> Any:
    """Return a list of the API, which has metadata and items.

    Raises
    ------
    InvalidMessage
        The reply has another form.
    """
    from urllib3.exceptions import HTTPError

    try:
        answer = list_function(**options)
    except HTTPError:  # some are also a ValueError
        raise
    except _INVALID as error:
        raise InvalidMessage(f"{error!r:.300}") from error
    if answer is None or answer.metadata is None or answer.items is None:
        raise InvalidMessage("a list has no metadata or no items")
    return answer


class _Watcher:
    """Thread that sets an event after each change of the listed resources.

    Parameters
    ----------
    list_function : callable
        List function of the client, such as ``CoreV1Api.list_namespaced_pod``.
    options : mapping
        Arguments of the list function.
    changed : threading.Event
        The event to set.
    """

    def __init__(
        self,
        list_function: Callable[..., Any],
        options: Mapping[str, Any],
        changed: threading.Event,
    ) -> None:
        self._list = list_function
        self._options = options
        self._changed = changed
        self._ended = threading.Event()
        self._version = self._current_version()
        self._watch: Any = None
        self._thread = threading.Thread(target=self._run, name="tfd-resolve-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if watch := self._watch:
            watch.stop()

    def join(self) -> None:
        end = time.monotonic() + _JOIN_SECONDS
        while self._thread.is_alive() and time.monotonic() < end:
            self.stop()  # repeated: the watch may have started after the first call
            self._thread.join(0.1)

    def _current_version(self) -> str:
        answer = read_list(self._list, **self._options, limit=1, _request_timeout=_JOIN_SECONDS)
        return str(answer.metadata.resource_version)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._follow()
            except Exception as error:
                # The caller's next list call reports the error. Events may be missing from here.
                self._changed.set()
                is_expired = getattr(error, "status", None) == _HTTP_GONE
                self._ended.wait(_PAUSE_SECONDS / 10 if is_expired else _PAUSE_SECONDS)
                with contextlib.suppress(Exception):
                    self._version = self._current_version()
                    self._changed.set()

    def _follow(self) -> None:
        from kubernetes import watch

        self._watch = watch.Watch()
        events = self._watch.stream(
            self._list,
            **self._options,
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_SECONDS,
            _request_timeout=_WATCH_SECONDS + _JOIN_SECONDS,
        )
        with contextlib.closing(events):
            for event in events:
                if self._ended.is_set():
                    return
                self._version = self._watch.resource_version or self._version
                if event and event["type"] != "BOOKMARK":
                    self._changed.set()


def _end(watchers: list[_Watcher]) -> None:
    """Stop all watchers concurrently, and wait for them."""
    for watcher in watchers:
        watcher.stop()
    for watcher in watchers:
        watcher.join()


def changes(
    list_function: Callable[..., Any], watched: Sequence[Mapping[str, Any]], end: float | None
) -> Iterator[None]:
    """Yield at once, and after each change, until `end` of the monotonic clock.

    Parameters
    ----------
    list_function : callable
        List function of the client.
    watched : sequence of mapping
        Arguments of the list function, one mapping for each watch.
    end : float, optional
        Default: unlimited.
    """
    changed = threading.Event()
    with contextlib.ExitStack() as stack:
        watchers: list[_Watcher] = []
        stack.callback(_end, watchers)
        for options in watched:
            watchers.append(_Watcher(list_function, options, changed))
        yield
        while end is None or (left := end - time.monotonic()) > 0:
            # Short waits, because not every wait can be interrupted with Ctrl-C.
            if changed.wait(_PAUSE_SECONDS if end is None else min(_PAUSE_SECONDS, left)):
                changed.clear()
                yield
