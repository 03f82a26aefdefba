"""Estimator and model of a ``pyspark.ml`` pipeline, with TensorFlow.

The counterpart is ``tensorflowonspark.pipeline``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
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
from tfd_notebook.spark.tfrecords import absolute_path

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
    """An estimator that trains a model from a DataFrame, on a cluster that it starts.

    Parameters
    ----------
    train_fn : callable
        ``train_fn(args, ctx)``, run in every node. For inference it must export a SavedModel to
        ``args.export_dir``.
    tf_args : mapping, argparse.Namespace or list of str
        Arguments of `train_fn`, to which all parameters are added. A list is passed unchanged.
    export_fn : callable, optional
        ``export_fn(args)``, run once on an executor after the cluster has ended.

    Notes
    -----
    With ``InputMode.SPARK``, the default, the columns of the input mapping are fed, sorted by
    name. With ``InputMode.TENSORFLOW`` the function reads TFRecord files in ``args.tfrecord_dir``.
    These are the files that the DataFrame was loaded from. Otherwise the estimator writes them.
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
        As for ``fit``.

        Returns
        -------
        concurrent.futures.Future
            A future with the result or the error of ``fit``.
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
                    "the input mapping is empty: no column would be fed",
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
    """A model that runs a SavedModel in Spark's Python workers, one batch of rows at a time.

    Parameters
    ----------
    tf_args : mapping, argparse.Namespace or list of str
        Values for parameters that are not set: ``export_dir``, ``batch_size``,
        ``signature_def_key`` and so on.

    Notes
    -----
    The result has the columns of the output mapping, sorted by the tensors' names, and no input
    columns. Whole numbers become ``bigint``, floating-point numbers ``double``, strings
    ``binary``, and further dimensions arrays. Each Python worker caches the last model.
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
        """Inspect the model in the background, and return the future of ``transform``.

        Parameters
        ----------
        dataset : pyspark.sql.DataFrame
        params : mapping of Param, optional
            As for ``transform``.

        Returns
        -------
        concurrent.futures.Future
            A future with the lazy DataFrame that ``transform`` returns, or its error.
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
                    f"the {name} mapping is empty",
                    fix=f"call set{name.capitalize()}Mapping({{...}})",
                )
        directory = merged.export_dir or merged.model_dir
        if not directory:
            raise UsageError("missing directory of the SavedModel", fix="setExportDir(directory)")
        if merged.batch_size < 1:
            raise UsageError(f"invalid batch_size {merged.batch_size}: expected 1 or more")
        signature = pipeline_inference.Signature(
            absolute_path(sc, directory),
            tuple((merged.tag_set or "serve").split(",")),
            merged.signature_def_key or "serving_default",
            {column: merged.input_mapping[column] for column in columns},
            dict(merged.output_mapping),
            merged.batch_size,
        )
        single_task = sc.parallelize([0], 1)
        (info,) = jobs.collect(single_task, functools.partial(_describe, signature))
        schema = dfutil.struct(info.outputs)
        return dataset.select(columns).mapInArrow(
            functools.partial(pipeline_inference.run, signature, info.inputs, schema.jsonValue()),
            schema,
        )


def _columns(dataset: Any, mapping: Mapping[str, str]) -> list[str]:
    """Return the columns of an input mapping, sorted by name as they are fed."""
    for name in mapping:
        if name not in dataset.columns:
            raise UnknownName(
                f"invalid column {name!r} in the input mapping",
                fix=f"use one of the columns {', '.join(dataset.columns)}",
            )
    vectors = [name for name, kind in dataset.dtypes if name in mapping and kind == "vector"]
    if vectors:
        raise UsageError(
            f"column {vectors[0]!r} holds vectors of pyspark.ml instead of arrays",
            fix="convert it with pyspark.ml.functions.vector_to_array(column)",
        )
    return sorted(mapping)


def _as_files(dataset: Any, directory: str | None, columns: list[str]) -> str:
    """Return the directory of a DataFrame's TFRecord files, and write them if necessary."""
    if dfutil.isLoadedDF(dataset):
        return dfutil.loadedDF[dataset]
    if not directory:
        raise UsageError(
            "missing directory: with InputMode.TENSORFLOW the rows are read from files",
            fix="call setTFRecordDir(directory), or use a DataFrame of dfutil.loadTFRecords",
        )
    dfutil.saveAsTFRecords(dataset.select(columns) if columns else dataset, directory)
    return absolute_path(dataset.sparkSession.sparkContext, directory)


def _describe(signature: pipeline_inference.Signature, index: int, rows: Any) -> Iterator[Any]:
    yield pipeline_inference.describe(signature)


def _export(export_fn: Callable[[Any], Any], tf_args: Any, index: int, rows: Any) -> Any:
    export_fn(tf_args)
    return ()
