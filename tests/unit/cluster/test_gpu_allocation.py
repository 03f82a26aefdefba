"""Allocation of GPUs to the tasks of one or more hosts, and the GPUs that each task sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import tfd_notebook as tfd
from tfd_notebook.cluster import gpu_allocation
from tfd_notebook.cluster.gpu_allocation import GpuAllocation, HostAllocation, HostGpus
from tfd_notebook.errors import Unsupported, UsageError
from tfd_notebook.launchers import Fake
from tfd_notebook.model.snapshot import GPU_COLUMNS
from tfd_notebook.model.spec import Role

pytestmark = pytest.mark.usefixtures("no_coordinator")


@pytest.mark.parametrize(
    ("requested", "meaning"),
    [
        ("auto", "auto"),
        (0, ()),
        ([], ()),
        ([1, 0], (1, 0)),
        (range(2), (0, 1)),
        ({"worker": 1}, {"worker": 1}),
        ({Role.WORKER: 2, "evaluator": 1}, {"worker": 2, "evaluator": 1}),
    ],
)
def test_requests_are_parsed(requested: Any, meaning: Any) -> None:
    assert gpu_allocation.check(requested) == meaning


@pytest.mark.parametrize(
    "requested",
    [
        *(1, -1, True, False, None, 1.0, "all", "0", b"0", object()),
        *([True], [-1], ["0"], [0.5], [1, 1]),
        *({"ps": 1}, {"worker": -1}, {"worker": True}, {"worker": "1"}, {1: 1}),
    ],
)
def test_invalid_requests_are_refused(requested: Any) -> None:
    with pytest.raises(UsageError, match="gpus"):
        gpu_allocation.check(requested)


def alone(role: str, index: int) -> int:
    """Place every task on the one host."""
    return 0


def in_turn(role: str, index: int) -> int:
    return index % 2


def share(*shares: tuple[int, ...]) -> tuple[HostAllocation, ...]:
    return (HostAllocation("", *shares),)


@pytest.mark.parametrize(
    ("requested", "workers", "evaluators", "count", "expected"),
    [
        ("auto", 2, 0, 4, GpuAllocation(2, share((0, 1, 2, 3)))),
        ("auto", 2, 1, 5, GpuAllocation(2, share((0, 1, 2, 3), (), (4,)))),
        ("auto", 0, 1, 4, GpuAllocation()),
        ("auto", 2, 0, 0, GpuAllocation()),
        ((), 2, 0, 4, GpuAllocation()),
        ((3, 1), 2, 0, 4, GpuAllocation(1, share((3, 1)))),
        ((3, 1), 1, 0, 4, GpuAllocation(2, share((3, 1)))),
        ({"worker": 1}, 2, 0, 4, GpuAllocation(1, share((0, 1, 2, 3)))),
        ({"worker": 1, "evaluator": 2}, 2, 1, 4, GpuAllocation(1, share((0, 1), (2, 3)))),
        ({"evaluator": 1}, 2, 1, 4, GpuAllocation(0, share((0, 1, 2), (3,)))),
        ({"evaluator": 1}, 2, 0, 0, GpuAllocation(0, share())),
    ],
)
def test_gpus_are_allocated(
    requested: Any, workers: int, evaluators: int, count: int, expected: GpuAllocation
) -> None:
    host = [HostGpus("here", tuple(range(count)))]
    dealt = gpu_allocation.allocate_gpus(requested, workers, evaluators, host, alone)
    assert dealt == expected
    assert GpuAllocation.unpack(json.loads(json.dumps(dealt.pack()))) == dealt


@pytest.mark.parametrize(
    ("requested", "workers", "count", "error", "message"),
    [
        ("auto", 5, 4, UsageError, "5 workers with 1 GPU each need 5, and there are 4\n"),
        ((0, 1, 2), 2, 4, UsageError, "3 GPUs cannot be divided evenly among 2 workers, and"),
        ((0,), 0, 4, UsageError, "evenly among 0 workers"),
        ((0, 7), 2, 4, UsageError, r"GPU 7 does not exist\nNext: choose from GPUs 0, 1, 2, 3"),
        ({"worker": 3}, 2, 4, UsageError, "2 workers with 3 GPUs each need 6, and there are 4\n"),
        ({"worker": 2, "evaluator": 1}, 2, 4, UsageError, "an evaluator with 1 need 5"),
        ((0,), 1, 0, Unsupported, "no NVML here"),
        ({"worker": 1}, 1, 0, Unsupported, "no NVML here"),
    ],
)
def test_impossible_allocations_are_refused(
    requested: Any, workers: int, count: int, error: type[Exception], message: str
) -> None:
    host = [HostGpus("here", tuple(range(count)), "" if count else "no NVML here")]
    with pytest.raises(error, match=message):
        gpu_allocation.allocate_gpus(requested, workers, 1, host, alone)


def test_tasks_get_distinct_gpus() -> None:
    dealt = GpuAllocation(2, share((0, 1, 2, 3), (4,)))
    assert [dealt.of(Role.WORKER, index, alone) for index in (0, 1)] == [(0, 1), (2, 3)]
    assert dealt.of(Role.EVALUATOR, 0, alone) == (4,)
    for role in (Role.PS, Role.DISPATCHER, Role.DATA_WORKER):
        assert dealt.of(role, 0, alone) == ()
    assert dealt.count(2, 1, alone) == 5
    dealt.check(2, alone)
    with pytest.raises(UsageError, match="3 workers need 6 GPUs"):
        dealt.check(3, alone)


ONE, TWO = HostGpus("ada@one", (0, 1)), HostGpus("ada@two", (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("requested", "workers", "evaluators", "expected"),
    [
        ("auto", 2, 0, [(0, 1), (0, 1)]),  # limited by the host with the fewest GPUs
        ("auto", 4, 0, [(0,), (0,), (1,), (1,)]),
        ("auto", 1, 0, [(0, 1)]),
        ((1, 0), 2, 0, [(1, 0), (1, 0)]),
        ((0, 1), 4, 0, [(0,), (0,), (1,), (1,)]),
        ((3,), 0, 0, None),
        ({"worker": 1}, 4, 0, [(0,), (0,), (1,), (1,)]),
        ({"worker": 1, "evaluator": 1}, 2, 1, [(0,), (0,), (1,)]),
    ],
)
def test_task_gets_only_gpus_of_its_host(
    requested: Any, workers: int, evaluators: int, expected: Any
) -> None:
    if expected is None:
        with pytest.raises(UsageError, match="GPU 3 does not exist on ada@one"):
            gpu_allocation.allocate_gpus(requested, workers, evaluators, [ONE, TWO], in_turn)
        return
    dealt = gpu_allocation.allocate_gpus(requested, workers, evaluators, [ONE, TWO], in_turn)
    visible = [dealt.of(Role.WORKER, index, in_turn) for index in range(workers)]
    visible += [dealt.of(Role.EVALUATOR, index, in_turn) for index in range(evaluators)]
    assert visible == expected
    assert dealt.count(workers, evaluators, in_turn) == sum(map(len, expected))
    assert GpuAllocation.unpack(json.loads(json.dumps(dealt.pack()))) == dealt


def host_gpus(host: str, *numbers: int, others: int = 0) -> HostGpus:
    """Return a name of a machine with these GPUs, and `others` that only this name has."""
    ids = [f"GPU-{number}" for number in numbers] + [f"{host}-{n}" for n in range(others)]
    return HostGpus(host, tuple(range(len(ids))), ids=tuple(ids))


@pytest.mark.parametrize(
    ("requested", "workers", "evaluators", "own", "expected"),
    [
        ("auto", 2, 0, 0, [(0, 2), (1, 3)]),
        ("auto", 4, 0, 0, [(0,), (1,), (2,), (3,)]),
        ("auto", 1, 0, 0, [(0, 1, 2, 3)]),  # the other name would leave its GPUs unused
        ("auto", 2, 0, 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ({"worker": 1}, 3, 0, 0, [(0,), (1,), (2,)]),
        ({"worker": 1, "evaluator": 2}, 2, 1, 0, [(0,), (2,), (1, 3)]),
    ],
)
def test_machine_with_two_names_allocates_gpus_once(
    requested: Any, workers: int, evaluators: int, own: int, expected: Any
) -> None:
    inventory = [host_gpus("exec/0", 0, 1, 2, 3), host_gpus("exec/1", 0, 1, 2, 3, others=own)]
    dealt = gpu_allocation.allocate_gpus(requested, workers, evaluators, inventory, in_turn)
    visible = [dealt.of(Role.WORKER, index, in_turn) for index in range(workers)]
    visible += [dealt.of(Role.EVALUATOR, index, in_turn) for index in range(evaluators)]
    assert visible == expected
    dealt_out = [f"{i % 2}:{n}" if own and n > 3 else n for i, of in enumerate(visible) for n in of]
    assert len(set(dealt_out)) == len(dealt_out)


def test_machine_with_two_names_counts_gpus_once() -> None:
    inventory = [host_gpus("exec/0", 0, 1), host_gpus("exec/1", 0, 1)]
    with pytest.raises(
        UsageError, match="2 workers with 1 GPU each need 2, and there is 1 on exec/0"
    ):
        gpu_allocation.allocate_gpus("auto", 4, 0, inventory, in_turn)
    text = r"exec/0, exec/1 are one machine, and see the same(.|\n)*\{\"worker\": 1\}"
    with pytest.raises(UsageError, match=text):
        gpu_allocation.allocate_gpus((0, 1), 2, 0, inventory, in_turn)
    with pytest.raises(UsageError, match="1 on exec/0: its other GPUs are for exec/1, which"):
        gpu_allocation.allocate_gpus({"worker": 1, "evaluator": 1}, 2, 1, inventory, in_turn)


def test_unused_gpus_are_kept_for_later_workers() -> None:
    inventory = [host_gpus("exec/0", 0, 1), host_gpus("exec/1", 0, 1)]
    dealt = gpu_allocation.allocate_gpus({"worker": 1}, 1, 0, inventory, in_turn)
    dealt.check(2, in_turn)
    received = [dealt.of(Role.WORKER, index, in_turn) for index in range(2)]
    assert sorted(received) == [(0,), (1,)]


NONE = HostGpus("ada@none", (), "there is no GPU")


@pytest.mark.parametrize(
    ("requested", "workers", "evaluators", "inventory", "error", "message"),
    [
        ("auto", 6, 0, (ONE, TWO), UsageError, "3 workers .* need 3, and there are 2 on ada@one"),
        ("auto", 2, 0, (NONE, TWO), UsageError, "there are 0 on ada@none: there is no GPU.*place="),
        (
            (0, 2),
            2,
            0,
            (ONE, TWO),
            UsageError,
            "GPU 2 does not exist on ada@one.*choose from GPUs 0, 1",
        ),
        ((0, 1), 3, 0, (ONE, TWO), UsageError, "2 workers on ada@one and 1 worker on ada@two"),
        ((0,), 2, 0, (TWO, NONE), Unsupported, "failed on ada@none: there is no GPU"),
        ({"worker": 2}, 4, 0, (ONE, TWO), UsageError, "need 4, and there are 2 on ada@one"),
        ({"worker": 1}, 2, 0, (TWO, NONE), Unsupported, "failed on ada@none"),
        ({"worker": 2, "evaluator": 1}, 2, 1, (ONE, TWO), UsageError, "evaluator .* on ada@one"),
    ],
)
def test_host_with_too_few_gpus_is_named(
    requested: Any,
    workers: int,
    evaluators: int,
    inventory: tuple[HostGpus, ...],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        gpu_allocation.allocate_gpus(requested, workers, evaluators, inventory, in_turn)


def test_host_without_workers_keeps_its_gpus() -> None:
    dealt = gpu_allocation.allocate_gpus("auto", 1, 0, [ONE, TWO], in_turn)
    dealt.check(3 - 1, in_turn)
    assert dealt.of(Role.WORKER, 1, in_turn) == (0, 1)
    with pytest.raises(UsageError, match="2 workers on ada@one need 4 GPUs, 2 each"):
        dealt.check(3, in_turn)


@pytest.fixture
def machine() -> Iterator[Fake]:
    """A launcher on a machine with four GPUs."""
    yield Fake(gpus=(0, 1, 2, 3))
    for cluster in tfd.clusters().values():
        cluster.stop()


def test_cluster_allocates_gpus(machine: Fake) -> None:
    cluster = tfd.Cluster(workers=2, ps=1, data_workers=1, evaluator=True, launcher=machine)
    assert machine.task_hosts[0].assigned_gpus == {
        "dispatcher:0": [],
        "data_worker:0": [],
        "ps:0": [],
        "worker:0": [0, 1],
        "worker:1": [2, 3],
        "evaluator:0": [],
    }
    machine.task_hosts[0].use_gpus(
        "localhost", use_percent=[None, 0, 35, 100], used=[None, 0, 2_100_000_000, 80_000_000_000]
    )
    assert cluster.to_frame().set_index("task").gpu["worker:1"] == (
        "2: 35 %, 2.1 of 80 GB; 3: 100 %, 80.0 of 80 GB"
    )
    with pytest.raises(UsageError, match="3 workers need 6 GPUs"):
        cluster.scale(workers=3)
    assert cluster.state == "ready"
    cluster.scale(workers=0)
    cluster.scale(workers=4)  # a new allocation, because no worker had GPUs
    assert [machine.task_hosts[0].assigned_gpus[f"worker:{i}"] for i in range(4)] == [
        [0],
        [1],
        [2],
        [3],
    ]


def test_start_fails_with_too_few_gpus(machine: Fake) -> None:
    with pytest.raises(UsageError, match=r"need 5, and there are 4\n[^$]*gpus=0"):
        tfd.Cluster(workers=5, ps=1, launcher=machine)
    assert machine.task_hosts[0].assigned_gpus == {}
    assert not tfd.clusters()
    tfd.Cluster(workers=5, ps=1, launcher=machine, gpus=0)
    assert not any(machine.task_hosts[1].assigned_gpus.values())


def test_workers_without_gpus_are_reported(machine: Fake) -> None:
    cluster = tfd.Cluster(workers=3, ps=1, launcher=machine)
    (notice,) = cluster.snapshot().notices
    assert notice.what == ("each worker gets 1 of the 4 GPUs, the same for all: 3 stay unused")


@pytest.fixture
def machines() -> Iterator[Fake]:
    """A launcher on two machines with two and four GPUs."""
    yield Fake(gpus={"ada@one": (0, 1), "ada@two": (0, 1, 2, 3)})
    for cluster in tfd.clusters().values():
        cluster.stop()


def test_all_gpus_of_all_hosts_are_in_one_table(machines: Fake) -> None:
    cluster = tfd.Cluster(workers=2, ps=1, launcher=machines, gpus={"worker": 2})
    assert [row.task for row in cluster.snapshot().gpus] == [""] * 6  # not reported yet
    task_host = machines.task_hosts[0]
    assert task_host.assigned_gpus["worker:0"] == task_host.assigned_gpus["worker:1"] == [0, 1]
    task_host.use_gpus("ada@two", use_percent=[90, 80, 0, None], used=[40e9, 20e9, 0, 1e9])
    task_host.use_gpus("ada@one", use_percent=[10, 0], used=[1e9, 2e9])
    frame = cluster.gpus().to_frame()
    assert tuple(frame.columns) == GPU_COLUMNS
    assert list(zip(frame.host, frame["index"], frame.task, strict=True)) == [
        ("ada@one", 0, "worker:0"),
        ("ada@one", 1, "worker:0"),
        ("ada@two", 0, "worker:1"),
        ("ada@two", 1, "worker:1"),
        ("ada@two", 2, ""),
        ("ada@two", 3, ""),
    ]
    assert list(frame.use_percent[:3]) == [10, 0, 90]
    assert list(frame.used_mb) == [1000, 2000, 40_000, 20_000, 0, 1000]
    assert set(frame.memory_mb) == {80_000}
    rows = cluster.to_frame().set_index("task").gpu
    assert rows["worker:1"] == "0: 90 %, 40.0 of 80 GB; 1: 80 %, 20.0 of 80 GB"
    assert rows["ps:0"] == ""
    with pytest.raises(UsageError, match="2 workers on ada@one need 4 GPUs"):
        cluster.scale(workers=3)
    cluster.stop()
    assert not cluster.snapshot().gpus
    assert tuple(cluster.gpus().to_frame().columns) == GPU_COLUMNS


def test_inprocess_tasks_cannot_have_gpus() -> None:
    with pytest.raises(Unsupported, match="share its view"):
        tfd.Cluster(workers=1, launcher="inprocess", gpus=[0])
    assert not tfd.clusters()
