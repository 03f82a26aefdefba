"""Parameters of the estimator and the model, in the manner of ``pyspark.ml``.

The counterparts are those of ``tensorflowonspark.pipeline``, where their names come from.
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
    """What parameters can be made of, beside ``pyspark.ml.param.TypeConverters``."""

    @staticmethod
    def toDict(value: Any) -> dict[str, str]:
        """Return a mapping of names to names."""
        if not isinstance(value, Mapping):
            raise TypeError(f"{value!r} is no mapping of names")
        wrong = [one for pair in value.items() for one in pair if not isinstance(one, str)]
        if wrong:
            raise TypeError(f"{wrong[0]!r} in {value!r} is no name")
        return dict(value)

    @staticmethod
    def toInputMode(value: Any) -> int:
        """Return a `TFCluster.InputMode`, as a number."""
        if value not in (0, 1):
            raise TypeError(f"{value!r} is neither InputMode.SPARK nor InputMode.TENSORFLOW")
        return int(value)

    @staticmethod
    def toOptionalString(value: Any) -> str | None:
        """Return a string, or None."""
        return None if value is None else str(TypeConverters.toString(value))


class Namespace:
    """Arguments by name, like ``argparse.Namespace``, made of whatever a program has.

    Parameters
    ----------
    d : mapping, list of str, argparse.Namespace or Namespace
        A list stands for a command line, and is kept in ``argv``.
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
                f"tf_args cannot be made of {type(d).__name__}",
                fix="a mapping, an argparse.Namespace, or a list of words",
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
    """What has parameters and arguments, which are one to the user's function."""

    args: Namespace

    def merge_args_params(self) -> Namespace:
        """Return the arguments with all parameters among them.

        A parameter that was set counts before an argument of the same name, and this before a
        parameter's default. The default counts, too, where the argument is None.
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
    """Rows in a batch."""

    batch_size = _param("batch_size", "number of rows in a batch", TypeConverters.toInt)

    def setBatchSize(self, value: int) -> Any:
        return self._set(batch_size=value)

    def getBatchSize(self) -> Any:
        return self.getOrDefault(self.batch_size)


class HasClusterSize(Params):
    """Nodes of the cluster, parameter servers among them."""

    cluster_size = _param("cluster_size", "number of nodes", TypeConverters.toInt)

    def setClusterSize(self, value: int) -> Any:
        return self._set(cluster_size=value)

    def getClusterSize(self) -> Any:
        return self.getOrDefault(self.cluster_size)


class HasDriverPSNodes(Params):
    """Whether the parameter servers run beside the driver."""

    driver_ps_nodes = _param(
        "driver_ps_nodes", "run parameter servers beside the driver", TypeConverters.toBoolean
    )

    def setDriverPSNodes(self, value: bool) -> Any:
        return self._set(driver_ps_nodes=value)

    def getDriverPSNodes(self) -> Any:
        return self.getOrDefault(self.driver_ps_nodes)


class HasEpochs(Params):
    """How often the rows are fed."""

    epochs = _param("epochs", "how often the rows are fed", TypeConverters.toInt)

    def setEpochs(self, value: int) -> Any:
        return self._set(epochs=value)

    def getEpochs(self) -> Any:
        return self.getOrDefault(self.epochs)


class HasExportDir(Params):
    """Where the SavedModel is."""

    export_dir = _param(
        "export_dir", "directory of the SavedModel", TFTypeConverters.toOptionalString
    )

    def setExportDir(self, value: str | None) -> Any:
        return self._set(export_dir=value)

    def getExportDir(self) -> Any:
        return self.getOrDefault(self.export_dir)


class HasFeedTimeout(Params):
    """Seconds without progress after which feeding gives up."""

    feed_timeout = _param(
        "feed_timeout", "seconds without progress while feeding", TypeConverters.toInt
    )

    def setFeedTimeout(self, value: int) -> Any:
        return self._set(feed_timeout=value)

    def getFeedTimeout(self) -> Any:
        return self.getOrDefault(self.feed_timeout)


class HasGraceSecs(Params):
    """Seconds that the nodes have, after the last row, to come to their end."""

    grace_secs = _param(
        "grace_secs", "seconds that nodes have after the last row", TypeConverters.toInt
    )

    def setGraceSecs(self, value: int) -> Any:
        return self._set(grace_secs=value)

    def getGraceSecs(self) -> Any:
        return self.getOrDefault(self.grace_secs)


class HasInputMapping(Params):
    """Which column becomes which tensor; columns are fed in the order of their names."""

    input_mapping = _param("input_mapping", "columns to input tensors", TFTypeConverters.toDict)

    def setInputMapping(self, value: Mapping[str, str]) -> Any:
        return self._set(input_mapping=value)

    def getInputMapping(self) -> Any:
        return self.getOrDefault(self.input_mapping)


class HasInputMode(Params):
    """Who reads the rows: Spark, or the user's function."""

    input_mode = _param("input_mode", "TFCluster.InputMode", TFTypeConverters.toInputMode)

    def setInputMode(self, value: int) -> Any:
        return self._set(input_mode=value)

    def getInputMode(self) -> Any:
        return self.getOrDefault(self.input_mode)


class HasMasterNode(Params):
    """What the first worker is called; None for ``worker:0``."""

    master_node = _param(
        "master_node", 'name of the first worker, "chief"', TFTypeConverters.toOptionalString
    )

    def setMasterNode(self, value: str | None) -> Any:
        return self._set(master_node=value)

    def getMasterNode(self) -> Any:
        return self.getOrDefault(self.master_node)


class HasModelDir(Params):
    """Where checkpoints are."""

    model_dir = _param("model_dir", "directory of checkpoints", TFTypeConverters.toOptionalString)

    def setModelDir(self, value: str | None) -> Any:
        return self._set(model_dir=value)

    def getModelDir(self) -> Any:
        return self.getOrDefault(self.model_dir)


class HasNumPS(Params):
    """Parameter servers."""

    num_ps = _param("num_ps", "number of parameter servers", TypeConverters.toInt)

    def setNumPS(self, value: int) -> Any:
        return self._set(num_ps=value)

    def getNumPS(self) -> Any:
        return self.getOrDefault(self.num_ps)


class HasOutputMapping(Params):
    """Which output tensor becomes which column; these stand in the order of the tensors' names."""

    output_mapping = _param("output_mapping", "output tensors to columns", TFTypeConverters.toDict)

    def setOutputMapping(self, value: Mapping[str, str]) -> Any:
        return self._set(output_mapping=value)

    def getOutputMapping(self) -> Any:
        return self.getOrDefault(self.output_mapping)


class HasProtocol(Params):
    """Kept for programs that set it; TensorFlow speaks gRPC."""

    protocol = _param("protocol", "kept, not used", TypeConverters.toString)

    def setProtocol(self, value: str) -> Any:
        return self._set(protocol=value)

    def getProtocol(self) -> Any:
        return self.getOrDefault(self.protocol)


class HasReaders(Params):
    """Readers, for functions that ask their arguments for it."""

    readers = _param("readers", "number of readers", TypeConverters.toInt)

    def setReaders(self, value: int) -> Any:
        return self._set(readers=value)

    def getReaders(self) -> Any:
        return self.getOrDefault(self.readers)


class HasSignatureDefKey(Params):
    """Which signature of the SavedModel is called."""

    signature_def_key = _param(
        "signature_def_key", "signature of the SavedModel", TFTypeConverters.toOptionalString
    )

    def setSignatureDefKey(self, value: str | None) -> Any:
        return self._set(signature_def_key=value)

    def getSignatureDefKey(self) -> Any:
        return self.getOrDefault(self.signature_def_key)


class HasSteps(Params):
    """Steps, for functions that ask their arguments for it."""

    steps = _param("steps", "number of steps", TypeConverters.toInt)

    def setSteps(self, value: int) -> Any:
        return self._set(steps=value)

    def getSteps(self) -> Any:
        return self.getOrDefault(self.steps)


class HasTagSet(Params):
    """Tags of the SavedModel, separated by commas."""

    tag_set = _param("tag_set", "tags of the SavedModel", TFTypeConverters.toOptionalString)

    def setTagSet(self, value: str | None) -> Any:
        return self._set(tag_set=value)

    def getTagSet(self) -> Any:
        return self.getOrDefault(self.tag_set)


class HasTensorboard(Params):
    """Whether the first worker starts TensorBoard."""

    tensorboard = _param("tensorboard", "start TensorBoard", TypeConverters.toBoolean)

    def setTensorboard(self, value: bool) -> Any:
        return self._set(tensorboard=value)

    def getTensorboard(self) -> Any:
        return self.getOrDefault(self.tensorboard)


class HasTFRecordDir(Params):
    """Where the DataFrame is written for functions that read it themselves."""

    tfrecord_dir = _param(
        "tfrecord_dir", "directory for TFRecord files", TFTypeConverters.toOptionalString
    )

    def setTFRecordDir(self, value: str | None) -> Any:
        return self._set(tfrecord_dir=value)

    def getTFRecordDir(self) -> Any:
        return self.getOrDefault(self.tfrecord_dir)
