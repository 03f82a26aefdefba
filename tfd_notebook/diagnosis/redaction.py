"""Redaction of secrets in texts and JSON values."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from tfd_notebook import errors

REMOVED = "[removed]"
#: Names of secrets.
_SECRET = re.compile(
    r"token|secret|passw|passphrase|pwd|api_?key|access_?key|private|credential|auth|cookie"
    r"|signature|\bsig\b|\bkey\b|_key$|(?-i:[a-z]Key)$|\bpass$|_pass$|_pw$|(?-i:[a-z]Pass)$",
    re.IGNORECASE,
)
#: Names that match `_SECRET`, but hold no secret.
_HARMLESS = frozenset(("SSH_AUTH_SOCK", "XAUTHORITY", "PWD", "OLDPWD"))
#: Minimum length of a secret. A shorter value also occurs in ordinary text.
_MIN_LENGTH = 4
#: End of a secret's name in text. In `PWD=/data`, the value is a directory.
_NAME = (
    r"(?:token|secret|passw(?:or)?d|passphrase|(?<!_)(?-i:(?!PWD=/))pwd|_pwd|credentials?|signature"
    r"|cookies?|authorization|(?:access|account|api|private|secret|shared)key|[_-]key)"
)
#: End of a password's short name. The word itself is ordinary before a colon.
_PASS = r"""(?:[a-z0-9]_(?:pass|pw)|(?-i:[a-z]Pass)|(?<![\w-])pass(?=\s*=|\\*["']))"""
_PASS_OPTION = r"(?<![\w-])--?(?:[\w-]{0,60}-)?pass"
#: Not a short number, a measured one or a truth value.
_NO_NUMBER = r"(?!(?:\d{1,3}|\d*\.\d+|true|false|none|null)(?:ms|us|s|%)?(?:[\s,;:/&)}\]]|\Z))"
#: A user and a password.
_PAIR = r"""(?=\\*["']?(?!\d+:\d+\b)[^\s"':]{1,200}:)"""
#: Not a port or a mapping of ports.
_NO_PORT = r"""(?!\\*["']?\d[\d.:-]*(?:/\w+)?(?:[\s"'\\,]|\Z))"""
#: Commands, up to the option with a password.
_PASSWORD_COMMANDS = tuple(
    rf"""{command}\b[^\n;|&]{{0,300}}?\s\\*["']?(?-i:{option})"""
    for command, option in (
        (r"""(?:docker|podman|helm|az|oc|skopeo)\b[^\n;|&]{0,100}?\s["']?login""", "-p"),
        (r"mongo(?:sh|dump|restore|export|import)?", "-p"),
        ("redis-cli", "-a"),
        ("ldap[a-z]{3,10}", "-w"),
        ("(?:un)?zip", "-P"),
    )
)
#: A value in quotation marks, which may be escaped, up to the closing mark or the end of the line.
_QUOTED = r"""(?P<mark>\\*["'])(?:(?!(?<!\\)(?P=mark))[^\n])+"""
#: A value without quotation marks. Punctuation inside it belongs to it.
_BARE = (
    r"""(?!\\*["']|\[removed\])(?:[^\s"'&;,)}\]]|,(?!\s|\Z|["']?[\w.-]+["']?\s*[=:])"""
    r"""|[)}\]](?=[^\s"'&;,:.)}\]<>])|["'](?=[^\s"'&;,:)}\]<>\\]))+"""
)
#: The lines of a key end with a line break, which JSON escapes.
_KEY_LINES = r"(?:(?<![a-z0-9+/])|(?<=\\n))(?:[a-z0-9+/]+={0,2}(?:\\r|\r)?(?:\\n|\n))+"
#: Names of mappings with environment variables.
_ENVIRONMENTS = ("env", "environment", "variables")
#: Complete strings, of several lines, of one line, and inside another string.
_LONG_STRING = r"""(?:\"{3}.*?\"{3}|'{3}.*?'{3})"""
_STRING = (
    rf"""(?:{_LONG_STRING}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"""|(\\+["'])(?:(?!(?<!\\)\2)[^\n])*\2)"""
)
_KEY_END = r"-{4,5} ?end [a-z0-9 ]*private key(?: block)?(?: ?-{4,5})?"


def _named(before_value: str) -> list[tuple[str, str]]:
    """Return the patterns of values after a name, in quotation marks and without."""
    return [
        (f"""({before_value})(?:\"""|\'\'\').*?(\"""|\'\'\'|\\Z)""", rf"\1{REMOVED}\2"),
        (f"({before_value}){_QUOTED}", rf"\1\g<mark>{REMOVED}"),
        (f"({before_value}){_BARE}", rf"\1{REMOVED}"),
    ]


def _quoted(before_value: str) -> tuple[str, str]:
    """Return the pattern of a value in quotation marks after `before_value`."""
    return f"({before_value}){_QUOTED}", rf"\1\g<mark>{REMOVED}"


def _credentials() -> list[tuple[str, str]]:
    """Return the patterns of values that follow a secret's name without a sign between them."""
    name = rf"[\w.-]{{0,60}}(?:{_NAME}|_pass|_pw)"
    quoted_name = rf"""\\*["']{name}\\*["']"""
    # The names of variables, headers and fields. Words such as `mask_token` occur in pairs, too.
    pair_name = (
        r"(?:(?-i:[A-Z][A-Z0-9_]{0,60}_(?:TOKEN|SECRET|PASSWORD|PASSWD|PASS|KEY))"
        r"|x-[a-z-]{0,60}(?:key|token)|password|passwd|client_secret)"
    )
    word = r"""[bru]{0,2}\\*["']"""
    user = rf"""(?:{word}[^"'\n]{{0,200}}["']|[\w.]{{1,60}})"""
    fields = r"""(?<![a-z0-9])(?:auth|credentials?)\\*["']?\s*[=:]\s*(?:[\w.]{1,60})?[(\[]"""
    calls = r"(?:(?-i:\b\w{0,60}(?:Auth|NTLM))|\blogin|\bset_password)\("
    return [
        # A user and a password in parentheses.
        (
            rf"((?:{fields}|{calls}))(?=\s*{user}\s*,\s*{word})(?:{_STRING}|[^)\]])*",
            rf"\1{REMOVED}",
        ),
        # Items of mappings, and variables that functions and commands set.
        *_named(rf"""(?:{_NAME}|_pass|_pw)\\*["']\]\s*=(?!=)\s*"""),
        _quoted(rf"""\(\s*\\*["']{pair_name}\\*["'],\s*"""),
        _quoted(
            r"\b(?:setdefault|putenv|setenv|getenv|environ\.get|setenvironmentvariable|setattr)\("
            rf"\s*(?:[\w.]{{1,60}},\s*)?{quoted_name},\s*"
        ),
        *_named(
            r"(?:\b(?:setx|setenv|set\s+-[a-z]{1,4}|configure\s+set|(?-i:ENV|ARG))|%(?:set_)?env)"
            rf"\s+{name}\s+"
        ),
        *_named(
            rf"""\b(?:name|key)\\*["']?\s*:\s*\\*["']?{name}\\*["']?\s*,?\s*"""
            r"""\\*["']?value\\*["']?\s*:\s*"""
        ),
        # SQL. In lower case, `identified by` is ordinary text.
        *_named(r"(?-i:\bIDENTIFIED\s+(?:WITH\s+\S{1,60}\s+)?BY)\s+(?:password\s+)?"),
        _quoted(
            r"\b(?:create|alter)\s+(?:user|role)\b[^\n;]{1,200}?\b"
            r"(?:identified\s+(?:with\s+\S{1,60}\s+)?by|password)\s+"
        ),
        _quoted(r"\bset\s+password\b[^=\n]{0,100}=\s*(?:password\()?\s*"),
        # Options of commands that have no name.
        *(
            pattern
            for command in _PASSWORD_COMMANDS
            for pattern in _named(rf"""\b{command}(?:\\*["'],)?\s+{_NO_PORT}""")
        ),
        *_named(r"\bsmbclient\b[^\n]{0,300}?\s(?-i:-U)\s*[^\s%]{1,100}%"),
        *_named(r"--from-literal[=\s]\s*[\w.-]{1,100}="),
        (
            r"(\becho\s+(?:-n\s+)?)(?!\[removed\])[^\n|]{1,200}"
            r"(?=\|[^\n|]{0,200}(?:--password-stdin|sudo\s+-S))",
            rf"\1{REMOVED} ",
        ),
        # Configuration of Docker and npm: a user and a password in base64.
        *_named(r"""\bauth\\*["']\s*:\s*(?=\\*["'][a-z0-9+/]{16,}={0,2}\\*["'])"""),
        *_named(r"""(?<![\w"'])_auth\s*=\s*"""),
    ]


def _environments() -> list[tuple[str, str]]:
    """Return the patterns of environment variables: Python, JSON, TOML, YAML and commands."""
    name = rf"""\b(?:{"|".join(_ENVIRONMENTS)})\\*["']?"""
    items = r"""\[(?=\s*(?:[{(]|["'][a-z_]\w*=))"""
    header = rf"""\[\s*(?:[^\]\n]*\.\s*)?["']?{name}\s*\][ \t]*(?:#[^\n]*)?\r?\n"""
    # The arguments of any call, if they start like those of a mapping.
    call = r"""[a-z_][\w.]{0,60}\((?=\s*(?:[\[{(*"']|[\w.]{1,60}\s*[=,(]))"""
    inner = rf"\((?:{_STRING}|[^()])*\)?".replace(r"\2", r"\3")  # its own quotation marks
    # No pattern has to match after a string. Otherwise, many strings could take exponential time.
    mappings = [
        (
            rf"({name}\s*[=:]\s*{opening})(?!\s*{closing}|\[removed\])(?:{_STRING}|{others})*",
            rf"\1{REMOVED}",
        )
        for opening, closing, others in (
            (r"(?:[\w.()]{1,60}\s*\|\s*)?\{", r"\}", r"[^}]"),
            (items, r"\]", r"[^\]]"),
            (call, r"\)", rf"{inner}|[^()]"),
        )
    ]
    option = r"""(?<![\w-])(?:--env(?:ironment)?|-e)(?:\\*["'],)?[\s=]+"""
    assigned = rf"""({name}\s*\.\s*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')\s*=(?!=|\s*\[removed\])\s*)"""
    return [
        *mappings,
        # A section of a profile, up to the next one.
        (
            rf"((?:\A|\n)[ \t]*{header})(?!\s*\[)"
            rf"(?:{_LONG_STRING}|(?!\n[ \t]*\[).)+",
            rf"\1{REMOVED}",
        ),
        (rf"{assigned}(?:{_LONG_STRING}|[^\n])+", rf"\1{REMOVED}"),
        # A block of YAML, up to the next line that is not below its name.
        (
            rf"""((?:\A|\n)([ \t]*)(?:-[ \t]+)?["']?{name}:[ \t]*(?:#[^\n]*)?)"""
            r"""(?=\r?\n\2(?:[ \t]+["']?[\w.-]+["']?:|[ \t]*-[ \t]))"""
            r"(?:\r?\n(?:\2(?:[ \t]|-[ \t])[^\n]*|[ \t\r]*(?=\n)))+",
            rf"\1\n\2  {REMOVED}",
        ),
        # Options of commands, the directive of systemd, and the command env, also as a list.
        *_named(rf"{option}[a-z_]\w{{0,200}}="),
        (rf"""({option})(?=\\*["'][a-z_]\w{{0,200}}=){_QUOTED}""", rf"\1\g<mark>{REMOVED}"),
        (r"""((?<![\w.-])environment=)(?=["']?[a-z_]\w{0,200}=)[^\n]+""", rf"\1{REMOVED}"),
        (rf"(\benv\s+)(?:[a-z_]\w*=(?:{_STRING}|\S)*(?:\s+|\Z))+", rf"\1{REMOVED} "),
        (rf"""(["']env["'],\s*)(?:(?=["'][a-z_]\w*=){_STRING},?\s*)+""", rf"\1'{REMOVED}', "),
    ]


_KEY_MARK = re.compile(_KEY_END.replace("end", "(?:begin|end)"), re.IGNORECASE)
_OPTION = re.compile(rf"--?[\w-]{{0,60}}{_NAME}|{_PASS_OPTION}", re.IGNORECASE)
_ENV_OPTIONS = ("-e", "--env", "--environment")
#: Tokens by their prefixes.
_TOKENS = (
    r"gh[pousr]_[a-z0-9]{20,}",
    r"github_pat_[a-z0-9_]{20,}",
    r"gl(?:pat|dt|rt|rtr|cbt|ptt|ft|imt|agent|oas|soat|ffct)-[\w-]{20,}(?:\.[\w-]+)*",
    r"(?:hf|api_org)_[a-z0-9]{30,}",
    # OpenAI, Anthropic and others: letters of both cases and a digit, or a long run with a digit.
    r"sk-(?-i:(?=[\w-]{0,99}[A-Z])(?=[\w-]{0,99}[a-z])(?=[\w-]{0,99}\d))[\w-]{20,}",
    r"sk-(?:[a-z]+-)?(?=[a-z]*\d)[a-z0-9]{20,}[\w-]*",
    r"xox[a-z][.-](?:xox[a-z]-)?[\w-]{10,}",
    r"xapp-\d-[\w-]{10,}",
    r"[rs]k_(?:live|test)_[a-z0-9]{16,}",
    r"npm_[a-z0-9]{36}",
    r"pypi-age[\w-]{40,}",
    r"(?-i:AIza)[\w-]{35}",
    r"ya29\.[\w-]{20,}",
    r"gocspx-[\w-]{20,}",
    r"(?-i:SG)\.[\w-]{16,}\.[\w-]{16,}",
    r"dapi[0-9a-f]{32}",
    r"dckr_pat_[\w-]{20,}",
    r"hv[sbr]\.[\w-]{20,}",
    r"nvapi-[\w-]{20,}",
    # JSON Web Tokens, and identifiers of AWS access keys.
    r"eyj[a-z0-9_-]{8,999}\.[a-z0-9_-]{8,}\.[a-z0-9_-]*",
    r"(?:AKIA|ASIA)[A-Z0-9]{16}\b",
)
# Keys are first, because other patterns remove their first lines.
_PATTERNS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (
        rf"-{{4,5}} ?begin [a-z0-9 ]*private key(?: block)?(?: ?-{{4,5}})?.*?({_KEY_END}|\Z)",
        REMOVED,
    ),
    # Lines that are not of a key match as well. Otherwise, each would be read many times.
    (
        rf"{_KEY_LINES}(?P<end>{_KEY_END})?|(?P<only_end>{_KEY_END})",
        lambda found: REMOVED if found.lastgroup else found[0],
    ),
    # Lines of keys in base64, neither hexadecimal digests nor paths.
    (
        r"(?<![\w+/.-])(?!/?(?-i:[A-Z]?[a-z0-9]*/){2})(?![0-9a-f]+(?![\w+/]))"
        r"(?-i:(?=[a-z0-9+/]*[A-Z])(?=[A-Z0-9+/]*[a-z])(?=[A-Za-z+/]*[0-9]))"
        r"[a-z0-9+/]{60,}={0,2}",
        REMOVED,
    ),
    # A line break that JSON escapes ends with a letter.
    (rf"(?:(?<![a-z0-9])|(?<=\\[nrt]))(?:{'|'.join(_TOKENS)})", REMOVED),
    (r"(\b(?:bearer|basic|token)\s+)[a-z0-9._~+/=-]{8,}", rf"\1{REMOVED}"),
    # Headers with several values, up to the quotation mark before them or the end of the line.
    (
        r"""(?P<mark>["'])?(\b(?:cookie|(?:proxy-)?authorization):\s*)"""
        r"""(?:(?!(?P=mark))[^\n])+""",
        rf"\g<mark>\2{REMOVED}",
    ),
    *_named(r"""\bauthorization\\*["'],\s*"""),
    *_credentials(),
    *_named(rf"""{_NAME}\\*["']?\s*[=:]{{1,2}}>?\s*"""),
    *_named(rf"""{_PASS}\\*["']?\s*[=:]{{1,2}}>?\s*{_NO_NUMBER}"""),
    # Arguments of commands, also in lists. The limits keep the time for a long line linear.
    *_named(rf"""(?<!-)--[\w-]{{0,60}}{_NAME}(?:\\*["'],)?\s+(?!\\*["']?--)"""),
    *_named(rf"""{_PASS_OPTION}(?:\\*["'],)?\s+(?!\\*["']?--){_NO_NUMBER}"""),
    *_named(r"(?:\bsshpass(?:\\*[\"'],)?\s+\\*[\"']?-p(?:\\*[\"'],)?\s*|-pass(?:in|out)?\s+pass:)"),
    *_named(rf"""\b(?:mysql\w*|7z[ar]?)\b[^\n]{{0,300}}?\s\\*["']?-p(?=\S){_NO_NUMBER}"""),
    # A line of .netrc, and an element of XML.
    *_named(r"\b(?:login|machine)\s+\S{1,200}\s+password\s+"),
    (rf"(<[\w:.-]{{0,60}}{_NAME}(?:\s[^<>\n]{{0,300}})?>)(?!\[removed\])[^<]+", rf"\1{REMOVED}"),
    *_named(rf"""--(?:proxy-)?user(?:\\*["'],)?[\s=]+{_PAIR}"""),
    *_named(rf"""\bcurl\b[^\n]{{0,300}}?\s\\*["']?-[a-z]*u(?:\\*["'],)?\s*{_PAIR}"""),
    *_named(rf"""\bcurl\b[^\n]{{0,300}}?\s\\*["']?-(?-i:[a-z]*U)(?:\\*["'],)?\s*{_PAIR}"""),
    (errors.QUERY_SECRET.pattern, rf"\g<1>{REMOVED}"),
    *_environments(),
]


def is_secret(name: str) -> bool:
    """Return True if a variable or field with this name holds a secret."""
    return name not in _HARMLESS and _SECRET.search(name) is not None


def _hides(option: object, value: object) -> bool:
    """Return True if an argument of a command is a secret, after the one before it."""
    if type(option) is not str or type(value) is not str:
        return False
    return _OPTION.fullmatch(option) is not None or (option in _ENV_OPTIONS and "=" in value)


class Redactor:
    """A filter that replaces known secrets, and text in the form of a secret.

    Parameters
    ----------
    *environments : mapping of str to str
        The values of variables with secret names are known secrets. Default: ``os.environ``.
    """

    def __init__(self, *environments: Mapping[str, str]) -> None:
        values = {
            value
            for environment in environments or (os.environ,)
            for name, value in environment.items()
            if is_secret(name) and len(value) >= _MIN_LENGTH
        }
        self._secrets = sorted(values, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return `text` without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, REMOVED)
        text = errors.without_user(text, f"{REMOVED}@")
        for pattern, replacement in _PATTERNS:
            text = re.sub(pattern, replacement, text, flags=re.IGNORECASE | re.DOTALL)
        return text

    def value(self, value: Any) -> Any:
        """Return a copy of JSON values, or of dataclasses with such fields, without secrets.

        Call it before the values are formatted, because a line break can split a secret.
        """
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes = {
                member.name: self.value(getattr(value, member.name)) for member in fields(value)
            }
            return dataclasses.replace(value, **changes)
        if isinstance(value, Mapping):
            return {self.value(key): self._field(str(key), inner) for key, inner in value.items()}
        if type(value) is str:  # Members of a str enumeration stay as they are.
            return self.text(value)
        if isinstance(value, (list, tuple)):
            if any(type(line) is str and _KEY_MARK.search(line) for line in value):
                return type(value)(self.text("\n".join(map(str, value))).split("\n"))
            names = ("", *value)
            cleaned = [
                REMOVED if _hides(name, inner) else self.value(inner)
                for name, inner in zip(names, value, strict=False)
            ]
            return type(value)(self._arguments(cleaned))
        return value

    def _arguments(self, values: list[Any]) -> list[Any]:
        """Return the arguments of a command without those that are a secret in this command."""
        if not all(type(each) is str for each in values):
            return values
        command, position, cleaned = self.text(" ".join(values)), 0, []
        for argument in values:
            found = command.find(argument, position)
            cleaned.append(argument if found >= 0 else REMOVED)
            position = max(position, found + len(argument) if found >= 0 else 0)
        return cleaned

    def _field(self, name: str, value: Any) -> Any:
        if is_secret(name) and value:
            return REMOVED
        if name in _ENVIRONMENTS and isinstance(value, Mapping):
            return dict.fromkeys(value, REMOVED)
        return self.value(value)
