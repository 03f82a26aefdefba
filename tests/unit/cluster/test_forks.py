"""The end of a child of os.fork() does not affect resources of its parent."""

import subprocess
import sys

JOURNAL_COPY = """
import os, sys
from tfd_notebook.cluster.journal_mirror import JournalCopy

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

SERVER = """
import os, sys
import tensorflow as tf
import tfd_notebook as tfd
from tfd_notebook.net.probe import probe

dispatcher = tfd.Dispatcher()
child = os.fork()
if child == 0:
    dispatcher.stop()
    sys.stdout.flush()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert probe(dispatcher.address, 10.0).alive
dispatcher.stop()
print("kept")
"""


def output(code):
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )
    return completed.stdout, completed.stderr


def test_forked_child_keeps_the_journal_copy():
    assert output(JOURNAL_COPY) == ("kept\n", "")


def test_dispatcher_keeps_running_after_a_forked_child_ends():
    assert output(SERVER)[0] == "kept\n"
