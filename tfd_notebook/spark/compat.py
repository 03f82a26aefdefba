"""Functions of ``tensorflowonspark.compat`` on top of today's TensorFlow.

New programs do not need them. They call ``model.export``, ``Dataset.with_options`` and
``tf.config.list_physical_devices`` directly.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["disable_auto_shard", "export_saved_model", "is_gpu_available"]


def export_saved_model(model: Any, export_dir: str, is_chief: bool = False) -> None:
    """Write a model as a SavedModel; call it in all workers.

    A strategy with several workers requires that all of them take part. Only the chief's model is
    kept. The others write to a temporary directory.

    The signature names its outputs as the installed Keras does: Keras 2 after the layers
    (``dense_1``), Keras 3 by position (``output_0``).

    Parameters
    ----------
    model : keras.Model or tf.Module
    export_dir : str
    is_chief : bool
        Whether this worker writes the model that is kept. Default false.
    """
    import tempfile

    if is_chief:
        _export(model, export_dir)
        return
    with tempfile.TemporaryDirectory(prefix="tfd-export-") as temporary:
        _export(model, os.path.join(temporary, "model"))


def _export(model: Any, directory: str) -> None:
    import inspect

    # `save` of Keras 2 names outputs after layers; its `export` names them "output_0" and so on.
    # Keras 3 cannot save this format, and its `save` has no such parameter.
    save = getattr(model, "save", None)
    if save is not None and "save_format" in inspect.signature(save).parameters:
        save(directory, save_format="tf")
    elif hasattr(model, "export"):
        model.export(directory)
    else:
        import tensorflow as tf

        tf.saved_model.save(model, directory)


def disable_auto_shard(options: Any) -> None:
    """Disable automatic sharding among workers for a dataset with these ``tf.data.Options``.

    Spark already distributes the rows that it feeds among the workers.
    """
    import tensorflow as tf

    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy


def is_gpu_available() -> bool:
    """Return True if TensorFlow sees a GPU in this process."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))
