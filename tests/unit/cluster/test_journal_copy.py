"""The end of a child of os.fork() does not affect resources of its parent."""

import subprocess
import sys

import pytest

JOURNAL_COPY = """
import os, sys
from tfd_notebook.cluster.journal_copy import JournalCopy

copy = JournalCopy(lambda have: {})
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert os.path.isdir(copy.directory)
copy.close()
assert not os.path.exists(copy.directory)
print("kept")
"""


@pytest.mark.slow
def test_forked_child_keeps_the_journal_copy():
    completed = subprocess.run(
        [sys.executable, "-c", JOURNAL_COPY], capture_output=True, text=True, timeout=100
    )
    assert (completed.stdout, completed.stderr) == ("kept\n", "")
