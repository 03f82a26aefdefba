"""Clusters with workers and ps, in processes that do not import TensorFlow."""

from __future__ import annotations

from collections.abc import Callable


def keep_gpus_visible(patch: Callable[[type, str, object], None] = setattr) -> None:
    """Patch clusters so that they do not hide this process's GPUs."""
    from tfd_notebook.cluster.training import ParameterServerTraining

    # Hiding GPUs would import TensorFlow.
    patch(ParameterServerTraining, "hide_gpus_from_kernel", lambda self: None)
