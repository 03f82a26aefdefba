"""Parameters of the estimator and the model, in the style of ``pyspark.ml``.

Their names are those of ``tensorflowonspark.pipeline``.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters

from tfd_notebook.errors import UsageError

__all__ = [
    "HasBatchSize",
    "HasClusterSize",
    "HasDriverPSNodes",
    "HasEpochs",
    "HasExportDir",
    "HasFeedTimeout",
    "HasGraceSecs",
    "HasInputMapping",
    "HasInputMode",
    "HasMasterNode",
    "HasModelDir",
    "HasNumPS",
    "HasOutputMapping",
    "HasProtocol",
    "HasReaders",
    "HasSignatureDefKey",
    "HasSteps",
    "HasTFRecordDir",
    "HasTagSet",
    "HasTensorboard",
    "Namespace",
    "TFParams",
    "TFTypeConverters",
]


class TFTypeConverters:
    """Converters of parameter values in addition to ``pyspark.ml.param.TypeConverters``."""

    @staticmethod
    def toDict(value: Any) -> dict[str, str]:
        """Return a mapping of strings to strings as a dict."""
        if not isinstance(value, Mapping):
            raise TypeError(f"invalid mapping {value!r}: expected a mapping of strings")
        wrong = [item for pair in value.items() for item in pair if not isinstance(item, str)]
        if wrong:
            raise TypeError(f"invalid name {wrong[0]!r} in {value!r}: expected a string")
        return dict(value)

    @staticmethod
    def toInputMode(value: Any) -> int:
        """Return a `TFCluster.InputMode` as a number."""
        if value not in (0, 1):
            raise TypeError(
                f"invalid input mode {value!r}: expected InputMode.SPARK or InputMode.TENSORFLOW"
            )
        return int(value)

    @staticmethod
    def toOptionalString(value: Any) -> str | None:
        """Return a string, or None."""
        return None if value is None else str(TypeConverters.toString(value))


class Namespace:
    """Arguments by name, like ``argparse.Namespace``, from several kinds of objects.

    Parameters
    ----------
    d : mapping, list of str, argparse.Namespace or Namespace
        A list is a command line, and is kept in ``argv``.
    """

    argv: list[str] | None = None

    def __init__(self, d: Any) -> None:
        if isinstance(d, list):
            self.argv = d
        elif isinstance(d, Mapping):
            self.__dict__.update(d)
        elif isinstance(d, (Namespace, argparse.Namespace)):
            self.__dict__.update(vars(d))
        elif d is not None:
            raise UsageError(
                f"invalid tf_args of type {type(d).__name__}",
                fix="pass a mapping, an argparse.Namespace, or a list of strings",
            )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Namespace({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"


class TFParams(Params):
    """A base class that merges parameters and arguments for the user's function."""

    args: Namespace

    def merge_args_params(self) -> Namespace:
        """Return the arguments together with all parameters.

        A parameter that is set overrides an argument of the same name. An argument overrides the
        default of a parameter, unless the argument is None.
        """
        merged = copy.copy(self.args)
        for param in self.params:
            name = param.name
            if self.isSet(param) or getattr(merged, name, None) is None:
                setattr(merged, name, self.getOrDefault(param) if self.isDefined(param) else None)
        return merged


class _HasParam(Params):
    """A base class that completes the parameter of a subclass, and adds its setter and getter.

    The methods are named after the subclass: `HasEpochs` has ``setEpochs`` and ``getEpochs``.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if _HasParam in cls.__bases__:  # not an estimator or a model
            (name,) = (name for name, value in vars(cls).items() if isinstance(value, Param))
            vars(cls)[name].name = name
            _add_accessors(cls, name)


def _add_accessors(cls: type, name: str) -> None:
    def set_value(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    def get_value(self: Any) -> Any:
        return self.getOrDefault(name)

    for verb, method in (("set", set_value), ("get", get_value)):
        method.__name__ = verb + cls.__name__.removeprefix("Has")
        method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
        setattr(cls, method.__name__, method)


def _param(doc: str, convert: Any) -> Any:
    """Return a parameter without a name, which `_HasParam` sets."""
    return Param(Params._dummy(), "", doc, typeConverter=convert)


class HasBatchSize(_HasParam):
    """Parameter: number of rows in a batch."""

    batch_size = _param("number of rows in a batch", TypeConverters.toInt)


class HasClusterSize(_HasParam):
    """Parameter: number of nodes of the cluster, including parameter servers."""

    cluster_size = _param("number of nodes", TypeConverters.toInt)


class HasDriverPSNodes(_HasParam):
    """Parameter: run parameter servers on the host of the driver."""

    driver_ps_nodes = _param(
        "run parameter servers on the host of the driver", TypeConverters.toBoolean
    )


class HasEpochs(_HasParam):
    """Parameter: number of passes over the rows."""

    epochs = _param("number of passes over the rows", TypeConverters.toInt)


class HasExportDir(_HasParam):
    """Parameter: directory of the SavedModel."""

    export_dir = _param("directory of the SavedModel", TFTypeConverters.toOptionalString)


class HasFeedTimeout(_HasParam):
    """Parameter: seconds without progress until a feed fails."""

    feed_timeout = _param("seconds without progress until a feed fails", TypeConverters.toInt)


class HasGraceSecs(_HasParam):
    """Parameter: seconds that an evaluator may run after the workers have ended."""

    grace_secs = _param(
        "seconds that an evaluator may run after the workers have ended", TypeConverters.toInt
    )


class HasInputMapping(_HasParam):
    """Parameter: mapping of columns to input tensors. Columns are fed sorted by name."""

    input_mapping = _param("columns to input tensors", TFTypeConverters.toDict)


class HasInputMode(_HasParam):
    """Parameter: source of the rows, Spark or the user's function."""

    input_mode = _param("TFCluster.InputMode", TFTypeConverters.toInputMode)


class HasMasterNode(_HasParam):
    """Parameter: role of the first worker. None stands for ``worker:0``."""

    master_node = _param(
        'role of the first worker, "chief" or "master"', TFTypeConverters.toOptionalString
    )


class HasModelDir(_HasParam):
    """Parameter: directory of the checkpoints."""

    model_dir = _param("directory of checkpoints", TFTypeConverters.toOptionalString)


class HasNumPS(_HasParam):
    """Parameter: number of parameter servers."""

    num_ps = _param("number of parameter servers", TypeConverters.toInt)


class HasOutputMapping(_HasParam):
    """Parameter: mapping of output tensors to columns, sorted by the tensors' names."""

    output_mapping = _param("output tensors to columns", TFTypeConverters.toDict)


class HasProtocol(_HasParam):
    """Parameter without effect, for programs that set it: TensorFlow always uses gRPC."""

    protocol = _param("not used", TypeConverters.toString)


class HasReaders(_HasParam):
    """Parameter: number of readers, for functions that use this argument."""

    readers = _param("number of readers", TypeConverters.toInt)


class HasSignatureDefKey(_HasParam):
    """Parameter: signature of the SavedModel to call."""

    signature_def_key = _param("signature of the SavedModel", TFTypeConverters.toOptionalString)


class HasSteps(_HasParam):
    """Parameter: number of steps, for functions that use this argument."""

    steps = _param("number of steps", TypeConverters.toInt)


class HasTagSet(_HasParam):
    """Parameter: tags of the SavedModel, separated by commas."""

    tag_set = _param("tags of the SavedModel", TFTypeConverters.toOptionalString)


class HasTensorboard(_HasParam):
    """Parameter: start TensorBoard next to the first worker."""

    tensorboard = _param("start TensorBoard", TypeConverters.toBoolean)


class HasTFRecordDir(_HasParam):
    """Parameter: directory of TFRecord files for functions that read the rows themselves."""

    tfrecord_dir = _param("directory for TFRecord files", TFTypeConverters.toOptionalString)
