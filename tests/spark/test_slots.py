"""Slots that the nodes of living clusters hold are not there for others, which is said at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.driver.registry import running
from tfd_notebook.spark.TFCluster import InputMode

pytestmark = pytest.mark.integration

#: Seconds for what takes a few on an idle machine.
LONG = 120.0


def takes() -> Any:
    """Return a function that takes rows, or waits for ever; made here, it travels by value."""

    def function(mode: Any, ctx: Any) -> None:
        if mode == InputMode.TENSORFLOW or ctx.job_name == "ps":
            import threading

            threading.Event().wait()
        feed = ctx.get_data_feed()
        while not feed.should_stop():
            feed.next_batch(4)

    return function


@contextlib.contextmanager
def started(sc: Any, mode: int, nodes: int, ps: int = 0, **options: Any) -> Iterator[Any]:
    """Have a cluster, and be sure of its end."""
    cluster = run(sc, mode, nodes, ps, **options)
    try:
        yield cluster
    finally:
        cluster.fail(errors.SparkError("the test is over"))
        until(lambda: cluster.name not in running(), LONG)


def run(sc: Any, mode: int, nodes: int, ps: int = 0, **options: Any) -> Any:
    """Start one; a wait for slots that never come free would end in another error."""
    options = {"reservation_timeout": LONG, "input_mode": mode, **options}
    return TFCluster.run(sc, takes(), mode, nodes, ps, **options)


def test_a_second_cluster_has_no_slots_while_the_first_holds_them(spark: Any, sc: Any) -> None:
    with started(sc, InputMode.TENSORFLOW, 2, name="first"):
        said = r"1 nodes must run .*2 tasks at once, of which 0 are free: cluster 'first' holds 2"
        with pytest.raises(errors.NotEnoughSlots, match=said) as caught:
            run(sc, InputMode.TENSORFLOW, 1)
        assert "shut down a cluster" in str(caught.value)
        assert list(running()) == ["first"]
    with started(sc, InputMode.TENSORFLOW, 2):
        pass


def test_the_rest_of_the_slots_is_there(spark: Any, sc: Any, capsys: Any) -> None:
    with started(sc, InputMode.TENSORFLOW, 1, name="first"):
        with pytest.raises(errors.NotEnoughSlots, match="1 is free: cluster 'first' holds 1"):
            run(sc, InputMode.SPARK, 2)
        # The check asks the executor of the slot that is free, and does not wait for the other.
        (found,) = tfd.spark.check(spark, 2)
        assert found.code == "TFD870"
        assert "spark.master=local-cluster[3,1,1024]" in found.fix
        assert "1 held by cluster 'first', 2 nodes requested" in capsys.readouterr().out
        with started(sc, InputMode.SPARK, 1):
            assert len(running()) == 2


def test_of_nodes_that_are_fed_only_those_hold_slots_that_serve_them(sc: Any) -> None:
    with started(sc, InputMode.SPARK, 2, name="workers") as workers:
        assert workers.slots_held == 0
        with started(sc, InputMode.SPARK, 2, 1, name="served") as served:
            assert served.slots_held == 1
            with pytest.raises(errors.NotEnoughSlots, match="1 is free: cluster 'served' holds 1"):
                run(sc, InputMode.SPARK, 2)
            workers.train(sc.parallelize(range(20), 4), 1)
        with started(sc, InputMode.SPARK, 3, 2, driver_ps_nodes=True) as beside:
            assert beside.slots_held == 0


def test_of_two_that_start_at_the_same_time_one_has_the_slots(sc: Any) -> None:
    begun: list[Future[Any]] = [
        run(sc, InputMode.TENSORFLOW, 2, name=name, wait=False) for name in ("one", "other")
    ]
    try:
        ends = [future.exception(LONG) for future in begun]
        assert sorted(type(end).__name__ for end in ends) == ["NoneType", "NotEnoughSlots"]
    finally:
        for cluster in running().values():
            cluster.fail(errors.SparkError("the test is over"))
        until(lambda: not running(), LONG)


def test_slots_are_free_when_nodes_have_ended(sc: Any) -> None:
    cluster = TFCluster.run(sc, lambda args, ctx: None, None, 2, 0)
    until(lambda: cluster.slots_held == 0, LONG)
    with started(sc, InputMode.TENSORFLOW, 2):
        cluster.shutdown(timeout=LONG)


def test_a_launcher_that_needs_them_all_says_who_holds_some(spark: Any, sc: Any) -> None:
    launcher = tfd.launchers.Spark(spark)
    with started(sc, InputMode.TENSORFLOW, 1, name="first"):
        said = r"1 is free: cluster 'first' holds 1(.|\n)*before those that hold slots"
        with pytest.raises(errors.NotEnoughSlots, match=said):
            tfd.Cluster(data_workers=1, name="late", launcher=launcher)
        assert not any(one.name == "late" for one in tfd.clusters())
    with (
        tfd.Cluster(data_workers=1, name="early", launcher=launcher) as early,
        started(sc, InputMode.TENSORFLOW, 2),
    ):
        assert early.state == "ready"


def test_executors_that_come_and_go_are_refused_at_once(
    sc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = sc.getConf().set("spark.dynamicAllocation.enabled", "true")
    monkeypatch.setattr(sc, "getConf", lambda: conf)
    with pytest.raises(errors.Unsupported, match=r"Allocation\.enabled is true: nodes"):
        run(sc, InputMode.SPARK, 99)
    assert not running()
