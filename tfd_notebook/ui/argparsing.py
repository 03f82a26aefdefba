"""Command lines with subcommands, for magics and for the shell: they raise instead of exiting."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from tfd_notebook import views
from tfd_notebook.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster


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


def add_scale_options(parser: Parser) -> None:
    """Add the options with the new number of tasks of a running cluster."""
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
        "--evaluator", action="store_true", help="an evaluator, a cluster of its own"
    )
    parser.add_argument(
        "--gpus",
        default="auto",
        metavar="X",
        help='what the workers see: auto, 0 (none), numbers as in "0,1", or "worker=1" (each)',
    )
    parser.add_argument(
        "--launcher",
        default="local",
        metavar="L",
        help="where the tasks run; the command launchers lists the choices (default: local)",
    )
    parser.add_argument("--name", help="name of the cluster (default: cluster)")
    parser.add_argument("--host", metavar="H", help="name or address that peers of the tasks use")
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="M",
        help="module or op library that each task loads first; may be repeated",
    )
    parser.add_argument("--work-dir", metavar="D", help="directory of the dispatcher's journal")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="CIDR",
        help="network that may connect besides this host; may be repeated",
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="seconds after which the cluster stops"
    )


def add_hours_option(parser: Any) -> None:
    """Add how long a cluster shall outlive its kernel."""
    parser.add_argument(
        "--hours", type=float, default=8.0, metavar="H", help="for so long (default: 8 hours)"
    )


def add_detach_option(parser: Any) -> None:
    """Add that a cluster shall outlive its kernel from the start."""
    parser.add_argument(
        "--detach",
        nargs="?",
        type=float,
        const=8.0,
        metavar="HOURS",
        help="let it outlive this process, for so many hours (default: 8)",
    )


def scale_wishes(options: argparse.Namespace) -> dict[str, int]:
    """Return the numbers of tasks that `options` name, as `Cluster.scale` takes them."""
    named = {name: getattr(options, name) for name in ("data_workers", "workers", "ps")}
    return {name: count for name, count in named.items() if count is not None}


def read_gpus(words: str) -> Any:
    """Return what ``--gpus`` means, as `Cluster` takes it; what cannot be read stays as it is."""
    if words == "0":
        return 0
    items = [item.strip() for item in words.split(",") if item.strip()]
    if items and all(item.isdecimal() for item in items):
        return [int(item) for item in items]
    pairs = [item.partition("=") for item in items]
    if pairs and all(sign and count.isdecimal() for _, sign, count in pairs):
        return {role: int(count) for role, _, count in pairs}
    return words


def make_cluster(options: argparse.Namespace, port: int = 0) -> Cluster:
    """Return the cluster that `options` describe, started; one that lives already is used.

    With ``--detach`` that can be one that outlived the process that started it.

    Parameters
    ----------
    options : argparse.Namespace
        What `add_start_options` reads.
    port : int
        TCP port of the dispatcher, 0 for a free one.
    """
    from tfd_notebook.cluster import attach
    from tfd_notebook.launchers import base
    from tfd_notebook.model.spec import Policy, Service

    launcher = base.launcher(options.launcher)
    wishes: dict[str, Any] = {}
    if options.host is not None:
        wishes["host"] = options.host
    if options.allow:
        wishes["allow"] = options.allow
    if wishes:
        launcher = type(launcher)(**wishes)
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
    """Return the installed launchers and the profiles, and where each runs the tasks."""
    from tfd_notebook.launchers import base, profiles

    return views.Table(
        (views.Column("launcher"), views.Column("where the tasks run", note=True)),
        [
            *((views.Cell(name), views.Cell(kind.summary)) for name, kind in base.kinds().items()),
            *(
                (views.Cell(name), _profile_cell(profile))
                for name, profile in profiles.profiles().items()
            ),
        ],
        label="launchers",
        empty="no launcher is installed",
    )


def _profile_cell(profile: Any) -> views.Cell:
    """Return a profile's launcher and file, or why the file cannot be read."""
    if isinstance(profile, UsageError):
        return views.Cell(profile.what)
    return views.Cell(f"{profile.launcher}, from {profile.path}")
