"""The GPUs of a cluster: a strip by host, and a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape

from tfd_notebook.model.snapshot import GPU_COLUMNS, GpuRow
from tfd_notebook.views import formatting as figures
from tfd_notebook.views.table import Cell, Column, Row, Table, text_table

FREE = "free"
#: Maximum number of GPUs in the strip. The totals include all GPUs.
MAX_GPUS = 256
#: GPUs of a host in one line of text.
_GPUS_PER_LINE = 16

_STRIP_COLUMNS = (
    Column("GPUs of"),
    Column("numbers", drop=3),
    Column("use", drop=2),
    Column("busy", right=True),
    Column("memory", drop=4),
    Column("used", right=True, drop=1),
    Column("tasks", note=True),
)
_COLUMNS = (
    Column("host"),
    Column("GPU", right=True),
    Column("name", drop=1),
    Column("task"),
    Column("use", right=True),
    Column("memory", right=True),
)


def strip_text(gpus: Sequence[GpuRow], width: int) -> list[str]:
    """Return the lines of the strip, with two bars per GPU: utilization and memory."""
    rows: list[Row] = []
    for host, host_gpus in _by_host(gpus[:MAX_GPUS]):
        for start in range(0, len(host_gpus), _GPUS_PER_LINE):
            chunk = host_gpus[start : start + _GPUS_PER_LINE]
            rows.append(
                [
                    Cell(host),
                    Cell(_numbers(chunk)),
                    Cell("".join(figures.block(gpu.use_percent) for gpu in chunk)),
                    Cell(figures.percent(_mean(gpu.use_percent for gpu in chunk))),
                    Cell("".join(figures.block(_memory_percent(gpu)) for gpu in chunk)),
                    Cell(_memory(chunk)),
                    Cell(
                        ", ".join(
                            f"{task} {_numbers(task_gpus)}" for task, task_gpus in _by_task(chunk)
                        )
                    ),
                ]
            )
    lines = text_table(_STRIP_COLUMNS, rows, width)
    return [*lines, _rest(gpus)] if _rest(gpus) else lines


def strip_html(gpus: Sequence[GpuRow]) -> str:
    """Return the elements of the strip. Each GPU has its values as text for screen readers."""
    if not gpus:
        return ""
    hosts = "".join(
        f'<div class="tfd-gpuhost"><div class="tfd-gpuname" title="{escape(host)}">{escape(host)}'
        f"</div>{''.join(itertools.starmap(_task_html, _by_task(host_gpus)))}</div>"
        for host, host_gpus in _by_host(gpus[:MAX_GPUS])
    )
    rest = f'<div class="tfd-quiet">{_rest(gpus)}</div>' if _rest(gpus) else ""
    return (
        '<div class="tfd-gpus" role="group" aria-label="GPUs"><div class="tfd-head">'
        f'<span>GPUs</span><span class="tfd-quiet">{summary(gpus)}; bars: use, memory</span></div>'
        f"{hosts}{rest}</div>"
    )


def _task_html(task: str, gpus: Sequence[GpuRow]) -> str:
    free = " tfd-free" if task == FREE else ""
    tiles = "".join(_tile(gpu) for gpu in gpus)
    return (
        f'<div class="tfd-gputask{free}"><span class="tfd-quiet">{escape(task)}</span>'
        f"<div>{tiles}</div></div>"
    )


def _tile(gpu: GpuRow) -> str:
    words = escape(_description(gpu))
    use = figures.percent(gpu.use_percent) or "–"
    bars = "".join(
        f'<i class="tfd-{kind}" style="width:{0 if share is None else share:.0f}%"></i>'
        for kind, share in (("use", gpu.use_percent), ("memory", _memory_percent(gpu)))
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
    """Return the number of GPUs, the number of free ones, and their overall usage, as text."""
    hosts = len({gpu.host for gpu in gpus})
    free = sum(not gpu.task for gpu in gpus)
    facts = [f"{len(gpus)} on {hosts} hosts" if hosts > 1 else str(len(gpus))]
    facts += [f"{free} free"] if free else []
    busy = _mean(gpu.use_percent for gpu in gpus)
    facts += [f"{figures.percent(busy)} busy"] if busy is not None else []
    facts += [f"{_memory(gpus)} used"] if _memory(gpus) else []
    return ", ".join(facts)


def gpus_table(gpus: Sequence[GpuRow]) -> Table:
    """Return the table of some GPUs, with `GPU_COLUMNS` as the names of its records."""
    rows = [
        (
            Cell(gpu.host),
            Cell(str(gpu.index)),
            Cell(gpu.name),
            Cell(gpu.task or FREE, "" if gpu.task else "quiet"),
            Cell(figures.percent(gpu.use_percent)),
            Cell(_memory([gpu])),
        )
        for gpu in gpus
    ]
    return Table(
        _COLUMNS,
        rows,
        label="GPUs",
        empty="no GPUs available to tasks",
        records=[{name: getattr(gpu, name) for name in GPU_COLUMNS} for gpu in gpus],
        names=GPU_COLUMNS,
        foot=summary(gpus) if gpus else "",
    )


def _by_host(gpus: Iterable[GpuRow]) -> list[tuple[str, list[GpuRow]]]:
    return [(host, list(own)) for host, own in itertools.groupby(gpus, key=lambda gpu: gpu.host)]


def _by_task(gpus: Sequence[GpuRow]) -> list[tuple[str, list[GpuRow]]]:
    return [
        (task or FREE, list(own)) for task, own in itertools.groupby(gpus, key=lambda gpu: gpu.task)
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
