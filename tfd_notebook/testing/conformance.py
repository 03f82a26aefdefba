"""The contract of launchers as checks that start real clusters.

They run without pytest (`check_launcher`), as a test class
(`tfd_notebook.testing.pytest_checks.LauncherConformance`), or from the command line
(``pytest -p tfd_notebook.testing.plugin --launcher NAME``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tfd_notebook.cluster import registry
from tfd_notebook.cluster.cluster import Cluster
from tfd_notebook.errors import TfdError, UnknownName, Unsupported
from tfd_notebook.launchers import base
from tfd_notebook.model.events import TaskChanged
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role, TaskState

_NAME = re.compile(r"[A-Za-z][\w.-]{0,63}", re.ASCII)
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Parameters
    ----------
    check : str
    state : {"passed", "refused", "failed"}
        ``refused``: the launcher raised Unsupported, as the contract permits.
    detail : str
        The reason of any other state than ``passed``.
    """

    check: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """The outcomes of all checks of a launcher, in their order."""

    launcher: str
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The checks that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.state == "failed")

    def __str__(self) -> str:
        lines = [f"launcher {self.launcher!r}: {len(self.failed)} of {len(self.outcomes)} failed"]
        for outcome in self.outcomes:
            detail = f": {outcome.detail}" if outcome.detail else ""
            lines.append(f"  {outcome.state:8} {outcome.check}{detail}")
        return "\n".join(lines)


def check_launcher(
    launcher: str | base.Launcher | type[base.Launcher],
    *,
    timeout: float = 60.0,
) -> Report:
    """Run all checks on a launcher, and return their outcomes.

    Parameters
    ----------
    launcher : str, Launcher or type
        The name of an installed launcher, a launcher, or a class that needs no arguments.
    timeout : float
        Maximum seconds of each wait. Default 60.

    Raises
    ------
    AssertionError
        A check failed. The message is the report.
    """
    report = Conformance(launcher, timeout=timeout).run_all()
    if report.failed:
        raise AssertionError(str(report))
    return report


class Conformance:
    """The checks of one launcher. They share one cluster. See `check_launcher`."""

    def __init__(
        self,
        launcher: str | base.Launcher | type[base.Launcher],
        *,
        timeout: float = 60.0,
    ) -> None:
        if isinstance(launcher, type):
            launcher = launcher()
        self.launcher = base.launcher(launcher)
        self.timeout = timeout
        self._cluster: Cluster | None = None

    def run_all(self) -> Report:
        """Return the outcomes of all checks."""
        self.open()
        try:
            outcomes = tuple(self.run(name) for name in CHECKS)
        finally:
            self.close()
        return Report(self.launcher.name, outcomes)

    def run(self, name: str) -> Outcome:
        """Return the outcome of one check. Never raises, except at Ctrl-C."""
        try:
            CHECKS[name](self)
        except Unsupported as error:
            return Outcome(name, "refused", error.what)
        except AssertionError as error:
            return Outcome(name, "failed", str(error) or traceback.format_exc())
        except Exception as error:
            return Outcome(name, "failed", f"{type(error).__name__}: {error}")
        return Outcome(name, "passed")

    def open(self) -> None:
        """Start the shared cluster; a check reports the failure."""
        with contextlib.suppress(Exception):
            self.cluster  # noqa: B018

    def close(self) -> None:
        """Stop the shared cluster."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()

    # For the checks

    def another(self) -> base.Launcher:
        """Return a launcher that is created from the options of the checked one."""
        return type(self.launcher)(**self.launcher.options)

    @property
    def cluster(self) -> Cluster:
        """The shared cluster, with two data workers."""
        if self._cluster is None or self._cluster.ended:
            self._cluster = self.start(data_workers=2)
        return self._cluster

    def start(self, **counts: int) -> Cluster:
        """Start a cluster with another launcher object."""
        name = f"conformance-{uuid.uuid4().hex[:8]}"
        return Cluster(name=name, launcher=self.another(), **counts)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def brief(self, **counts: int) -> Iterator[Cluster]:
        """Start a cluster for a ``with`` block."""
        cluster = self.start(**counts)
        try:
            yield cluster
        finally:
            cluster.stop()

    def until(self, holds: Callable[[], Any], what: str) -> None:
        """Wait until `holds()` is true; fail with the sentence `what`."""
        deadline = time.monotonic() + self.timeout
        while not holds():
            assert time.monotonic() < deadline, f"not within {self.timeout:g} s: {what}"
            time.sleep(_POLL_SECONDS)

    def row(self, task: str) -> TaskRow:
        """Return the row of a task of the shared cluster."""
        row = self.cluster.snapshot().task(task)
        assert row is not None, f"{task} is missing"
        return row

    def is_ready(self, task: str) -> bool:
        """Return True if a task of the shared cluster is ready."""
        return self.row(task).state is TaskState.READY


def _attributes(kit: Conformance) -> None:
    launcher = kit.launcher
    assert _NAME.fullmatch(launcher.name), f"invalid name {launcher.name!r}"
    assert launcher.summary, "summary is empty"
    assert "\n" not in launcher.summary, "summary has several lines"
    assert launcher.roles, "roles is empty"
    assert launcher.roles <= set(Role), f"invalid roles {launcher.roles!r}"


def _options(kit: Conformance) -> None:
    options = kit.launcher.options
    assert json.loads(json.dumps(options)) == options, "options has values that JSON changes"
    assert kit.another().options == options, "a launcher created from options has other options"


def _start(kit: Conformance) -> None:
    cluster = kit.cluster
    assert cluster.state == "ready", f"the cluster is {cluster.state}"
    names = [task.name for task in cluster.tasks]
    assert names == ["dispatcher:0", "data_worker:0", "data_worker:1"], f"tasks are {names}"
    addresses = [task.address for task in cluster.tasks]
    assert all(addresses), f"tasks without an address: {addresses}"
    assert len(set(addresses)) == 3, f"tasks share an address: {addresses}"


def _events(kit: Conformance) -> None:
    order = (TaskState.PLANNED, TaskState.STARTING, TaskState.READY)
    for task in kit.cluster.tasks:
        states = [
            event.state
            for event in kit.cluster.snapshot().events
            if isinstance(event, TaskChanged) and event.task == task.name
        ]
        first = states[: states.index(TaskState.READY) + 1] if TaskState.READY in states else states
        assert first, f"no event of {task.name}"
        assert first[-1] is TaskState.READY, f"{task.name} was never reported ready: {states}"
        positions = [order.index(state) for state in first if state in order]
        assert positions == sorted(positions), f"events of {task.name} out of order: {states}"


def _data(kit: Conformance) -> None:
    if _is_simulated(kit):
        raise Unsupported("its tasks are simulated")
    import tensorflow as tf

    dataset = tf.data.Dataset.range(100).apply(kit.cluster.distribute("dynamic"))
    numbers = sorted(int(number) for number in dataset)
    assert numbers == list(range(100)), f"the service delivered {len(numbers)} of 100 elements"


def _is_simulated(kit: Conformance) -> bool:
    from tfd_notebook.net.probe import probe

    return not probe(kit.row("dispatcher:0").address, timeout=kit.timeout).alive


def _logs(kit: Conformance) -> None:
    assert isinstance(kit.cluster.logs("data_worker:0"), str)


def _restart(kit: Conformance) -> None:
    before = kit.row("data_worker:0")
    kit.cluster.restart("data_worker:0")
    kit.until(lambda: kit.is_ready("data_worker:0"), "the restarted task is ready")
    after = kit.row("data_worker:0")
    assert after.address == before.address, "the restarted task has another address"
    assert after.restarts > before.restarts, "the restart was not counted"


def _kill(kit: Conformance) -> None:
    if kit.launcher.in_process:
        raise Unsupported("a task in the calling process cannot be killed")
    before = kit.row("data_worker:1")
    kit.cluster.kill("data_worker:1")
    kit.until(lambda: kit.row("data_worker:1").restarts > before.restarts, "it is restarted")
    kit.until(lambda: kit.is_ready("data_worker:1"), "the killed task is ready again")
    assert kit.row("data_worker:1").address == before.address, "it has another address"


def _scale(kit: Conformance) -> None:
    for count in (3, 2):
        kit.cluster.scale(data_workers=count)
        names = [task.name for task in kit.cluster.tasks if task.role == Role.DATA_WORKER]
        assert len(names) == count, f"after scale(data_workers={count}): {names}"
    kit.until(lambda: kit.cluster.state == "ready", "the cluster is ready after scale")


def _unknown_task(kit: Conformance) -> None:
    for operation in (kit.cluster.restart, kit.cluster.kill, kit.cluster.logs):
        try:
            operation("data_worker:99")
        except UnknownName:
            continue
        raise AssertionError(f"{operation.__name__}('data_worker:99') did not raise UnknownName")


def _two_clusters(kit: Conformance) -> None:
    with kit.brief(data_workers=1) as second:
        assert second.state == "ready", f"the second cluster is {second.state}"
        assert kit.cluster.state == "ready", f"the first cluster is {kit.cluster.state}"
        shared = {t.address for t in second.tasks} & {t.address for t in kit.cluster.tasks}
        assert _is_simulated(kit) or not shared, f"both clusters use {', '.join(sorted(shared))}"
    assert kit.cluster.state == "ready", "the end of the second cluster changed the first"


def _training(kit: Conformance) -> None:
    if not {Role.WORKER, Role.PS} <= kit.launcher.roles:
        raise Unsupported("it runs no training workers and parameter servers")
    if kit.launcher.in_process:
        raise Unsupported("TensorFlow cannot stop these servers in the calling process")
    with kit.brief(workers=1, ps=1) as cluster:
        states = {task.name: str(task.state) for task in cluster.tasks}
        assert states == {"ps:0": "ready", "worker:0": "ready"}, f"tasks are {states}"


def _stop(kit: Conformance) -> None:
    with kit.brief(data_workers=1) as cluster:
        name = cluster.name
        pids = [task.pid for task in cluster.tasks if task.pid and kit.launcher.on_this_host]
    assert cluster.state == "stopped", f"after stop() the cluster is {cluster.state}"
    assert name not in registry.clusters(), "the name of a stopped cluster is still in use"
    left = {pid for pid in pids if pid != os.getpid()}
    kit.until(
        lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left), "its processes have ended"
    )
    cluster.stop()  # a second call changes nothing


def _failed_start(kit: Conformance) -> None:
    try:
        with kit.brief(data_workers=-1):
            pass
    except TfdError:
        return
    raise AssertionError("data_workers=-1 raised no error of tfd_notebook.errors")


#: The checks by name, in their order.
CHECKS: dict[str, Callable[[Conformance], None]] = {
    "attributes": _attributes,
    "options": _options,
    "start": _start,
    "events": _events,
    "data": _data,
    "logs": _logs,
    "restart": _restart,
    "kill": _kill,
    "scale": _scale,
    "unknown_task": _unknown_task,
    "two_clusters": _two_clusters,
    "training": _training,
    "stop": _stop,
    "failed_start": _failed_start,
}
