"""GPUs found, dealt out and measured, with an NVML that is made up."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

import tfd_notebook as tfd
from tfd_notebook import gpus
from tfd_notebook.errors import Unsupported, UsageError
from tfd_notebook.gpus import Deal
from tfd_notebook.launchers import Fake
from tfd_notebook.spec import Role

pytestmark = pytest.mark.usefixtures("no_coordinator")


class FakeNVML:
    """What `gpus` uses of the module pynvml."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 4, broken: bool = False) -> None:
        self.count = count
        self.broken = broken
        self.users = 0
        self.busy: dict[int, int] = {}

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= self.count:
            raise self.NVMLError("Not Found")
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # older versions give bytes
        return b"NVIDIA Imaginary 80GB"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}-abc"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=2_100_000_000, total=80_000_000_000)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle not in self.busy:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy[handle])


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNVML:
    made = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", made)  # type: ignore[arg-type]
    return made


def numbers(found: Mapping[str, Any]) -> list[int]:
    return [gpu["index"] for gpu in found["gpus"]]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3", [1, 3]),
        ("GPU-22, GPU-00-abc", [2, 0]),
        ("1,9,2", [1]),  # as CUDA: what it does not know ends the list
        ("GPU-", []),
        ("-1", []),
        ("", []),
        ("MIG-1", []),
    ],
)
def test_the_environment_says_which_may_be_used(
    nvml: FakeNVML, setting: str | None, expected: list[int]
) -> None:
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    found = gpus.find(environment)
    assert numbers(found) == expected
    assert found["why"] == ("" if expected else f"CUDA_VISIBLE_DEVICES={setting} hides 4 GPUs")
    assert nvml.users == 0


def test_what_is_told_of_a_gpu(nvml: FakeNVML) -> None:
    assert gpus.find({})["gpus"][1] == {
        "index": 1,
        "name": "NVIDIA Imaginary 80GB",
        "uuid": "GPU-11-abc",
        "memory": 80_000_000_000,
    }


def test_without_nvml_there_are_none_and_the_reason_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    assert "nvidia-ml-py" in gpus.find({})["why"]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(broken=True))  # type: ignore[arg-type]
    assert "Driver Not Loaded" in gpus.find({})["why"]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(count=0))  # type: ignore[arg-type]
    assert gpus.find({}) == {"gpus": [], "why": "there is no GPU", "hidden": False}


def test_use_and_memory_in_words(nvml: FakeNVML) -> None:
    meter = gpus.Meter()
    nvml.busy = {0: 35}
    assert meter.read([0, 1]) == "0: 35 %, 2.1 of 80 GB; 1: 2.1 of 80 GB"
    assert meter.read([9]) is None
    assert nvml.users == 1


def test_a_meter_without_nvml_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(broken=True))  # type: ignore[arg-type]
    meter = gpus.Meter()
    assert meter.read([0]) is None
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML())  # type: ignore[arg-type]
    assert meter.read([0]) is None


def test_what_a_process_sees() -> None:
    assert gpus.environment([]) == {"CUDA_VISIBLE_DEVICES": "-1"}
    assert gpus.environment([2, 0]) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2,0",
    }


@pytest.mark.parametrize(
    ("wish", "meaning"),
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
def test_wishes(wish: Any, meaning: Any) -> None:
    assert gpus.check(wish) == meaning


@pytest.mark.parametrize(
    "wish",
    [
        *(1, -1, True, False, None, 1.0, "all", "0", b"0", object()),
        *([True], [-1], ["0"], [0.5], [1, 1]),
        *({"ps": 1}, {"worker": -1}, {"worker": True}, {"worker": "1"}, {1: 1}),
    ],
)
def test_wishes_that_cannot_be_meant(wish: Any) -> None:
    with pytest.raises(UsageError, match="gpus"):
        gpus.check(wish)


@pytest.mark.parametrize(
    ("wish", "workers", "evaluators", "found", "expected"),
    [
        ("auto", 2, 0, 4, Deal(2, (0, 1, 2, 3))),
        ("auto", 2, 1, 5, Deal(2, (0, 1, 2, 3), left=(4,))),
        ("auto", 0, 1, 4, Deal()),
        ("auto", 2, 0, 0, Deal()),
        ((), 2, 0, 4, Deal()),
        ((3, 1), 2, 0, 4, Deal(1, (3, 1))),
        ((3, 1), 1, 0, 4, Deal(2, (3, 1))),
        ({"worker": 1}, 2, 0, 4, Deal(1, (0, 1, 2, 3))),
        ({"worker": 1, "evaluator": 2}, 2, 1, 4, Deal(1, (0, 1), (2, 3))),
        ({"evaluator": 1}, 2, 1, 4, Deal(0, (0, 1, 2), (3,))),
        ({"evaluator": 1}, 2, 0, 0, Deal()),
    ],
)
def test_deals(wish: Any, workers: int, evaluators: int, found: int, expected: Deal) -> None:
    assert gpus.deal(wish, workers, evaluators, range(found)) == expected


@pytest.mark.parametrize(
    ("wish", "workers", "found", "error", "said"),
    [
        ("auto", 5, 4, UsageError, "4 GPUs cannot be dealt out to 5 workers"),
        ((0, 1, 2), 2, 4, UsageError, "3 GPUs cannot be dealt out evenly to 2 workers"),
        ((0,), 0, 4, UsageError, "evenly to 0 workers"),
        ((0, 7), 2, 4, UsageError, r"there is no GPU 7\nNext: the GPUs here are 0, 1, 2, 3"),
        ({"worker": 3}, 2, 4, UsageError, "2 workers with 3 GPUs each need 6, and there are 4"),
        ({"worker": 2, "evaluator": 1}, 2, 4, UsageError, "an evaluator with 1 need 5"),
        ((0,), 1, 0, Unsupported, "no NVML here"),
        ({"worker": 1}, 1, 0, Unsupported, "no NVML here"),
    ],
)
def test_deals_that_cannot_be(
    wish: Any, workers: int, found: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        gpus.deal(wish, workers, 1, range(found), "no NVML here")


def test_each_task_gets_its_own() -> None:
    dealt = Deal(2, (0, 1, 2, 3), (4,))
    assert [dealt.of(Role.WORKER, index) for index in (0, 1)] == [(0, 1), (2, 3)]
    assert dealt.of(Role.EVALUATOR, 0) == (4,)
    for role in (Role.PS, Role.DISPATCHER, Role.DATA_WORKER):
        assert dealt.of(role, 0) == ()
    dealt.check(2)
    with pytest.raises(UsageError, match="3 workers need 6 GPUs"):
        dealt.check(3)


@pytest.fixture
def machine() -> Iterator[Fake]:
    """A launcher on a machine with four GPUs."""
    yield Fake(gpus=(0, 1, 2, 3))
    for cluster in tfd.clusters().values():
        cluster.stop()


def test_a_cluster_deals_them_out(machine: Fake) -> None:
    cluster = tfd.Cluster(workers=2, ps=1, data_workers=1, evaluator=True, launcher=machine)
    assert machine.nodes[0].dealt == {
        "dispatcher:0": [],
        "data_worker:0": [],
        "ps:0": [],
        "worker:0": [0, 1],
        "worker:1": [2, 3],
        "evaluator:0": [],
    }
    machine.nodes[0].measure("worker:1", gpu="2: 35 %, 2.1 of 80 GB")
    assert cluster.to_frame().set_index("task").gpu["worker:1"] == "2: 35 %, 2.1 of 80 GB"
    with pytest.raises(UsageError, match="3 workers need 6 GPUs"):
        cluster.scale(workers=3)
    assert cluster.state == "ready"
    cluster.scale(workers=0)
    cluster.scale(workers=4)  # dealt anew: nobody had any
    assert [machine.nodes[0].dealt[f"worker:{i}"] for i in range(4)] == [[0], [1], [2], [3]]


def test_nothing_starts_where_they_do_not_go_round(machine: Fake) -> None:
    with pytest.raises(UsageError, match=r"4 GPUs cannot be dealt out to 5 workers[^$]*gpus=0"):
        tfd.Cluster(workers=5, ps=1, launcher=machine)
    assert machine.nodes[0].dealt == {}
    assert not tfd.clusters()
    tfd.Cluster(workers=5, ps=1, launcher=machine, gpus=0)
    assert not any(machine.nodes[1].dealt.values())


def test_who_gets_none_is_said(machine: Fake) -> None:
    cluster = tfd.Cluster(workers=3, ps=1, launcher=machine)
    (notice,) = cluster.snapshot().notices
    assert notice.what == "4 GPUs do not divide evenly between 3 workers: nobody gets 3"


def test_inside_this_process_they_cannot_be_given() -> None:
    with pytest.raises(Unsupported, match="one view"):
        tfd.Cluster(workers=1, launcher="inprocess", gpus=[0])
    assert not tfd.clusters()
