"""The GPUs of a cluster: a strip by host, and a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from tfd_notebook.model.snapshot import GPU_COLUMNS, GpuRow
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.table import Cell, Column, Table

#: Label of the GPUs that no task uses.
UNASSIGNED = "not assigned"
#: Maximum number of GPUs in the strip. The totals include all GPUs.
MAX_GPUS = 256
#: Percentages that change the color of a bar. `_FULL` is of the memory, the others of the use.
_IDLE, _BUSY, _FULL = 10, 50, 90
#: GPUs of a host in one line of text.
_GPUS_PER_LINE = 16

_STRIP_COLUMNS = (
    Column("GPUs of", lambda chunk: chunk[0].host),
    Column("numbers", lambda chunk: _numbers(chunk), drop=3),
    Column("use", lambda chunk: "".join(figures.block(gpu.use_percent) for gpu in chunk), drop=2),
    Column(
        "busy", lambda chunk: figures.percent(_mean(gpu.use_percent for gpu in chunk)), right=True
    ),
    Column(
        "memory", lambda chunk: "".join(figures.block(_memory_percent(g)) for g in chunk), drop=4
    ),
    Column("used", lambda chunk: _memory(chunk), right=True, drop=1),
    Column(
        "tasks",
        lambda chunk: ", ".join(f"{task} {_numbers(gpus)}" for task, gpus in _by_task(chunk)),
        note=True,
    ),
)
_COLUMNS = (
    Column("host"),
    Column("GPU", lambda gpu: gpu.index, right=True),
    Column("name", drop=1),
    Column("task", lambda gpu: Cell(gpu.task or UNASSIGNED, "" if gpu.task else "quiet")),
    Column("use", lambda gpu: figures.percent(gpu.use_percent), right=True),
    Column("memory", lambda gpu: _memory([gpu]), right=True),
)


@dataclass(frozen=True)
class GpuStrip:
    """The GPUs of a cluster by host, with two bars per GPU: utilization and memory."""

    gpus: Sequence[GpuRow]

    def lines(self, width: int) -> list[str]:
        chunks = [
            host_gpus[start : start + _GPUS_PER_LINE]
            for _, host_gpus in _by_host(self.gpus[:MAX_GPUS])
            for start in range(0, len(host_gpus), _GPUS_PER_LINE)
        ]
        return Table(_STRIP_COLUMNS, chunks, label="GPUs", foot=_rest(self.gpus)).lines(width)

    def element(self) -> str:
        """Return the HTML. Each GPU has its values as text for screen readers."""
        if not self.gpus:
            return ""
        hosts = "".join(
            f'<div class="tfd-gpuhost"><div class="tfd-gpuname" title="{escape(host)}">'
            f"{escape(host)}</div>{''.join(itertools.starmap(_task_html, _by_task(host_gpus)))}"
            "</div>"
            for host, host_gpus in _by_host(self.gpus[:MAX_GPUS])
        )
        rest = f'<div class="tfd-quiet">{_rest(self.gpus)}</div>' if _rest(self.gpus) else ""
        return (
            '<div class="tfd-gpus" role="group" aria-label="GPUs"><div class="tfd-head"><span>GPUs'
            f'</span><span class="tfd-quiet">{summary(self.gpus)}; bars: use, memory</span></div>'
            f"{hosts}{rest}</div>"
        )


def _task_html(task: str, gpus: Sequence[GpuRow]) -> str:
    free = " tfd-free" if task == UNASSIGNED else ""
    tiles = "".join(_tile(gpu) for gpu in gpus)
    return (
        f'<div class="tfd-gputask{free}"><span class="tfd-quiet">{escape(task)}</span>'
        f"<div>{tiles}</div></div>"
    )


def _tile(gpu: GpuRow) -> str:
    words = escape(_description(gpu))
    use = figures.percent(gpu.use_percent) or "–"
    use_percent, memory_percent = gpu.use_percent or 0.0, _memory_percent(gpu) or 0.0
    load = "idle" if use_percent < _IDLE else "busy" if use_percent >= _BUSY else "use"
    full = " tfd-full" if memory_percent >= _FULL else ""
    bars = (
        f'<i class="tfd-{load}" style="width:{use_percent:.0f}%"></i>'
        f'<i class="tfd-memory{full}" style="width:{memory_percent:.0f}%"></i>'
    )
    return (
        f'<div class="tfd-gpu" role="img" aria-label="{words}" title="{words}">'
        f"<span>{escape(str(gpu.index))}</span><span>{use}</span>{bars}</div>"
    )


def _description(gpu: GpuRow) -> str:
    """Return the text alternative of a GPU, for screen readers and tooltips."""
    use = (
        "utilization unknown"
        if gpu.use_percent is None
        else f"{figures.percent(gpu.use_percent)} busy"
    )
    memory = f", {_memory([gpu])} used" if _memory([gpu]) else ""
    task = gpu.task or "no task"
    name = f" ({gpu.name})" if gpu.name else ""
    return f"GPU {gpu.index} of {gpu.host}{name}, seen by {task}: {use}{memory}"


def summary(gpus: Sequence[GpuRow]) -> str:
    """Return the numbers of all and of unassigned GPUs, and their overall usage, as text."""
    hosts = len({gpu.host for gpu in gpus})
    unassigned = sum(not gpu.task for gpu in gpus)
    facts = [f"{len(gpus)} on {hosts} hosts" if hosts > 1 else str(len(gpus))]
    facts += [f"{unassigned} {UNASSIGNED}"] if unassigned else []
    busy = _mean(gpu.use_percent for gpu in gpus)
    facts += [f"{figures.percent(busy)} busy"] if busy is not None else []
    facts += [f"{_memory(gpus)} used"] if _memory(gpus) else []
    return ", ".join(facts)


def gpus_table(gpus: Sequence[GpuRow]) -> Table:
    """Return the table of some GPUs, with `GPU_COLUMNS` as the names of its records."""
    return Table(
        _COLUMNS,
        gpus,
        label="GPUs",
        empty="no GPUs available to tasks",
        names=GPU_COLUMNS,
        foot=summary(gpus) if gpus else "",
    )


def _by_host(gpus: Iterable[GpuRow]) -> list[tuple[str, list[GpuRow]]]:
    return [(host, list(own)) for host, own in itertools.groupby(gpus, key=lambda gpu: gpu.host)]


def _by_task(gpus: Sequence[GpuRow]) -> list[tuple[str, list[GpuRow]]]:
    return [
        (task or UNASSIGNED, list(own))
        for task, own in itertools.groupby(gpus, key=lambda gpu: gpu.task)
    ]


def _numbers(gpus: Sequence[GpuRow]) -> str:
    """Return the indices of GPUs with ranges, such as ``0-3, 5``."""
    ranges: list[str] = []
    first = last = gpus[0].index
    for number in [*(gpu.index for gpu in gpus[1:]), None]:
        if number is not None and number == last + 1:
            last = number
            continue
        ranges.append(str(first) if first == last else f"{first}-{last}")
        if number is not None:
            first = last = number
    return ", ".join(ranges)


def _memory_percent(gpu: GpuRow) -> float | None:
    """Return the used memory in percent, or None if unknown."""
    if gpu.used_mb is None or not gpu.memory_mb:
        return None
    return 100 * gpu.used_mb / gpu.memory_mb


def _memory(gpus: Sequence[GpuRow]) -> str:
    """Return the used and total memory, of the GPUs with both values."""
    known = [(g.used_mb, g.memory_mb) for g in gpus if g.used_mb is not None and g.memory_mb]
    if not known:
        return ""
    used, total = (sum(pair[i] for pair in known) for i in (0, 1))
    return f"{used / 1e3:.1f} of {total / 1e3:.0f} GB"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rest(gpus: Sequence[GpuRow]) -> str:
    return f"… and {len(gpus) - MAX_GPUS:,} more GPUs" if len(gpus) > MAX_GPUS else ""
