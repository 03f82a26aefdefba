"""What limits a pipeline, in one sentence with figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfd_notebook.errors import UsageError

#: What can limit a data path.
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

#: What can limit a coordinator.
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
    """What limits a data path now, what to change, and what that would gain; its repr says it.

    Parameters
    ----------
    kind : str
        One of `DATA_KINDS` or, for a coordinator, `COORDINATOR_KINDS`: the consumer's own work, the
        source of the data, a stage of the pipeline, Python functions that take turns at the
        interpreter's lock, the way between workers and consumer, the data workers, the copy to a
        device, or nothing.
    stage : str
        Which stage or task, as the user wrote it, with its place; empty where that is the consumer
        or nothing.
    share : float, optional
        Share of the time that it takes, 0 to 1; None where it was not measured.
    figures : mapping of str to float
        What this rests on: ``elements_per_s``, ``wait_fraction`` and ``cpu_cores`` for a consumer,
        ``cpu_cores`` and ``bytes_per_s`` for a data worker, and more; times are in seconds.
    advice : str
        What to change; empty where nothing is to be changed.
    expected_gain : float, optional
        How many times as fast the data would come then; None where nobody knows.
    service : str
        Whether a tf.data service would help here; empty where that was not looked at.

    See Also
    --------
    tf.data.experimental.AutotuneOptions : what TensorFlow tunes by itself.
    """

    kind: str
    stage: str = ""
    share: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    advice: str = ""
    expected_gain: float | None = None
    service: str = ""

    def __repr__(self) -> str:
        return self.sentence()

    def sentence(self) -> str:
        """Return it as one sentence."""
        parts = [self._who()]
        if self.advice:
            gain = self.expected_gain
            parts.append(self.advice + (f" (about {gain:.1f} times as fast)" if gain else ""))
        if self.service:
            parts.append(self.service)
        text = "; ".join(parts)
        return text[:1].upper() + text[1:] + "."

    def _who(self) -> str:
        share = "" if self.share is None else f" {self.share:.0%} of the time"
        if "closures_per_s" in self.figures:
            return self._who_coordinates(share)
        rate = self.figures.get("elements_per_s")
        if self.kind == "none" and rate == 0 and not self.advice:
            return "nothing is known yet: nothing was read in the last seconds"
        speed = "" if rate is None else f", at {rate:,.{0 if rate >= 10 else 1}f} elements/s"
        said = {
            "consumer": f"the consumer is the limit: its own work takes{share}",
            "source": f"the source is the limit: {self.stage} is busy{share}",
            "stage": f"the stage {self.stage} is the limit: it is busy{share}",
            "python": f"Python is the limit: {self.stage} holds the interpreter's lock{share}",
            "transfer": f"the way from the workers to here is the limit: it takes{share}",
            "workers": self._workers(share),
            "device_copy": f"the copy to the device is the limit: {self.stage} takes{share}",
            "none": "nothing is wrong with the data path",
        }[self.kind]
        return said + speed

    def _who_coordinates(self, share: str) -> str:
        rate = self.figures["closures_per_s"]
        if self.kind == "none" and not rate:
            return "nothing is known yet: too few closures have ended"
        said = {
            "fetch_in_loop": "waiting for each result before the next is scheduled is the limit: "
            f"the workers are idle{share}",
            "few_closures": f"there are too few closures: the workers are idle{share}",
            "short_closures": "the closures are too short: handing them over costs more than "
            f"running them ({self.figures.get('run_ms_median', 0):.2g} ms)",
            "retracing": f"tracing is the limit: {self.stage} is traced anew for"
            f"{share.removesuffix(' of the time')} of its closures",
            "input": "the input is the limit: the workers wait for data inside the closures",
            "one_ps": f"the task {self.stage} is the limit: it holds"
            f"{share.removesuffix(' of the time')} of the variables",
            "network": "the way between workers and parameter servers is the limit",
            "compute": f"the workers' own computing is the limit: they are busy{share}",
            "none": "nothing is wrong",
        }[self.kind]
        return f"{said}, at {rate:,.{0 if rate >= 10 else 1}f} closures/s"

    def _workers(self, share: str) -> str:
        if not self.stage:
            return f"the data workers are the limit: the consumer waits for them{share}"
        part = "" if self.share is None else f" ({self.share:.0%})"
        return f"the task {self.stage} is the limit{part}"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two limits, before and after a change; its repr says what the change did.

    Parameters
    ----------
    before, after : Limit
    gain : float
        How many times as fast the data comes after the change.
    """

    before: Limit
    after: Limit
    gain: float

    def __repr__(self) -> str:
        unit = _unit(self.before, self.after)
        rates = [each.figures.get(unit, 0.0) for each in (self.before, self.after)]
        verb = "faster" if self.gain >= 1.05 else "slower" if self.gain <= 0.95 else "as fast"
        factor = max(self.gain, 1 / self.gain) if self.gain > 0 else float("inf")
        said = f"{factor:.1f} times {verb}" if verb != "as fast" else "as fast as before"
        expected = self.before.expected_gain
        promised = f" ({expected:.1f} times was expected)" if expected else ""
        limits = [
            (each.stage or each.kind).partition(" (")[0] for each in (self.before, self.after)
        ]
        change = (
            f"still {limits[0]}" if limits[0] == limits[1] else f"was {limits[0]}, is {limits[1]}"
        )
        unit = unit.replace("_per_s", "/s")
        both = f"{rates[0]:,.1f} to {rates[1]:,.1f} {unit}"
        return f"{both}, {said}{promised}; the limit {change}."


def _unit(before: Limit, after: Limit) -> str:
    """Return the figure in which two limits can be compared."""
    if "closures_per_s" in before.figures and "closures_per_s" in after.figures:
        return "closures_per_s"
    sizes = [
        each.figures.get("bytes_per_s", 0.0) / each.figures["elements_per_s"]
        if each.figures.get("elements_per_s")
        else 0.0
        for each in (before, after)
    ]
    # Batches against single elements: the data is what is the same.
    if min(sizes) > 0 and max(sizes) > 1.5 * min(sizes):
        return "bytes_per_s"
    return "elements_per_s"


def compare(before: Limit, after: Limit) -> Comparison:
    """Return what changed between two limits, such as ``stream.limit`` before and after.

    Parameters
    ----------
    before, after : Limit
        From `tfd_notebook.explain`, ``stream.limit`` or ``cluster.limit``; streams and clusters
        stand for their present limit.
    """
    found = [
        each if isinstance(each, Limit) else getattr(each, "limit", None)
        for each in (before, after)
    ]
    for each, limit in zip((before, after), found, strict=True):
        if not isinstance(limit, Limit):
            raise UsageError(
                f"a {type(each).__name__} has no limit that could be compared",
                fix="compare what tfd.explain(dataset) says",
            )
    assert isinstance(found[0], Limit)
    assert isinstance(found[1], Limit)
    rates = [each.figures.get(_unit(found[0], found[1]), 0.0) for each in (found[0], found[1])]
    gain = rates[1] / rates[0] if rates[0] else float("inf") if rates[1] else 1.0
    return Comparison(found[0], found[1], gain)
