"""Command lines of the command table, for magics and for the shell.

They raise an exception instead of exiting the process.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from tfd_notebook import views
from tfd_notebook.errors import UnknownName, UsageError, nearest
from tfd_notebook.model import command_table
from tfd_notebook.model.command import Argument, Command
from tfd_notebook.model.spec import Policy, Service

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster


class HelpRequested(Exception):
    """A request for help. `text` is the help."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Parser(argparse.ArgumentParser):
    """Parser of a command's arguments. It raises `UsageError` or `HelpRequested` and never exits.

    Parameters
    ----------
    prog : str
        The command as users write it, such as ``"%tfd_cluster start"``.
    command : Command
    surface : str
        The program, such as ``"%tfd_cluster"``.
    """

    def __init__(self, prog: str, command: Command, surface: str) -> None:
        summary = command.summary[0].upper() + command.summary[1:]
        example = f"example: {prog} {command.example(surface)}".rstrip()
        super().__init__(
            prog=prog,
            description=f"{summary}.",
            epilog=example,
            allow_abbrev=False,
        )
        self.color = False
        self.arguments = command.arguments(surface)
        groups: dict[str, Any] = {"": self}
        for argument in self.arguments:
            if argument.group not in groups:
                groups[argument.group] = self.add_mutually_exclusive_group()
            settings: dict[str, Any] = {"default": argument.default}
            if argument.kind is bool:
                settings["action"] = "store_true"
            elif argument.repeat:
                settings |= {"action": "append", "default": [], "metavar": argument.metavar}
            else:
                settings |= {"type": argument.kind, "nargs": argument.nargs}
                settings |= {"metavar": argument.metavar, "choices": argument.choices}
                settings |= {"const": argument.const} if argument.const else {}
            text = argument.text.replace("%", "%%") or argparse.SUPPRESS
            flags = argument.flags or (argument.name,)
            groups[argument.group].add_argument(*flags, help=text, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", fix=self.format_usage().strip())

    def print_help(self, file: Any = None) -> NoReturn:
        raise HelpRequested(self.format_help())

    @property
    def options(self) -> tuple[str, ...]:
        """The options that the help lists: each in its long form, if it has one."""
        return ("--help", *(a.flags[-1] for a in self.arguments if a.flags and a.help))

    def read(self, tokens: Sequence[str]) -> argparse.Namespace:
        """Return the parsed `tokens`.

        Raises
        ------
        UsageError
            The error suggests the nearest option.
        HelpRequested
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
                f"{self.prog}: unexpected argument {token!r}",
                fix=self.format_usage().strip(),
            )
        for argument in self.arguments:
            value = getattr(known, argument.name)
            if argument.split:
                known.name, second = _split(argument, value)
                setattr(known, argument.split, second)
            elif argument.minimum is not None and value is not None:
                argument.check(value)
        return known


def _split(argument: Argument, words: Sequence[str]) -> tuple[str | None, Any]:
    """Return the name and the task or number in `words`, in any order."""
    if argument.split == "task":
        seconds, expected = [word for word in words if ":" in word], "one cluster and one task"
    else:
        seconds = [word for word in words if re.fullmatch(r"-?\d{1,19}", word, re.ASCII)]
        expected = "one number and one name"
    names = [word for word in words if word not in seconds]
    if len(seconds) > 1 or len(names) > 1:
        raise UsageError(
            f"invalid arguments {' '.join(words)!r}: expected {expected}",
            fix=f"write {argument.metavar}",
        )
    name, second = next(iter(names), None), next(iter(seconds), None)
    return name, second if second is None or argument.split == "task" else int(second)


class CommandLine:
    """The command line of a program: a magic, or ``tfd``.

    Parameters
    ----------
    surface : str
        The program as users write it, such as ``"%tfd_cluster"`` or ``"tfd"``.
    *context : object
        Arguments of the class of its handlers, such as the shell.
    """

    def __init__(self, surface: str, *context: Any) -> None:
        self.surface = surface
        self.commands = command_table.commands(surface)
        self._context = context
        self._aliases = {c.alias: name for name, c in self.commands.items() if c.alias is not None}
        #: The name of the command of a program without subcommands.
        self.single_command = "" if surface in command_table.PROGRAMS else next(iter(self.commands))

    def parser(self, name: str) -> Parser:
        """Return the parser of the command `name`."""
        prog = self.surface if self.single_command else f"{self.surface} {name}"
        return Parser(prog, self.commands[name], self.surface)

    def help(self) -> str:
        """Return the help on all commands."""
        if self.single_command:
            return self.parser(self.single_command).format_help()
        width = max(map(len, self.commands))
        lines = [
            f"  {name.ljust(width)}  {command.summary.partition('.')[0]}"
            for name, command in self.commands.items()
        ]
        summary = command_table.PROGRAMS[self.surface]
        usage = f"usage: {self.surface} COMMAND [options]\n\n{summary}\n\ncommands:\n"
        name, first = next(iter(self.commands.items()))
        more = f"{self.surface} COMMAND --help shows the options of a command and an example.\n"
        more += f"example: {self.surface} {name} {first.example(self.surface)}".rstrip()
        return usage + "\n".join(lines) + f"\n\n{more}\n"

    def run(self, tokens: Sequence[str]) -> Any:
        """Run the command named by the first token, and return its result.

        Raises
        ------
        UsageError
            The error suggests the nearest name.
        HelpRequested
        """
        name, *rest = (self.single_command, *tokens) if self.single_command else tokens or ("",)
        name = self._aliases.get(name, name)
        if name in ("", "?", "-h", "--help", "help"):
            raise HelpRequested(self.help())
        if name not in self.commands:
            raise UnknownName(
                f"{self.surface} has no command {name!r}",
                fix=nearest(name, self.commands) + f"commands: {', '.join(self.commands)}",
            )
        parser = self.parser(name)
        is_line_magic = self.single_command and not self.surface.startswith("%%")
        if is_line_magic and not rest and any(a.required for a in parser.arguments):
            raise HelpRequested(self.help())
        options = parser.read(rest)
        return command_table.handler(self.commands[name], self.surface, *self._context)(options)


def split(line: str) -> list[str]:
    """Split the line of a magic at its spaces.

    Quoted text is one token. It keeps its quotation marks inside an expression.

    Raises
    ------
    UsageError
        A closing quotation mark is missing.
    """
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError:
        raise UsageError("missing closing quotation mark", fix="add it") from None
    return [
        token[1:-1] if len(token) > 1 and token[0] == token[-1] and token[0] in "'\"" else token
        for token in tokens
    ]


def read_gpus(text: str) -> Any:
    """Return the value of ``--gpus`` as an argument of `Cluster`.

    An invalid value is returned unchanged, because `Cluster` raises the error.
    """
    if text == "0":
        return 0
    items = [item.strip() for item in text.split(",") if item.strip()]
    if items and all(item.isdecimal() for item in items):
        return [int(item) for item in items]
    pairs = [item.partition("=") for item in items]
    if pairs and all(sign and count.isdecimal() for _, sign, count in pairs):
        return {role: int(count) for role, _, count in pairs}
    return text


def make_cluster(options: argparse.Namespace) -> Cluster:
    """Start the cluster that `options` describe, or return the running one.

    With ``--detach`` the running one can be a detached cluster of a process that has ended.

    Parameters
    ----------
    options : argparse.Namespace
        The arguments of the command ``start``.
    """
    # Import time: only the start of a cluster needs these modules.
    from tfd_notebook.cluster import attach
    from tfd_notebook.cluster.config import ClusterOptions
    from tfd_notebook.launchers import base

    arguments: dict[str, Any] = {}
    if options.host is not None:
        arguments["host"] = options.host
    if options.allow:
        arguments["allow"] = options.allow
    cluster = ClusterOptions(
        data_workers=options.data_workers,
        workers=options.workers,
        ps=options.ps,
        evaluator=options.evaluator,
        gpus=read_gpus(options.gpus),
        launcher=base.launcher(options.launcher, arguments),
        name=options.name,
        preload=options.preload,
        policy=Policy(time_limit=options.time_limit),
        service=Service(
            port=getattr(options, "port", 0),
            work_dir=options.work_dir,
            worker_tags=options.worker_tags,
            cross_trainer_cache_size_bytes=options.cross_trainer_cache_size_bytes,
            snapshot_max_chunk_size_bytes=options.snapshot_max_chunk_size_bytes,
        ),
    )
    return attach.start(cluster, options.detach)


def adaptation_range(options: argparse.Namespace) -> tuple[int | None, int | None]:
    """Return the range of the command ``adapt``: None and None with ``--off``.

    Raises
    ------
    UsageError
        The range is incomplete, or given together with ``--off``.
    """
    minimum, maximum = options.minimum, options.maximum
    complete = minimum is not None and maximum is not None
    if complete is options.off or (options.off and (minimum, maximum) != (None, None)):
        raise UsageError(
            "adapt needs a minimum and a maximum, or --off",
            fix="add --minimum 1 --maximum 8, or only --off",
        )
    return minimum, maximum


def launchers_table() -> views.Table:
    """Return a table of the installed launchers and the profiles, with the place of the tasks."""
    # Import time, as in `make_cluster`.
    from tfd_notebook.launchers import base, profiles

    return views.Table(
        (views.Column("launcher"), views.Column("where the tasks run", note=True)),
        [
            {"launcher": name, "where the tasks run": where}
            for name, where in [
                *((name, each.summary) for name, each in base.available_launchers().items()),
                *((name, _profile_text(each)) for name, each in profiles.profiles().items()),
            ]
        ],
        label="launchers",
        empty="no launcher is installed",
    )


def _profile_text(profile: Any) -> str:
    """Return a profile's launcher and file, or the error of reading the file."""
    if isinstance(profile, UsageError):
        return str(profile.what)
    return f"{profile.launcher}, from {profile.path}"
