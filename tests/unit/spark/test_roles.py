"""Roles and phases of a cluster on Spark, without Spark."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tfd_notebook import errors
from tfd_notebook.model.snapshot import SPARK_PHASES
from tfd_notebook.spark import roles
from tfd_notebook.spark.driver.phases import MOVES, Phase, Phases


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"num_executors": 2}, "worker:0 worker:1"),
        ({"num_executors": 3, "num_ps": 1}, "ps:0 worker:0 worker:1"),
        ({"num_executors": 1, "master_node": "chief"}, "chief:0"),
        (
            {"num_executors": 5, "num_ps": 1, "master_node": "chief", "eval_node": True},
            "ps:0 chief:0 evaluator:0 worker:0 worker:1",
        ),
        ({"num_executors": 2, "master_node": "master"}, "master:0 worker:0"),
    ],
)
def test_order_of_the_roles(arguments: dict[str, Any], names: str) -> None:
    assigned = roles.assign(**arguments)
    assert " ".join(node.name for node in assigned) == names
    assert [node.node for node in assigned] == list(range(len(assigned)))


def test_parameter_servers_on_the_driver() -> None:
    assigned = roles.assign(4, 2, driver_ps_nodes=True)
    assert [node.on_driver for node in assigned] == [True, True, False, False]
    assert roles.template(assigned) == {"ps": [0, 1], "worker": [2, 3]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_executors": 0}, "num_executors=0"),
        ({"num_executors": True}, "num_executors=True"),
        ({"num_executors": 2, "num_ps": -1}, "num_ps=-1"),
        ({"num_executors": 2, "num_ps": 2}, "leaves no worker in addition to ps, ps"),
        ({"num_executors": 1, "eval_node": True}, "leaves no worker"),
        ({"num_executors": 2, "master_node": "leader"}, "chief or master"),
    ],
)
def test_invalid_numbers_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.UsageError, match=message):
        roles.assign(**arguments)


def test_tf_config_names_an_evaluator_to_itself_only() -> None:
    assigned = roles.assign(3, 0, "chief", eval_node=True)
    spec = roles.cluster_spec(assigned, {n: f"host:{n + 1}" for n in range(3)})
    assert spec == {"chief": ["host:1"], "evaluator": ["host:2"], "worker": ["host:3"]}
    chief = json.loads(roles.tf_config(spec, "chief", 0))
    assert chief["cluster"] == {"chief": ["host:1"], "worker": ["host:3"]}
    assert chief["task"] == {"type": "chief", "index": 0}
    assert json.loads(roles.tf_config(spec, "evaluator", 0))["cluster"] == spec


def test_views_support_every_phase() -> None:
    assert list(SPARK_PHASES) == [str(phase) for phase in Phase]


def test_phases_follow_each_other_as_drawn() -> None:
    for path in (
        [Phase.STARTING, Phase.RUNNING, Phase.FEEDING, Phase.RUNNING, Phase.DRAINING],
        [Phase.STARTING, Phase.RUNNING, Phase.FAILED],
        [Phase.FAILED],
    ):
        phases = Phases()
        assert all(phases.move(to) for to in path)
        assert phases.now is path[-1]
    assert not Phases().move(Phase.FEEDING)
    assert all(phase.is_end == (phase in (Phase.STOPPED, Phase.FAILED)) for phase in MOVES)


def test_feeding_lasts_as_long_as_the_last_feed() -> None:
    received = []
    phases = Phases(lambda: received.append(phases.now))
    phases.move(Phase.STARTING)
    phases.move(Phase.RUNNING)
    phases.feed_began()
    phases.feed_began()
    phases.feed_ended()
    assert phases.now is Phase.FEEDING
    phases.feed_ended()
    assert received == [Phase.STARTING, Phase.RUNNING, Phase.FEEDING, Phase.RUNNING]
    phases.feed_began()
    phases.move(Phase.FAILED, "why")
    phases.feed_ended()
    assert (phases.now, phases.reason) == (Phase.FAILED, "why")


def test_a_phase_can_be_waited_for() -> None:
    phases = Phases()
    assert not phases.wait(lambda phase: phase.is_end, 0.01)
    thread = threading.Thread(target=phases.move, args=(Phase.FAILED,))
    thread.start()
    assert phases.wait(lambda phase: phase.is_end, 30)
    thread.join()
