"""The bottleneck of a data path or of a coordinator, with figures and advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfd_notebook.errors import UsageError

#: Bottlenecks of a data path.
DATA_KINDS = (
    "consumer",
    "source",
    "stage",
    "python",
    "transfer",
    "workers",
    "device_copy",
    "none",
)

#: Bottlenecks of a coordinator.
COORDINATOR_KINDS = (
    "fetch_in_loop",
    "few_closures",
    "short_closures",
    "retracing",
    "input",
    "one_ps",
    "network",
    "compute",
    "none",
)


@dataclass(frozen=True, repr=False)
class Limit:
    """The current bottleneck, a fix, and the expected gain. Its repr describes them.

    Parameters
    ----------
    kind : str
        One of `DATA_KINDS` or, for a coordinator, `COORDINATOR_KINDS`. ``python`` stands for Python
        functions that hold the GIL. ``transfer`` stands for the transfer from the data workers,
        ``device_copy`` for the copy to a device.
    stage : str
        The stage or task, as the user wrote it, with its source location. Empty if the bottleneck
        is the consumer, or if there is none.
    share : float, optional
        Share of the time that the bottleneck takes, 0 to 1. None if it was not measured.
    figures : mapping of str to float
        The measurements behind the result, times in seconds. For example ``elements_per_s``,
        ``wait_fraction`` and ``cpu_cores`` for a consumer, ``cpu_cores`` and ``bytes_per_s`` for
        a data worker.
    advice : str
        Suggested change. Empty if no change is needed.
    expected_gain : float, optional
        Expected throughput after the change, relative to the current one. None if unknown.
    service : str
        Whether a tf.data service would help here, or the cost of the stages that this process runs
        after it. Empty if that was not examined.

    See Also
    --------
    tf.data.experimental.AutotuneOptions : the settings that TensorFlow tunes automatically.
    """

    kind: str
    stage: str = ""
    share: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict, hash=False)
    advice: str = ""
    expected_gain: float | None = None
    service: str = ""

    def __repr__(self) -> str:
        return self.sentence()

    def sentence(self) -> str:
        """Return the bottleneck, the advice and the verdict on the service as one line."""
        parts = [self._summary()]
        if self.advice:
            gain = self.expected_gain
            text = f"{self.advice[:1].upper()}{self.advice[1:]}"
            if self.kind != "none":
                text = f"Try: {self.advice}"
            parts.append(text + (f" (about {gain:.1f}x faster)" if gain else ""))
        if self.service:
            parts.append(f"Service: {self.service}")
        return "".join(f"{part}. " for part in parts).rstrip()

    def _summary(self) -> str:
        if "closures_per_s" in self.figures:
            return self._coordinator_summary()
        rate = self.figures.get("elements_per_s")
        if self.kind == "none" and rate == 0 and not self.advice:
            return "Not known yet: no elements were read in the last seconds"
        time = self._percent(" of the time")
        name, share = {
            "consumer": ("the consumer's own work", time),
            "source": (f"the source {self.stage}", time and f"busy {time}"),
            "stage": (f"the stage {self.stage}", time and f"busy {time}"),
            "python": (f"the GIL, held by {self.stage}", time),
            "transfer": ("transfer from the data workers", time),
            "workers": (f"the task {self.stage}", self._percent(""))
            if self.stage
            else ("the data workers", time and f"the consumer waits {time}"),
            "device_copy": (f"the copy to the device in {self.stage}", time),
            "none": ("", ""),
        }[self.kind]
        return _summary(name, share, "" if rate is None else f"{_rate(rate)} elements/s")

    def _coordinator_summary(self) -> str:
        rate = self.figures["closures_per_s"]
        if self.kind == "none" and not rate:
            return "Not known yet: too few closures have ended"
        time = self._percent(" of the time")
        idle = time and f"the workers are idle {time}"
        name, share = {
            "fetch_in_loop": ("each result is fetched before the next closure is scheduled", idle),
            "few_closures": ("too few closures", idle),
            "short_closures": (
                "the closures are too short, sending them costs more than running them",
                f"they run {self.figures.get('run_ms_median', 0):.2g} ms",
            ),
            "retracing": (f"retracing of {self.stage}", self._percent(" of its closures")),
            "input": ("input, the workers wait for data inside the closures", ""),
            "one_ps": (f"the task {self.stage}", self._percent(" of the variables")),
            "network": ("the network between workers and parameter servers", ""),
            "compute": ("computation on the workers", time and f"busy {time}"),
            "none": ("", ""),
        }[self.kind]
        return _summary(name, share, f"{_rate(rate)} closures/s")

    def _percent(self, unit: str) -> str:
        return "" if self.share is None else f"{100 * self.share:.0f} %{unit}"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two bottlenecks, before and after a change. Its repr describes the effect of the change.

    Parameters
    ----------
    before, after : Limit
    gain : float
        Throughput after the change, relative to the one before.
    """

    before: Limit
    after: Limit
    gain: float

    def __repr__(self) -> str:
        unit = _unit(self.before, self.after)
        rates = [each.figures.get(unit, 0.0) for each in (self.before, self.after)]
        expected = self.before.expected_gain
        factor = max(self.gain, 1 / self.gain) if self.gain > 0 else float("inf")
        effect = "as fast as before"
        if not 0.95 < self.gain < 1.05:
            effect = f"{factor:.1f}x {'faster' if self.gain > 1 else 'slower'}"
        if expected:
            effect += f" (expected: {expected:.1f}x)"
        before, after = (
            (each.stage or each.kind).partition(" (")[0] for each in (self.before, self.after)
        )
        change = f"still {before}" if before == after else f"was {before}, is now {after}"
        unit = unit.replace("_per_s", "/s")
        return f"{rates[0]:,.1f} to {rates[1]:,.1f} {unit}, {effect}. Bottleneck: {change}."


def _summary(name: str, share: str, rate: str) -> str:
    figures = ", ".join(filter(None, (share, rate)))
    text = f"Bottleneck: {name}" if name else "No bottleneck"
    return f"{text} ({figures})" if figures else text


def _rate(rate: float) -> str:
    return f"{rate:,.{0 if rate >= 10 else 1}f}"


def _unit(before: Limit, after: Limit) -> str:
    """Return the name of the figure by which two limits are compared."""
    if "closures_per_s" in before.figures and "closures_per_s" in after.figures:
        return "closures_per_s"
    sizes = [
        each.figures.get("bytes_per_s", 0.0) / each.figures["elements_per_s"]
        if each.figures.get("elements_per_s")
        else 0.0
        for each in (before, after)
    ]
    # Batched and unbatched elements are only comparable by their bytes.
    if min(sizes) > 0 and max(sizes) > 1.5 * min(sizes):
        return "bytes_per_s"
    return "elements_per_s"


def compare(before: Limit, after: Limit) -> Comparison:
    """Compare two bottlenecks, such as ``stream.limit`` before and after a change.

    Parameters
    ----------
    before, after : Limit
        From `tfd_notebook.explain`, ``stream.limit`` or ``cluster.limit``. For a stream or a
        cluster, its current limit is used.
    """
    limits = [_limit_of(before), _limit_of(after)]
    rates = [limit.figures.get(_unit(*limits), 0.0) for limit in limits]
    gain = rates[1] / rates[0] if rates[0] else float("inf") if rates[1] else 1.0
    return Comparison(limits[0], limits[1], gain)


def _limit_of(item: object) -> Limit:
    limit = item if isinstance(item, Limit) else getattr(item, "limit", None)
    if not isinstance(limit, Limit):
        raise UsageError(
            f"cannot compare a {type(item).__name__}: it has no limit",
            fix="pass the results of tfd.explain(dataset)",
        )
    return limit
