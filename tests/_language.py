"""Checker of the language rules in CONTRIBUTING.md.

``python -m tests._language [PATH ...]`` prints each hit as ``file:line: <text> -> <hint>``, then
the hits per file. Without a path, it checks everything. ``--names`` checks identifiers, and
``--clean`` prints the paths without hits.
"""

from __future__ import annotations

import argparse
import ast
import collections
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests._texts import ROOT, Text, files, notebook_code, texts

#: Paths that are checked, relative to the root of the repository.
CHECKED = (
    "tfd_notebook",
    "tests",
    "benchmarks",
    "docs",
    "notebooks",
    "labextension/src",
    "labextension/tests",
    "labextension/scripts",
    "labextension/style",
    "labextension/schema",
    "labextension/package.json",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "Makefile",
    "pyproject.toml",
    ".ci/run",
)

LONGEST_TEST_NAME = 60
LONGEST_SENTENCE = 20


class Hit(NamedTuple):
    """A violation of a rule."""

    path: str
    line: int
    text: str
    hint: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.text.split())} -> {self.hint}"


class Rule(NamedTuple):
    """A forbidden phrase, with the kinds of text that it applies to."""

    pattern: re.Pattern[str]
    hint: str
    kinds: frozenset[str]


ALL = frozenset({"docstring", "comment", "string", "prose", "cell", "heading"})
NO_HEADING = ALL - {"heading"}
MESSAGES = frozenset({"string"})

#: Nouns for people at the end of a text. They take "who" and the verbs of persons.
PEOPLE = re.compile(
    r"\b(?:users?|people|persons?|readers?|contributors?|maintainers?|developers?|administrators?"
    r"|authors?|attackers?|operators?|colleagues?|those|you)[(\"',]*\s+$"
)

#: Nouns for documents at the end of a text. A document can say something.
WRITINGS = re.compile(
    r"\b(?:message|notice|finding|warning|documentation|docs|page|comment|docstring|specification"
    r"|rfc\s+\d+)\s+$"
)


def _rule(pattern: str, hint: str, kinds: frozenset[str] = ALL) -> Rule:
    return Rule(re.compile(pattern, re.MULTILINE | re.IGNORECASE), hint, kinds)


RULES = (
    # Persons as the subject
    _rule(
        r"\b(?:whoever|whomever|(?:some|no|any|every)body|no one|(?:some|any|every)one)\b",
        "name the subject: the client, caller, agent, worker, driver, user",
    ),
    _rule(
        r"\bwho\b",
        "name the subject: the client, caller, agent, worker, driver, user",
        NO_HEADING,
    ),
    _rule(r"\bwhatever\b", "name the thing"),
    # Noun clauses as the subject
    _rule(
        r"(?:\A|\n|(?<=[.;:¶]) )what (?!if\b|to\b)(?![^.?!]*\?)[\w']+",
        "start with the thing, not with a what-clause",
        NO_HEADING,
    ),
    # Existence and validity
    _rule(
        r"(?<!there )\b(?:is|are|was|were) no "
        r"(?!longer|more|less|fewer|later|earlier|different|such)\w+",
        "not a valid ..., invalid ...",
    ),
    _rule(
        r"(?:(?<=[.;:] )|(?<=[.;:] CODE )|\A(?:CODE:? )?)there (?:is|are|was|were) (?:no|none)\b",
        "<operation> failed: <cause>, no <thing>, or <thing> not found",
        MESSAGES,
    ),
    _rule(r"\b(?:cannot|can not|can't|could not) be meant\b", "invalid <argument> <value>"),
    _rule(r"\b(?:is|are|was|were) meant\b(?! to\b| for\b)", "refers to, stands for"),
    # Numbers
    _rule(r"\b(?:so|as|this|that) many\b", "n, count, the number of"),
    _rule(r"\b(?:so long|so much|so often)\b", "name the duration or the amount"),
    # Words
    _rule(r"\b(?:anew|afresh)\b", "again, or re-<verb>"),
    _rule(r"\bshall\b", "must, or the present tense"),
    _rule(r"\bfor ever\b", "indefinitely, forever, or without a timeout"),
    _rule(r"\bbesides?\b", "next to, concurrently, in addition, except"),
    _rule(r"\bmend(?:s|ed|ing)?\b", "fix, repair"),
    _rule(r"\b(?:in turns?|by turns|take turns)\b", "one after another, alternately"),
    _rule(
        r"\b(?:of|is|are|as|not|than|with|from|to|and) (?:ours|yours|theirs)\b",
        "name the owner: started by tfd, the caller's",
    ),
    _rule(r"\bof (?:its|their|his|your|our|one's) own\b", "its own <noun>, a separate <noun>"),
    _rule(
        r"\b(?:of|none of) (?:(?:the|a|an|its|their|this|that) )?\w+'s"
        r"(?= (?:is|are|was|has|that|which|and|or|in|to|at|on|with|for|from)\b|[.,;:)]|$)"
        r"(?! (?:and|or) \w+'s)",
        "the <owner>'s <noun>, a <noun> of <owner>",
    ),
    _rule(r"\bno more(?= of\b|[.,;:)]|$)|\bno more to do with\b", "no longer, not ... any more"),
    _rule(r"\bbut for\b", "except, except for"),
    _rule(
        r"(?:\A|(?<=[.;:¶]) )(?:have|let) (?:the(?! user)|it|its|them|a|an|CODE|what)\b(?! go\b)",
        "an active verb: make, start, allow",
        NO_HEADING - {"docstring"},
    ),
    _rule(r"\bstrangers?\b", "other users, unauthenticated clients"),
    _rule(r"\belsewhere\b", "on another host, in another process, remote"),
    _rule(r"\ba word\b", "message, argument"),
    _rule(r"\b(?:the|its|their|every|half) way\b", "path, route, transfer, how"),
    _rule(r"\blest\b", "so that ... not"),
    _rule(r"\b(?:lets?|letting) (?:it |them |\w+ )?go\b", "release, close, detach"),
    _rule(
        r"\b(?:has|have|had|having) (?!been |already |never |not )\w+ (?:done|made)\b",
        "an active verb",
    ),
    # Verbs of persons
    _rule(r"\b(?:hears?|heard|hearing)\b", "receive, learn, is notified"),
    _rule(r"\b(?:tells?|told|telling)\b(?! apart|\()", "notify, send, report, show"),
    _rule(r"\b(?:says|said|saying)\b", "report, show, return, state"),
    _rule(
        r"\bsay (?:so|which|that|what|how|where|whether|when|who|why|if|it|no|on|the|a)\b",
        "report, show, return, state",
    ),
    _rule(r"\b(?:lives|lived|living)\b", "run, exist, is stored; running"),
    _rule(
        r"\b(?:to|that|which|clusters|it|they|tasks|servers|can|must|may|will|not) live\b",
        "run, exist, is stored",
    ),
    _rule(
        r"\b(?:looks|looked|looking) (?:at|after|into|for|on|in|whether|if|there|so|again|only)\b",
        "inspect, check",
    ),
    _rule(r"\b(?:take|has|have|one|a) (?:a )?look\b", "inspect, check"),
    _rule(r"\bwants\b", "need, request, expect"),
    _rule(r"\bknows\b", "have, store, recognize"),
    _rule(r"\b(?:does|do|did) not know\b", "has no ..., cannot determine"),
    _rule(r"\b(?:forgets|forgot|forgotten)\b", "discard, remove"),
    _rule(r"\b(?:goes|go|went|gone|going) on\b", "continue, keep running"),
    _rule(r"\bcom(?:es?|ing) to (?:its|their|an|the) end\b", "finish, end"),
    # "where" as a condition
    _rule(r"\b(?:None|True|False) where\b", "None if ..., True if ..."),
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Openings of docstrings that are noun clauses or causatives.
OPENINGS = _words(
    "what how whether where when have let who whose whoever that which why whatever whenever "
    "wherever has had having if as be been "
)

#: Openings of docstrings that make persons of machines.
PERSONAL = _words("say tell hear look know mend forget speak")

#: Openings of functions' docstrings that are not verbs in the imperative.
NOT_IMPERATIVE = _words(
    "the a an this these those it its they their we you all any each every both either "
    "neither no not none nothing one two three some several many much more most other another "
    "such same only also of for from to in on at by with without within while until after "
    "before during since like than is are was were does did can could may might must should "
    "will would true false number name names path port time seconds "
)

#: Names of variables and parameters that do not describe the value.
NAMES = {
    "asked": "requested, request, query",
    "found": "the thing: match, addresses, clusters",
    "got": "received, reply, elements",
    "living": "running",
    "looked": "sampled, status, snapshot",
    "made": "the thing: created, iterator, process",
    "one": "the thing: task, item, cluster",
    "said": "message, output, error",
    "seen": "known, received, last_seq",
    "told": "reported, events, notified",
    "wish": "requested, request",
}

#: Words that the names of test functions do not contain.
NAME_WORDS = _words(
    "who whose whoever whom somebody someone nobody anybody anyone everybody everyone whatever "
    "told tell tells hear hears heard lives living anew afresh shall beside besides elsewhere "
    "ours yours theirs stranger strangers mend mended lest"
)

#: Words in -s, -ing or -ed that are imperatives.
IMPERATIVE = _words(
    "apply reply supply rely multiply imply comply "
    "pass process access address press guess bypass focus compress express discuss toss bless "
    "miss dismiss suppress assess cross canonicaliz bring ping string embed feed shed need "
    "speed seed exceed proceed succeed spring swing fling alias bias bus "
)


def check(text: Text) -> Iterator[Hit]:
    """Yield the violations in one text."""
    flowing = re.sub(r"(?<!\n)\n(?!\n)", " ", text.text)
    for rule in RULES:
        if text.kind not in rule.kinds:
            continue
        for match in rule.pattern.finditer(flowing):
            if _excepted(match, text):
                continue
            around = _around(flowing, match)
            yield Hit(
                text.path,
                text.line_at(match.start(), match[0].strip()),
                around,
                f"{match[0].strip()!r}: {rule.hint}",
            )
    if text.kind == "docstring":
        yield from _check_opening(text)
    if text.kind in ("docstring", "comment", "prose"):
        yield from _check_sentences(text)


def _around(text: str, match: re.Match[str]) -> str:
    start, end = match.start(), match.end()
    left = text.rfind(" ", 0, max(start - 30, 0)) + 1
    right = text.find(" ", end + 30)
    return text[left : right if right > 0 else len(text)].replace("¶", "")


def _excepted(match: re.Match[str], text: Text) -> bool:
    if re.match(r"""["'][\w ]+["']$""", text.text[max(match.start() - 1, 0) : match.end() + 1]):
        return True  # A quoted word is mentioned, not used.
    word = match[0].strip().lower()
    before = text.text[max(match.start() - 60, 0) : match.start()].lower()
    if word in ("who", "wants", "knows", "says", "said", "do not know") and PEOPLE.search(before):
        return True
    if word == "tell" and re.match(r" \w+ apart\b", text.text[match.end() :]):
        return True
    if word in ("says", "tells") and WRITINGS.search(before):
        return True
    if word.startswith("what ") and text.kind == "docstring":
        # An opening is reported once, as such.
        return not text.text[: match.start()].strip()
    return False


def _check_opening(text: Text) -> Iterator[Hit]:
    first_line = text.text.strip().split("\n", 1)[0]
    words = re.findall(r"[A-Za-z][\w'-]*", first_line)
    if not words or not first_line[0].isalpha():
        return
    first = words[0].lower()
    line = text.line_at(len(text.text) - len(text.text.lstrip()))
    if first in OPENINGS:
        hint = {
            "class": "a noun phrase",
            "module": "a noun phrase, or a verb",
            "property": "a noun phrase",
            "test": "a statement",
        }.get(text.owner, "an imperative verb: 'Return ...', 'Return True if ...'")
        yield Hit(text.path, line, first_line, f"open with {hint}")
    elif first in PERSONAL and words[1:2] != ["up"]:
        yield Hit(text.path, line, first_line, "report, send, receive, inspect, fix, discard")
    elif text.owner == "function" and not _imperative(first):
        yield Hit(text.path, line, first_line, "open with an imperative verb: 'Return ...'")


def _imperative(word: str) -> bool:
    if word in IMPERATIVE:
        return True
    if word in NOT_IMPERATIVE or word == "code":
        return False
    return not word.endswith(("s", "ing", "ed", "ly"))


def _check_sentences(text: Text) -> Iterator[Hit]:
    for match in re.finditer(r"(?:[^.!?¶\n]|\n(?!\s*\n)|[.!?](?!\s|$))+", text.text):
        sentence = match[0]
        start = text.line_at(match.start() + len(sentence) - len(sentence.lstrip()))
        shown = " ".join(sentence.split())[:60] + " ..."
        words = len(re.findall(r"[A-Za-z][\w'-]*", sentence))
        if words > LONGEST_SENTENCE:
            hint = f"{words} words: split into sentences of at most 20"
            yield Hit(text.path, start, shown, hint)
        elif len(re.findall(r"\S[;:]\s", sentence)) > 1:
            yield Hit(text.path, start, shown, "a chain of semicolons or colons: split")


def name_hits(paths: Iterable[str]) -> Iterator[Hit]:
    """Yield the forbidden names of variables, parameters and test functions."""
    for name in files(paths):
        if name.endswith((".py", ".ipynb")):
            source = (ROOT / name).read_text("utf-8")
            hits_of = python_name_hits if name.endswith(".py") else notebook_name_hits
            yield from sorted(set(hits_of(source, name)))


def notebook_name_hits(source: str, name: str) -> Iterator[Hit]:
    """Yield the forbidden names in the code cells of a notebook."""
    for code, numbers in notebook_code(source):
        for hit in python_name_hits(code, name):
            yield hit._replace(line=numbers[hit.line - 1])


def python_name_hits(source: str, name: str) -> Iterator[Hit]:
    """Yield the forbidden names in Python source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            words = NAME_WORDS.intersection(node.name.split("_"))
            if node.name.startswith("test_") and words:
                hint = f"{', '.join(sorted(words))}: name the behavior"
                yield Hit(name, node.lineno, node.name, hint)
            elif node.name.startswith("test_") and len(node.name) > LONGEST_TEST_NAME:
                hint = f"{len(node.name)} characters: at most {LONGEST_TEST_NAME}"
                yield Hit(name, node.lineno, node.name, hint)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            identifier = node.id
        elif isinstance(node, ast.arg):
            identifier = node.arg
        else:
            continue
        if identifier in NAMES:
            yield Hit(name, node.lineno, identifier, NAMES[identifier])


def hits(paths: Iterable[str]) -> Iterator[Hit]:
    """Yield the violations in the files under the paths, in the order of the files."""
    for name in files(paths):
        yield from sorted({hit for text in texts(name) for hit in check(text)})


def clean(paths: Iterable[str], dirty: set[str]) -> Iterator[str]:
    """Yield the largest directories, and the files next to them, that have no violation."""
    for given in paths:
        inside = list(files([given]))
        if not inside:
            continue
        if dirty.isdisjoint(inside):
            yield given
        elif (ROOT / given).is_dir():
            entries = sorted((ROOT / given).iterdir())
            yield from clean([entry.relative_to(ROOT).as_posix() for entry in entries], dirty)


def main(arguments: list[str]) -> int:
    """Print the violations and their count per file; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests._language")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="check these (default: all)")
    parser.add_argument("--names", action="store_true", help="check identifiers instead of texts")
    parser.add_argument("--clean", action="store_true", help="print the paths without violations")
    options = parser.parse_args(arguments)
    given = [Path(path).resolve().relative_to(ROOT).as_posix() for path in options.paths]
    paths = given or CHECKED
    counts: collections.Counter[str] = collections.Counter()
    for hit in name_hits(paths) if options.names else hits(paths):
        counts[hit.path] += 1
        if not options.clean:
            print(hit)
    if options.clean:
        print("\n".join(clean(paths, set(counts))))
        return 0
    if counts:
        print()
    for path, count in sorted(counts.items()):
        print(f"{count:5} {path}")
    print(f"{counts.total():5} in all")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
