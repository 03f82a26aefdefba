"""The linter of the language rules reports a text that breaks a rule, at its line."""

from __future__ import annotations

import json

import pytest

from tests import language

DOCSTRINGS = "How it runs|Say it|The port|No port|Other ports|While it runs|Should run|Returns it"
#: One bad example for each rule, in the order of the rules.
EXAMPLES = """What runs is lost|Let it run|Nobody reads it|Whatever it reads|It is no port
It cannot be meant|A port is meant|Wait so many seconds|Build it anew|It shall run|Run for ever
Run beside it|Mend it|Run in turn|A task of ours|A task of its own|Receive no more|All but for it
Refuse strangers|Stored elsewhere|End without a word|Bytes on the way|Stop lest it fails|Let go
It has it done|It heard it|It is told it|It said it|Clients say so|It lives here|It will live
It looks at it|Take a look|It wants it|It knows it|It does not know it|It forgets it|It goes on
It comes to an end|Its port, None where it stopped""".replace("\n", "|")
SOURCES = [
    *(f'def f():\n    """{text}."""\n' for text in DOCSTRINGS.split("|")),
    'raise E("there is no such port")\n',
    *(f"# {text}.\n" for text in EXAMPLES.split("|")),
    *(f"# It {'is ' * 20}.\n", "# Close it; stop it; end it.\n"),
]
HINTS = [*filter(None, language.HINTS), "split 21 words, at most 20", "split the chain of"]
GOOD = '''# Users who read the word 'nobody', as long as "elsewhere" ends ``told``. It is on the
#
# way. There is no port; it is no longer used.  # noqa: lest
def f():
    """Pass the pids, and tell them apart.\n\n    >>> anew()\n    """
@property
def g():
    """The port.\n\n    what : str\n        It {0}.\n    that : str\n        It {0}.\n    """
'''.format("is " * 19)
MARKDOWN = "# Nobody\n\nRuns\n* anew\n\n~~~\nanew\n~~~\n[a](x anew) `anew`\n\n| a | anew |\n"
CELLS = [("markdown", ["A title\n", "lives\n"]), ("code", ["%load_ext x\n", "f()  # anew"])]
NOTEBOOK = json.dumps({"cells": [{"cell_type": k, "source": s} for k, s in CELLS]}, indent=1)
FILES = [
    ("tfd_notebook/a.py", GOOD, []),
    ("tfd_notebook/b.py", 'f("a new port",\n  help="it runs"\n  f" {x} on the"\n " way")', [3]),
    ("tests/a.py", "x = 'nobody reads this'\n# It is on the\n# way.\n# Nobody.", [2, 4]),
    ("a.md", MARKDOWN, [1, 4, 11]),
    ("a.ts", "// Nobody.\nconst a = 'no task lives here';\n/* a\n * stranger */", [1, 2, 4]),
    *(("Makefile", "# A\na:  # anew\n\t'#' anew", [2]), ("a.ipynb", NOTEBOOK, [7, 14])),
]


@pytest.mark.parametrize(("source", "hint"), [*zip(SOURCES, HINTS, strict=True)])
def test_each_rule_reports_its_example_once(source, hint):
    assert [text[: len(hint)] for *_, text in language.check(source, "tfd_notebook/a.py")] == [hint]


@pytest.mark.parametrize(("name", "source", "lines"), FILES)
def test_violations_are_reported_at_their_lines(name, source, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(language, "ROOT", tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(source)
    assert sorted(line for line, *_ in language.check_file(name)) == lines
    assert language.main([name]) == bool(lines)
