"""``tfd doctor``, ``tfd why`` and ``tfd support``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

from tfd_notebook import diagnosis, views
from tfd_notebook.cluster import control_socket
from tfd_notebook.diagnosis import code_reference
from tfd_notebook.diagnosis import support_bundle as archive
from tfd_notebook.errors import TfdError
from tfd_notebook.model.diagnostics import SEVERITIES
from tfd_notebook.ui.argparsing import Parser
from tfd_notebook.ui.cli import targets as places
from tfd_notebook.ui.cli.screen import Screen

_SECONDS = 60.0


def arguments(parser: Parser) -> None:
    """Add those of ``tfd doctor``."""
    parser.add_argument(
        "name", nargs="?", metavar="TARGET", help="a cluster, or HOST:PORT (default: this host)"
    )
    places.add_pid(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the findings; 1 if there is an error among them."""
    if options.name is not None and ":" in options.name:
        seen = diagnosis.doctor(options.name)
        found, looked_at = seen.records(), list(seen.looked_at)
    elif options.name is not None or options.pid is not None:
        place = places.find(options)
        found, looked_at = place.ask("doctor", _SECONDS), [f"cluster {place.name!r}"]
    else:
        found, looked_at = _host()
    if options.json:
        print(json.dumps(found))
    else:
        print(views.findings_table(found, looked_at).text(Screen().width))
    return int(any(one["severity"] == "error" for one in found))


def _host() -> tuple[list[dict[str, Any]], list[str]]:
    """Look at this process, and have the user's other ones look at themselves."""
    seen = diagnosis.everything()
    found, looked_at = seen.records(), ["this host"]
    # What is so here is told once.
    known = {(one["code"], one["what"]) for one in found}
    for pid, said in _ask_all("doctor"):
        if isinstance(said, TfdError):
            looked_at.append(f"not process {pid}: {said.what}")
            continue
        looked_at.append(f"process {pid}")
        for one in said:
            if (one["code"], one["what"]) not in known:
                found.append({**one, "where": one["where"] or f"process {pid}"})
    found.sort(key=lambda one: (SEVERITIES.index(one["severity"]), one["code"]))
    return found, looked_at


def _ask_all(command: str) -> Iterator[tuple[int, Any]]:
    """Ask the user's other processes; for one that does not answer its error is given."""
    for pid in control_socket.processes():
        if pid != os.getpid():
            try:
                yield pid, control_socket.call(pid, {"command": command}, _SECONDS)
            except TfdError as error:
                yield pid, error


def why_arguments(parser: Parser) -> None:
    """Add those of ``tfd why``."""
    parser.add_argument("code", metavar="CODE", help="such as TFD811; the name of an error serves")


def why(options: argparse.Namespace) -> int:
    """Print what a code means."""
    print(code_reference.why(options.code, min(Screen().width, 100)))
    return 0


def file_argument(parser: Parser) -> None:
    """Add those of ``tfd support``."""
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="default: tfd-support-<time>.tar.gz, here"
    )


def support(options: argparse.Namespace) -> int:
    """Write the archive."""
    texts = {f"here/{name}": text for name, text in archive.of_process().items()}
    texts.update(archive.of_host())
    for pid, said in _ask_all("support"):
        if isinstance(said, TfdError):
            said = {"no-answer.txt": str(said)}
        texts.update({f"process-{pid}/{name}": text for name, text in said.items()})
    print(f"{archive.write(texts, options.file)}: read it before you give it to anybody")
    return 0
