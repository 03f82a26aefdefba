"""Python stacks of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

#: The keys of a row of ``Cluster.stacks``.
FIELDS = ("task", "thread", "function", "file", "line", "seconds", "note", "stack")


class PythonFrame(TypedDict):
    """One frame of a thread.

    ``users`` is true for the user's code, and for the outermost frame of a dataset's function.
    ``seconds`` is the time since the call was first observed, None if it is unknown.
    """

    function: str
    file: str
    line: int
    users: bool
    seconds: float | None


class PythonThread(TypedDict):
    """A thread and its frames, the outermost first.

    ``pipeline`` is true if it runs a Python function of a dataset. Then the frames are those of
    this call.
    """

    name: str
    pipeline: bool
    frames: list[PythonFrame]


class TaskStacks(TypedDict):
    """The threads of a task. ``note`` has the reason if they are not known, else it is empty."""

    note: str
    threads: list[PythonThread]


def stack_records(
    stacks: Mapping[str, TaskStacks], cell_of: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Return a row for each thread, and one for each task without threads.

    Parameters
    ----------
    stacks : mapping of str to TaskStacks
        By the name of the task.
    cell_of : callable
        Returns the user's name of a cell that is compiled under the name of a file, or "".

    Returns
    -------
    list of dict
        The values of `FIELDS`. Function, file, line and seconds are those of the innermost frame
        of the user's code. Without such a frame, they are those of the innermost frame.
    """
    return [row for task, entry in stacks.items() for row in _rows(task, entry, cell_of)]


def _rows(task: str, entry: TaskStacks, cell_of: Callable[[str], str]) -> Iterator[dict[str, Any]]:
    for thread in entry["threads"]:
        stack = [_position(frame, cell_of) for frame in thread["frames"]]
        if stack:
            users = [at for at, frame in enumerate(thread["frames"]) if frame["users"]]
            shown = stack[users[-1] if users else -1]
            yield {"task": task, "thread": thread["name"], **shown, "note": "", "stack": stack}
    if not entry["threads"]:
        empty: dict[str, Any] = dict.fromkeys(FIELDS, None)
        texts = {"thread": "", "function": "", "file": ""}
        note = entry["note"] or "no Python code runs"
        yield {**empty, **texts, "task": task, "note": note, "stack": []}


def _position(frame: PythonFrame, cell_of: Callable[[str], str]) -> dict[str, Any]:
    file, seconds = frame["file"], frame["seconds"]
    return {
        "function": frame["function"],
        "file": cell_of(file) or file,
        "line": frame["line"],
        "seconds": None if seconds is None else round(seconds, 1),
    }
