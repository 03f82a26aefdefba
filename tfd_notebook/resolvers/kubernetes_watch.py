"""Being told by Kubernetes that something has changed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

#: Seconds after which a watch without news is renewed: silence may be a connection that was lost.
_WATCH_SECONDS = 30
#: Seconds between two looks while nothing can be watched, and for the end of a watch.
_PAUSE_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_GONE = 410


class _Watcher:
    """Rings after each change of what a list function lists, from when it was made.

    Parameters
    ----------
    list_function : callable
        Of the client, such as ``CoreV1Api.list_namespaced_pod``.
    options : mapping
        What it is called with.
    news : threading.Event
        To be set.
    """

    def __init__(
        self, list_function: Callable[..., Any], options: Mapping[str, Any], news: threading.Event
    ) -> None:
        self._list = list_function
        self._options = options
        self._news = news
        self._ended = threading.Event()
        self._version = self._now()
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
            self.stop()  # again: the watch may have begun just then
            self._thread.join(0.1)

    def _now(self) -> str:
        answer = self._list(**self._options, limit=1, _request_timeout=_JOIN_SECONDS)
        return str(answer.metadata.resource_version)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._follow()
            except Exception as error:
                # Whoever looks next learns what is wrong; from here on there may be gaps.
                self._news.set()
                gone = getattr(error, "status", None) == _GONE
                self._ended.wait(_PAUSE_SECONDS / 10 if gone else _PAUSE_SECONDS)
                with contextlib.suppress(Exception):
                    self._version = self._now()
                    self._news.set()

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
                    self._news.set()


def _end(watchers: list[_Watcher]) -> None:
    """Tell all, and then wait for all."""
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
        Of the client.
    watched : sequence of mapping
        Arguments for it: one watch for each.
    end : float, optional
        Default: never.
    """
    news = threading.Event()
    with contextlib.ExitStack() as stack:
        watchers: list[_Watcher] = []
        stack.callback(_end, watchers)
        for options in watched:
            watchers.append(_Watcher(list_function, options, news))
        yield
        while end is None or (left := end - time.monotonic()) > 0:
            # In pieces, since not every wait answers Ctrl-C.
            if news.wait(_PAUSE_SECONDS if end is None else min(_PAUSE_SECONDS, left)):
                news.clear()
                yield
