"""Python stacks of tasks, and the calls of datasets' functions in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

#: The keys of a row of ``Cluster.stacks``.
FIELDS = ("task", "thread", "function", "file", "line", "seconds", "note", "stack")

_MAX_NAMES = 3


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


@dataclass(frozen=True)
class BlockedFunction:
    """A Python function of a dataset that has not returned.

    Parameters
    ----------
    function : str
    file : str
    line : int
        The current line in the function.
    tasks : tuple of str
        The tasks in which it runs.
    seconds : float
        The longest time for which one of its calls has been observed.
    site : str
        File and line in the user's notation.
    """

    function: str
    file: str
    line: int
    tasks: tuple[str, ...]
    seconds: float
    site: str

    def __str__(self) -> str:
        more = len(self.tasks) - _MAX_NAMES
        tasks = ", ".join(self.tasks[:_MAX_NAMES]) + (f" and {more} others" if more > 0 else "")
        return f"{self.function} ({self.site}) in {tasks}"


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


def blocked_functions(
    stacks: Mapping[str, TaskStacks], named: Callable[[tuple[str, int]], str], least: float
) -> list[BlockedFunction]:
    """Return the datasets' functions with a call that has been observed for `least` seconds.

    Parameters
    ----------
    stacks : mapping of str to TaskStacks
    named : callable
        Returns the user's notation of a file and a line.
    least : float
        In seconds.

    Returns
    -------
    list of BlockedFunction
        Calls at the same line are one entry. The longest is first.
    """
    found: dict[tuple[str, str, int], tuple[dict[str, None], float]] = {}
    for task, frame in _pipeline_calls(stacks):
        seconds = frame["seconds"]
        if seconds is not None and seconds >= least:
            key = frame["function"], frame["file"], frame["line"]
            tasks, longest = found.get(key, ({}, 0.0))
            found[key] = {**tasks, task: None}, max(longest, seconds)
    blocked = [
        BlockedFunction(function, file, line, tuple(tasks), longest, named((file, line)))
        for (function, file, line), (tasks, longest) in found.items()
    ]
    return sorted(blocked, key=lambda each: -each.seconds)


def observed_seconds(stacks: Mapping[str, TaskStacks]) -> Iterable[float]:
    """Return the time for which each call of a dataset's function has been observed."""
    seconds = (frame["seconds"] for _, frame in _pipeline_calls(stacks))
    return [each for each in seconds if each is not None]


def _pipeline_calls(stacks: Mapping[str, TaskStacks]) -> Iterator[tuple[str, PythonFrame]]:
    """Yield the task and the outermost frame of each function of a dataset that runs."""
    for task, entry in stacks.items():
        for thread in entry["threads"]:
            users = [frame for frame in thread["frames"] if frame["users"]]
            if thread["pipeline"] and users:
                yield task, users[0]
