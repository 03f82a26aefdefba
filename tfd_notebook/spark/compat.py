"""What programs ask ``tensorflowonspark.compat`` for, which TensorFlow has today.

New programs need none of it: they call ``model.export``, ``Dataset.with_options`` and
``tf.config.list_physical_devices`` themselves.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["disable_auto_shard", "export_saved_model", "is_gpu_available"]


def export_saved_model(model: Any, export_dir: str, is_chief: bool = False) -> None:
    """Write a model as a SavedModel; call it in all workers.

    Under a strategy of several workers all of them have to take part, but only the chief's is of
    use: the others write to a directory that is removed.

    Parameters
    ----------
    model : keras.Model or tf.Module
    export_dir : str
    is_chief : bool
        Whether this is the one worker whose model shall be there. Default false.
    """
    import tempfile

    if is_chief:
        _export(model, export_dir)
        return
    with tempfile.TemporaryDirectory(prefix="tfd-export-") as nobodys:
        _export(model, os.path.join(nobodys, "model"))


def _export(model: Any, directory: str) -> None:
    if hasattr(model, "export"):
        model.export(directory)
    elif hasattr(model, "save"):  # Keras 2 before TensorFlow 2.13
        model.save(directory, save_format="tf")
    else:
        import tensorflow as tf

        tf.saved_model.save(model, directory)


def disable_auto_shard(options: Any) -> None:
    """Have a dataset with these ``tf.data.Options`` not be sharded among workers.

    Rows that Spark feeds are dealt to the workers already.
    """
    import tensorflow as tf

    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy


def is_gpu_available() -> bool:
    """Whether TensorFlow sees a GPU in this process."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))
