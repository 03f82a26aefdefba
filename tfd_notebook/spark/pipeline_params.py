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


def _param(name: str, doc: str, convert: Any) -> Any:
    return Param(Params._dummy(), name, doc, typeConverter=convert)


class HasBatchSize(Params):
    """Parameter: number of rows in a batch."""

    batch_size = _param("batch_size", "number of rows in a batch", TypeConverters.toInt)

    def setBatchSize(self, value: int) -> Any:
        return self._set(batch_size=value)

    def getBatchSize(self) -> Any:
        return self.getOrDefault(self.batch_size)


class HasClusterSize(Params):
    """Parameter: number of nodes of the cluster, including parameter servers."""

    cluster_size = _param("cluster_size", "number of nodes", TypeConverters.toInt)

    def setClusterSize(self, value: int) -> Any:
        return self._set(cluster_size=value)

    def getClusterSize(self) -> Any:
        return self.getOrDefault(self.cluster_size)


class HasDriverPSNodes(Params):
    """Parameter: run parameter servers on the host of the driver."""

    driver_ps_nodes = _param(
        "driver_ps_nodes",
        "run parameter servers on the host of the driver",
        TypeConverters.toBoolean,
    )

    def setDriverPSNodes(self, value: bool) -> Any:
        return self._set(driver_ps_nodes=value)

    def getDriverPSNodes(self) -> Any:
        return self.getOrDefault(self.driver_ps_nodes)


class HasEpochs(Params):
    """Parameter: number of passes over the rows."""

    epochs = _param("epochs", "number of passes over the rows", TypeConverters.toInt)

    def setEpochs(self, value: int) -> Any:
        return self._set(epochs=value)

    def getEpochs(self) -> Any:
        return self.getOrDefault(self.epochs)


class HasExportDir(Params):
    """Parameter: directory of the SavedModel."""

    export_dir = _param(
        "export_dir", "directory of the SavedModel", TFTypeConverters.toOptionalString
    )

    def setExportDir(self, value: str | None) -> Any:
        return self._set(export_dir=value)

    def getExportDir(self) -> Any:
        return self.getOrDefault(self.export_dir)


class HasFeedTimeout(Params):
    """Parameter: seconds without progress until a feed fails."""

    feed_timeout = _param(
        "feed_timeout", "seconds without progress until a feed fails", TypeConverters.toInt
    )

    def setFeedTimeout(self, value: int) -> Any:
        return self._set(feed_timeout=value)

    def getFeedTimeout(self) -> Any:
        return self.getOrDefault(self.feed_timeout)


class HasGraceSecs(Params):
    """Parameter: seconds that an evaluator may run after the last row."""

    grace_secs = _param(
        "grace_secs", "seconds that an evaluator may run after the last row", TypeConverters.toInt
    )

    def setGraceSecs(self, value: int) -> Any:
        return self._set(grace_secs=value)

    def getGraceSecs(self) -> Any:
        return self.getOrDefault(self.grace_secs)


class HasInputMapping(Params):
    """Parameter: mapping of columns to input tensors. Columns are fed sorted by name."""

    input_mapping = _param("input_mapping", "columns to input tensors", TFTypeConverters.toDict)

    def setInputMapping(self, value: Mapping[str, str]) -> Any:
        return self._set(input_mapping=value)

    def getInputMapping(self) -> Any:
        return self.getOrDefault(self.input_mapping)


class HasInputMode(Params):
    """Parameter: source of the rows, Spark or the user's function."""

    input_mode = _param("input_mode", "TFCluster.InputMode", TFTypeConverters.toInputMode)

    def setInputMode(self, value: int) -> Any:
        return self._set(input_mode=value)

    def getInputMode(self) -> Any:
        return self.getOrDefault(self.input_mode)


class HasMasterNode(Params):
    """Parameter: role of the first worker. None stands for ``worker:0``."""

    master_node = _param(
        "master_node", 'role of the first worker, "chief"', TFTypeConverters.toOptionalString
    )

    def setMasterNode(self, value: str | None) -> Any:
        return self._set(master_node=value)

    def getMasterNode(self) -> Any:
        return self.getOrDefault(self.master_node)


class HasModelDir(Params):
    """Parameter: directory of the checkpoints."""

    model_dir = _param("model_dir", "directory of checkpoints", TFTypeConverters.toOptionalString)

    def setModelDir(self, value: str | None) -> Any:
        return self._set(model_dir=value)

    def getModelDir(self) -> Any:
        return self.getOrDefault(self.model_dir)


class HasNumPS(Params):
    """Parameter: number of parameter servers."""

    num_ps = _param("num_ps", "number of parameter servers", TypeConverters.toInt)

    def setNumPS(self, value: int) -> Any:
        return self._set(num_ps=value)

    def getNumPS(self) -> Any:
        return self.getOrDefault(self.num_ps)


class HasOutputMapping(Params):
    """Parameter: mapping of output tensors to columns, sorted by the tensors' names."""

    output_mapping = _param("output_mapping", "output tensors to columns", TFTypeConverters.toDict)

    def setOutputMapping(self, value: Mapping[str, str]) -> Any:
        return self._set(output_mapping=value)

    def getOutputMapping(self) -> Any:
        return self.getOrDefault(self.output_mapping)


class HasProtocol(Params):
    """Parameter without effect, for programs that set it: TensorFlow always uses gRPC."""

    protocol = _param("protocol", "not used", TypeConverters.toString)

    def setProtocol(self, value: str) -> Any:
        return self._set(protocol=value)

    def getProtocol(self) -> Any:
        return self.getOrDefault(self.protocol)


class HasReaders(Params):
    """Parameter: number of readers, for functions that use this argument."""

    readers = _param("readers", "number of readers", TypeConverters.toInt)

    def setReaders(self, value: int) -> Any:
        return self._set(readers=value)

    def getReaders(self) -> Any:
        return self.getOrDefault(self.readers)


class HasSignatureDefKey(Params):
    """Parameter: signature of the SavedModel to call."""

    signature_def_key = _param(
        "signature_def_key", "signature of the SavedModel", TFTypeConverters.toOptionalString
    )

    def setSignatureDefKey(self, value: str | None) -> Any:
        return self._set(signature_def_key=value)

    def getSignatureDefKey(self) -> Any:
        return self.getOrDefault(self.signature_def_key)


class HasSteps(Params):
    """Parameter: number of steps, for functions that use this argument."""

    steps = _param("steps", "number of steps", TypeConverters.toInt)

    def setSteps(self, value: int) -> Any:
        return self._set(steps=value)

    def getSteps(self) -> Any:
        return self.getOrDefault(self.steps)


class HasTagSet(Params):
    """Parameter: tags of the SavedModel, separated by commas."""

    tag_set = _param("tag_set", "tags of the SavedModel", TFTypeConverters.toOptionalString)

    def setTagSet(self, value: str | None) -> Any:
        return self._set(tag_set=value)

    def getTagSet(self) -> Any:
        return self.getOrDefault(self.tag_set)


class HasTensorboard(Params):
    """Parameter: start TensorBoard next to the first worker."""

    tensorboard = _param("tensorboard", "start TensorBoard", TypeConverters.toBoolean)

    def setTensorboard(self, value: bool) -> Any:
        return self._set(tensorboard=value)

    def getTensorboard(self) -> Any:
        return self.getOrDefault(self.tensorboard)


class HasTFRecordDir(Params):
    """Parameter: directory of TFRecord files for functions that read the rows themselves."""

    tfrecord_dir = _param(
        "tfrecord_dir", "directory for TFRecord files", TFTypeConverters.toOptionalString
    )

    def setTFRecordDir(self, value: str | None) -> Any:
        return self._set(tfrecord_dir=value)

    def getTFRecordDir(self) -> Any:
        return self.getOrDefault(self.tfrecord_dir)
