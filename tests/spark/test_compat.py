"""`spark.compat`: the functions of the module `compat` of TensorFlowOnSpark."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfd_notebook.spark import compat

pytestmark = pytest.mark.integration

ROWS = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def model_of(keras: Any) -> Any:
    """Return a model with two outputs whose layers have names."""
    inputs = keras.layers.Input([2], name="features")
    outputs = [keras.layers.Dense(1, name=name)(inputs) for name in ("dense_1", "scores")]
    return keras.Model(inputs, outputs)


def serving(directory: Path) -> Any:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(directory))
    return loaded, loaded.signatures["serving_default"]


@pytest.mark.parametrize(
    ("package", "names"),
    [("tf_keras", ["dense_1", "scores"]), ("keras", ["output_0", "output_1"])],
)
def test_only_the_chief_exports_a_model(tmp_path: Path, package: str, names: list[str]) -> None:
    model = model_of(importlib.import_module(package))
    compat.export_saved_model(model, str(tmp_path / "chief"), is_chief=True)
    compat.export_saved_model(model, str(tmp_path / "worker"))
    assert [path.name for path in tmp_path.iterdir()] == ["chief"]
    loaded, function = serving(tmp_path / "chief")
    assert sorted(function.structured_outputs) == names
    (tensor,) = function.structured_input_signature[1]
    outputs = function(**{tensor: ROWS})
    expected = model(ROWS)
    for name, values in zip(names, expected, strict=True):
        np.testing.assert_allclose(outputs[name], values, rtol=1e-5)
    del loaded


def test_a_module_is_exported_with_its_own_signatures(tmp_path: Path) -> None:
    import tensorflow as tf

    class Double(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        def __call__(self, x: Any) -> Any:
            return {"twice": 2 * x}

    compat.export_saved_model(Double(), str(tmp_path / "chief"), is_chief=True)
    loaded = tf.saved_model.load(str(tmp_path / "chief"))
    assert loaded(tf.constant([1.0]))["twice"].numpy() == [2.0]
