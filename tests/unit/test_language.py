"""Texts and names follow the language rules of CONTRIBUTING.md.

``python -m tests._language PATH ...`` prints the violations with replacements.
"""

from __future__ import annotations

import json

import pytest

from tests import _language, _texts


@pytest.mark.parametrize("path", _language.CHECKED)
def test_texts_follow_the_rules(path):
    assert list(_texts.files([path])), f"{path} has no text files"
    _fail_on(list(_language.hits([path])))


@pytest.mark.parametrize("path", _language.CHECKED)
def test_names_describe_their_values(path):
    assert list(_texts.files([path])), f"{path} has no text files"
    _fail_on(list(_language.name_hits([path])))


def _fail_on(hits):
    if hits:
        pytest.fail("\n".join(map(str, hits)) + f"\n{len(hits)} violations", pytrace=False)


def _python(source, name="tfd_notebook/sample.py"):
    return [hit for text in _texts.python_texts(source, name) for hit in _language.check(text)]


def _function(docstring, name="tfd_notebook/sample.py"):
    return _python(f'def run(self):\n    """{docstring}"""\n', name)


@pytest.mark.parametrize(
    "comment",
    [
        "The server accepts whoever has the token.",
        "Nobody reads the queue.",
        "Keep the socket for the client who asked first.",
        "What the server sends is parsed later.",
        "Two causes: what is lost is sent again.",
        "The file is no journal.",
        "An empty name cannot be meant.",
        "Wait for so many seconds.",
        "Allocate as many GPUs as workers.",
        "The pool is built anew after a crash.",
        "The agent shall restart the task.",
        "Block for ever on an empty queue.",
        "Runs beside the kernel.",
        "Mend the connection first.",
        "The readers are served in turn.",
        "A dataset of ours.",
        "A thread of its own sends the messages.",
        "Refuse connections of strangers.",
        "The file is stored elsewhere.",
        "The other end closes without a word.",
        "Bytes on the way to the host.",
        "Let it go after the last read.",
        "The driver hears of the failure.",
        "The agent is told to stop.",
        "The kernel says that it is busy.",
        "The dispatcher lives in the kernel.",
        "The watchdog looks at every task.",
        "The scheduler wants two slots.",
        "The agent knows the port.",
        "The task goes on without its owner.",
        "Its port, None where the task has stopped.",
        "A private name of TensorFlow's.",
        "The client receives no more.",
        "Nothing remains but for the lease.",
        "Let the closures run first.",
    ],
)
def test_forbidden_phrases_are_reported(comment):
    (hit,) = _python(f"x = 1\n\n# {comment}\n")
    assert (hit.path, hit.line) == ("tfd_notebook/sample.py", 3)


@pytest.mark.parametrize(
    "comment",
    [
        "The server accepts clients that have the token.",
        "Users who run two kernels see both clusters.",
        "There is no dispatcher in this mode, so the port stays free.",
        "Retry three times. The notice says which host failed.",
        "The live view updates once a second.",
        "Return early: what if the queue is empty?",
        "The pids tell them apart.",
        "At most no more than three.",
        "The name of the task's host.",
        "Wait as long as the lease lasts.",
        "The word 'nobody' is the name of a Unix user.",
        "noqa: whoever reads this",
    ],
)
def test_plain_english_is_not_reported(comment):
    assert _python(f"# {comment}\n") == []


@pytest.mark.parametrize(
    "docstring",
    [
        "What the worker has read.",
        "How many tasks run.",
        "Whether the task runs.",
        "Have the agent stop the task.",
        "Let the closures run.",
        "Who reads the dataset.",
        "The running clusters by name.",
        "Returns the running clusters.",
        "Running clusters by name.",
        "Nothing happens here.",
        "Tell the agent to stop.",
    ],
)
def test_docstrings_of_functions_open_with_an_imperative(docstring):
    hits = _function(docstring)
    assert hits
    assert {hit.line for hit in hits} == {2}


@pytest.mark.parametrize(
    "docstring",
    [
        "Return the running clusters by name.",
        "Return True if the task runs.",
        "Pass the request to the agent.",
        "Look up the address of a task.",
        "Apply a merge patch.",
    ],
)
def test_imperative_docstrings_are_not_reported(docstring):
    assert _function(docstring) == []


def test_only_functions_need_an_imperative():
    assert _python('"""Callbacks that run when a cluster starts."""\n') == []
    assert _python('class Task:\n    """A running task."""\n') == []
    assert _python('@property\ndef port(self):\n    """The port of the task."""\n') == []
    assert _function("The agent restarts the task.", "tests/helpers.py")
    assert _python('def test_x():\n    """The agent restarts it."""\n', "tests/test_x.py") == []
    assert _python('class Task:\n    """What runs."""\n')
    assert _python('"""What runs on a host."""\n')


def test_long_sentences_are_reported():
    sentence = "Return " + "the port and " * 12 + "the name."
    (hit,) = _function(sentence)
    assert "32 words" not in sentence
    assert "words: split" in hit.hint
    parameters = "".join(f"    port_{n} : int\n        The port.\n" for n in range(20))
    assert _function(f"Return a port.\n\n    Parameters\n    ----------\n{parameters}    ") == []


def test_chains_of_semicolons_are_reported():
    (hit,) = _function("Close the port; stop the task; remove the files.")
    assert "chain" in hit.hint
    assert _function("Close the port; stop the task.") == []


@pytest.mark.parametrize(
    "message",
    [
        'f"{port} is no port"',
        '"there is no cluster with this name"',
        'f"{name!r}: there is no such task"',
        '"the name" " cannot be meant"',
        '"nobody reads this stream"',
    ],
)
def test_messages_are_checked(message):
    (hit,) = _python(f"raise ValueError(\n    {message}\n)\n")
    assert hit.line == 2


def test_strings_of_tests_are_not_checked():
    assert _python('text = "nobody reads this stream"\n', "tests/unit/test_x.py") == []


def test_code_is_not_checked():
    assert _function("Return ``the way``.\n\n    >>> print('whoever said so')\n    ") == []
    assert _function("Return `nobody`.") == []


def test_a_phrase_across_lines_is_reported_at_its_first_line():
    source = "x = 1\n# The message is on the\n# way to the host.\n"
    (hit,) = _python(source)
    assert hit.line == 2
    (hit,) = _function("Return the port.\n\n    It is on the\n    way to the host.\n    ")
    assert hit.line == 4


def _markdown(text):
    return [
        (hit.line, hit.hint)
        for part in _texts.markdown_texts(text, "docs/sample.md")
        for hit in _language.check(part)
    ]


def test_markdown_is_checked_without_its_code():
    assert _markdown("# Who can connect\n\nRun `whoever`.\n\n```python\n# anew\n```\n") == []
    assert _markdown("| column | what it means |\n|---|---|\n| a | the state |\n") == []
    assert [line for line, _ in _markdown("Start.\n\n* It runs\n  anew.\n")] == [4]
    assert [line for line, _ in _markdown("| a | b |\n|---|---|\n| x | for ever |\n")] == [3]
    assert _markdown("See [the guide](https://example.org/the way).\n") == []


def test_notebooks_are_checked_at_the_lines_of_their_file():
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "\n", "It runs anew.\n"]},
        {"cell_type": "code", "source": ["%load_ext x\n", "run()  # beside the kernel\n"]},
    ]
    source = json.dumps({"cells": cells}, indent=1)
    lines = source.split("\n")
    hits = [
        hit
        for text in _texts.notebook_texts(source, "notebooks/sample.ipynb")
        for hit in _language.check(text)
    ]
    assert [lines[hit.line - 1].strip() for hit in hits] == [
        r'"It runs anew.\n"',
        r'"run()  # beside the kernel\n"',
    ]


def test_typescript_is_checked():
    source = (
        "// Nobody reads this.\n"
        "const label = 'no cluster lives here';\n"
        "/** The view is\n * built anew. */\n"
        "const title = `what ${name} is`;\n"
        "import {whoever} from './whoever';\n"
    )
    hits = [
        hit.line
        for text in _texts.typescript_texts(source, "labextension/src/sample.ts")
        for hit in _language.check(text)
    ]
    assert sorted(hits) == [1, 2, 4, 5]


def test_comments_of_scripts_are_checked():
    hits = [
        hit.line
        for text in _texts.hash_texts("# Nobody.\nall: x  # anew\n\ttest '#' anew\n", "Makefile")
        for hit in _language.check(text)
    ]
    assert hits == [1, 2]


def test_names_are_checked():
    source = (
        "def start(told, clusters):\n"
        "    found = [one for one in clusters]\n"
        "    for task in found:\n"
        "        task.seen = True\n"
    )
    hits = list(_language.python_name_hits(source, "tfd_notebook/sample.py"))
    assert sorted((hit.line, hit.text) for hit in hits) == [(1, "told"), (2, "found"), (2, "one")]
    source = "def test_nobody_is_told(cluster):\n    pass\n"
    (hit,) = _language.python_name_hits(source, "tests/unit/test_sample.py")
    assert hit.text == "test_nobody_is_told"
    (hit,) = _language.python_name_hits(f"def test_{'x' * 56}(): pass\n", "tests/unit/test_x.py")
    assert hit.hint == "61 characters: at most 60"


def test_names_in_notebooks_are_checked():
    cells = [
        {"cell_type": "markdown", "source": ["seen = 1\n"]},
        {"cell_type": "code", "source": ["seen = %tfd_status\n", "%tfd_list\n", "made = 1"]},
        {"cell_type": "code", "source": ["%%tfd_kernel kernel\n", "told = 1\n"]},
    ]
    source = json.dumps({"cells": cells}, indent=1)
    lines = source.split("\n")
    hits = list(_language.notebook_name_hits(source, "notebooks/sample.ipynb"))
    assert [hit.text for hit in hits] == ["seen", "made", "told"]
    assert all(f"{hit.text} = " in lines[hit.line - 1] for hit in hits)


def test_the_command_prints_and_counts(capsys):
    assert _language.main(["tests/unit/test_language.py"]) == 0
    assert capsys.readouterr().out.strip() == "0 in all"
