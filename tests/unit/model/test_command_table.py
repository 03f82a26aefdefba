"""The command table, its handlers, its reference, and commands that other files name."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests import _command_reference
from tfd_notebook import errors
from tfd_notebook.coordinator.values import VALUE_STATES
from tfd_notebook.model import command_table
from tfd_notebook.model.command import REQUIRED, Argument
from tfd_notebook.resolvers import factory
from tfd_notebook.ui import magics
from tfd_notebook.ui.argparsing import CommandLine, split
from tfd_notebook.ui.magics import completion

ROOT = Path(__file__).parents[3]
SURFACES = sorted({surface for c in command_table.COMMANDS for surface in c.surfaces})


@pytest.mark.parametrize("surface", SURFACES)
def test_each_command_has_a_handler_with_its_arguments(surface: str) -> None:
    context = (object(),) if surface[0] == "%" or surface == "panel" else ()
    for command in command_table.commands(surface).values():
        handler = command_table.handler(command, surface, *context)
        if surface in ("request", "panel"):
            names = [argument.name for argument in command.arguments(surface)]
            inspect.signature(handler).bind(**dict.fromkeys(names))
        else:
            inspect.signature(handler).bind(object())


@pytest.mark.parametrize("path", sorted(set(command_table.HANDLERS.values())))
def test_each_handler_is_in_the_table(path: str) -> None:
    module, _, name = path.partition(":")
    kind = getattr(import_module(f"tfd_notebook.{module}"), name)
    methods = {n for n, _ in inspect.getmembers(kind, inspect.isfunction) if n[0] != "_"}
    assert methods <= {command.name.replace("-", "_") for command in command_table.COMMANDS}


@pytest.mark.parametrize("surface", [s for s in SURFACES if s not in ("request", "panel")])
def test_each_example_is_a_valid_command_line(surface: str) -> None:
    line = CommandLine(surface)
    assert f"\nexample: {surface} " in line.help()
    for name, command in line.commands.items():
        parser = line.parser(name)
        assert f"\nexample: {parser.prog}" in parser.format_help()
        for optional in (split(command.example(surface)), []):
            if optional or not any(argument.required for argument in parser.arguments):
                parser.read(optional)


def test_all_magics_are_registered() -> None:
    assert {f"%{name}" for name in magics.NAMES} == {s for s in SURFACES if re.match("%[^%]", s)}
    assert {f"%%{name}" for name in magics.CELL_MAGICS} == {s for s in SURFACES if s[:2] == "%%"}


def test_reference_is_current() -> None:
    assert _command_reference.PAGE.read_text() == _command_reference.page(), (
        "run python -m tests._command_reference"
    )


@pytest.mark.parametrize(
    "path", ["README.md", *sorted(p.name for p in (ROOT / "docs").glob("*.md"))]
)
def test_pages_name_existing_commands_and_options(path: str) -> None:
    page = ROOT / path if path == "README.md" else ROOT / "docs" / path
    for program, words in re.findall(r"`(%{0,2}tfd(?:_\w+)?) ([a-z-][^`\n]*)`", page.read_text()):
        if (program, words) == ("tfd", "--version"):
            continue
        if program in command_table.PROGRAMS:
            name = words.split()[0].split(",")[0]
            line = CommandLine(program)
            assert name in line.commands, f"{program} {words}"
        else:
            line = CommandLine(program)
            name = line.single_command
        options = {flag for argument in line.parser(name).arguments for flag in argument.flags}
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", words)) <= options | {"--help"}, words


def test_messages_name_existing_commands() -> None:
    for path in (ROOT / "tfd_notebook").rglob("*.py"):
        if path.name == "command_table.py":
            continue
        text = path.read_text()
        for program, name in re.findall(r"(%tfd_(?:cluster|stream|spark)) ([a-z][a-z-]+)", text):
            assert name in command_table.commands(program), f"{path}: {program} {name}"
        for name in re.findall(r"\btfd (\w+) NAME", text):
            assert name in command_table.commands("tfd"), f"{path}: tfd {name}"


def test_front_end_sends_commands_of_the_table() -> None:
    known = command_table.commands("request").keys() | command_table.commands("panel").keys()
    sources = "\n".join(p.read_text() for p in (ROOT / "labextension" / "src").rglob("*.ts"))
    sent = set(
        re.findall(r"(?:link\.command\(|status\.run(?:<[^(]*>)?\(\s*[^,]+,)\s*'(\w+)'", sources)
    )
    assert {"scale", "logs", "start", "resolve", "pause", "step"} <= sent
    quick = re.search(r"QUICK = \[(.*?)\]", sources, re.DOTALL)
    assert quick
    assert sent | set(re.findall(r"'(\w+)'", quick[1])) <= known


def test_help_names_every_choice() -> None:
    arguments = {a.name: a for a in command_table.commands("tfd")["resolve"].arguments("tfd")}
    assert all(name in arguments["resolver"].help for name in factory.CHOICES)
    assert {
        a.source for c in command_table.COMMANDS for s in c.surfaces for a in c.arguments(s)
    } == {
        *completion.SOURCES,
        "",
    }
    assert VALUE_STATES


@pytest.mark.parametrize(
    ("argument", "valid", "invalid"),
    [
        (Argument("n N", minimum=1, maximum=3), [1, 3], [0, 4, True, 1.0, "1", None, 10**400]),
        (Argument("s S", minimum=0), [0, 1.5], [-1, True, "1", float("nan"), None]),
        (Argument("name"), ["x", "x" * 200], ["", "x" * 201, 1, None, ["x"]]),
        (Argument("flag", kind=bool), [True, False], [0, 1, "true", None]),
        (Argument("options", kind=dict), [{}], [[], None, "{}"]),
    ],
)
def test_values_of_requests_are_checked(
    argument: Argument, valid: list[Any], invalid: list[Any]
) -> None:
    for value in valid:
        assert argument.check(value) is value
    for value in invalid:
        with pytest.raises(errors.UsageError, match=f"invalid {argument.name}.*expected "):
            argument.check(value)


def test_request_gets_defaults_and_ignores_other_fields() -> None:
    logs = command_table.commands("request")["logs"]
    expected = {"name": "c", "task": None, "lines": 100, "offset": None}
    assert logs.read({"command": "logs", "name": "c", "client": "x"}) == expected
    assert logs.read({"name": "c", "offset": 3})["offset"] == 3
    with pytest.raises(errors.UsageError, match="invalid lines None"):
        logs.read({"lines": None})
    required = [a.name for a in command_table.commands("request")["hold"].arguments("request")]
    assert required == ["name", "worker", "held"]
    assert REQUIRED not in logs.read({}).values()
