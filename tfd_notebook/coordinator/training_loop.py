"""`training_loop`: training steps with checkpoints, which survive the loss of tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tfd_notebook.coordinator import error_hints
from tfd_notebook.errors import CoordinatorError, StateError, TasksMissing, UsageError
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.model.spec import ClusterConfig
from tfd_notebook.net.clock import Deadline

if TYPE_CHECKING:
    from tfd_notebook.coordinator.coordinator import Coordinator

#: The loop raises after this number of losses without a finished round in between.
_MAX_LOSSES = 3
#: Number of rounds, saving included, that must fit before the time limit.
_ROUNDS_LEFT = 1.5
#: Minimum seconds left before the cluster's time limit.
_MIN_SECONDS_LEFT = 2.0


@dataclass(frozen=True, eq=False)
class Work(Handle):
    """The parts of a training, built again for each strategy.

    Parameters
    ----------
    step : tf.function
        One step of training, for any worker.
    checkpoint : tf.train.Checkpoint
        All state to restore after a loss.
    args : sequence, optional
        Arguments of `step`, such as an iterator from ``create_per_worker_dataset``.
    """

    _instead = "send the function that builds it"

    step: Any
    checkpoint: Any
    args: Sequence[Any] = ()


@dataclass
class Progress:
    """The progress of a training.

    Attributes
    ----------
    steps : int
        Number of finished steps, including those before a restored checkpoint.
    checkpoint : str
        The latest checkpoint, or empty.
    losses : int
        Number of times that parameter servers were lost. Losses without a finished round in
        between count once.
    finished : bool
        Whether all steps have finished. False if the time limit was reached first.
    work : Work, optional
        The last result of `build`, with its variables.
    """

    steps: int = 0
    checkpoint: str = ""
    losses: int = 0
    finished: bool = False
    work: Work | None = field(default=None, repr=False)


class TrainingCluster(Protocol):
    """A cluster with workers and parameter servers, as the loop uses it."""

    @property
    def config(self) -> ClusterConfig: ...

    def snapshot(self) -> Snapshot: ...

    def coordinator(self) -> Coordinator: ...

    def recover(self) -> Coordinator: ...


def training_loop(
    cluster: TrainingCluster,
    build: Callable[[Coordinator], Work],
    steps: int,
    directory: str,
    every: int = 100,
    keep: int = 3,
    on_round: Callable[[Progress], object] | None = None,
    on_time_limit: str = "continue",
) -> Progress:
    """Train for a number of steps and recover from the loss of workers and parameter servers.

    The steps are scheduled in rounds. After each round, the loop joins and saves a checkpoint. When
    a parameter server is lost, the loop recovers the cluster and builds the work again. It
    continues from the latest checkpoint. It starts from the latest checkpoint in `directory`, if
    any. So the cell can be run again, even in a new kernel. Before the cluster's time limit, it
    saves and returns.

    Parameters
    ----------
    cluster : Cluster
        A cluster with workers and parameter servers.
    build : callable
        Takes the coordinator and returns a `Work`. Called in the strategy's scope, and again after
        each loss.
    steps : int
        Total number of steps. A step whose worker is lost while it runs may run twice.
    directory : str
        Directory of the checkpoints.
    every : int
        Steps per round. Default 100.
    keep : int
        Number of checkpoints to keep. Default 3.
    on_round : callable, optional
        Called with the `Progress` after each round.
    on_time_limit : {"continue", "checkpoint"}
        What to do at the notice of the time limit (``Policy(time_limit_notice=)``). ``"continue"``
        (default) runs the rounds that still fit. ``"checkpoint"`` ends after the current round,
        whose checkpoint is saved. After the notice, both are the same.

    Returns
    -------
    Progress

    Raises
    ------
    UsageError
        Invalid argument.
    CoordinatorError
        Parameter servers were lost three times without a finished round in between.
    Exception
        The error of a step.

    See Also
    --------
    tf.train.CheckpointManager
    """
    for name, value in (("steps", steps), ("every", every), ("keep", keep)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"invalid {name} {value!r}: expected 1 or more")
    if not callable(build):
        raise UsageError(
            "invalid build: expected a function", fix="build(coordinator) -> tfd.Work(...)"
        )
    if on_time_limit not in ("continue", "checkpoint"):
        raise UsageError(
            f"invalid on_time_limit {on_time_limit!r}: expected 'continue' or 'checkpoint'"
        )
    reserve = cluster.config.policy.time_limit_notice if on_time_limit == "checkpoint" else 0.0
    return _TrainingLoop(cluster, build, steps, directory, every, keep, on_round, reserve).run()


class _TrainingLoop:
    def __init__(
        self,
        cluster: TrainingCluster,
        build: Callable[[Coordinator], Work],
        steps: int,
        directory: str,
        every: int,
        keep: int,
        on_round: Callable[[Progress], object] | None,
        reserve: float,
    ) -> None:
        self._cluster = cluster
        self._build = build
        self._steps = steps
        self._directory = directory
        self._every = every
        self._keep = keep
        self._on_round = on_round
        #: Seconds before the time limit at which no round starts.
        self._reserve = reserve
        self._progress = Progress()
        self._round_seconds = 0.0
        self._expires: Deadline | None = None

    def run(self) -> Progress:
        cluster, progress, consecutive_losses, manager = self._cluster, self._progress, 0, None
        self._fits()
        while manager is None or (progress.steps < self._steps and self._fits()):
            began = time.monotonic()
            try:
                if manager is None:
                    after_loss = consecutive_losses > 0
                    coordinator = cluster.recover() if after_loss else cluster.coordinator()
                    manager = self._start(coordinator)
                    continue
                count = min(self._every, self._steps - progress.steps)
                self._run_round(coordinator, count)
                progress.checkpoint = manager.save(checkpoint_number=progress.steps + count)
                progress.steps += count
                consecutive_losses = 0
            except Exception as error:
                if manager is not None and self._has_expired():
                    break  # time limit reached during a round: the last checkpoint is the result
                if not self._is_loss(error):
                    raise
                consecutive_losses += 1
                progress.losses += consecutive_losses == 1
                if consecutive_losses >= _MAX_LOSSES:
                    raise CoordinatorError(
                        f"parameter servers were lost {consecutive_losses} times without a round "
                        f"of {self._every} steps in between",
                        fix="use a smaller every=, or see cluster.logs('ps:0'). The next call "
                        f"continues from step {progress.steps}",
                    ) from error
                manager = None
                continue
            # A decaying maximum: one short round must not shorten the estimate.
            self._round_seconds = max(time.monotonic() - began, 0.9 * self._round_seconds)
            if self._on_round is not None:
                self._on_round(progress)
        progress.finished = progress.steps >= self._steps
        return progress

    def _start(self, coordinator: Coordinator) -> Any:
        """Build the work, restore the latest checkpoint, and return the checkpoint manager."""
        import tensorflow as tf

        with coordinator.strategy.scope():
            work = self._build(coordinator)
        if not isinstance(work, Work):
            raise UsageError(
                f"invalid result of build: {type(work).__name__}",
                fix="return tfd.Work(step, checkpoint, args)",
            )
        manager = tf.train.CheckpointManager(
            work.checkpoint, self._directory, max_to_keep=self._keep
        )
        restored = manager.restore_or_initialize()
        build = self._build
        coordinator.build = lambda coordinator: build(coordinator).checkpoint
        self._progress.work = work
        self._progress.checkpoint = restored or ""
        number = str(restored or "").rpartition("-")[2]
        self._progress.steps = int(number) if number.isdigit() else 0
        return manager

    def _run_round(self, coordinator: Coordinator, count: int) -> None:
        work = self._progress.work
        assert work is not None
        for _ in range(count):
            coordinator.schedule(work.step, args=tuple(work.args))
        coordinator.join()

    def _is_loss(self, error: Exception) -> bool:
        """Return True if an error results from a lost or restarted parameter server."""
        import tensorflow as tf

        if isinstance(error, StateError):
            return False
        if isinstance(error, TasksMissing) or error_hints.is_loss(error):
            return True
        if not isinstance(error, tf.errors.OpError):
            return False
        # The server may have restarted already, without the variables.
        return "/job:ps" in str(error) and error_hints.is_stale(error)

    def _fits(self) -> bool:
        """Return True if another round fits before the cluster's time limit."""
        snapshot = self._cluster.snapshot()
        if snapshot.expires is None:
            self._expires = None
            return True
        left = Deadline(snapshot.expires - snapshot.time)
        if self._expires is None and left.left <= self._reserve:
            self._reserve = 0.0  # a limit so short has no notice
        self._expires = left
        needed = max(_MIN_SECONDS_LEFT, _ROUNDS_LEFT * self._round_seconds, self._reserve)
        return self._expires.left > needed

    def _has_expired(self) -> bool:
        """Return True if the cluster has reached its time limit."""
        return self._expires is not None and self._expires.expired
