"""Slots that nodes of running clusters hold. Requests for more slots fail at once."""

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

#: Timeout in seconds of steps that take a few seconds on an idle machine.
LONG = 120.0


def reading_function() -> Any:
    """Return a function that reads rows or blocks. Spark pickles a local function by value."""

    def function(mode: Any, ctx: Any) -> None:
        if mode == InputMode.TENSORFLOW or ctx.job_name == "ps":
            import threading

            threading.Event().wait()
        feed = ctx.get_data_feed()
        while not feed.should_stop():
            feed.next_batch(4)

    return function


@contextlib.contextmanager
def running_cluster(sc: Any, mode: int, nodes: int, ps: int = 0, **options: Any) -> Iterator[Any]:
    """Yield a running cluster and end it afterwards."""
    cluster = run(sc, mode, nodes, ps, **options)
    try:
        yield cluster
    finally:
        cluster.fail(errors.SparkError("the test is over"))
        until(lambda: cluster.name not in running(), LONG)


def run(sc: Any, mode: int, nodes: int, ps: int = 0, **options: Any) -> Any:
    """Start a cluster. The long timeout prevents another error while slots are held."""
    options = {"reservation_timeout": LONG, "input_mode": mode, **options}
    return TFCluster.run(sc, reading_function(), mode, nodes, ps, **options)


def test_slots_of_a_running_cluster_are_not_available(spark: Any, sc: Any) -> None:
    with running_cluster(sc, InputMode.TENSORFLOW, 2, name="first"):
        message = (
            r"1 nodes must run .*2 tasks at once, of which 0 are free: cluster 'first' holds 2"
        )
        with pytest.raises(errors.NotEnoughSlots, match=message) as caught:
            run(sc, InputMode.TENSORFLOW, 1)
        assert "shut down a cluster" in str(caught.value)
        assert list(running()) == ["first"]
    with running_cluster(sc, InputMode.TENSORFLOW, 2):
        pass


def test_free_slots_are_available(spark: Any, sc: Any, capsys: Any) -> None:
    with running_cluster(sc, InputMode.TENSORFLOW, 1, name="first"):
        with pytest.raises(errors.NotEnoughSlots, match="1 is free: cluster 'first' holds 1"):
            run(sc, InputMode.SPARK, 2)
        # The check runs on the executor with the free slot and does not wait for the other.
        (finding,) = tfd.spark.check(spark, 2)
        assert finding.code == "TFD870"
        assert "spark.master=local-cluster[3,1,1024]" in finding.fix
        assert "1 held by cluster 'first', 2 nodes requested" in capsys.readouterr().out
        with running_cluster(sc, InputMode.SPARK, 1):
            assert len(running()) == 2


def test_only_parameter_servers_of_fed_nodes_hold_slots(sc: Any) -> None:
    with running_cluster(sc, InputMode.SPARK, 2, name="workers") as workers:
        assert workers.slots_held == 0
        with running_cluster(sc, InputMode.SPARK, 2, 1, name="served") as served:
            assert served.slots_held == 1
            with pytest.raises(errors.NotEnoughSlots, match="1 is free: cluster 'served' holds 1"):
                run(sc, InputMode.SPARK, 2)
            workers.train(sc.parallelize(range(20), 4), 1)
        with running_cluster(sc, InputMode.SPARK, 3, 2, driver_ps_nodes=True) as on_driver:
            assert on_driver.slots_held == 0


def test_one_of_two_concurrent_starts_gets_the_slots(sc: Any) -> None:
    futures: list[Future[Any]] = [
        run(sc, InputMode.TENSORFLOW, 2, name=name, wait=False) for name in ("first", "second")
    ]
    try:
        results = [future.exception(LONG) for future in futures]
        assert sorted(type(result).__name__ for result in results) == ["NoneType", "NotEnoughSlots"]
    finally:
        for cluster in running().values():
            cluster.fail(errors.SparkError("the test is over"))
        until(lambda: not running(), LONG)


def test_slots_are_free_after_the_end_of_nodes(sc: Any) -> None:
    cluster = TFCluster.run(sc, lambda args, ctx: None, None, 2, 0)
    until(lambda: cluster.slots_held == 0, LONG)
    with running_cluster(sc, InputMode.TENSORFLOW, 2):
        cluster.shutdown(timeout=LONG)


def test_the_launcher_names_clusters_that_hold_slots(spark: Any, sc: Any) -> None:
    launcher = tfd.launchers.Spark(spark)
    with running_cluster(sc, InputMode.TENSORFLOW, 1, name="first"):
        message = r"1 is free: cluster 'first' holds 1(.|\n)*before those that hold slots"
        with pytest.raises(errors.NotEnoughSlots, match=message):
            tfd.Cluster(data_workers=1, name="late", launcher=launcher)
        assert not any(cluster.name == "late" for cluster in tfd.clusters())
    with (
        tfd.Cluster(data_workers=1, name="early", launcher=launcher) as early,
        running_cluster(sc, InputMode.TENSORFLOW, 2),
    ):
        assert early.state == "ready"


def test_dynamic_allocation_is_refused_at_once(sc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = sc.getConf().set("spark.dynamicAllocation.enabled", "true")
    monkeypatch.setattr(sc, "getConf", lambda: conf)
    with pytest.raises(errors.Unsupported, match=r"Allocation\.enabled is true: nodes"):
        run(sc, InputMode.SPARK, 99)
    assert not running()
