"""Command lines with subcommands, for magics and for the shell: they raise instead of exiting."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tfd_notebook.errors import UnknownName, UsageError


class HelpAsked(Exception):
    """Somebody asked for help; `text` is what to show."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that raises `UsageError` and `HelpAsked` and never exits."""

    def __init__(self, prog: str, description: str = "") -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.color = False

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", fix=self.format_usage().strip())

    def print_help(self, file: Any = None) -> NoReturn:
        raise HelpAsked(self.format_help())

    @property
    def options(self) -> tuple[str, ...]:
        """The long options, and the short ones that have no long form, as the help lists them."""
        return tuple(
            next((s for s in action.option_strings if s.startswith("--")), action.option_strings[0])
            for action in self._actions
            if action.option_strings and action.help is not argparse.SUPPRESS
        )

    def read(self, tokens: Sequence[str]) -> argparse.Namespace:
        """Return what `tokens` say.

        Raises
        ------
        UsageError
            With the nearest option that exists.
        HelpAsked
        """
        if "?" in tokens:
            self.print_help()
        known, rest = self.parse_known_args(list(tokens))
        for token in rest:
            if token.startswith("-"):
                option = token.partition("=")[0]
                raise UnknownName(
                    f"{self.prog} has no option {option!r}",
                    fix=nearest(option, self.options) + f"options: {', '.join(self.options)}",
                )
            raise UsageError(
                f"{self.prog} does not know what to do with {token!r}",
                fix=self.format_usage().strip(),
            )
        return known


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'? "`` for the name that is closest, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Parameters
    ----------
    name, summary : str
    run : callable
        Gets the parsed arguments; what it returns is the command's result.
    prepare : callable, optional
        Adds arguments to the parser.
    aliases : tuple of str
        Other names that run the subcommand. Help and completion do not list them.
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace], Any]
    prepare: Callable[[Parser], None] = field(default=lambda parser: None)
    aliases: tuple[str, ...] = ()


class CommandLine:
    """A family of subcommands.

    Parameters
    ----------
    prog : str
        How users call it: ``"%tfd_cluster"`` or ``"tfd"``.
    summary : str
        One sentence.
    commands : iterable of Command
    """

    def __init__(self, prog: str, summary: str, commands: Iterable[Command]) -> None:
        self.prog = prog
        self.summary = summary
        self.commands = {command.name: command for command in commands}
        self._aliases = {
            alias: name for name, command in self.commands.items() for alias in command.aliases
        }

    def parser(self, name: str) -> Parser:
        """Return the parser of the subcommand `name`."""
        command = self.commands[name]
        parser = Parser(f"{self.prog} {name}", command.summary)
        command.prepare(parser)
        return parser

    def help(self) -> str:
        """Return the help on all subcommands."""
        wide = max(map(len, self.commands))
        lines = [f"  {name.ljust(wide)}  {c.summary}" for name, c in self.commands.items()]
        usage = f"usage: {self.prog} COMMAND [options]\n\n{self.summary}\n\ncommands:\n"
        return usage + "\n".join(lines) + f"\n\n{self.prog} COMMAND --help tells more.\n"

    def run(self, tokens: Sequence[str]) -> Any:
        """Run the subcommand that `tokens` begin with, and return its result.

        Raises
        ------
        UsageError
            With the nearest name that exists.
        HelpAsked
        """
        if not tokens or tokens[0] in ("?", "-h", "--help", "help"):
            raise HelpAsked(self.help())
        name, *rest = tokens
        name = self._aliases.get(name, name)
        if name not in self.commands:
            raise UnknownName(
                f"{self.prog} has no command {name!r}",
                fix=nearest(name, self.commands) + f"commands: {', '.join(self.commands)}",
            )
        return self.commands[name].run(self.parser(name).read(rest))


class SingleCommand(CommandLine):
    """A command line without subcommands.

    Parameters
    ----------
    command : Command
        Its name is how users call it, such as ``"%tfd_explain"``.
    bare : bool
        Whether it does something without any argument, instead of showing its help.
    """

    def __init__(self, command: Command, bare: bool = False) -> None:
        super().__init__(command.name, command.summary, ())
        self._command = command
        self._bare = bare

    def parser(self, name: str = "") -> Parser:
        """Return its parser."""
        parser = Parser(self.prog, self.summary)
        self._command.prepare(parser)
        return parser

    def help(self) -> str:
        """Return the help on it."""
        return self.parser().format_help()

    def run(self, tokens: Sequence[str]) -> Any:
        """Run it.

        Raises
        ------
        UsageError
        HelpAsked
        """
        if not tokens and not self._bare:
            raise HelpAsked(self.help())
        return self._command.run(self.parser().read(tokens))


def split(line: str) -> list[str]:
    """Split a magic's line at its spaces; quotes hold together, and stay inside expressions.

    Raises
    ------
    UsageError
        A quotation mark is not closed.
    """
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError:
        raise UsageError("a quotation mark is not closed", fix="close it") from None
    return [
        token[1:-1] if len(token) > 1 and token[0] == token[-1] and token[0] in "'\"" else token
        for token in tokens
    ]
