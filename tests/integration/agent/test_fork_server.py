"""The import of TensorFlow in a process that tasks and nodes are forked from."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

WRAPPERS = """
import json, sys
from tfd_notebook.agent import fork_server

imported = fork_server.import_tensorflow("tfd_notebook.agent.task_process")
before = "sklearn" in sys.modules
import keras
import tensorflow as tf
from keras.wrappers import SKLearnRegressor
from sklearn.base import BaseEstimator

Classifier = keras.wrappers.SKLearnClassifier
classes = Classifier, tf.keras.wrappers.SKLearnClassifier, SKLearnRegressor
print(json.dumps([
    imported.get("error"), before, [issubclass(each, BaseEstimator) for each in classes],
    classes[0] is classes[1],
]))
"""


def test_wrappers_of_scikit_learn_are_imported_on_use() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", WRAPPERS], capture_output=True, text=True, timeout=150
    )
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout) == [None, False, [True] * 3, True]
