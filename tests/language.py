"""Linter of the language rules in CONTRIBUTING.md: ``python -m tests.language [PATH ...]``.

Each violation is printed as ``file:line: text -> replacement``.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CHECKED = (
    *("tfd_notebook", "tests", "benchmarks", "docs", "notebooks", "labextension/package.json"),
    *(f"labextension/{name}" for name in ("src", "tests", "scripts", "style", "schema")),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml", ".ci/run"),
)
BUILT = re.compile(r"/(?:static|_build|__pycache__|\.ipynb_checkpoints)/|^tfd_notebook/labext")

LONGEST_SENTENCE = 20

#: The marks that replace the delimiter in front of a text.
FUNCTION, DOCSTRING, MESSAGE, PROSE = "ƒ§“¶"
#: The marks that an opening follows. A rule without a mark applies to all words.
MARKS = {
    "function": FUNCTION,
    "docstring": FUNCTION + DOCSTRING,
    "message": MESSAGE,
    "sentence": MESSAGE + PROSE + ".;:",
}
#: Forbidden openings and words, and their replacements. A rule without a replacement allows a
#: phrase. Later rules do not apply to it.
RULES = r"""
(?<!\w)('[\w\x20]+'|"[\w\x20]+")(?!\w)
there (is|are|was|were) no
(users?|people|persons?|readers?|contributors?|maintainers?|developers?) (who|wants|knows|says)
(administrators?|authors?|attackers?|operators?|those|you),? (who|wants|knows|says)
(message|notice|finding|warning|documentation|docs|page|specification) (says|tells)
tell \w+ apart
docstring: what|how|whether|when|where|have|let|that|which|why|who|whose|has|having|if|as|be -> \
Return ... (functions), a noun phrase (classes, modules)
docstring: say|tell|hear|look(?! up)|know|mend|forget|speak -> report, send, receive, inspect, fix
function: the|an?|this|these|those|it|they|we|you|all|any|each|every|both|either -> Return ...
function: neither|no|not|none|nothing|one|two|three|some|several|many|much|more|most -> Return ...
function: other|another|such|same|only|also|of|for|from|to|in|on|at|by|with|without -> Return ...
function: while|until|after|before|like|since|than|are|did|can|could|may|might|must -> Return ...
function: should|will|would|true|false|number|name(?! the\b)|path|port|time -> Return True if ...
function: (?!(\w+ss|\w*eed|embed|shed|apply|reply|supply|multiply|rely|alias|bias|focus|bring|ping|\
string)\b)\w+(s|ing|ed|ly) -> Return ...
message: (x+:? )?there (is|are|was|were) (no|none) -> <operation> failed: <cause>
sentence: what (?!if\b|to\b|:)(?![^.?!]*\?)\w+ -> start with the thing
sentence: (have|let) (the(?! user)|its?|them|an?|x+|what)(?! go\b) -> make, start, allow
who(m?ever)?|(some|no|any|every)body|no one|(some|any|every)one -> the client, caller, agent, user
whatever -> name the thing
(is|are|was|were) no (?!longer|more|less|fewer|later|earlier|different|such)\w+ -> invalid ...
(cannot|can not|can't|could not) be meant -> invalid <argument> <value>
(is|are|was|were) meant(?! to\b| for\b) -> refers to, stands for
(so|as|this|that) many|so (long|much|often) -> n, count, the number of, name the amount
anew|afresh -> again, or re-<verb>
shall -> must, or the present tense
for ever -> indefinitely, forever, or without a timeout
besides? -> next to, concurrently, in addition, except
mend(s|ed|ing)? -> fix, repair
in turns?|by turns|take turns -> one after another, alternately
(of|is|are|as|not|than|with|from|to|and) (ours|yours|theirs) -> name the owner
of (its|their|his|your|our|one's) own -> its own <noun>, a separate <noun>
no more(?= of\b|[.,;:)¶]|$| to do with\b) -> no longer, not ... any more
but for -> except, except for
strangers? -> other users, unauthenticated clients
elsewhere -> on another host, in another process, remote
a word -> message, argument
(the|its|their|every|half) way -> path, route, transfer, how
lest -> so that ... not
(lets?|letting) (it |them |\w+ )?go -> release, close, detach
(has|have|had|having) (?!been |already |never |not )\w+ (done|made) -> an active verb
hears?|heard|hearing -> receive, learn, is notified
(tells?|told|telling)(?! apart|\() -> notify, send, report, show
says|said|saying -> report, show, return, state
say (so|which|that|what|how|where|whether|when|who|why|if|it|no|on|the|a) -> report, show, return
lives|lived|living -> run, exist, is stored; running
(to|that|which|clusters|it|they|tasks|servers|can|must|may|will|not) live -> run, exist, is stored
look(s|ed|ing) (at|after|into|for|on|in|whether|if|there|so|again|only) -> inspect, check
(take|has|have|one|a) (a )?look -> inspect, check
wants -> need, request, expect
knows -> have, store, recognize
(does|do|did) not know -> has no ..., cannot determine
forgets|forgot|forgotten -> discard, remove
(goes|go|went|gone|going) on -> continue, keep running
com(es?|ing) to (its|their|an|the) end -> finish, end
(none|true|false) where -> None if ..., True if ...
"""


def _compiled() -> tuple[re.Pattern[str], list[str | None]]:
    """Return one expression with a group for each rule, and the replacement of each rule."""
    openings, words, hints = [], [], []
    for rule in RULES.replace("\\\n", "").strip().split("\n"):
        kind, pattern, hint = re.fullmatch(r"(?:(\w+): )?(.+?)(?: -> (.*))?", rule).groups()
        pattern = re.sub(r"(?<!\\)\((?!\?)", "(?:", pattern).replace(" ", " +")
        hints.append(hint)
        if kind:
            openings.append(rf"[{MARKS[kind]}]\x20*((?:{pattern})(?![\w-]))")
        else:
            (words if hint else openings).append(f"({pattern})")
    return re.compile("|".join((*openings, rf"\b(?:{'|'.join(words)})\b"))), hints


FORBIDDEN, HINTS = _compiled()
SENTENCE = re.compile(r"(?:[^.!?¶]|[.!?](?![ ¶]|$))+")

COMMENT = r"(?P<comment>^[ \t]*{0}[^\n]*(?:\n[ \t]*{0}[^\n]*)*|{1})"
STRING = r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
LITERAL = r'[rRfFbB]*(?:"""(?:\\.|[^\\])*?"""|' rf"'''(?:\\.|[^\\])*?'''|{STRING})"
SCRIPT = COMMENT.format("//", r"//[^\n]*|/\*.*?\*/") + rf"|(?P<string>{STRING}|`(?:\\.|[^`\\])*`)"
# The texts in each type of file. Markdown and notebooks are all text.
LEXERS = {
    ".py": COMMENT.format("#", r"#[^\n]*")
    + r"|(?P<header>^(?:[ \t]*@[^\n]*\n)*[ \t]*(?:async )?(?:def|class) \w+)"
    r'|(?:^|(?<=:\n)[ \t]*)r?"""(?P<docstring>(?:\\.|[^\\])*?)"""'
    rf"|(?P<string>{LITERAL}(?:\s+{LITERAL})*)",
    ".json": r'"[\w.:-]*(?:title|description|label|caption)": (?P<string>"(?:\\.|[^"])*")',
    **dict.fromkeys((".ts", ".mjs", ".mts", ".css"), SCRIPT),
    **dict.fromkeys(("", ".toml"), COMMENT.format("#", r"(?<=\s)# [^\n]*")),
}


# Code and markup, with the character that replaces each of their characters.
CODE = (r"``(?s:.+?)``|`[^`\n]+`|<[^>\s]+>", "x")
EXAMPLE = (r"^ *(?:>>>|\.\.\.|\$ |%|-{3,}$).*", "¶")
LEADER = (r"^[ \t]*(?:#[#:]*|//+|/\*+|\*+/?)|\*+/$", " ")
DIRECTIVE = (r"#\s*(?:noqa|type:|pragma|ruff:|mypy:|fmt:|%|!).*", "¶")
VALUE = (r"\$?\{[^{}]*\}", "x")
ESCAPE = (r"\\[nt]", "¶")
QUOTES = (r"""\A[rRfFbB]*["'`]+|["'`]+\s+[rRfF]*["'`]+|["'`]+\Z""", " ")
FENCED = (r"^ *(```+|~~~+)(?s:.*?)(?:^ *\1.*?$|\Z)", "¶")
LINK = (r"(?<=\])\([^)]*\)|\*\*|(?<=\S)\*|\*(?=\S)", " ")
ROW = (r"^ *\|.*", "¶")
MARKUP = (r"^ *(?:<.*|:::.*|\([\w-]+\)=$)", "¶")
ITEM = re.compile(r"\s*(?:[│├└]|(?:[-*+#]|\d+\.)\s)")


def _masked(text: str, *masks: tuple[str, str]) -> str:
    """Replace code and line breaks with placeholders of the same length."""
    for pattern, fill in masks:
        text = re.sub(pattern, lambda match, fill=fill: fill * len(match[0]), text, flags=re.M)
    lines = text.split("\n")
    parts = lines[:1]
    for above, line in itertools.pairwise(lines):
        indents = [len(each) - len(each.lstrip(" \t")) for each in (above, line)]
        ends = indents[1] < indents[0] or (indents[1] > indents[0] and not ITEM.match(above))
        parts.append(PROSE if ends or not above.strip() or not line or ITEM.match(line) else " ")
        parts.append(line)
    return "".join(parts).lower()


def _texts(source: str, name: str) -> Iterator[tuple[int, str]]:
    """Yield the offset of each text, and a mark and the text with its code masked."""
    suffix = Path(name).suffix
    if suffix == ".md":
        yield -1, PROSE + _masked(source, FENCED, ROW, CODE, LINK, MARKUP)
        for row in re.finditer(ROW[0], source, re.M):
            yield row.start() - 1, MESSAGE + _masked(row[0], CODE, LINK)
        return
    messages = suffix != ".py" or name.startswith("tfd_notebook/")
    header = ""
    for match in re.finditer(LEXERS[suffix], source, re.S | re.M):
        kind, text = match.lastgroup, match[match.lastgroup]
        start = match.start(kind) - 1
        if kind == "header":
            header = text
        elif kind == "comment":
            yield start, PROSE + _masked(text, DIRECTIVE, CODE, LEADER)
        elif kind == "docstring":
            exempt = re.search(r"@.*(?:property|setter|fixture)|\bclass |\bdef test_", header)
            mark = FUNCTION if header and not exempt else DOCSTRING
            yield start, mark + _masked(text, CODE, EXAMPLE)
        elif messages and len(re.findall("[A-Za-z]{2,}", text)) > 2:
            yield start, MESSAGE + _masked(text, QUOTES, CODE, VALUE, ESCAPE)


def check(source: str, name: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, text and replacement of each violation in the source of a file."""
    for offset, text in _texts(source, name):
        hits = [
            (*match.span(match.lastindex), HINTS[match.lastindex - 1])
            for match in FORBIDDEN.finditer(text)
            if HINTS[match.lastindex - 1]
        ]
        for match in SENTENCE.finditer(text if text[0] != MESSAGE else ""):
            start, end = match.end() - len(match[0].lstrip()), match.end()
            count = len(re.findall(r"[a-z][\w'-]*", match[0]))
            if count > LONGEST_SENTENCE:
                hits.append((start, end, f"split {count} words, at most {LONGEST_SENTENCE}"))
            elif len(re.findall(r"\S[;:]\s", match[0])) > 1:
                hits.append((start, end, "split the chain of semicolons or colons"))
        for start, end, hint in hits:
            phrase = " ".join(source[max(offset + start, 0) : offset + end].split())[:60]
            yield source.count("\n", 0, offset + start) + 1, phrase, hint


def _cells(source: str, kind: str) -> str:
    """Return the lines of a notebook's cells of a type, at their lines in the file."""
    lines = [""] * (source.count("\n") + 1)
    cells = rf'"cell_type": "{kind}",(?:(?!"cell_type").)*?"source": \[\n(.*?)\n   \]'
    for match in re.finditer(cells, source, re.DOTALL):
        start = source.count("\n", 0, match.start(1))
        for number, line in enumerate(match[1].split("\n"), start):
            lines[number] = json.loads(line.strip().rstrip(",")).rstrip("\n")
    return "\n".join(lines)


def check_file(name: str) -> Iterator[tuple[int, str, str]]:
    """Yield the violations in a file, which is named relative to the root."""
    source = (ROOT / name).read_text("utf-8")
    if name.endswith(".ipynb"):
        yield from check(_cells(source, "markdown"), "cells.md")
        yield from check(_cells(source, "code"), "cells.py")
    else:
        yield from check(source, name)


def files(given: str) -> Iterator[str]:
    """Yield the files under a path that the rules apply to, without links and build outputs."""
    path = ROOT / given
    if not path.exists():
        raise FileNotFoundError(given)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        name = file.relative_to(ROOT).as_posix()
        known = file.suffix in {*LEXERS, ".md", ".ipynb"}
        if known and file.is_file() and not file.is_symlink() and not BUILT.search(name):
            yield name


def main(paths: list[str]) -> int:
    """Print the violations under the paths, and return the exit status."""
    status = 0
    for name in (name for path in paths or CHECKED for name in files(path)):
        for line, text, hint in check_file(name):
            status = 1
            print(f"{name}:{line}: {text} -> {hint}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
