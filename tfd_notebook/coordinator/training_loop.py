"""`training_loop`: steps with checkpoints, which survive what a cluster can lose."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfd_notebook.errors import CoordinatorError, StateError, TasksMissing, UsageError
from tfd_notebook.net.clock import Deadline

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster
    from tfd_notebook.coordinator.coordinator import Coordinator

#: A cluster that loses a server again before one round is through is given up.
_MOST_LOSSES = 3
#: Rounds of closures that must still fit in before a time limit, saving included.
_ROUNDS_LEFT = 1.5
#: Seconds that are always left before the cluster's end.
_LEAST_LEFT = 2.0


@dataclass(frozen=True)
class Work:
    """What a training consists of, made anew for each strategy.

    Parameters
    ----------
    step : tf.function
        One step of training, for any worker.
    checkpoint : tf.train.Checkpoint
        All that is to survive.
    args : sequence, optional
        Arguments of `step`, such as an iterator from ``create_per_worker_dataset``.
    """

    step: Any
    checkpoint: Any
    args: Sequence[Any] = ()


@dataclass
class Progress:
    """How far a training is.

    Attributes
    ----------
    steps : int
        Steps that are through, those before a restored checkpoint included.
    checkpoint : str
        The latest checkpoint; empty while there is none.
    losses : int
        How often parameter servers were lost and brought back.
    finished : bool
        Whether all steps are through; false where the time limit came first.
    work : Work, optional
        What was built last, with its variables.
    """

    steps: int = 0
    checkpoint: str = ""
    losses: int = 0
    finished: bool = False
    work: Work | None = field(default=None, repr=False)


def training_loop(
    cluster: Cluster,
    build: Callable[[Coordinator], Work],
    steps: int,
    directory: str,
    every: int = 100,
    keep: int = 3,
    on_round: Callable[[Progress], object] | None = None,
) -> Progress:
    """Train for so many steps, through the loss of workers and parameter servers.

    The steps are scheduled in rounds; each round is joined and saved. When a parameter server is
    lost the cluster is recovered, the work is built again, and the loop goes on from the latest
    checkpoint. It begins with the latest one in `directory`, if there is one, so that a cell, or a
    kernel, can simply be run again. Before the cluster's time limit it saves and returns.

    Parameters
    ----------
    cluster : Cluster
        With workers and parameter servers.
    build : callable
        Takes the coordinator and returns a `Work`; called in the strategy's scope, again after
        each loss.
    steps : int
        How many steps in all. A step whose worker is lost in the middle may run twice.
    directory : str
        Where the checkpoints are.
    every : int
        Steps of a round. Default 100.
    keep : int
        Checkpoints that are kept. Default 3.
    on_round : callable, optional
        Called with the `Progress` after each round.

    Returns
    -------
    Progress

    Raises
    ------
    UsageError
        An argument cannot be meant.
    CoordinatorError
        Parameter servers were lost three times in a row, without a round in between.
    Exception
        The error of a step.

    See Also
    --------
    tf.train.CheckpointManager
    """
    for name, value in (("steps", steps), ("every", every), ("keep", keep)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}={value!r} must be 1 or more")
    if not callable(build):
        raise UsageError("build must be a function", fix="build(coordinator) -> tfd.Work(...)")
    return _Loop(cluster, build, steps, directory, every, keep, on_round).run()


class _Loop:
    def __init__(
        self,
        cluster: Cluster,
        build: Callable[[Coordinator], Work],
        steps: int,
        directory: str,
        every: int,
        keep: int,
        on_round: Callable[[Progress], object] | None,
    ) -> None:
        self._cluster = cluster
        self._build = build
        self._steps = steps
        self._directory = directory
        self._every = every
        self._keep = keep
        self._on_round = on_round
        self._progress = Progress()
        self._round_seconds = 0.0
        self._expires: Deadline | None = None

    def run(self) -> Progress:
        cluster, progress, in_a_row, manager = self._cluster, self._progress, 0, None
        while manager is None or (progress.steps < self._steps and self._fits()):
            began = time.monotonic()
            try:
                if manager is None:
                    after_loss = in_a_row > 0
                    coordinator = cluster.recover() if after_loss else cluster.coordinator()
                    manager = self._start(coordinator)
                    continue
                count = min(self._every, self._steps - progress.steps)
                self._one_round(coordinator, count)
                progress.checkpoint = manager.save(checkpoint_number=progress.steps + count)
                progress.steps += count
                in_a_row = 0
            except Exception as error:
                if manager is not None and self._is_over():
                    break  # its end came in the middle of a round: what was saved counts
                if not self._is_loss(error):
                    raise
                in_a_row += 1
                progress.losses += 1
                if in_a_row >= _MOST_LOSSES:
                    raise CoordinatorError(
                        f"parameter servers were lost {in_a_row} times without a round of "
                        f"{self._every} steps in between",
                        fix=f"make every= smaller, or see cluster.logs('ps:0'); it goes on from "
                        f"step {progress.steps} when called again",
                    ) from error
                manager = None
                continue
            # The longest of late, since a single short one tells little.
            self._round_seconds = max(time.monotonic() - began, 0.9 * self._round_seconds)
            if self._on_round is not None:
                self._on_round(progress)
        progress.finished = progress.steps >= self._steps
        return progress

    def _start(self, coordinator: Coordinator) -> Any:
        """Build the work, restore the latest checkpoint, and return the manager of them."""
        import tensorflow as tf

        with coordinator.strategy.scope():
            work = self._build(coordinator)
        if not isinstance(work, Work):
            raise UsageError(
                f"build returned a {type(work).__name__}",
                fix="return tfd.Work(step, checkpoint, args)",
            )
        manager = tf.train.CheckpointManager(
            work.checkpoint, self._directory, max_to_keep=self._keep
        )
        found = manager.restore_or_initialize()
        build = self._build
        self._cluster.remember_build(lambda coordinator: build(coordinator).checkpoint)
        self._progress.work = work
        self._progress.checkpoint = found or ""
        number = str(found or "").rpartition("-")[2]
        self._progress.steps = int(number) if number.isdigit() else 0
        return manager

    def _one_round(self, coordinator: Coordinator, count: int) -> None:
        work = self._progress.work
        assert work is not None
        for _ in range(count):
            coordinator.schedule(work.step, args=tuple(work.args))
        coordinator.join()

    def _is_loss(self, error: Exception) -> bool:
        """Whether an error comes from a parameter server that is gone, or is back without state."""
        import tensorflow as tf

        from tfd_notebook.coordinator import error_hints

        if isinstance(error, StateError):
            return False
        if isinstance(error, TasksMissing) or error_hints.is_loss(error):
            return True
        if not isinstance(error, tf.errors.OpError):
            return False
        # Its server may be back already, and know nothing of the variables.
        return "/job:ps" in str(error) and error_hints.is_stale(error)

    def _fits(self) -> bool:
        """Whether another round ends before the cluster does."""
        seen = self._cluster.snapshot()
        if seen.expires is None:
            self._expires = None
            return True
        self._expires = Deadline(seen.expires - seen.time)
        return self._expires.left > max(_LEAST_LEFT, _ROUNDS_LEFT * self._round_seconds)

    def _is_over(self) -> bool:
        """Whether the cluster has reached its time limit."""
        return self._expires is not None and self._expires.over
