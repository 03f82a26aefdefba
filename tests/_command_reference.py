"""The page ``docs/commands.md``, made from the command table.

``python -m tests._command_reference`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tfd_notebook.model import command_table
from tfd_notebook.model.command import REQUIRED, Argument, Command

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
_INTRODUCTION = """\
# Commands

This page lists the commands of the magics, of `tfd`, of the control socket and of front ends. It is
generated from `tfd_notebook/model/command_table.py`. `--help` explains the arguments.

`%load_ext tfd_notebook` adds the magics. Tab completes subcommands, options, tasks and names, and
`?` after a magic shows its help. `%tfd_cluster` alone shows the form. The exit status of `tfd` is 0
for success, 1 for a failure and 2 for wrong usage. `tfd --version` prints the version.
"""
_REQUESTS = {
    "request": "Other processes of the same user send these requests to the control socket of a "
    "process. Front ends send them over [the bus](bus.md). Each is a JSON object with `command` "
    "and the fields below. A field without a default is required.",
    "panel": "Front ends also send these requests to a kernel with a notebook.",
}


def page() -> str:
    """Return the text of the page."""
    lines = [_INTRODUCTION]
    programs = [name for name in command_table.PROGRAMS if name != "tfd"]
    single = [s for c in command_table.COMMANDS for s in c.surfaces if s[0] == "%"]
    single = [name for name in single if name not in programs]
    for program in (*programs, "tfd"):
        lines += [f"## `{program}`\n", f"{command_table.PROGRAMS[program]}\n"]
        lines += _rows(program, command_table.commands(program))
    lines += ["## Other magics\n"]
    lines += _rows("", {name: c for name in single for c in command_table.commands(name).values()})
    for surface, text in _REQUESTS.items():
        title = "Requests" if surface == "request" else "Requests to a notebook"
        lines += [f"## {title}\n", f"{text}\n", "| command | purpose | fields |", "|---|---|---|"]
        for name, command in command_table.commands(surface).items():
            fields = ", ".join(map(_field, command.arguments(surface)))
            lines.append(f"| `{name}` | {command.summary} | {fields or '–'} |")
        lines.append("")
    return "\n".join(lines)


def _rows(program: str, commands: dict[str, Command]) -> Iterator[str]:
    yield from ("| command | purpose | arguments | example |", "|---|---|---|---|")
    for name, command in commands.items():
        surface = program or name
        usages = ", ".join(
            f"`{_usage(argument)}`" for argument in command.arguments(surface) if argument.help
        )
        example = f"{'' if surface == name else surface} {name} {command.example(surface)}".strip()
        yield f"| `{name}` | {command.summary} | {usages or '–'} | `{example}` |"
    yield ""


def _usage(argument: Argument) -> str:
    """Return the form on a command line; for a value with several words, these words."""
    is_words = not argument.flags and (argument.split or " " in argument.usage)
    return argument.metavar if is_words else argument.usage


def _field(argument: Argument) -> str:
    kind = {str: "text", bool: "true or false", int: "integer", float: "number", dict: "object"}
    text = f"`{argument.name}`: {kind[argument.kind or str]}"
    if argument.maximum is not None and argument.kind is int:
        text += f" {argument.minimum} to {argument.maximum}"
    if argument.default is REQUIRED:
        return text
    return f"{text} (default: {json.dumps(argument.default)})"


if __name__ == "__main__":
    PAGE.write_text(page())
