"""Copies, comparison, pickles and garbage collection of public objects have no side effect."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import inspect
import pickle
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._jupyter_kernel import Kernel, jupyter_server
from tfd_notebook import launchers, resolvers, views
from tfd_notebook.coordinator.training_loop import Progress
from tfd_notebook.coordinator.values import Values
from tfd_notebook.data.service.saving import SaveProgress, Saving
from tfd_notebook.errors import UsageError
from tfd_notebook.launchers import Fake
from tfd_notebook.launchers.fake import FakeTaskHost
from tfd_notebook.launchers.jupyter import JupyterHost, JupyterServer
from tfd_notebook.model.closure_store import Store
from tfd_notebook.model.diagnostics import Finding
from tfd_notebook.model.events import GpusMeasured, Notice
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.resolution import Change, ResolutionSnapshot, RuleResult, TaskStatus
from tfd_notebook.model.snapshot import CoordinatorRow, NodeRow, SparkRow, StreamRow
from tfd_notebook.model.spec import ClusterConfig
from tfd_notebook.views.diagnostics import Findings

API = Path(__file__).parents[3] / "docs" / "api.md"
SECRET = "hunter2"

LAUNCHERS: dict[str, Callable[[], launchers.Launcher]] = {
    "Dask": lambda: launchers.Dask("tcp://host:8786"),
    "Fake": launchers.Fake,
    "IPyParallel": launchers.IPyParallel,
    "InProcess": launchers.InProcess,
    "Jupyter": lambda: launchers.Jupyter("https://host/", token=SECRET),
    "Kubernetes": lambda: launchers.Kubernetes("image", environment={"TOKEN": SECRET}),
    "Local": launchers.Local,
    "Ray": launchers.Ray,
    "SSH": lambda: launchers.SSH("host", variables={"TOKEN": SECRET}),
    "Slurm": launchers.Slurm,
    "Spark": launchers.Spark,
}


class Shared(Handle):
    """Stand-in for an object with a thread, such as a remote kernel with this label."""

    label, clusters = "host", ()


def credentials() -> Any:
    return pytest.importorskip("google.oauth2.credentials").Credentials(SECRET)


RESOLVERS: dict[str, Callable[[], resolvers.Resolver]] = {
    "ClusterFileResolver": lambda: resolvers.ClusterFileResolver("cluster.json"),
    "GCEResolver": lambda: resolvers.GCEResolver("p", "z", "g", 1, credentials=credentials()),
    "KernelResolver": lambda: resolvers.KernelResolver(Shared()),
    "KubernetesResolver": lambda: resolvers.KubernetesResolver({"worker": "app=train"}),
    "KubernetesResolver of a client": lambda: resolvers.KubernetesResolver(
        {"worker": "app=train"},
        client=threading.Lock(),  # as in an API client
    ),
    "Resolver": resolvers.Resolver,
    "SageMakerResolver": resolvers.SageMakerResolver,
    "SlurmResolver": lambda: resolvers.SlurmResolver({"worker": 2}),
    "SparkResolver": resolvers.SparkResolver,
    "TFConfigResolver": resolvers.TFConfigResolver,
    "TPUResolver": lambda: resolvers.TPUResolver("grpc://10.0.0.1:8470"),
    "UnionResolver": lambda: resolvers.UnionResolver(resolvers.TFConfigResolver()),
}
#: Resolvers with an object of this process.
LIVE_RESOLVERS = {"KernelResolver", "KubernetesResolver of a client"}


def server_configs() -> tfd.Service:
    """Return settings with times for which TensorFlow reads 0 as the default, and writes 1."""
    service = tf.data.experimental.service
    return tfd.Service(
        work_dir="journal",
        dispatcher_config=service.DispatcherConfig(worker_addresses=["localhost"]),
        worker_config=service.WorkerConfig("localhost:1"),
        worker_tags=["COLOCATED"],
    )


@contextlib.contextmanager
def registered(**arguments: Any) -> Iterator[tfd.Cluster]:
    arguments = {"data_workers": 1, "launcher": "fake", "start": False, **arguments}
    cluster = tfd.Cluster(name="handle", env={"TOKEN": SECRET}, **arguments)
    try:
        yield cluster
    finally:
        cluster.stop()


def of_cluster(read: Callable[[tfd.Cluster], Any]) -> Callable[[], Any]:
    """Return a function that starts a cluster and returns something of it."""

    def create() -> Any:
        fake = Fake(gpus=[0])
        with registered(workers=1, ps=1, launcher=fake, start=True) as cluster:
            (host,) = fake.task_hosts
            host.use_gpus("localhost", use_percent=[50.0], used=[0])
            return read(cluster)

    return create


def of_kernel(read: Callable[[tfd.RemoteKernel], Any]) -> Callable[[], Any]:
    """Return a function that connects to a kernel with a cluster, and returns something of it."""

    def create() -> Any:
        remote = Kernel()
        remote.clusters["demo"] = {"coordinator": {}}
        with jupyter_server(remote) as url, tfd.RemoteKernel(url, token=SECRET) as kernel:
            return read(kernel)

    return create


def with_history(resolution: tfd.Resolution) -> views.Table:
    resolution.close()
    return resolution.history()


def a_limit() -> tfd.Limit:
    return tfd.Limit("stage", "map", 0.5, {"elements_per_s": 3.0}, "batch", 2.0)


def a_finding() -> Finding:
    return Finding("TFD811", "error", "what", "why", "fix")


def a_status() -> TaskStatus:
    return TaskStatus("worker", 0, "localhost:1", "alive")


VALUES: dict[str, Callable[[], Any]] = {
    "Change": lambda: Change(1.0, "worker:0", "alive", "hung"),
    "Cluster.config": of_cluster(lambda cluster: cluster.config),
    "Cluster.gpus": of_cluster(lambda cluster: cluster.gpus()),
    "Cluster.jobs": of_cluster(lambda cluster: cluster.jobs()),
    "Cluster.limits": of_cluster(lambda cluster: cluster.limits()),
    "Cluster.snapshot": of_cluster(lambda cluster: cluster.snapshot()),
    "Cluster.stacks": of_cluster(lambda cluster: cluster.stacks()),
    "ClusterConfig": lambda: ClusterConfig("name", gpus={"worker": 1}, options={"nodes": [1]}),
    "Comparison": lambda: tfd.compare(a_limit(), a_limit()),
    "CoordinatorRow": lambda: CoordinatorRow("running", counts={"ready": 1}),
    "Finding": a_finding,
    "Findings": lambda: Findings([a_finding()], ["this process"]),
    "GpusMeasured": lambda: GpusMeasured(({"index": 0},)),
    "Limit": a_limit,
    "NodeRow": lambda: NodeRow(1, "worker", 0),
    "Notice": lambda: Notice("warning", "text"),
    "Policy": lambda: tfd.Policy(restarts=2),
    "Resolution.history": lambda: with_history(tfd.resolve({"worker": ["localhost:1"]})),
    "ResolutionSnapshot": lambda: ResolutionSnapshot("argument", "here", 1.0, (a_status(),)),
    "RuleResult": lambda: RuleResult("argument", "fired", "because"),
    "SaveProgress": lambda: SaveProgress("writing", 1, 0, 2, 3, 4, 5, None),
    "Service": server_configs,
    "SparkRow": lambda: SparkRow("running", 1.0, nodes=(NodeRow(1, "worker", 0),)),
    "StreamRow": lambda: StreamRow("train", "dataset", "running", 1, 1, 1.0, 1.0, 0.1, (0, 1)),
    "TaskRow": of_cluster(lambda cluster: cluster.snapshot().tasks[0]),
    "TaskStatus": a_status,
    "View": of_cluster(lambda cluster: views.View(cluster.snapshot())),
}


def a_server() -> tfd.Dispatcher:
    return tfd.Dispatcher(start=False)


HANDLES: dict[str, Callable[[], Any]] = {
    **LAUNCHERS,
    "Cluster": of_cluster(lambda cluster: cluster),
    "Cluster.dispatcher": of_cluster(lambda cluster: cluster.dispatcher),
    "Cluster.distribute": of_cluster(lambda cluster: cluster.distribute("off")),
    "Cluster.observe": of_cluster(lambda cluster: cluster.observe(tf.data.Dataset.range(3))),
    "Cluster.observe, batched": of_cluster(
        lambda cluster: cluster.observe(tf.data.Dataset.range(3)).batch(2)
    ),
    "Cluster.observe, iterator": of_cluster(
        lambda cluster: iter(cluster.observe(tf.data.Dataset.range(3)))
    ),
    "Cluster.resolver": of_cluster(lambda cluster: cluster.resolver),
    "Cluster.save": of_cluster(lambda cluster: Saving(cluster._data_service, "directory")),
    "Cluster.stream": of_cluster(lambda cluster: cluster.stream(tf.data.Dataset.range(3))),
    "Cluster.tasks": of_cluster(lambda cluster: cluster.tasks[0]),
    "DataWorker": lambda: tfd.DataWorker(
        tf.data.experimental.service.WorkerConfig("localhost:1"), start=False
    ),
    "Dispatcher": a_server,
    "RemoteCluster": of_kernel(lambda kernel: kernel.clusters["demo"]),
    "RemoteCoordinator": of_kernel(lambda kernel: kernel.clusters["demo"].coordinator),
    "RemoteHost": lambda: JupyterHost(JupyterServer("https://host/", SECRET, None), "python3"),
    "RemoteKernel": of_kernel(lambda kernel: kernel),
    "Resolution": lambda: tfd.resolve({"worker": ["localhost:1"]}),
    "SocketChannel": lambda: launchers.SocketChannel(socket.socket()),
    "Values": lambda: Values(Store(), lambda: False),
    "TaskHost": lambda: FakeTaskHost(ClusterConfig("name"), print, {}),
    "Work": lambda: tfd.Work(print, "checkpoints", [tf.Variable([1.0, 2.0])]),
}


def test_each_documented_class_is_tested() -> None:
    """An object of each public class is tested here, or of a subclass of an abstract one.

    `tests/spark` and `tests/coordinator` have their own.
    """
    tested = {Progress, launchers.Channel, tfd.Coordinator}
    for create in (VALUES | RESOLVERS | HANDLES).values():
        created = create()
        tested.add(type(created))
        close(created)
    unknown = []
    for name in re.findall(r"autoclass:: tfd_notebook\.(?!spark\.)([\w.]+)", API.read_text()):
        module, _, attribute = f"tfd_notebook.{name}".rpartition(".")
        kind = getattr(importlib.import_module(module), attribute)
        names = {kind, *kind.__subclasses__()} if inspect.isabstract(kind) else {kind}
        if not names & tested:
            unknown.append(name)
    assert unknown == []


@pytest.mark.parametrize("module", [tfd, launchers, resolvers], ids=lambda module: module.__name__)
def test_each_public_class_is_documented(module: Any) -> None:
    documented = API.read_text()
    for name in module.__all__:
        if inspect.isclass(getattr(module, name)):
            assert re.search(rf"autoclass:: {module.__name__}\.{name}\b", documented)


def close(handle: Any) -> None:
    """End the thread or socket of an object that does not end with its cluster."""
    if isinstance(handle, (launchers.SocketChannel, tfd.Resolution)):
        handle.close()
    elif isinstance(handle, (tfd.Dispatcher, tfd.DataWorker)):
        handle.stop()


def copies(value: Any) -> Iterator[Any]:
    yield copy.copy(value)
    yield copy.deepcopy({"value": [value]})["value"][0]


@pytest.fixture
def unchanged(leftovers: Callable[[], Any]) -> Callable[[], None]:
    """Return a check that nothing was started or registered since."""
    before, clusters = leftovers(), dict(tfd.clusters())

    def check() -> None:
        before.check("the copy", settle=0)
        assert dict(tfd.clusters()) == clusters

    return check


@pytest.mark.parametrize("name", VALUES)
def test_values_are_copied_and_pickled(name: str, unchanged: Callable[[], None]) -> None:
    value = VALUES[name]()
    assert SECRET not in repr(value)
    for restored in (*copies(value), pickle.loads(pickle.dumps(value))):
        assert restored == value
        assert hash(restored) == hash(value)
        assert repr(restored) == repr(value)
    assert value != name
    unchanged()


@pytest.mark.parametrize("name", HANDLES)
def test_copies_of_a_handle_are_the_same_object(name: str, request: pytest.FixtureRequest) -> None:
    handle = HANDLES[name]()
    unchanged = request.getfixturevalue("unchanged")
    assert SECRET not in repr(handle)
    assert [id(each) for each in copies(handle)] == [id(handle)] * 2
    assert {handle: 1}[handle] == 1
    assert [handle] == [copy.copy(handle)]
    assert handle != name
    error = rf"this {type(handle).__name__} cannot be sent to another process.*\nNext: {{}}"
    with pytest.raises(UsageError, match=error.format(re.escape(handle._instead))):
        pickle.dumps([handle])
    with pytest.raises(UsageError, match=error.format(re.escape(handle._instead))):
        cloudpickle.dumps(lambda: handle)
    assert repr(handle) == repr(copy.copy(handle))
    unchanged()
    close(handle)


def test_unused_objects_are_collected() -> None:
    references = {}
    for name, create in (LAUNCHERS | RESOLVERS | HANDLES | VALUES).items():
        created = create()
        if hasattr(created, "__weakref__"):
            references[name] = weakref.ref(created)
        close(created)
        del created
    gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == []


@pytest.mark.parametrize("name", RESOLVERS)
def test_resolvers_are_copied_with_their_arguments(
    name: str, unchanged: Callable[[], None], plain_environment: None
) -> None:
    resolver = RESOLVERS[name]()
    assert SECRET not in repr(resolver)
    assert " object at 0x" not in repr(resolver)
    restored = [*copies(resolver)]
    if name in LIVE_RESOLVERS:
        with pytest.raises(UsageError, match="cannot be sent to another process"):
            pickle.dumps(resolver)
    else:
        restored.append(pickle.loads(pickle.dumps(resolver)))
    for each in restored:
        assert type(each) is type(resolver)
        assert each.place == resolver.place
        assert repr(each) == repr(resolver)
        assert vars(each).keys() == vars(resolver).keys()
        if name == "TPUResolver" and each is resolver:
            continue  # TensorFlow's class defines that
        each.task_type = "other"
        assert resolver._task_type != "other"
    assert {resolver: 1}[resolver] == 1
    unchanged()


@pytest.mark.parametrize("name", tfd.errors.__all__)
def test_errors_are_copied_and_pickled(name: str) -> None:
    error = getattr(tfd.errors, name)("it failed", task="worker:0", fix="start it again")
    for restored in (*copies(error), pickle.loads(pickle.dumps(error))):
        assert type(restored) is type(error)
        assert (str(restored), repr(restored)) == (str(error), repr(error))
    assert {error: 1}[error] == 1


def test_tensorflows_coordinator_can_be_converted() -> None:
    """A strategy has only one coordinator, and TensorFlow may have created it."""
    theirs: Any = object.__new__(tf.distribute.coordinator.ClusterCoordinator)
    theirs.__class__ = tfd.Coordinator
    assert copy.copy(theirs) is theirs


def test_progress_is_copied_with_its_work() -> None:
    progress = Progress(3, work=tfd.Work(print, "checkpoints"))
    assert [*copies(progress)] == [progress, progress]
    assert copy.deepcopy(progress).work is progress.work
    assert pickle.loads(pickle.dumps(Progress(3))) == Progress(3)
    with pytest.raises(UsageError, match="send the function that builds it"):
        pickle.dumps(progress)
    with pytest.raises(TypeError, match="unhashable type: 'Progress'"):
        hash(progress)


def test_a_cluster_is_not_copied_or_started() -> None:
    with registered() as cluster:
        before = dict(tfd.clusters())
        assert copy.deepcopy({"cluster": [cluster]}) == {"cluster": [cluster]}
        assert copy.deepcopy(tfd.clusters()) == before
        with pytest.raises(UsageError, match=r"this Cluster cannot be sent.*\n.*tfd.attach"):
            pickle.dumps(tfd.clusters())
        assert tfd.clusters() == before
        assert cluster.state == "new"


def test_a_part_is_equal_to_the_same_part() -> None:
    with registered(workers=1, ps=1, start=True) as cluster:
        assert cluster.dispatcher == cluster.dispatcher
        assert cluster.tasks == cluster.tasks
        assert len({*cluster.tasks}) == 4
        assert cluster.resolver == cluster.resolver
        assert {cluster.resolver: 1}[cluster.resolver] == 1
        assert repr(cluster.resolver) == "<OwnResolver of the cluster 'handle'>"


@pytest.mark.parametrize("count", ["1 element", "2 elements"])
def test_a_repr_counts_in_singular_and_plural(count: str) -> None:
    with registered(start=True) as cluster:
        stream = cluster.stream(tf.data.Dataset.range(int(count[0])), name="train")
        assert stream.start().wait(timeout=60)
        assert repr(stream) == f"<Stream train finished, {count}>"


def test_a_part_of_a_remote_kernel_is_equal_to_the_same_part() -> None:
    kernel = of_kernel(lambda kernel: kernel)()
    cluster = kernel.clusters["demo"]
    assert cluster == kernel.clusters["demo"]
    assert cluster.coordinator == cluster.coordinator
    assert len({cluster.coordinator, cluster.coordinator}) == 1
    place = f"cluster 'demo' at {kernel.label}"
    assert (
        repr(cluster.coordinator) == f"<RemoteCoordinator of {place}: {cluster.coordinator.values}>"
    )


def test_a_cluster_is_shown_while_it_starts() -> None:
    shown = []

    class Shown(Fake):
        def connect(self, *args: Any, **options: Any) -> Any:
            cluster: Any = tfd.clusters()["handle"]
            shown.append(repr(cluster))
            parts = (cluster.dispatcher, cluster.tasks, cluster.resolver, cluster.snapshot())
            shown.append(" ".join(map(repr, parts)))
            return super().connect(*args, **options)

    with registered(launcher=Shown(), start=True):
        assert shown[0] == "<Cluster 'handle' starting on fake: no task ready>"
        assert "<dispatcher of cluster 'handle', starting>" in shown[1]
        assert SECRET not in shown[1]


def test_a_handle_keeps_its_identity_in_containers() -> None:
    handle = Shared()
    copied = copy.deepcopy([handle, {handle: handle}])
    assert copied == [handle, {handle: handle}]
    with pytest.raises(UsageError, match="this Shared cannot be sent to another process"):
        pickle.dumps(handle)
