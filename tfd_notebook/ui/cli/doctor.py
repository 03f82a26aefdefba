"""``tfd doctor``, ``tfd why`` and ``tfd support``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

from tfd_notebook import diagnosis, views
from tfd_notebook.diagnosis import code_reference, support_bundle
from tfd_notebook.errors import TfdError
from tfd_notebook.model.diagnostics import SEVERITIES
from tfd_notebook.net import control_calls
from tfd_notebook.ui.cli import targets
from tfd_notebook.ui.cli.screen import Screen

_SECONDS = 60.0


class DoctorCommands:
    """``tfd doctor``, ``tfd why`` and ``tfd support``."""

    def doctor(self, options: argparse.Namespace) -> int:
        """Print the findings. Return 1 if one of them is an error, else 0."""
        if options.name is not None and ":" in options.name:
            findings = diagnosis.doctor(options.name)
            records, checked = findings.records(), list(findings.checked)
        elif options.name is not None or options.pid is not None:
            target = targets.find(options)
            records, checked = target.call("doctor", _SECONDS), [f"cluster {target.name!r}"]
        else:
            records, checked = _check_host()
        if options.json:
            print(json.dumps(records))
        else:
            print(views.findings_table(records, checked).text(Screen().width))
        return int(any(record["severity"] == "error" for record in records))

    def why(self, options: argparse.Namespace) -> None:
        print(code_reference.why(options.code, min(Screen().width, 100)))

    def support(self, options: argparse.Namespace) -> None:
        texts = {f"here/{name}": text for name, text in support_bundle.describe_process().items()}
        texts.update(support_bundle.describe_host())
        for pid, answer in _call_all("support"):
            if isinstance(answer, TfdError):
                answer = {"no-answer.txt": str(answer)}
            texts.update({f"process-{pid}/{name}": text for name, text in answer.items()})
        print(f"{support_bundle.write(texts, options.file)}: read it before you share it")


def _check_host() -> tuple[list[dict[str, Any]], list[str]]:
    """Check this process, and request the findings of the user's other processes."""
    records, checked = diagnosis.check_all().records(), ["this host"]
    # A finding about the host is reported by every process. Keep it once.
    known = {(record["code"], record["what"]) for record in records}
    for pid, answer in _call_all("doctor"):
        if isinstance(answer, TfdError):
            checked.append(f"not process {pid}: {answer.what}")
            continue
        checked.append(f"process {pid}")
        for record in answer:
            if (record["code"], record["what"]) not in known:
                records.append({**record, "where": record["where"] or f"process {pid}"})
    records.sort(key=lambda record: (SEVERITIES.index(record["severity"]), record["code"]))
    return records, checked


def _call_all(command: str) -> Iterator[tuple[int, Any]]:
    """Yield the answer of each of the user's other processes, or the error of the call."""
    for pid in control_calls.processes():
        if pid != os.getpid():
            try:
                yield pid, control_calls.call(pid, {"command": command}, _SECONDS)
            except TfdError as error:
                yield pid, error
