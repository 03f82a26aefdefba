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

    Under a strategy of several workers all of them have to take part. Only the chief's model is
    kept: the others write to a directory that is removed.

    The signature names its outputs as this Keras does: Keras 2 after the layers (``dense_1``),
    Keras 3 by position (``output_0``).

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
    with tempfile.TemporaryDirectory(prefix="tfd-export-") as temporary:
        _export(model, os.path.join(temporary, "model"))


def _export(model: Any, directory: str) -> None:
    import inspect

    # Keras 2 names outputs after layers here, and "output_0" and so on in `export`. Keras 3
    # cannot save this format, and its `save` has no such parameter.
    save = getattr(model, "save", None)
    if save is not None and "save_format" in inspect.signature(save).parameters:
        save(directory, save_format="tf")
    elif hasattr(model, "export"):
        model.export(directory)
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
