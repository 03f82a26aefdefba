"""The exceptions of tfd_notebook, in one tree.

::

    TfdError                  TFD000  base of all errors of this package
    ├── UsageError            TFD100  an invalid argument (also a ValueError)
    │   ├── UnknownName       TFD101  a launcher, task, option or cluster that does not exist
    │   ├── NameTaken         TFD102  the name belongs to a cluster with another specification
    │   ├── PortInUse         TFD103  another process uses the port
    │   ├── WorkDirError      TFD104  work_dir is not writable, or its disk is full
    │   └── StateError        TFD105  the call does not fit the object's state
    ├── LaunchError           TFD200  a task or its agent did not start
    │   ├── TensorFlowMissing TFD201  TensorFlow is not installed on a host that needs it
    │   ├── StartTimeout      TFD202  not ready within the time limit
    │   ├── AgentLost         TFD203  the agent that supervises the tasks has ended
    │   └── FilterFailed      TFD205  a port cannot be closed to other hosts
    ├── RemoteError           TFD204  a remote kernel, or the source that it runs, failed
    ├── InvalidMessage        TFD206  another host sent an invalid message
    ├── DataError             TFD300  reading data failed
    │   ├── NoWorkers         TFD301  no data worker can serve the dataset
    │   ├── DataLoss          TFD302  elements were lost and cannot be delivered
    │   ├── FinishedJob       TFD303  the job has already delivered its data
    │   ├── PipelineError     TFD304  the user's pipeline failed in a data worker
    │   ├── NotSerializable   TFD305  the dataset cannot be sent to the data workers
    │   ├── DispatcherLost    TFD306  the dispatcher does not answer
    │   ├── Interrupted       TFD307  iteration was cancelled
    │   └── DataChanged       TFD308  a service would change the data
    ├── TimeLimit             TFD400  a wait timed out (also a TimeoutError)
    ├── Unsupported           TFD500  not possible on this platform or version
    ├── Refused               TFD501  the administrator's policy does not allow it
    ├── CoordinatorError      TFD600  scheduling or running closures failed
    │   ├── PausedError       TFD601  a wait would never end: the coordinator is paused
    │   ├── ValueGone         TFD602  the RemoteValue of a closure no longer exists
    │   └── TasksMissing      TFD603  a worker or parameter server does not answer
    ├── RunError              TFD610  a function that runs on every worker failed
    │   ├── RankFailed        TFD611  the function raised on a worker
    │   └── RankLost          TFD612  the process of the function ended
    ├── ResolveError          TFD700  finding the tasks of a cluster failed
    │   ├── NotThere          TFD701  the source of the cluster's description does not exist
    │   ├── Malformed         TFD702  the cluster's description is invalid
    │   ├── NoTasks           TFD703  a group or job without usable tasks
    │   ├── AccessDenied      TFD704  credentials are missing, expired or not sufficient
    │   └── NoAnswer          TFD705  the service that lists the tasks fails or does not answer
    └── SparkError            TFD890  a cluster on Spark executors failed
        ├── NotEnoughSlots    TFD891  Spark cannot run all nodes, or agents, at once
        ├── ReservationLimit  TFD892  not all nodes reported in time (also a TimeoutError)
        ├── NodeFailed        TFD893  the user's function raised in a node
        ├── NodeLost          TFD894  a node's process, or its executor, has ended
        └── FeedTimeout       TFD895  a node read no rows for too long (also a TimeoutError)

Every error has a ``code``, ``what`` (the problem), ``task`` (the task concerned, or ``None``) and
``fix`` (the next step). Its text combines them in one or two lines.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterable
from typing import Any, ClassVar

_USER = r"[^\s:@/\[]*:(?!\d{1,5}(?:[/?#]|$))"
#: Where the authority of an address begins. Its scheme may be quoted, and a path joins the slashes.
_BEGIN = r"(?:(?<=:/)|(?<=://)|(?<=%3[aA]/)|(?<=%3[aA]//))"
# Each pattern reads a text once, because another host may have sent megabytes. It ends at the next
# slash, or the part that it searches ends with "@". User parts may not be as the standard requires.
_WORD = re.compile(r"\S+")
_USER_IN_WORD = re.compile(
    rf"{_BEGIN}(?:[^/?#\s]*@|{_USER}\S*@)"
    # Without a scheme.
    rf"|(?<=//)(?<![\w)\]:/]//)(?!:){_USER}(?:[^/?#\s]*@|\S*@)"
)
_QUOTED_USER = re.compile(r"(?<=%3[aA]%2[fF]%2[fF])(?:(?!%2[fF]|%3[fF]|%23)[^\s/?#&])*%40")
#: Parts of a text, with a group if they end with "@", and what a user part in them begins with.
_ENDED_USERS = [
    # A password with spaces, in one line. A closing quotation mark ends an address.
    (
        re.compile(r"(?:[^\n@'\":]+|:(?!//)|['\"](?=\w))+(@(?:\S*@)?)?"),
        re.compile(rf"{_BEGIN}{_USER}(?!\s|\d{{1,5}}(?:\W|$))"),
    ),
    # Without slashes.
    (
        re.compile(r"[^\s@'\"]+(@(?=[\w\[:]))?"),
        re.compile(r"(?<![\w.:/@+-])[\w.+-]+:(?!/|\d*@)"),
    ),
]
#: A secret in the query of an address, or in an argument ``token=...``, in its second group.
QUERY_SECRET = re.compile(
    r"((?:[?&;#]|%3[fF]|%26|%23)(?:[\w.-]{0,40}(?:token|secret|signature|passw(?:or)?d|credential)"
    r"|(?:[\w.-]{0,40}[_-])?(?:key|pass)|sig|auth|pwd)(?:=|%3[dD])"
    r"|(?<![\w.(-])(?:--)?(?:token|password)=\\*[\"']?)"
    r"((?!\.\.\.|\[removed\])[^\s&#;,'\"()<>]+)",
    re.IGNORECASE,
)
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
#: All characters that move a terminal's cursor or break a line, except tab and newline.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

#: Parts of the paths of modules that are not the user's.
_PACKAGE, _INSTALLED = __file__.removesuffix("errors.py"), "-packages/"


class TfdError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    what : str
        The problem, in one sentence.
    task : str, optional
        The task concerned, such as ``"data_worker:0"``.
    fix : str, optional
        The next step for the user.

    Attributes
    ----------
    code : str
        Stable identifier of the error class, such as ``"TFD000"``.
    """

    code: ClassVar[str] = "TFD000"

    def __init_subclass__(cls, code: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if code:
            cls.code = code
            BY_CODE[code] = cls

    def __init__(self, what: str, *, task: str | None = None, fix: str | None = None) -> None:
        # Another host may have sent any part of them.
        self.what = _printable(what)
        self.task = None if task is None else _printable(task)
        self.fix = None if fix is None else _printable(fix)
        super().__init__(self.what)

    def __str__(self) -> str:
        head = f"{self.task}: " if self.task and self.task not in self.what else ""
        tail = f"\nNext: {self.fix}" if self.fix else ""
        return f"[{self.code}] {head}{self.what}{tail}"

    @property
    def in_one_line(self) -> str:
        """The problem and the next step, without code and task."""
        return self.what if self.fix is None else f"{self.what}; next: {self.fix}"

    def _render_traceback_(self) -> Any:
        """Return the lines that IPython shows, with the frames of the user's code only.

        ``%xmode Verbose`` gives all frames, and the errors that are the cause.
        """
        shell = sys.modules["IPython"].get_ipython()
        formatter, traceback = shell.InteractiveTB, self.__traceback__
        if formatter.mode == "Verbose":
            return formatter.structured_traceback(type(self), self, traceback)
        cause, suppressed = self.__cause__, self.__suppress_context__
        self.__cause__ = None  # its text is a part of this error
        try:
            users = _without_libraries(traceback)
            return formatter.structured_traceback(type(self), self, users)
        finally:
            self.__cause__, self.__suppress_context__ = cause, suppressed

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.task, self.fix)


def _without_libraries(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback that ends at the last frame of code that is not installed."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    names = [each.tb_frame.f_code.co_filename for each in entries]
    users = [
        n
        for n, name in enumerate(names)
        if not name.startswith(_PACKAGE) and _INSTALLED not in name
    ]
    for each in reversed(entries[: users[-1] + 1] if users else entries):
        traceback = types.TracebackType(traceback, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return traceback


def without_user(text: str, replacement: str = "") -> str:
    """Return a text without the user parts (``user:password@``) of the addresses in it."""
    text = _QUOTED_USER.sub(replacement, text)
    if "@" not in text:
        return text

    def word(found: re.Match[str]) -> str:
        end = found[0].rfind("@") + 1
        return _USER_IN_WORD.sub(replacement, found[0][:end]) + found[0][end:]

    text = _WORD.sub(word, text)
    for part, begin in _ENDED_USERS:

        def cut(found: re.Match[str], begin: re.Pattern[str] = begin) -> str:
            start, end = found.span()
            user = begin.search(found.string, start, end) if found[1] else None
            return found[0] if user is None else found.string[start : user.start()] + replacement

        text = part.sub(cut, text)
    return text


def _printable(text: object) -> str:
    """Return a text without colors, control characters, and the secrets of addresses."""
    clean = QUERY_SECRET.sub(r"\1...", without_user(str(text)))
    return CONTROL.sub("\ufffd", _COLORS.sub("", clean))


#: The classes of this module by code.
BY_CODE: dict[str, type[TfdError]] = {TfdError.code: TfdError}


def _rebuild(kind: type[TfdError], what: str, task: str | None, fix: str | None) -> TfdError:
    return kind(what, task=task, fix=fix)


class UsageError(TfdError, ValueError, code="TFD100"):
    """An invalid argument."""


class UnknownName(UsageError, KeyError, code="TFD101"):
    """The name of a launcher, task, option or cluster that does not exist."""


class NameTaken(UsageError, code="TFD102"):
    """The name of a running cluster that has another specification."""


class PortInUse(UsageError, code="TFD103"):
    """A port that another process uses. The message names the process if possible."""


class WorkDirError(UsageError, code="TFD104"):
    """A working directory that is missing, read-only or full."""


class StateError(UsageError, code="TFD105"):
    """A call that does not fit the state of the object, such as stopped or not started."""


class LaunchError(TfdError, code="TFD200"):
    """Failure to start a task, or the agent that starts tasks."""


class TensorFlowMissing(LaunchError, code="TFD201"):
    """TensorFlow cannot be imported on a host whose task needs it."""


class StartTimeout(LaunchError, TimeoutError, code="TFD202"):
    """A task that was not ready within ``Policy.start_timeout`` seconds."""


class AgentLost(LaunchError, code="TFD203"):
    """Unexpected end of the agent that supervises a host's tasks."""


class FilterFailed(LaunchError, code="TFD205"):
    """Failure to attach the packet filter that closes a port to other hosts."""


class DataError(TfdError, code="TFD300"):
    """Failure to read, distribute or save a dataset."""


class NoWorkers(DataError, code="TFD301"):
    """A dataset that no data worker can serve."""


class DataLoss(DataError, code="TFD302"):
    """Elements that were lost with a task and cannot be delivered."""


class FinishedJob(DataError, code="TFD303"):
    """A job that has already delivered its data. TensorFlow would deliver no more elements."""


class PipelineError(DataError, code="TFD304"):
    """Failure of the user's pipeline in a data worker."""


class NotSerializable(DataError, code="TFD305"):
    """A dataset, or a Python function in it, that cannot be sent to the data workers."""


class DispatcherLost(DataError, code="TFD306"):
    """A dispatcher that does not answer, or has stopped and is not restarted automatically."""


class Interrupted(DataError, code="TFD307"):
    """Iteration that ``stop()``, ``interrupt()`` or the end of the cluster cancelled."""


class DataChanged(DataError, code="TFD308"):
    """A dataset whose elements would be wrong if they were read through a tf.data service."""


class CoordinatorError(TfdError, code="TFD600"):
    """Failure to schedule or run closures."""


class PausedError(CoordinatorError, code="TFD601"):
    """A wait that would never end: the coordinator is paused and no controller can resume it."""


class ValueGone(CoordinatorError, LookupError, code="TFD602"):
    """The RemoteValue of a closure is no longer referenced, so its result was discarded."""


class TasksMissing(CoordinatorError, code="TFD603"):
    """A worker or parameter server that is needed and does not answer."""


class RunError(TfdError, code="TFD610"):
    """Failure of a function that `Cluster.run` calls on every worker."""


class RankFailed(RunError, code="TFD611"):
    """An exception of the user's function.

    Attributes
    ----------
    rank : int
        The rank whose function raised first.
    traceback : str
        The traceback of the exception in the rank's process.
    """

    rank = 0
    traceback = ""


class RankLost(RunError, code="TFD612"):
    """The end of a process before the user's function returned."""


class ResolveError(TfdError, code="TFD700"):
    """Failure to find the tasks of a cluster or their addresses."""


class NotThere(ResolveError, code="TFD701"):
    """The source of the cluster's description does not exist.

    The source is, for example, a step, group, file or environment variable.
    """


class Malformed(ResolveError, code="TFD702"):
    """The cluster description cannot be parsed, or is invalid."""


class NoTasks(ResolveError, code="TFD703"):
    """A group or job without usable tasks."""


class AccessDenied(ResolveError, code="TFD704"):
    """Credentials that are missing, expired or not sufficient."""


class NoAnswer(ResolveError, code="TFD705"):
    """The service that lists the cluster's tasks fails or does not answer."""


class SparkError(TfdError, code="TFD890"):
    """Failure of a cluster on the executors of Apache Spark."""


class NotEnoughSlots(SparkError, code="TFD891"):
    """Spark cannot run all nodes, or start all agents, at the same time."""


class ReservationLimit(SparkError, TimeoutError, code="TFD892"):
    """Not all nodes reported from their executors within ``reservation_timeout`` seconds."""


class NodeFailed(SparkError, code="TFD893"):
    """An exception of the user's function in a node. The message includes its traceback."""


class NodeLost(SparkError, code="TFD894"):
    """Unexpected end of a node's process, or of the executor that it belongs to."""


class FeedTimeout(SparkError, TimeoutError, code="TFD895"):
    """A node that read no rows for ``feed_timeout`` seconds."""


class TimeLimit(TfdError, TimeoutError, code="TFD400"):
    """A wait that reached its time limit."""


class RemoteError(TfdError, code="TFD204"):
    """Failure of a remote kernel, or of the source that it runs."""


class InvalidMessage(TfdError, code="TFD206"):
    """An invalid message from another host."""


class Refused(TfdError, code="TFD501"):
    """An operation that the policy of this host's administrator does not allow."""


class Unsupported(TfdError, code="TFD500"):
    """An operation that this platform or the version of a library does not support."""


__all__ = sorted(kind.__name__ for kind in BY_CODE.values())


def nearest(word: object, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'? "`` for the most similar name, or an empty string."""
    # Import time: few errors need it.
    from difflib import get_close_matches

    matches = get_close_matches(str(word), list(known), n=1)
    return f"did you mean {matches[0]!r}? " if matches else ""


def one_of(word: object, known: Iterable[str]) -> str:
    """Return the step for a name that is not one of `known`, with the most similar name."""
    choices = list(known)
    return f"{nearest(word, choices)}use one of {', '.join(choices)}"


def no_lease(cluster: str) -> StateError:
    """Return the error for renewing the lease of a cluster that has none."""
    return StateError(
        f"cluster {cluster!r} stops with its kernel and has no lease to renew",
        fix="call cluster.detach(hours=8) to keep it running",
    )


def unknown_task(cluster: str, task: str, tasks: Iterable[str]) -> UnknownName:
    """Return the error for a task that is not among the `tasks` of a cluster."""
    known = list(tasks)
    return UnknownName(
        f"cluster {cluster!r} has no task {task!r}",
        fix=f"{nearest(task, known)}its tasks are {', '.join(known) or 'none'}",
    )
