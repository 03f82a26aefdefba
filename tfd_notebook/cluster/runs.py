"""`Cluster.run`: a function in a new process next to each training worker."""

from __future__ import annotations

import concurrent.futures
import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from tfd_notebook.cluster.servers import ClusterServers
from tfd_notebook.errors import RankFailed, RankLost, StateError, TfdError, TimeLimit, UsageError
from tfd_notebook.launchers import base
from tfd_notebook.model.events import RankChanged, RunChanged
from tfd_notebook.model.spec import Role, TaskState, check_seconds
from tfd_notebook.net import plain_values, validation
from tfd_notebook.net.clock import Deadline

_POLL_SECONDS = 0.2
#: Seconds to wait for the ends of other ranks after the first failure.
_FAILURE_SECONDS = 1.0
#: The order in which ends of ranks are reported, by the field of the reply.
_ORDER = {"lost": 0, "kind": 1}
#: Bytes of output that one request reads.
_OUTPUT_BYTES = 1_000_000
#: Callback for new lines of a rank.
_Output: TypeAlias = Callable[[int, str], object]
#: Seconds to wait for the end of a function, whose time the deadline of the run limits.
_NO_LIMIT = 1e9


def run(
    servers: ClusterServers,
    function: Callable[..., Any],
    *args: Any,
    timeout: float | None = None,
    output: Callable[[int, str], object] | None = None,
) -> list[Any]:
    """Call `function(*args)` next to each training worker, and return the results by rank.

    Each call runs in a new process on the host of its worker, with the worker's GPUs. With
    ``launcher="inprocess"`` it has no GPU, because the kernel holds the GPUs. The variable
    ``TF_CONFIG`` describes all of these processes, so that
    ``tf.distribute.MultiWorkerMirroredStrategy()`` works without arguments. Their output is
    shown as it arrives, each line with its rank. At the first exception, after `timeout` and
    at Ctrl-C, all processes end.

    Parameters
    ----------
    servers : ClusterServers
    function : callable
        Sent by value if it is defined in the notebook. If it has a parameter ``ctx`` without an
        argument, it gets a context with ``worker_num``, ``num_workers``, ``job_name``,
        ``task_index`` and ``cluster_spec``. So ``map_fun(args, ctx)`` for TFCluster works.
    *args : object
        Its arguments, the same for all ranks.
    timeout : float, optional
        Seconds. Default: no limit.
    output : callable, optional
        Called as ``output(rank, text)`` with new lines. If it raises, all ranks stop and `run`
        raises the exception. Default: print each line with its rank.

    Returns
    -------
    list
        Numbers, text, bytes, arrays, and lists, tuples, sets and dicts of them. Tensors become
        NumPy arrays.

    Raises
    ------
    RankFailed
        The function raised an exception.
    RankLost
        A process ended. ``Policy(restarts=)`` sets how often all ranks start again first. Use
        ``tf.keras.callbacks.BackupAndRestore`` or a checkpoint to continue.
    TimeLimit
        The function did not return within `timeout`.
    StateError
        The cluster has no training worker, or a worker is not ready, or another call runs.
    UsageError
        `function` or `output` is not a callable, or the function or an argument cannot be
        pickled.

    See Also
    --------
    tf.distribute.MultiWorkerMirroredStrategy
    """
    deadline = None if timeout is None else Deadline(check_seconds("timeout", timeout))
    show = print_lines if output is None else output
    for name, value in (("function", function), ("output", show)):
        if not callable(value):
            raise UsageError(f"invalid {name} {value!r}: expected a callable")
    servers.require_running()
    if not servers.run_lock.acquire(blocking=False):
        raise StateError(
            f"cluster {servers.name!r} already runs a function",
            fix="wait until it has returned, or interrupt its cell",
        )
    try:
        return _run(servers, function, _pickled(function, args), deadline, show)
    finally:
        servers.run_lock.release()


def _run(
    servers: ClusterServers,
    function: Any,
    pickled: bytes,
    deadline: Deadline | None,
    output: _Output,
) -> list[Any]:
    monitor = servers.monitor
    name = getattr(function, "__name__", type(function).__name__)
    restarts = servers.policy.restarts
    for attempt in range(1, restarts + 2):
        tasks = _workers(servers)
        monitor.apply(RunChanged(name, attempt, tuple(tasks)))
        call = _Call(servers, tasks, pickled, deadline, output)
        try:
            return call.results()
        except RankLost as error:
            if attempt > restarts:
                error.fix = (
                    f"see the output above; all {restarts} restarts of tfd.Policy(restarts=) "
                    "are used"
                )
                raise
            monitor.notice("warning", f"{error.what}; all ranks start again")
    raise AssertionError("unreachable")


def _workers(servers: ClusterServers) -> list[str]:
    rows = servers.task_manager.rows_of(Role.WORKER)
    if not rows:
        raise StateError(
            f"cluster {servers.name!r} has no training worker",
            fix="cluster.scale(workers=2), or tfd.Cluster(workers=2)",
        )
    for row in rows:
        if row.state is not TaskState.READY:
            raise StateError(
                f"{row.task} is {row.state}",
                task=row.task,
                fix=f"cluster.restart({row.task!r})",
            )
    return [row.task for row in rows]


class _Call:
    """One attempt to call a function for each of these workers."""

    def __init__(
        self,
        servers: ClusterServers,
        tasks: Sequence[str],
        pickled: bytes,
        deadline: Deadline | None,
        output: _Output,
    ) -> None:
        self._host: base.TaskHost = servers.task_manager.task_host
        self._monitor = servers.monitor
        self._tasks = tasks
        self._pickled = pickled
        self._deadline = deadline
        self._output = output
        self._offsets = dict.fromkeys(tasks, 0)
        self._rest = dict.fromkeys(tasks, "")
        self._results: list[Any] = [None] * len(tasks)
        self._running = set(tasks)

    def results(self) -> list[Any]:
        """Return the results by rank, or raise the first error. At the end, no process remains."""
        host, tasks = self._host, self._tasks
        addresses = host.open_ranks(tasks)
        jobs = {str(Role.WORKER): [addresses[task] for task in tasks]}
        pool = concurrent.futures.ThreadPoolExecutor(len(tasks), "tfd-run")
        replies: dict[concurrent.futures.Future[dict[str, Any]], int] = {}
        try:
            for rank, task in enumerate(tasks):
                reply = pool.submit(host.run_rank, task, self._pickled, jobs, timeout=_NO_LIMIT)
                replies[reply] = rank
                self._monitor.apply(RankChanged(task, "running"))
            self._await(replies)
        finally:
            try:
                host.close_ranks(tasks)
            finally:
                pool.shutdown(wait=False)
                for task in sorted(self._running):
                    self._monitor.apply(RankChanged(task, "stopped"))
        return self._results

    def _await(self, replies: dict[concurrent.futures.Future[dict[str, Any]], int]) -> None:
        pending = set(replies)
        while pending:
            done, pending = concurrent.futures.wait(
                pending, _POLL_SECONDS, concurrent.futures.FIRST_COMPLETED
            )
            if any("result" not in _value(reply) for reply in done):
                # The loss of a rank makes the others fail, and may be reported after that.
                more, pending = concurrent.futures.wait(pending, _FAILURE_SECONDS)
                done |= more
            self._show_output({self._tasks[replies[reply]] for reply in done})
            for reply in sorted(
                done, key=lambda reply: _ORDER.get(next(iter(_value(reply)), ""), 2)
            ):
                self._end(replies[reply], reply.result())
            if pending and self._deadline is not None and self._deadline.expired:
                waiting = ", ".join(
                    f"rank {rank}" for rank in sorted(replies[reply] for reply in pending)
                )
                raise TimeLimit(
                    f"the function did not return in time on {waiting}",
                    fix="see the output above; allow more time with timeout=",
                )

    def _end(self, rank: int, reply: dict[str, Any]) -> None:
        """Record the end of a rank; raise its error."""
        task = self._tasks[rank]
        self._running.discard(task)
        where = f"rank {rank} ({task})"
        if "result" in reply:
            try:
                self._results[rank] = plain_values.unpack(reply["result"])
            except (ValueError, TypeError, KeyError) as error:
                raise RankFailed(f"the result of {where} is invalid: {error}", task=task) from None
            self._monitor.apply(RankChanged(task, "finished"))
        elif "lost" in reply:
            self._monitor.apply(RankChanged(task, "lost", reply["lost"]))
            raise RankLost(f"the process of {where} {_ended(reply['lost'])}", task=task)
        else:
            text = f"{reply['kind']}: {reply['text']}"
            self._monitor.apply(RankChanged(task, "failed", text))
            host = self._monitor.snapshot().ranks[rank].host
            failed = RankFailed(
                f"the function failed on {where} on {host}: {text}\n{reply['traceback'].rstrip()}",
                task=task,
            )
            failed.rank, failed.traceback = rank, reply["traceback"]
            raise failed

    def _show_output(self, ended: Collection[str]) -> None:
        """Show new lines of all ranks, and all of those that have ended."""
        for rank, task in enumerate(self._tasks):
            while self._show_lines(rank, task) and task in ended:
                if self._deadline is not None and self._deadline.expired:
                    break
            if ended and self._rest[task]:  # a last incomplete line
                self._output(rank, self._rest[task])
                self._rest[task] = ""

    def _show_lines(self, rank: int, task: str) -> bool:
        """Show the next lines of a rank; return True if there may be more."""
        new = ""
        # A lost host is reported by the rank's own request.
        with contextlib.suppress(TfdError):
            new, self._offsets[task] = self._host.rank_output(
                task, _OUTPUT_BYTES, self._offsets[task]
            )
        *lines, rest = (self._rest[task] + new).split("\n")
        if len(rest) > _OUTPUT_BYTES:
            lines, rest = [*lines, rest], ""
        self._rest[task] = rest
        if lines:
            self._output(rank, "\n".join(lines))
        return len(new) >= _OUTPUT_BYTES // 2


def print_lines(rank: int, text: str) -> None:
    """Print lines of a rank, each with its rank."""
    for line in text.split("\n"):
        print(f"[{rank}] {validation.terminal_output(line)}")  # noqa: T201 - output of the function
    sys.stdout.flush()


def _value(reply: concurrent.futures.Future[dict[str, Any]]) -> dict[str, Any]:
    return reply.result() if reply.exception() is None else {}


def _ended(reason: str) -> str:
    return reason if reason.startswith("ended") else f"was {reason}"


def _cell_sources() -> dict[str, list[str]]:
    """Return the sources of functions that are in no file, which AutoGraph reads."""
    return {
        name: list(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }


def _pickled(function: Any, args: tuple[Any, ...]) -> bytes:
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps((function, args, _cell_sources()))
    except Exception as error:
        raise UsageError(
            f"the function or an argument cannot be sent to the workers: {error}",
            fix="create datasets, models and files inside the function",
        ) from error
    return pickled
