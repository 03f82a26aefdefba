"""Command lines with subcommands, for magics and for the shell.

They raise an exception instead of exiting the process.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from tfd_notebook import views
from tfd_notebook.errors import UnknownName, UsageError
from tfd_notebook.model.spec import Policy, Service

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster


class HelpRequested(Exception):
    """A request for help. `text` is the help."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that raises `UsageError` or `HelpRequested` and never exits."""

    def __init__(self, prog: str, description: str = "", example: str | None = None) -> None:
        epilog = None if example is None else f"example: {prog} {example}".rstrip()
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
        self.color = False

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", fix=self.format_usage().strip())

    def print_help(self, file: Any = None) -> NoReturn:
        raise HelpRequested(self.format_help())

    @property
    def options(self) -> tuple[str, ...]:
        """The options that the help lists: each in its long form, if it has one."""
        return tuple(
            next((s for s in action.option_strings if s.startswith("--")), action.option_strings[0])
            for action in self._actions
            if action.option_strings and action.help is not argparse.SUPPRESS
        )

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
        return known


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'? "`` for the most similar name, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {matches[0]!r}? " if matches else ""


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Parameters
    ----------
    name, summary : str
    run : callable
        Receives the parsed arguments and returns the command's result.
    prepare : callable, optional
        Adds arguments to the parser.
    aliases : tuple of str
        Other names that run the subcommand. Help and completion do not list them.
    example : str
        Arguments of the example in the help.
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace], Any]
    prepare: Callable[[Parser], None] = field(default=lambda parser: None)
    aliases: tuple[str, ...] = ()
    example: str = ""


class CommandLine:
    """A command with subcommands.

    Parameters
    ----------
    prog : str
        The command as users write it, such as ``"%tfd_cluster"`` or ``"tfd"``.
    summary : str
        A sentence.
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
        parser = Parser(f"{self.prog} {name}", command.summary, command.example)
        command.prepare(parser)
        return parser

    def help(self) -> str:
        """Return the help on all subcommands."""
        width = max(map(len, self.commands))
        lines = [f"  {name.ljust(width)}  {c.summary}" for name, c in self.commands.items()]
        usage = f"usage: {self.prog} COMMAND [options]\n\n{self.summary}\n\ncommands:\n"
        more = f"{self.prog} COMMAND --help shows the options of a command and an example."
        return usage + "\n".join(lines) + f"\n\n{more}\n"

    def run(self, tokens: Sequence[str]) -> Any:
        """Run the subcommand named by the first token, and return its result.

        Raises
        ------
        UsageError
            The error suggests the nearest name.
        HelpRequested
        """
        if not tokens or tokens[0] in ("?", "-h", "--help", "help"):
            raise HelpRequested(self.help())
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
        Its name is the command as users write it, such as ``"%tfd_explain"``.
    bare : bool
        Whether it runs without arguments. Otherwise it then shows its help. Default false.
    """

    def __init__(self, command: Command, bare: bool = False) -> None:
        super().__init__(command.name, command.summary, ())
        self._command = command
        self._bare = bare

    def parser(self, name: str = "") -> Parser:
        """Return the parser of the command."""
        parser = Parser(self.prog, self.summary, self._command.example)
        self._command.prepare(parser)
        return parser

    def help(self) -> str:
        """Return the help on the command."""
        return self.parser().format_help()

    def run(self, tokens: Sequence[str]) -> Any:
        """Run the command and return its result.

        Raises
        ------
        UsageError
        HelpRequested
        """
        if not tokens and not self._bare:
            raise HelpRequested(self.help())
        return self._command.run(self.parser().read(tokens))


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


def add_scale_options(parser: Parser) -> None:
    """Add the options for the new number of tasks of a running cluster."""
    _add_worker_options(parser, "unchanged")
    # Hidden from the help: it is parsed so that the error can name the alternative.
    parser.add_argument("--ps", type=int, help=argparse.SUPPRESS)


def _add_worker_options(parser: Parser, default: str) -> None:
    for option, kind in (("--data-workers", "tf.data service"), ("--workers", "training")):
        text = f"number of {kind} workers (default: {default})"
        parser.add_argument(option, type=int, metavar="N", help=text)


def add_start_options(parser: Parser) -> None:
    """Add the options that describe a cluster."""
    _add_worker_options(parser, "0")
    parser.add_argument(
        "--ps", type=int, metavar="N", help="number of parameter servers (default: 0)"
    )
    parser.add_argument(
        "--evaluator", action="store_true", help="start an evaluator, which is a separate server"
    )
    parser.add_argument(
        "--gpus",
        default="auto",
        metavar="X",
        help="GPUs of the workers: auto (default), 0 (none), indices such as 0,1, or a count for "
        "each, such as worker=1",
    )
    parser.add_argument(
        "--launcher",
        default="local",
        metavar="L",
        help="launcher of the tasks; the command launchers lists the choices (default: local)",
    )
    parser.add_argument("--name", help="name of the cluster (default: cluster)")
    parser.add_argument("--host", metavar="H", help="host name or address that the tasks advertise")
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="M",
        help="load this module or op library first in each task; may be repeated",
    )
    parser.add_argument("--work-dir", metavar="D", help="directory of the dispatcher's journal")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="CIDR",
        help="accept connections from this network, too; may be repeated",
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="stop the cluster after S seconds"
    )


def add_hours_option(parser: Any) -> None:
    """Add the option for the hours that a cluster keeps running after its kernel."""
    parser.add_argument(
        "--hours", type=float, default=8.0, metavar="H", help="how long to keep it (default: 8)"
    )


def add_detach_option(parser: Any) -> None:
    """Add the option that detaches a cluster from its kernel at the start."""
    parser.add_argument(
        "--detach",
        nargs="?",
        type=float,
        const=8.0,
        metavar="HOURS",
        help="keep it running after this process ends, for HOURS hours (default: 8)",
    )


def requested_counts(options: argparse.Namespace) -> dict[str, int]:
    """Return the numbers of tasks in `options`, as arguments of `Cluster.scale`."""
    named = {name: getattr(options, name) for name in ("data_workers", "workers", "ps")}
    return {name: count for name, count in named.items() if count is not None}


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


def make_cluster(options: argparse.Namespace, port: int = 0) -> Cluster:
    """Start the cluster that `options` describe, or return the running one.

    With ``--detach`` the running one can be a detached cluster of a process that has ended.

    Parameters
    ----------
    options : argparse.Namespace
        The options of `add_start_options`.
    port : int
        TCP port of the dispatcher, 0 for a free one.
    """
    # Import time: only the start of a cluster needs these modules.
    from tfd_notebook.cluster import attach
    from tfd_notebook.launchers import base

    launcher = base.launcher(options.launcher)
    arguments: dict[str, Any] = {}
    if options.host is not None:
        arguments["host"] = options.host
    if options.allow:
        arguments["allow"] = options.allow
    if arguments:
        launcher = type(launcher)(**arguments)
    return attach.start(
        options.detach,
        data_workers=options.data_workers or 0,
        workers=options.workers or 0,
        ps=options.ps or 0,
        evaluator=options.evaluator,
        gpus=read_gpus(options.gpus),
        launcher=launcher,
        name=options.name,
        preload=options.preload,
        policy=Policy(time_limit=options.time_limit),
        service=Service(port=port, work_dir=options.work_dir),
    )


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
