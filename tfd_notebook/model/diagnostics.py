"""What can be wrong without an error: findings, and the one list of what looks for them.

A feature names what it can find (`kind`) and how it looks for it (`check`), in a module of its own
called ``findings``; `tfd_notebook.diagnosis` has them look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

Severity = Literal["error", "warning", "info"]
#: What a check looks at: this process, the tasks that a description names, a tf.data service, a
#: cluster, a dataset, or a Spark.
About = Literal["process", "tasks", "service", "cluster", "dataset", "spark"]

#: The worst first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
#: Names of a finding's fields, for tables and JSON.
FIELDS = ("code", "severity", "where", "what", "why", "fix")
_NAMED = 5


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or will be.

    Parameters
    ----------
    code : str
        Stable, such as ``"TFD811"``; ``tfd why TFD811`` tells more.
    severity : {"error", "warning", "info"}
        Does not work; works until something happens, or badly; worth knowing.
    what : str
        What was found, one sentence.
    why : str
        Why that matters, one sentence.
    fix : str
        The next step.
    where : str
        The cluster, task or dataset concerned; empty for this process.
    """

    code: str
    severity: Severity
    what: str
    why: str
    fix: str
    where: str = ""

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where and self.where not in self.what else ""
        return f"[{self.code}] {where}{self.what}: {self.why}\nNext: {self.fix}"

    def at(self, where: str) -> Finding:
        """Return the same finding, at a place."""
        return replace(self, where=": ".join(filter(None, (where, self.where))))

    def as_dict(self) -> dict[str, str]:
        """Return it as JSON values: the fields of `FIELDS`."""
        found = asdict(self)
        return {name: found[name] for name in FIELDS}


@dataclass(frozen=True)
class Kind:
    """What can be found.

    Parameters
    ----------
    code : str
    severity : {"error", "warning", "info"}
    title : str
        A few words.
    why : str
        Why it matters, one sentence without a capital and a full stop.
    """

    code: str
    severity: Severity
    title: str
    why: str

    def found(self, what: str, fix: str, where: str = "") -> Finding:
        """Return that it was found."""
        return Finding(self.code, self.severity, what, self.why, fix, where)


_Check = Callable[[Any], Iterable[Finding]]
_AnyCheck = TypeVar("_AnyCheck", bound=_Check)

_kinds: dict[str, Kind] = {}
_checks: dict[About, list[_Check]] = {}


def kind(code: str, severity: Severity, title: str, why: str) -> Kind:
    """Make known that something can be found, and return its `Kind`."""
    assert code not in _kinds, code
    made = _kinds[code] = Kind(code, severity, title, why)
    return made


def check(about: About) -> Callable[[_AnyCheck], _AnyCheck]:
    """Have a function look; it takes what it looks at, and gives `Finding` objects."""

    def register(function: _AnyCheck) -> _AnyCheck:
        _checks.setdefault(about, []).append(function)
        return function

    return register


def kinds() -> dict[str, Kind]:
    """Return all that is known to be found, by code."""
    return dict(sorted(_kinds.items()))


FAILED = kind("TFD800", "info", "a check failed", "what it looks for may be there and is not shown")


def look(about: About, subject: Any) -> Iterator[Finding]:
    """Have all checks look at `subject`; one that fails is a finding itself."""
    for function in _checks.get(about, ()):
        try:
            # All of it here: a generator may fail at its last finding.
            yield from tuple(function(subject))
        except Exception as error:
            yield FAILED.found(
                f"{function.__module__}.{function.__qualname__} raised "
                f"{type(error).__name__}: {error}",
                "report it, with what tfd support writes",
            )


def listed(names: Iterable[str]) -> str:
    """Return names for a sentence: the first few, and how many more there are."""
    first, rest = (found := list(names))[:_NAMED], len(found) - _NAMED
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def ordered(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, each once, the worst first."""
    unique = dict.fromkeys(found)
    return tuple(sorted(unique, key=lambda one: (SEVERITIES.index(one.severity), one.code)))
