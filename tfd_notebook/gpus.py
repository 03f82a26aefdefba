"""Who sees which GPUs of a host: found by NVML, dealt out evenly to the workers, and measured.

NVML comes with NVIDIA's driver and is asked through the package ``nvidia-ml-py``, which is
optional. A GPU is called by its number in ``nvidia-smi``.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tfd_notebook.errors import TfdError, Unsupported, UsageError
from tfd_notebook.spec import Role, check_count

#: What a user may ask for, once `check` has looked at it.
Wish = str | tuple[int, ...] | Mapping[str, int]

_DEALT_TO = (Role.WORKER, Role.EVALUATOR)
_FIX = 'write gpus="auto", 0 (none), [0, 1] (these) or {"worker": 1} (so many to each)'


def check(wish: Any) -> Wish:
    """Return what ``Cluster(gpus=...)`` means: ``"auto"``, numbers of GPUs, or how many to each.

    Raises
    ------
    UsageError
    """
    if isinstance(wish, str) and wish == "auto":
        return "auto"
    if isinstance(wish, int) and not isinstance(wish, bool) and wish == 0:
        return ()
    if isinstance(wish, Mapping):
        for role, count in wish.items():
            if role not in _DEALT_TO:
                raise UsageError(
                    f"gpus={dict(wish)!r}: a {role} gets no GPU",
                    fix="name worker or evaluator only: other tasks do not compute",
                )
            check_count(f"gpus[{str(role)!r}]", count)
        return {str(role): count for role, count in wish.items()}
    if isinstance(wish, Iterable) and not isinstance(wish, (str, bytes)):
        numbers = tuple(wish)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise UsageError(f"gpus={wish!r}: {number!r} is no number of a GPU", fix=_FIX)
            if numbers.count(number) > 1:
                raise UsageError(
                    f"gpus={wish!r}: GPU {number} is there twice",
                    fix="name each GPU once: tasks cannot share one",
                )
        return numbers
    raise UsageError(f"gpus={wish!r} cannot be meant", fix=_FIX)


@dataclass(frozen=True)
class Deal:
    """Which GPUs each task sees.

    Parameters
    ----------
    each : int
        How many each worker sees.
    workers : tuple of int
        Those of the workers, in the order in which they are dealt out.
    evaluator : tuple of int
        Those of the evaluator.
    left : tuple of int
        Those that nobody gets because they do not divide evenly.
    """

    each: int = 0
    workers: tuple[int, ...] = ()
    evaluator: tuple[int, ...] = ()
    left: tuple[int, ...] = ()

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Deal:
        """Return the one whose fields, as JSON values, are `packed`."""
        lists = {name: tuple(packed[name]) for name in ("workers", "evaluator", "left")}
        return cls(each=packed["each"], **lists)

    def of(self, role: Role, index: int) -> tuple[int, ...]:
        """Return the GPUs that a task sees."""
        if role is Role.EVALUATOR:
            return self.evaluator
        if role is not Role.WORKER:
            return ()
        return self.workers[index * self.each : (index + 1) * self.each]

    def check(self, workers: int) -> None:
        """Raise UsageError unless there is enough for so many workers."""
        if workers * self.each > len(self.workers):
            raise UsageError(
                f"{workers} workers need {workers * self.each} GPUs, {self.each} each as those "
                f"that run, and there are {len(self.workers)} for workers",
                fix=f"make a new cluster with workers={workers}: a worker that runs keeps its GPUs",
            )


def deal(wish: Wish, workers: int, evaluators: int, found: Sequence[int], why: str = "") -> Deal:
    """Deal out the GPUs of a host.

    TensorFlow's strategies want the same number at every worker. Parameter servers, dispatcher
    and data workers see none, the evaluator only what is asked for it.

    Parameters
    ----------
    wish : "auto", tuple of int or mapping of str to int
        As `check` returns it.
    workers, evaluators : int
        How many there shall be.
    found : sequence of int
        The GPUs that may be used.
    why : str
        Why there are none, where that is known.

    Raises
    ------
    UsageError
        They do not go round, or not evenly.
    Unsupported
        Some are asked for by name, and it cannot be known which there are.
    """
    asked = 0
    if isinstance(wish, Mapping):
        each, rest = wish.get(str(Role.WORKER), 0), wish.get(str(Role.EVALUATOR), 0)
        asked = workers * each + evaluators * rest
    elif not isinstance(wish, str):
        asked = len(wish)
    if asked and not found:
        raise Unsupported(
            f"gpus={wish if isinstance(wish, Mapping) else list(wish)} cannot be given: "
            + (why or "there is no GPU"),
            fix="use gpus=0 for the processor alone",
        )
    if isinstance(wish, Mapping):
        return _deal_by_number(each, rest * evaluators, workers, found)
    if isinstance(wish, str):
        if not found or not workers:
            return Deal()
        if workers > len(found):
            raise UsageError(
                f"{_gpus(len(found))} cannot be dealt out to {workers} workers, and TensorFlow "
                "wants all workers alike",
                fix=f"use gpus=0, or no more than {len(found)} of them",
            )
        each = len(found) // workers
        return Deal(each, tuple(found[: each * workers]), left=tuple(found[each * workers :]))
    if missing := [gpu for gpu in wish if gpu not in found]:
        raise UsageError(
            f"gpus={list(wish)!r}: there is no GPU {missing[0]}",
            fix=f"the GPUs here are {', '.join(map(str, found))}",
        )
    if wish and (not workers or len(wish) % workers):
        raise UsageError(
            f"{_gpus(len(wish))} cannot be dealt out evenly to {workers} workers, and TensorFlow "
            "wants all workers alike",
            fix="name as many GPUs as there are workers, or a multiple",
        )
    return Deal(len(wish) // workers if wish else 0, wish)


def _deal_by_number(each: int, evaluator: int, workers: int, found: Sequence[int]) -> Deal:
    needed = workers * each + evaluator
    if needed > len(found):
        raise UsageError(
            f"{workers} workers with {_gpus(each)} each"
            + (f" and an evaluator with {evaluator}" if evaluator else "")
            + f" need {needed}, and there are {len(found)}",
            fix="ask for fewer, or have fewer workers",
        )
    # The evaluator takes the last ones, so that workers may come.
    cut = len(found) - evaluator
    return Deal(each, tuple(found[:cut]), tuple(found[cut:]))


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def environment(gpus: Sequence[int]) -> dict[str, str]:
    """Return the variables by which a process sees exactly these GPUs."""
    if not gpus:
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    # CUDA counts the fastest GPU first unless it is told to count as nvidia-smi does.
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
    }


@dataclass(frozen=True)
class Gpu:
    """A GPU of this host; memory in bytes."""

    index: int
    name: str
    uuid: str
    memory: int


def find(environment: Mapping[str, str]) -> dict[str, Any]:
    """Look which GPUs of this host a process with that environment may use.

    Returns
    -------
    dict
        JSON values: ``gpus``, a list of the fields of `Gpu` in the order in which
        ``CUDA_VISIBLE_DEVICES`` names them; ``why`` there are none; ``hidden``: whether there
        seem to be some all the same.
    """
    try:
        nvml = _nvml()
    except TfdError as error:
        return {"gpus": [], "why": error.what, "hidden": bool(glob.glob("/dev/nvidia[0-9]*"))}
    try:
        found = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return {"gpus": [], "why": f"NVML fails: {error}", "hidden": True}
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    visible = found if setting is None else _visible(found, setting)
    why = "" if visible else "there is no GPU"
    if found and not visible:
        why = f"CUDA_VISIBLE_DEVICES={setting} hides {_gpus(len(found))}"
    return {"gpus": [asdict(gpu) for gpu in visible], "why": why, "hidden": False}


def _nvml() -> Any:
    """Return the module that asks NVML, ready for use."""
    try:
        import pynvml
    except ImportError:
        raise Unsupported(
            "the GPUs are not known without the package nvidia-ml-py "
            '(pip install "tfd-notebook[gpu]")'
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unsupported(f"NVML, which knows the GPUs, cannot be asked: {error}") from None
    return pynvml


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index,
        _text(nvml.nvmlDeviceGetName(handle)),
        _text(nvml.nvmlDeviceGetUUID(handle)),
        int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _visible(gpus: Sequence[Gpu], setting: str) -> list[Gpu]:
    """Return what ``CUDA_VISIBLE_DEVICES`` lets through; as for CUDA, what it lacks ends it."""
    chosen: list[Gpu] = []
    for word in (word.strip() for word in setting.split(",")):
        meant = [
            gpu
            for gpu in gpus
            if word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if len(meant) != 1 or meant[0] in chosen:
            break
        chosen += meant
    return chosen


class Meter:
    """Reads what GPUs of this host do; safe where there is no NVML."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gone = False

    def read(self, gpus: Sequence[int]) -> str | None:
        """Return use and memory of some GPUs in words; None where that cannot be known.

        The figures are those of the whole GPU, whoever uses it; a GB is 10**9 bytes.
        """
        if self._nvml is None and not self._gone:
            try:
                self._nvml = _nvml()
            except TfdError:
                self._gone = True
        if self._gone:
            return None
        try:
            return "; ".join(f"{gpu}: {self._figures(gpu)}" for gpu in gpus)
        except self._nvml.NVMLError:
            return None

    def _figures(self, gpu: int) -> str:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(gpu)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        said = f"{memory.used / 1e9:.1f} of {memory.total / 1e9:.0f} GB"
        # Some virtual GPUs do not tell how busy they are.
        with contextlib.suppress(self._nvml.NVMLError):
            said = f"{self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu} %, {said}"
        return said
