"""Keras under the strategy of a cluster: Keras 2 trains, and Keras 3 is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfd_notebook as tfd
from tfd_notebook.errors import Unsupported

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*shuffle=True:UserWarning"),
]

#: Runs in a separate process, because TensorFlow selects Keras 2 or Keras 3 at import. First, as in
#: TensorFlow's tutorial, `fit` creates the coordinator of a strategy.
FIT = """
import json
import numpy as np
import tensorflow as tf
import tfd_notebook as tfd

batches = tf.data.Dataset.from_tensors((tf.ones((16, 1)), 3 * tf.ones((16, 1)))).repeat()
with tfd.Cluster(workers=1, ps=1, name="keras-2-first") as cluster:
    strategy = tf.distribute.ParameterServerStrategy(cluster.resolver)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")

    def fit(**options):
        return model.fit(batches, steps_per_epoch=5, verbose=0, **options).history["loss"]

    (first,) = fit()
    bare = tf.distribute.coordinator.ClusterCoordinator(strategy)
    assert type(bare) is tf.distribute.coordinator.ClusterCoordinator
    coordinator = cluster.coordinator(strategy)
    assert coordinator is bare
    assert isinstance(coordinator, tfd.Coordinator)
    assert coordinator is cluster.current_coordinator()
    (second,) = fit()
    assert second < first
    assert coordinator.values.counts()["ready"] == 5
    (row, *_) = coordinator.values.records(1)
    assert (row["function"], row["worker"]) == ("train_function", 0)
    coordinator.pause()
    value = coordinator.schedule(tf.function(lambda: tf.constant(7)))
    assert not coordinator.done()
    assert coordinator.step() == 1
    assert value.fetch() == 7
    coordinator.resume()
    assert fit(epochs=2)[-1] < second
    assert coordinator.values.counts()["ready"] == 16

x = np.linspace(-1, 1, 256, dtype="float32")[:, None]
batches = tf.data.Dataset.from_tensor_slices((x, 3 * x)).shuffle(256).repeat().batch(16)
with tfd.Cluster(workers=2, ps=1, name="keras-2") as cluster:
    with cluster.strategy().scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
        model.compile(tf.keras.optimizers.SGD(0.3), "mse", steps_per_execution=2)
    losses = model.fit(batches, epochs=4, steps_per_epoch=20, verbose=0).history["loss"]
    coordinator = cluster.coordinator()
    records = coordinator.values.records(100)
    print(json.dumps({
        "keras": tf.keras.__name__,
        "losses": losses,
        "ours": isinstance(coordinator, tfd.Coordinator),
        "functions": sorted({row["function"] for row in records}),
        "workers": sorted({row["worker"] for row in records}),
        "ready": coordinator.values.counts()["ready"],
        "ps": sorted(cluster.snapshot().coordinator.ps_bytes),
    }))
"""


def test_keras_2_trains_and_its_coordinator_is_adopted() -> None:
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", FIT], env=environment, capture_output=True, text=True, timeout=170
    )
    assert completed.returncode == 0, completed.stderr[-3_000:]
    data = json.loads(completed.stdout.splitlines()[-1])
    assert data["keras"].startswith("tf_keras")
    assert data["losses"][-1] < 0.1 * data["losses"][0]
    assert data["ours"]
    assert data["functions"] == ["train_function"]
    assert data["workers"] == [0, 1]
    assert data["ready"] == 40  # 80 steps, two in each
    assert data["ps"] == ["ps:0"]


def test_keras_3_is_refused_with_a_fix() -> None:
    x = np.ones((32, 4), "float32")
    with tfd.Cluster(workers=1, ps=1, name="keras-3") as cluster:
        with cluster.strategy().scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        for use in (lambda: model.fit(x, x[:, :1], verbose=0), lambda: model.predict(x, verbose=0)):
            with pytest.raises(Unsupported, match="Keras 3 cannot train") as caught:
                use()
            assert "TF_USE_LEGACY_KERAS=1" in str(caught.value)
