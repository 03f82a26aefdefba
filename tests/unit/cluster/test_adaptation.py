"""The rule of adaptive data workers, also on simulated loads of up to 1,000 data workers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests._load_trace import Simulation
from tfd_notebook.cluster.adaptation import (
    Bounds,
    Decision,
    History,
    Load,
    Measurement,
    decide,
    failed,
)

LARGE = Bounds(1, 1000)


def constant(demand: float | None) -> Callable[[float], float | None]:
    return lambda time: demand


def turns(simulation: Simulation) -> int:
    """Return how often the direction of the changes turned."""
    sizes = [size for _, size, _ in simulation.sizes]
    steps = [b - a for a, b in itertools.pairwise(sizes) if a != b]
    return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))


def serving_at(simulation: Simulation, time: float) -> int:
    return next(serving for at, _, serving in simulation.sizes if at >= time)


def random_load(seed: int) -> Simulation:
    """Return a simulation of a random load with steps, noise and pauses."""
    chance = random.Random(seed)
    levels: list[float | None] = [
        chance.choice([None, 0.0, *(10 * chance.uniform(0.5, 900) for _ in range(5))])
        for _ in range(20)
    ]
    length = chance.uniform(10, 120)
    minimum = chance.choice([1, 1, 5, 40])
    return Simulation(
        lambda time: levels[int(time / length) % len(levels)],
        Bounds(minimum, chance.choice([minimum, 50, 1000])),
        workers=chance.randint(1, 60),
        start_seconds=chance.choice([0.5, 2.0, 8.0, 30.0]),
        noise=lambda value: value + chance.uniform(-0.03, 0.03),
    )


def seeds(*many_tasks: int) -> list[Any]:
    """Return twelve seeds. Loads of many data workers take longer than a test of the gate may."""
    return [
        pytest.param(seed, marks=[pytest.mark.slow] if seed in many_tasks else [])
        for seed in range(12)
    ]


@pytest.mark.parametrize("seed", seeds(1, 2, 5, 11))
def test_number_stays_in_its_range_under_any_load(seed: int) -> None:
    simulation = random_load(seed).run(900)
    bounds = simulation.bounds
    assert all(bounds.minimum <= size <= bounds.maximum for _, size, _ in simulation.sizes)


@pytest.mark.parametrize("seed", seeds(0, 2, 4, 5, 6, 7, 9, 10, 11))
def test_constant_load_needs_one_direction(seed: int) -> None:
    chance = random.Random(seed)
    demand = 10 * chance.uniform(1, 900)
    noise = chance.choice([0.0, 0.02, 0.04])
    simulation = Simulation(
        constant(demand),
        LARGE,
        start_seconds=chance.choice([1.0, 5.0, 20.0]),
        noise=lambda value: value + chance.uniform(-noise, noise),
    ).run(600)
    assert turns(simulation) <= 1
    need = demand / simulation.rate
    size = simulation.sizes[-1][1]
    assert need * 0.85 <= size <= need * 1.3 + 1
    assert simulation.decisions[-1][0] < 200


@pytest.mark.slow
@pytest.mark.parametrize("start_seconds", [2.5, 5.0, 20.0])
@pytest.mark.parametrize("demand", [40.0, 1000.0, 4800.0])
def test_doubled_load_is_followed_within_two_starts(start_seconds: float, demand: float) -> None:
    for phase in (0.0, 0.5):
        doubled = 300.0 + phase
        simulation = Simulation(
            lambda time, at=doubled: demand * (2 if time >= at else 1),  # type: ignore[misc]
            LARGE,
            start_seconds=start_seconds,
        ).run(400)
        capacity = serving_at(simulation, doubled + 2 * start_seconds) * simulation.rate
        assert capacity >= 2 * demand * 0.9


@pytest.mark.parametrize("period", [3.0, 8.0, 20.0])
def test_periodic_load_within_a_cool_down_changes_nothing(period: float) -> None:
    # The cool-down of a start of 10 s is 20 s.
    simulation = Simulation(
        lambda time: 1000.0 if time % period < period / 2 else 100.0, LARGE, start_seconds=10.0
    ).run(660)
    assert turns(simulation) == 0
    assert simulation.sizes[-1][1] >= 100


def test_reductions_that_were_too_large_become_rare() -> None:
    # The load returns soon after each cool-down.
    simulation = Simulation(
        lambda time: 1000.0 if time % 12 < 4 else 100.0, LARGE, start_seconds=1.0
    )
    first = turns(simulation.run(300))
    assert 1 <= first <= 10
    assert turns(simulation.run(300)) == first


def test_unused_data_workers_leave_in_half_the_cool_down() -> None:
    def fall(low: float | None) -> float:
        simulation = Simulation(
            lambda time: 400.0 if time < 100 else low, LARGE, start_seconds=10.0
        ).run(200)
        return next(at - 100 for at, size, _ in simulation.sizes if at > 100 and size < 30)

    assert 20 <= fall(50.0) <= 23
    assert 10 <= fall(None) <= 13


def test_paused_consumer_needs_the_minimum() -> None:
    simulation = Simulation(constant(None), Bounds(2, 8), workers=6).run(60)
    ((_, decision),) = simulation.decisions
    assert decision.workers == 2
    assert "no consumer has read" in decision.reason


def test_consumer_that_never_waits_gives_data_workers_back() -> None:
    simulation = Simulation(constant(25.0), Bounds(1, 64), workers=64, start_seconds=1.0).run(400)
    assert 3 <= simulation.sizes[-1][1] <= 4
    assert turns(simulation) <= 2


def test_pending_data_workers_count_and_time_out() -> None:
    simulation = Simulation(
        constant(100.0), Bounds(1, 16, start_timeout=30.0), starts=lambda at: at < 0
    ).run(29)
    assert [d.workers for _, d in simulation.decisions] == [4]
    simulation.run(20)
    assert simulation.decisions[1][1] == Decision(1, "3 did not start within 30 s")
    # The next attempt follows after a pause.
    simulation.run(120)
    assert [d.workers for _, d in simulation.decisions[2:4]] == [4, 1]
    assert len(simulation.decisions) <= 8


def test_number_grows_at_most_four_times_at_once() -> None:
    simulation = Simulation(constant(1000.0), LARGE, start_seconds=10.0).run(300)
    sizes = [decision.workers for _, decision in simulation.decisions]
    assert sizes[:3] == [4, 16, 64]
    assert 100 <= simulation.sizes[-1][1] <= 130
    for at, decision in simulation.decisions:
        assert decision.workers <= 4 * serving_at(simulation, at)


def test_without_a_consumer_nothing_is_decided() -> None:
    history = History()
    for second in range(100):
        history, decision = decide(Bounds(1, 8), history, Measurement(float(second), 4, 4))
        assert decision is None


def checks(loads: Callable[[int], tuple[Load, ...]], workers: int = 4) -> Decision | None:
    """Return the first decision of 60 checks."""
    history = History()
    for second in range(60):
        now = Measurement(float(second), workers, workers, start_seconds=1.0, loads=loads(second))
        history, decision = decide(Bounds(1, 64), history, now)
        if decision is not None:
            return decision
    return None


def starved(second: int, **options: object) -> Load:
    return Load("train", float(second), 30 * second, 0.5 * second, **options)  # type: ignore[arg-type]


def test_number_is_computed_from_the_share_of_waiting() -> None:
    decision = checks(lambda second: (starved(second),))
    assert decision == Decision(8, "'train' waits 50 % of the time")


def test_consumer_without_an_element_gets_no_data_workers() -> None:
    """It may wait for another consumer, or for a function that does not return."""
    assert checks(lambda second: (Load("train", float(second), 0, float(second)),)) is None


def test_end_of_a_wait_does_not_make_elements_look_expensive() -> None:
    bounds, history, load = Bounds(1, 4), History(), Load("train", 0.0, 0, 0.0)
    decisions = []
    # Seconds, elements per second and share of waiting: a burst, its end, and a quiet time.
    for seconds, rate, waiting in ((30, 40, 1.0), (1, 5, 0.15), (30, 4, 0.0)):
        for _ in range(seconds):
            load = replace(
                load,
                time=load.time + 1,
                elements=load.elements + rate,
                waited=load.waited + waiting,
            )
            now = Measurement(load.time, 4, 4, start_seconds=1.0, loads=(load,))
            history, decision = decide(bounds, history, now)
            decisions += [decision] * (decision is not None)
    assert decisions[0] == Decision(
        1, "1 was enough for 5 s: 75 % of worker time saved, no more waiting"
    )


def test_consumers_share_the_data_workers() -> None:
    # A satisfied consumer reads as much as the starved one.
    decision = checks(lambda s: (starved(s), Load("test", float(s), 30 * s, 0.0)))
    assert decision is not None
    assert decision.workers == 6


@pytest.mark.parametrize(
    "options", [{"bottleneck": "transfer"}, {"useful": 4}, {"keeps": "all"}], ids=str
)
def test_data_workers_that_cannot_help_are_not_added(options: dict[str, object]) -> None:
    decision = checks(lambda second: (starved(second, **options),))
    assert decision is None or decision.workers < 4


@pytest.mark.parametrize("keeps", ["fewer", "all"])
def test_reduction_waits_for_the_end_of_an_epoch(keeps: str) -> None:
    def satisfied(second: int) -> tuple[Load, ...]:
        return (Load("train", float(second), 30 * second, 0.0, keeps=keeps),)

    assert checks(satisfied) is None
    assert checks(lambda s: (Load("train", float(s), 30 * s, 0.0),)) == Decision(
        3, "3 were enough for 5 s: 25 % of worker time saved, no more waiting"
    )


def test_range_is_enforced_without_a_consumer() -> None:
    for workers, expected in ((1, 2), (9, 8)):
        _, decision = decide(Bounds(2, 8), History(), Measurement(0.0, workers, workers))
        assert decision is not None
        assert decision.workers == expected


def test_failed_change_is_not_repeated_at_once() -> None:
    history = failed(History(), Measurement(0.0, 4, 4, start_seconds=1.0))
    assert 0 < history.blocked < math.inf
    for second in range(60):
        now = Measurement(float(second), 4, 4, start_seconds=1.0, loads=(starved(second),))
        history, decision = decide(Bounds(1, 64), history, now)
        if decision is not None:
            assert second >= history.blocked
            return
    raise AssertionError("no data worker was added")
