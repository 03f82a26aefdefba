"""TensorFlow in a ``pyspark.ml`` pipeline: an estimator that trains, a model that infers.

The counterpart is ``tensorflowonspark.pipeline``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from pyspark.ml import Estimator, Model

from tfd_notebook.errors import TfdError, UnknownName, UsageError
from tfd_notebook.spark import TFCluster, dfutil, pipeline_inference, pipeline_params
from tfd_notebook.spark.driver import application, jobs
from tfd_notebook.spark.driver.jobs import in_background
from tfd_notebook.spark.pipeline_params import (
    HasBatchSize,
    HasClusterSize,
    HasDriverPSNodes,
    HasEpochs,
    HasExportDir,
    HasFeedTimeout,
    HasGraceSecs,
    HasInputMapping,
    HasInputMode,
    HasMasterNode,
    HasModelDir,
    HasNumPS,
    HasOutputMapping,
    HasProtocol,
    HasReaders,
    HasSignatureDefKey,
    HasSteps,
    HasTagSet,
    HasTensorboard,
    HasTFRecordDir,
    Namespace,
    TFParams,
)
from tfd_notebook.spark.tfrecords import located

__all__ = ["TFEstimator", "TFModel"]
__all__ += pipeline_params.__all__


class TFEstimator(
    Estimator,
    TFParams,
    HasInputMapping,
    HasInputMode,
    HasClusterSize,
    HasEpochs,
    HasBatchSize,
    HasSteps,
    HasNumPS,
    HasDriverPSNodes,
    HasMasterNode,
    HasProtocol,
    HasReaders,
    HasGraceSecs,
    HasFeedTimeout,
    HasTensorboard,
    HasModelDir,
    HasExportDir,
    HasTFRecordDir,
):
    """Trains a model on a cluster that is started for it, from a DataFrame.

    Parameters
    ----------
    train_fn : callable
        ``train_fn(args, ctx)``, run in every node. It exports a SavedModel to ``args.export_dir``
        if the model shall infer.
    tf_args : mapping, argparse.Namespace or list of str
        What `train_fn` gets, with all parameters among it; a list it gets as it is.
    export_fn : callable, optional
        ``export_fn(args)``, run once on an executor when the cluster has ended.

    Notes
    -----
    With ``InputMode.SPARK``, the default, it is fed the columns of the input mapping, in the order
    of their names. With ``InputMode.TENSORFLOW`` it finds TFRecord files in ``args.tfrecord_dir``:
    those that the DataFrame was loaded from, or what is written there.
    """

    def __init__(
        self,
        train_fn: Callable[[Any, Any], Any],
        tf_args: Any,
        export_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self.train_fn = train_fn
        self.args = Namespace(tf_args)
        self.export_fn = export_fn
        self._setDefault(
            input_mapping={},
            input_mode=int(TFCluster.InputMode.SPARK),
            cluster_size=1,
            epochs=1,
            batch_size=100,
            steps=1000,
            num_ps=0,
            driver_ps_nodes=False,
            master_node="chief",
            protocol="grpc",
            readers=1,
            grace_secs=30,
            feed_timeout=600,
            tensorboard=False,
            model_dir=None,
            export_dir=None,
            tfrecord_dir=None,
        )

    def fit_async(self, dataset: Any, params: Any = None) -> Future[TFModel]:
        """Train in the background.

        Parameters
        ----------
        dataset : pyspark.sql.DataFrame
        params : mapping of Param, optional
            As ``fit`` takes them.

        Returns
        -------
        concurrent.futures.Future
            Of what ``fit`` returns or raises.
        """
        return in_background(lambda: self.fit(dataset, params), "fit")

    def _fit(self, dataset: Any) -> TFModel:
        sc = application.context_of(dataset.sparkSession, "a pipeline")
        merged = self.merge_args_params()
        columns = _columns(dataset, merged.input_mapping)
        mode = TFCluster.InputMode.SPARK
        if merged.input_mode == TFCluster.InputMode.SPARK:
            if not columns:
                raise UsageError(
                    "no column would be fed: the input mapping is empty",
                    fix='setInputMapping({"column": "tensor"})',
                )
        else:
            mode = TFCluster.InputMode.TENSORFLOW
            files = _as_files(dataset, merged.tfrecord_dir, columns)
            vars(merged)["tfrecord_dir"] = files
        tf_args = merged.argv or merged
        cluster = TFCluster.run(
            sc,
            self.train_fn,
            tf_args,
            merged.cluster_size,
            merged.num_ps,
            merged.tensorboard,
            mode,
            log_dir=merged.model_dir,
            driver_ps_nodes=merged.driver_ps_nodes,
            master_node=merged.master_node,
        )
        try:
            if mode is TFCluster.InputMode.SPARK:
                cluster.train(
                    dataset.select(columns), merged.epochs, feed_timeout=merged.feed_timeout
                )
            cluster.shutdown(grace_secs=merged.grace_secs)
        except BaseException:
            with contextlib.suppress(TfdError):
                cluster.shutdown(timeout=60)
            raise
        if self.export_fn is not None:
            jobs.collect(
                sc.parallelize([0], 1), functools.partial(_export, self.export_fn, tf_args)
            )
        model: TFModel = self._copyValues(TFModel(self.args))
        return model


class TFModel(
    Model,
    TFParams,
    HasInputMapping,
    HasOutputMapping,
    HasBatchSize,
    HasModelDir,
    HasExportDir,
    HasSignatureDefKey,
    HasTagSet,
):
    """Infers with a SavedModel, in the executors' Python, one batch of rows after the other.

    Parameters
    ----------
    tf_args : mapping, argparse.Namespace or list of str
        Arguments that stand for parameters that are not set: ``export_dir``, ``batch_size``,
        ``signature_def_key`` and so on.

    Notes
    -----
    The result has the columns of the output mapping, in the order of the tensors' names, and none
    of the input: whole numbers as ``bigint``, floating-point ones as ``double``, strings as
    ``binary``, further dimensions as arrays. An executor keeps the model it used last.
    """

    def __init__(self, tf_args: Any) -> None:
        super().__init__()
        self.args = Namespace(tf_args)
        self._setDefault(
            input_mapping={},
            output_mapping={},
            batch_size=100,
            model_dir=None,
            export_dir=None,
            signature_def_key=None,
            tag_set=None,
        )

    def transform_async(self, dataset: Any, params: Any = None) -> Future[Any]:
        """Look at the model in the background, which ``transform`` waits for.

        Parameters
        ----------
        dataset : pyspark.sql.DataFrame
        params : mapping of Param, optional
            As ``transform`` takes them.

        Returns
        -------
        concurrent.futures.Future
            Of the DataFrame that ``transform`` returns, lazy as any other, or of what it raises.
        """
        return in_background(lambda: self.transform(dataset, params), "transform")

    def _transform(self, dataset: Any) -> Any:
        merged = self.merge_args_params()
        sc = application.context_of(dataset.sparkSession, "a pipeline")
        columns = _columns(dataset, merged.input_mapping)
        for name, mapping in (
            ("input", merged.input_mapping),
            ("output", merged.output_mapping),
        ):
            if not mapping:
                raise UsageError(
                    f"the {name} mapping is empty", fix=f"set{name.capitalize()}Mapping({{...}})"
                )
        directory = merged.export_dir or merged.model_dir
        if not directory:
            raise UsageError("no SavedModel is named", fix="setExportDir(directory)")
        if merged.batch_size < 1:
            raise UsageError(f"batch_size={merged.batch_size} is no number of rows")
        wanted = pipeline_inference.Signature(
            located(sc, directory),
            tuple((merged.tag_set or "serve").split(",")),
            merged.signature_def_key or "serving_default",
            {column: merged.input_mapping[column] for column in columns},
            dict(merged.output_mapping),
            merged.batch_size,
        )
        one = sc.parallelize([0], 1)
        (described,) = jobs.collect(one, functools.partial(_describe, wanted))
        schema = _schema(described.outputs)
        return dataset.select(columns).mapInArrow(
            functools.partial(pipeline_inference.run, wanted, described.inputs, schema.jsonValue()),
            schema,
        )


def _columns(dataset: Any, mapping: Mapping[str, str]) -> list[str]:
    """Return the columns of an input mapping as they are fed: by name."""
    for name in mapping:
        if name not in dataset.columns:
            raise UnknownName(
                f"the input mapping names {name!r}, which is no column",
                fix=f"the columns are {', '.join(dataset.columns)}",
            )
    vectors = [name for name, kind in dataset.dtypes if name in mapping and kind == "vector"]
    if vectors:
        raise UsageError(
            f"column {vectors[0]!r} holds vectors of pyspark.ml, which are no arrays",
            fix="pyspark.ml.functions.vector_to_array(column)",
        )
    return sorted(mapping)


def _as_files(dataset: Any, directory: str | None, columns: list[str]) -> str:
    """Return where the rows of a DataFrame are as TFRecord files; written if need be."""
    if dfutil.isLoadedDF(dataset):
        return dfutil.loadedDF[dataset]
    if not directory:
        raise UsageError(
            "with InputMode.TENSORFLOW the rows are read from files, and no directory is named",
            fix="setTFRecordDir(directory), or a DataFrame of dfutil.loadTFRecords",
        )
    dfutil.saveAsTFRecords(dataset.select(columns) if columns else dataset, directory)
    return located(dataset.sparkSession.sparkContext, directory)


def _schema(outputs: Sequence[tuple[str, str, int]]) -> Any:
    from pyspark.sql import types

    kinds = {
        "boolean": types.BooleanType(),
        "binary": types.BinaryType(),
        "bigint": types.LongType(),
        "double": types.DoubleType(),
    }
    made = types.StructType()
    for column, kind, dimensions in outputs:
        type_: Any = kinds[kind]
        for _ in range(dimensions):
            type_ = types.ArrayType(type_)
        made.add(column, type_)
    return made


def _describe(wanted: pipeline_inference.Signature, index: int, rows: Any) -> Iterator[Any]:
    yield pipeline_inference.describe(wanted)


def _export(export_fn: Callable[[Any], Any], tf_args: Any, index: int, rows: Any) -> Any:
    export_fn(tf_args)
    return ()
