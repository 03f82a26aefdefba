"""Findings of the doctor, and the registry of the checks that report them.

A module ``diagnostics`` of a package registers its findings (`kind`) and checks (`check`).
`tfd_notebook.diagnosis` runs the checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

Severity = Literal["error", "warning", "info"]
#: Subjects of a check. ``process`` is this process, ``tasks`` the tasks of a description, and
#: ``service`` a tf.data service. ``spark`` is a Spark installation.
About = Literal["process", "tasks", "service", "cluster", "dataset", "spark"]

#: Most severe first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
#: Names of a finding's fields, for tables and JSON.
FIELDS = ("code", "severity", "where", "what", "why", "fix")
_MAX_NAMES = 5


@dataclass(frozen=True)
class Finding:
    """A problem that exists or will occur.

    Parameters
    ----------
    code : str
        Stable, such as ``"TFD811"``. ``tfd why TFD811`` explains it.
    severity : {"error", "warning", "info"}
        ``error``: it does not work. ``warning``: it works badly, or only until some event.
        ``info``: useful to know.
    what : str
        The problem, in one sentence.
    why : str
        The consequence, in one sentence.
    fix : str
        The next step.
    where : str
        The cluster, task or dataset concerned. Empty for this process.
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
        """Return a copy with `where` added in front of the location."""
        return replace(self, where=": ".join(filter(None, (where, self.where))))

    def as_dict(self) -> dict[str, str]:
        """Return the fields of `FIELDS` as JSON values."""
        values = asdict(self)
        return {name: values[name] for name in FIELDS}


@dataclass(frozen=True)
class Kind:
    """A registered type of finding.

    Parameters
    ----------
    code : str
    severity : {"error", "warning", "info"}
    title : str
        A few words.
    why : str
        The consequence, in one clause without a capital letter and a full stop.
    """

    code: str
    severity: Severity
    title: str
    why: str

    def finding(self, what: str, fix: str, where: str = "") -> Finding:
        """Return a `Finding` of this kind."""
        return Finding(self.code, self.severity, what, self.why, fix, where)


_Check = Callable[[Any], Iterable[Finding]]
_AnyCheck = TypeVar("_AnyCheck", bound=_Check)

_kinds: dict[str, Kind] = {}
_checks: dict[About, list[_Check]] = {}


def kind(code: str, severity: Severity, title: str, why: str) -> Kind:
    """Register a type of finding, and return it.

    Parameters
    ----------
    code : str
    severity : {"error", "warning", "info"}
    title, why : str
        See `Kind`.
    """
    assert code not in _kinds, code
    registered = _kinds[code] = Kind(code, severity, title, why)
    return registered


def check(about: About) -> Callable[[_AnyCheck], _AnyCheck]:
    """Return a decorator that registers a function as a check of a subject.

    The function takes the subject and returns or yields `Finding` objects.
    """

    def register(function: _AnyCheck) -> _AnyCheck:
        _checks.setdefault(about, []).append(function)
        return function

    return register


def kinds() -> dict[str, Kind]:
    """Return the registered types of findings by code."""
    return dict(sorted(_kinds.items()))


FAILED = kind(
    "TFD800", "info", "a check failed", "the problems that it detects may exist and are not shown"
)


def run_checks(about: About, subject: Any) -> Iterator[Finding]:
    """Run all checks of `subject`. A check that raises is reported as a finding.

    The location of a finding without one is the ``place`` of `subject`.
    """
    place = str(getattr(subject, "place", ""))
    for function in _checks.get(about, ()):
        try:
            # Collect all findings first: a generator can raise after its first ones.
            findings = tuple(function(subject))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            findings = (
                FAILED.finding(
                    f"{function.__module__}.{function.__qualname__} raised {what}",
                    "report this bug with the output of tfd support",
                ),
            )
        for finding in findings:
            yield finding if finding.where else replace(finding, where=place)


def listed(names: Iterable[str]) -> str:
    """Return names for a sentence: the first five, and the number of the others."""
    every = list(names)
    rest = len(every) - _MAX_NAMES
    return ", ".join(every[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings without duplicates, most severe first."""
    unique = dict.fromkeys(findings)
    return tuple(
        sorted(unique, key=lambda finding: (SEVERITIES.index(finding.severity), finding.code))
    )
