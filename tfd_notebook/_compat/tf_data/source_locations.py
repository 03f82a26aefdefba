"""Lines of the user's code that create a dataset or cause a warning."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfd_notebook._compat import import_hooks
from tfd_notebook._compat.tf_data import autograph

_MODULE = "tensorflow.python.data.ops.dataset_ops"
_PACKAGES = ("tensorflow", "keras", "tf_keras")
_PACKAGE_DIR = str(Path(__file__).parents[2]) + os.sep

Site = tuple[str, int]


def record() -> None:
    """Record the source location of every dataset that is created from now on."""
    import_hooks.when_imported(_MODULE, _change)


def undo() -> None:
    """Stop recording."""
    if _MODULE in sys.modules:
        dataset: Any = sys.modules[_MODULE].DatasetV2
        original = getattr(dataset.__init__, "_tfd_original", None)
        if original is not None:
            dataset.__init__ = original


def site_of(dataset: Any) -> Site | None:
    """Return the file and line that created `dataset`, or None if unknown."""
    site: Site | None = getattr(dataset, "_tfd_site", None)
    return site


def call_of(dataset: Any) -> str:
    """Return the method or function that created `dataset`. Empty if unknown."""
    return str(getattr(dataset, "_tfd_call", ""))


def named(site: Site | None) -> str:
    """Return the user's notation of a location, ``In[3], line 4`` or ``train.py:12``."""
    if site is None:
        return ""
    file, line, _ = autograph.original(*site, "")
    cell = cell_of(file)
    return f"{cell}, line {line}" if cell else f"{os.path.basename(file)}:{line}"


def cell_of(file: str) -> str:
    """Return the user's notation of a cell, ``In[3]``. Empty for another file."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    cell = None if shell is None else shell.compile.format_code_name(file)
    return "" if cell is None else str(cell[1])


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the user's line, at any depth of calls."""
    frame, _ = _user_frame()
    if frame is None:  # a thread of a library
        warnings.warn(message, category, stacklevel=2)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(
        message, category, frame.f_code.co_filename, frame.f_lineno, module, registry
    )


def _change(module: types.ModuleType) -> None:
    dataset: Any = module.DatasetV2
    original = dataset.__init__
    if hasattr(original, "_tfd_original"):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._tfd_site, self._tfd_call = _caller()

    init._tfd_original = original  # type: ignore[attr-defined]
    dataset.__init__ = init


def _caller() -> tuple[Site | None, str]:
    """Return the line that creates a dataset, and the method that it calls."""
    frame, call = _user_frame(_is_method)
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno), call


@functools.cache
def _is_method(name: str) -> bool:
    """Return True for a method of datasets, and for a function that creates one."""
    import tensorflow as tf

    is_public = not name.startswith("_") and name not in ("apply", "with_options")
    return is_public and (hasattr(tf.data.Dataset, name) or "_dataset_from_" in name)


def _user_frame(
    is_call: Callable[[str], bool] = lambda name: False,
) -> tuple[types.FrameType | None, str]:
    """Return the innermost frame outside of TensorFlow, Keras and this package, and its call.

    The call is the outermost function inside of them whose name `is_call` accepts.
    """
    frame: types.FrameType | None = sys._getframe(1)
    call = ""
    while frame is not None and not (
        is_users(frame) and not autograph.is_generated(frame.f_code.co_filename)
    ):
        call = frame.f_code.co_name if is_call(frame.f_code.co_name) else call
        frame = frame.f_back
    return frame, call


def is_users(frame: types.FrameType) -> bool:
    """Return True if `frame` runs code outside of TensorFlow, Keras and this package.

    This includes code that AutoGraph has generated from the user's.
    """
    return not frame.f_code.co_filename.startswith(_library_dirs())


@functools.cache
def _library_dirs() -> tuple[str, ...]:
    """Return the directories of TensorFlow, Keras and this package."""
    from importlib.util import find_spec

    directories = []
    for name in _PACKAGES:
        with contextlib.suppress(ImportError, ValueError):
            spec = find_spec(name)
            directories += list(spec.submodule_search_locations or ()) if spec is not None else []
    return (_PACKAGE_DIR, *(directory + os.sep for directory in directories))
