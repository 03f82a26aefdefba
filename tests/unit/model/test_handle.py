"""Copies, comparison and pickles of public objects have no side effect."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook.coordinator.values import Values
from tfd_notebook.data.service.saving import Saving
from tfd_notebook.errors import UsageError
from tfd_notebook.launchers import Fake
from tfd_notebook.model.handle import Handle

HANDLES = {
    *("Cluster", "Coordinator", "DataWorker", "Dispatcher"),
    *("RemoteKernel", "Resolution", "Stream"),
}
VALUES = (tfd.Policy(restarts=2), tfd.Service(), tfd.Limit("none"), tfd.Work(print, "checkpoints"))


@contextlib.contextmanager
def registered() -> Iterator[tfd.Cluster]:
    cluster = tfd.Cluster(data_workers=1, launcher="fake", name="handle", start=False)
    try:
        yield cluster
    finally:
        cluster.stop()


def test_tensorflows_coordinator_can_be_converted() -> None:
    """A strategy has only one coordinator, and TensorFlow may have created it."""
    theirs: Any = object.__new__(tf.distribute.coordinator.ClusterCoordinator)
    theirs.__class__ = tfd.Coordinator
    assert copy.copy(theirs) is theirs


def test_each_public_class_is_a_handle_or_a_value() -> None:
    classes = {name for name in tfd.__all__ if inspect.isclass(getattr(tfd, name))}
    assert {name for name in classes if issubclass(getattr(tfd, name), Handle)} == HANDLES
    assert classes - HANDLES == {type(value).__name__ for value in VALUES}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_copied_and_pickled(value: Any) -> None:
    for restored in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert restored == value
        assert repr(restored) == repr(value)


def test_a_copy_of_a_cluster_is_the_cluster() -> None:
    with registered() as cluster:
        before = dict(tfd.clusters())
        assert copy.copy(cluster) is cluster
        assert copy.deepcopy({"cluster": [cluster]}) == {"cluster": [cluster]}
        assert {cluster: 1}[copy.deepcopy(cluster)] == 1
        assert cluster != "handle"
        with pytest.raises(UsageError, match=r"this Cluster cannot be sent.*\n.*tfd.attach"):
            pickle.dumps([cluster])
        with pytest.raises(UsageError, match="this Cluster cannot be sent"):
            cloudpickle.dumps(lambda: cluster)
        assert tfd.clusters() == before
        assert cluster.state == "new"


def test_parts_of_a_cluster_are_handles() -> None:
    with tfd.Cluster(data_workers=1, workers=1, ps=1, launcher="fake", name="handle") as cluster:
        for part in (cluster.tasks[0], cluster.dispatcher, cluster.resolver):
            assert copy.deepcopy([part])[0] is part
            assert part in {part}
            with pytest.raises(UsageError, match=f"this {type(part).__name__} cannot be sent"):
                pickle.dumps(part)
    for kind in (Saving, Values):
        assert issubclass(kind, Handle)


def test_a_cluster_is_shown_while_it_starts() -> None:
    shown = []

    class Shown(Fake):
        def connect(self, *args: Any, **options: Any) -> Any:
            shown.append(repr(tfd.clusters()["handle"]))
            return super().connect(*args, **options)

    with tfd.Cluster(data_workers=1, launcher=Shown(), name="handle"):
        assert shown == ["<Cluster 'handle' starting on fake: no task ready>"]


def test_a_cluster_is_collected_after_its_end() -> None:
    with registered() as cluster:
        reference = weakref.ref(cluster)
    del cluster
    gc.collect()
    assert reference() is None


class Shared(Handle):
    """Stand-in for an object with a thread."""


def test_a_handle_keeps_its_identity_in_containers() -> None:
    handle = Shared()
    copied = copy.deepcopy([handle, {handle: handle}])
    assert copied == [handle, {handle: handle}]
    with pytest.raises(UsageError, match="this Shared cannot be sent to another process"):
        pickle.dumps(handle)
