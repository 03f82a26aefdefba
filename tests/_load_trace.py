"""Simulator of adaptive data workers: replays a load with the rule, in simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tfd_notebook.cluster.adaptation import Bounds, Decision, History, Load, Measurement, decide

#: Seconds between two checks and between two samples of a consumer, as in a real cluster.
CHECK_SECONDS = 0.5
SAMPLE_SECONDS = 1.0


@dataclass
class Simulation:
    """A cluster with one consumer whose demand changes.

    Parameters
    ----------
    demand : callable
        Takes the time in seconds. Returns the elements per second that the consumer would read.
        None stands for a paused consumer.
    bounds : Bounds
    workers : int
        Data workers at the start.
    rate : float
        Elements per second of one data worker.
    start_seconds : float
        Time from the request of a data worker to its first element.
    starts : callable
        Takes the time of a request. Returns whether data workers requested then ever start.
    noise : callable
        Takes a value, and returns it as it is measured.
    """

    demand: Callable[[float], float | None]
    bounds: Bounds
    workers: int = 1
    rate: float = 10.0
    start_seconds: float = 5.0
    starts: Callable[[float], bool] = lambda time: True
    noise: Callable[[float], float] = lambda value: value
    time: float = 0.0
    #: Time and decision, and for each check: time, requested and serving data workers.
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    worker_seconds: float = 0.0
    waited: float = 0.0

    def __post_init__(self) -> None:
        self._requested = [-math.inf] * self.workers
        self._history = History()
        self._elements = 0.0
        self._load = Load("train", 0.0, 0, 0.0)

    def run(self, seconds: float) -> Simulation:
        """Simulate `seconds`."""
        end = self.time + seconds
        while self.time < end - 1e-9:
            self._step()
        return self

    def _step(self) -> None:
        demand, serving = self.demand(self.time), self._serving()
        if demand:
            delivered = min(demand, serving * self.rate)
            self._elements += delivered * CHECK_SECONDS
            waiting = min(1.0, max(0.0, self.noise(1 - delivered / demand)))
            self.waited += waiting * CHECK_SECONDS
        self.worker_seconds += len(self._requested) * CHECK_SECONDS
        self.time += CHECK_SECONDS
        if math.isclose(self.time % SAMPLE_SECONDS, 0.0, abs_tol=1e-9):
            self._load = Load(
                "train", self.time, int(self._elements), self.waited, paused=demand is None
            )
        pending = [at for at in self._requested if not self._has_started(at)]
        measurement = Measurement(
            time=self.time,
            workers=len(self._requested),
            serving=self._serving(),
            pending=len(pending),
            pending_seconds=self.time - min(pending, default=self.time),
            start_seconds=self.start_seconds,
            loads=(self._load,),
        )
        self._history, decision = decide(self.bounds, self._history, measurement)
        if decision is not None:
            self.decisions.append((self.time, decision))
            added = decision.workers - len(self._requested)
            self._requested = self._requested[: decision.workers] + [self.time] * added
        self.sizes.append((self.time, len(self._requested), self._serving()))

    def _has_started(self, requested: float) -> bool:
        return self.starts(requested) and requested + self.start_seconds <= self.time

    def _serving(self) -> int:
        return sum(map(self._has_started, self._requested))
