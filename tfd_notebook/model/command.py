"""Declarations of commands and of their arguments, and the check of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfd_notebook.errors import UsageError

#: The default of an argument that a request must contain.
REQUIRED: Any = ...
#: The types of values by the names that stand for them in the help.
_KINDS = {"N": int, "I": int, "ID": int, "S": float, "H": float, "HOURS": float, "SECONDS": float}
_EXPECTED = {str: "text", bool: "true or false", int: "an integer", float: "a number"}
#: Default of the maximum length of a string in a request.
_MAX_TEXT = 200


@dataclass(eq=False)
class Argument:
    """An argument of commands, on command lines and in requests.

    Parameters
    ----------
    usage : str
        Its form on a command line, as in ``"-n --lines N"``. A flag has no value. The name of a
        positional argument has no hyphens. Brackets mark an optional value, and three dots several.
        The name of the value gives its type. ``N``, ``I`` and ``ID`` are integers. ``S``, ``H``,
        ``HOURS`` and ``SECONDS`` are floats.
    help : str
        Empty if the help omits it.
    example : str
        A value for the example in the help of commands. Any text adds a flag to the example.
    default : object
        The value if the argument is missing. `REQUIRED` if a request must contain it.
    on : str
        The kinds of surfaces that have the argument. Default: ``"magic tfd request"``.
    source : str
        The existing objects that completion offers.
    minimum, maximum : float, optional
        Range of a number. For a string in a request, `maximum` is its length, by default 200.
    kind : type, optional
        The type of the value, if `usage` does not give it.
    choices : tuple of str, optional
    const : object
        The value of an option without its optional value.
    repeat : bool
        Whether the option may be repeated. Its value is then a list.
    split : str
        The value consists of a name and an argument of this name, in any order.
    group : str
        Options of a command with the same group exclude each other.
    label : str
        Label in a form. Default: the name.
    """

    usage: str
    help: str = ""
    example: str = ""
    default: Any = None
    on: str = "magic tfd request"
    source: str = ""
    minimum: float | None = None
    maximum: float | None = None
    kind: type[Any] | None = None
    choices: tuple[str, ...] | None = None
    const: Any = None
    repeat: bool = False
    split: str = ""
    group: str = ""
    label: str = ""
    flags: tuple[str, ...] = field(init=False)
    name: str = field(init=False)
    metavar: str = field(init=False)
    nargs: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        words = self.usage.split(" ")
        self.flags = tuple(word for word in words if word.startswith("-"))
        head = words[max(len(self.flags) - 1, 0)]
        value = " ".join(words[len(self.flags) or 1 :])
        form = value if self.flags else head
        self.name = head.strip("-[].").replace("-", "_")
        self.metavar = (value if " " in value else value.strip("[].")) or self.name.upper()
        if form.rstrip("]").endswith("..."):
            self.nargs = "*" if form.startswith("[") else "+"
        elif form.startswith("["):
            self.nargs = "?"
        self.kind = self.kind or (_KINDS.get(self.metavar, str) if form else bool)
        if self.kind is bool and self.default is None:
            self.default = False

    @property
    def required(self) -> bool:
        """True if a command line must contain the argument."""
        return not self.flags and self.nargs is None

    @property
    def text(self) -> str:
        """The help with the default."""
        text = f"{self.help}; may be repeated" if self.repeat else self.help
        shown = text and self.kind is not bool and self.default not in (None, ())
        if not shown or "(default" in text:
            return text
        default = f"{self.default:g}" if self.kind is float else self.default
        return f"{text} (default: {default})"

    def check(self, value: Any) -> Any:
        """Return `value` if it is valid.

        Raises
        ------
        UsageError
            It has the wrong type, or is out of range.
        """
        kind, is_number = self.kind or str, self.kind in (int, float)
        valid = isinstance(value, (int, float) if kind is float else kind)
        if not valid or (is_number and isinstance(value, bool)):
            expected = _EXPECTED.get(kind, "an object")
            raise UsageError(f"invalid {self.name} {ascii(value)[:100]}: expected {expected}")
        if kind is str and not 0 < len(value) <= (self.maximum or _MAX_TEXT):
            maximum = self.maximum or _MAX_TEXT
            raise UsageError(f"invalid {self.name}: expected 1 to {maximum:.15g} characters")
        if is_number and self.minimum is not None:
            maximum = math.inf if self.maximum is None else self.maximum
            if not self.minimum <= value <= maximum:  # NaN is in no range
                limit = "or more" if self.maximum is None else f"to {maximum:.19g}"
                expected = f"{self.minimum:g} {limit}"
                raise UsageError(f"invalid {self.name}={value!s:.60}: expected {expected}")
        return value


class Command:
    """A command, and the surfaces on which it exists.

    Parameters
    ----------
    name, summary : str
    surfaces : str
        Programs, such as ``%tfd_cluster``, ``%tfd_pause`` or ``tfd``. ``request`` is for requests
        of other processes and front ends, and ``panel`` for those that only a front end sends.
    *arguments : Argument
    alias : str, optional
        Another name of the command. Help and completion do not list it. An empty one makes it the
        command of a program without a subcommand.
    """

    def __init__(
        self, name: str, summary: str, surfaces: str, *arguments: Argument, alias: str | None = None
    ) -> None:
        self.name, self.summary, self.alias = name, summary, alias
        self.surfaces = surfaces.split()
        self._arguments = arguments

    def arguments(self, surface: str) -> list[Argument]:
        """Return the arguments that the command has on a surface."""
        kind = {"tfd": "tfd", "request": "request", "panel": "request"}.get(surface, "magic")
        return [argument for argument in self._arguments if kind in argument.on.split()]

    def example(self, surface: str) -> str:
        """Return arguments of the command as an example."""
        words: list[str] = []
        for argument in self.arguments(surface):
            if argument.example:
                words += argument.flags[-1:]
                words += [argument.example] if argument.kind is not bool else []
        return " ".join(words)

    def read(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments in a request, with their defaults. Other fields are ignored.

        Raises
        ------
        UsageError
            An argument is missing, has the wrong type, or is out of range.
        """
        values: dict[str, Any] = {}
        for argument in self.arguments("request"):
            value = request.get(argument.name, argument.default)
            if value is None and argument.default is None:
                values[argument.name] = None
            else:
                values[argument.name] = argument.check(None if value is REQUIRED else value)
        return values
