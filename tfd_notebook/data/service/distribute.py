"""Datasets that are read through the tf.data service of a cluster.

These functions correspond to those of ``tf.data.experimental.service``. In addition, they reject
calls that would hang or lose data. They send the user's Python functions to the data workers. They
choose defaults for the hosts of consumer and workers, and return datasets that are observed.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tfd_notebook._compat.tf_data import autograph, graph
from tfd_notebook._compat.tf_data.pipeline_model import buffers_of, shares_of, splits_of
from tfd_notebook.data.bottleneck.usage import Delivery, ServiceReadOptions
from tfd_notebook.data.consume.observe import check_dataset, plain, watch
from tfd_notebook.data.service import captured_state, elements, validation
from tfd_notebook.data.service.changes import check_semantics
from tfd_notebook.data.service.division import Division, divide
from tfd_notebook.data.service.options import STATIC, ReadOptions, mode_of
from tfd_notebook.data.service.protocols import DataServiceProtocol, Registered
from tfd_notebook.data.service.saving import Saving
from tfd_notebook.errors import DataError, UsageError
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.spec import check_seconds

#: The mode in which a dataset is checked when it is registered. Its changes occur in all modes.
_REGISTERED_MODE = "OFF"

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _eagerly(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run `function` outside of the ``tf.function`` that calls it, if one does."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        import tensorflow as tf

        with tf.init_scope():
            return function(*args, **kwargs)

    return call


def distribute(
    cluster: DataServiceProtocol,
    processing_mode: Any,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    compression: str | None = "auto",
    cross_trainer_cache: Any = None,
    target_workers: str = "AUTO",
    semantics: str = "checked",
) -> Callable[[Any], Any]:
    """Return a function for ``Dataset.apply`` that runs the dataset on the data workers.

    Parameters
    ----------
    cluster : DataServiceProtocol
    processing_mode : str or tf.data.experimental.service.ShardingPolicy
        ``"off"``, ``"dynamic"``, ``"file"``, ``"data"``, ``"file_or_data"``, ``"hint"``,
        ``"parallel_epochs"`` (same as off) or ``"distributed_epoch"`` (same as dynamic).
    job_name : str, optional
        Consumers with the same name share one job. Default: a separate job.
    consumer_index, num_consumers : int, optional
        For coordinated reads: `num_consumers` consumers read one element each per round.
    max_outstanding_requests : int, optional
        Maximum number of elements in transfer. Default: TensorFlow's choice.
    data_transfer_protocol : str, optional
        Default: ``"local"`` if the workers run in this process, else TensorFlow's choice. A
        coordinated read uses ``"grpc"`` here, because ``"local"`` cannot serve it.
    compression : {"auto", "AUTO", "snappy", None}
        ``"auto"`` (default) does not compress on one host and leaves it to TensorFlow
        (``"AUTO"``) between hosts. It uses ``"AUTO"`` also for elements that TensorFlow can only
        send compressed, such as a single ragged tensor.
    cross_trainer_cache : tf.data.experimental.service.CrossTrainerCache, optional
    target_workers : {"AUTO", "ANY", "LOCAL"}
        The workers to read from. Default ``"AUTO"``.
    semantics : {"checked", "same", "tensorflow"}
        ``"checked"`` (default) refuses a pipeline that would join or lose elements, and warns of
        other changes. ``"same"`` runs operations whose result would change in this process, with
        those after them. It refuses what would still change. Elements arrive in no fixed order,
        which also applies to the members of batches. ``"tensorflow"`` checks nothing.

    Returns
    -------
    callable
        Takes a ``tf.data.Dataset`` and returns one that is observed. If each
        epoch delivers each element exactly once, its cardinality is exact, and a shorter epoch
        raises an error. A dataset that is created in a ``tf.function``, or in the function of
        ``interleave`` or ``flat_map``, is distributed without observation. Its cardinality is
        unknown.

    Raises
    ------
    DataChanged
        Elements would be joined with wrong ones, or lost.
    UsageError, NoWorkers, NotSerializable, FinishedJob, DispatcherLost
        Either here or when the function is called. Later calls do not hang.

    See Also
    --------
    tf.data.experimental.service.distribute
    """
    reading = ReadOptions(
        mode_of(processing_mode),
        job_name,
        consumer_index,
        num_consumers,
        max_outstanding_requests,
        data_transfer_protocol,
        cross_trainer_cache,
        target_workers,
    )
    return _distributor(cluster, reading, compression, check_semantics(semantics))


class Distributor(Handle):
    """The result of `distribute`: a function that applies a service to a dataset."""

    _instead = "call distribute in the process that reads, or send the id from cluster.register"

    def __init__(self, apply: Callable[[Any], Any]) -> None:
        self._apply = apply

    def __call__(self, dataset: Any) -> Any:
        return self._apply(dataset)


autograph.keep_unconverted(Distributor)  # a tf.function may call an object of it


def _distributor(
    cluster: DataServiceProtocol, reading: ReadOptions, compression: str | None, semantics: str
) -> Callable[[Any], Any]:
    """Return the function of `distribute`."""
    elements.check_compression(compression)
    job_name = reading.job_name

    def distribute_again(
        dataset: Any, compression: str | None = compression, semantics: str = "tensorflow"
    ) -> Any:
        alone = dataclasses.replace(
            reading,
            job_name=None,
            consumer_index=None,
            num_consumers=None,
            cross_trainer_cache=None,
        )
        return _distributor(cluster, alone, compression, semantics)(dataset)

    def transfer_of(dataset: Any) -> elements.Transfer:
        by_reference = reading.transfer(cluster.service_in_process) == "local"
        on_this_host = cluster.service_on_this_host
        return elements.transfer_of(compression, dataset.element_spec, on_this_host, by_reference)

    def through_service(dataset: Any, transfer: elements.Transfer) -> Any:
        from tensorflow.data.experimental import service

        reading.check_tags(cluster.service_in_process, cluster.worker_tags)
        validation.check_job(cluster, reading, job_name)
        arguments = reading.tensorflow_arguments(cluster.service_in_process)
        return validation.translated(
            lambda: dataset.apply(
                service.distribute(
                    service=cluster.service_target, compression=transfer.compression, **arguments
                )
            )
        )

    def apply(dataset: Any) -> Any:
        import tensorflow as tf

        check_dataset(dataset)
        if semantics == "same" and not graph.is_traced(dataset):
            with tf.init_scope():
                parts = divide(dataset, reading.mode, cluster.service_in_process)
                if parts is not None:
                    return apply_divided(parts)
        transfer = transfer_of(dataset)
        if graph.is_traced(dataset):
            ops = validation.prepare_traced(cluster, dataset, reading.mode, semantics)
            dataset = graph.with_rebatch(dataset, ops)
            validation.print_delivery(cluster, reading.mode)
            with warnings.catch_warnings():
                # TensorFlow warns about its own call, and the caller cannot change that call.
                warnings.filterwarnings("ignore", "To make it possible to preserve tf.data options")
                return through_service(dataset, transfer)
        # A function that is being traced can use a dataset from outside the function for an
        # unknown time.
        permanent = job_name is not None or not tf.executing_eagerly()
        with tf.init_scope():
            return apply_eagerly(dataset, transfer, permanent)

    def apply_divided(parts: Division) -> Any:
        names = parts.local_names()
        if names and (job_name is not None or reading.num_consumers is not None):
            raise UsageError(
                f"{names} must run in each consumer of the shared job, so each would have another "
                "result",
                fix='omit job_name= and num_consumers=, or use semantics="checked"',
            )
        read = parts.build(_distributor(cluster, reading, compression, "tensorflow"))
        if not parts.local:
            return read
        before = validation.BeforeReading(cluster, None)
        if not names:  # all of it consists of random numbers
            return watch(read, cluster.consumers, before=before)
        validation.print_note(
            f"cluster {cluster.name!r}: {parts.note(reading.mode, cluster.service_in_process)}"
        )
        return watch(read, cluster.consumers, f"dataset (here from {names})", before)

    def apply_eagerly(dataset: Any, transfer: elements.Transfer, permanent: bool) -> Any:
        from tensorflow.data.experimental import INFINITE_CARDINALITY, assert_cardinality

        pipeline = validation.prepare(
            cluster,
            dataset,
            reading.mode,
            semantics,
            permanent=permanent,
            divisible=job_name is None and reading.num_consumers is None,
        )
        cardinality = int(dataset.cardinality())
        validation.check_infinite(reading, cardinality)
        captured = captured_state.states_of(dataset, pipeline.semantics)
        ops = pipeline.semantics.ops
        read = through_service(graph.with_rebatch(dataset, ops), transfer)
        key = graph.service_id(read)
        if (
            reading.mode == "DYNAMIC"
            and pipeline.keeps_count
            and cardinality >= 0
            and job_name is None
            and reading.target_workers != "LOCAL"
            and cluster.policy.on_loss == "raise"
        ):
            read = read.apply(assert_cardinality(cardinality))
        infinite = cardinality == INFINITE_CARDINALITY
        refused = validation.refused_later(pipeline.semantics, reading.mode, semantics)
        checked = captured if semantics != "tensorflow" else ()
        groups = validation.short_batches(pipeline.semantics, reading.mode)
        before = validation.BeforeReading(
            cluster, job_name, checked, refused, reading.mode, cardinality, len(groups)
        )
        # Stages that count elements, such as batch, produce an incomplete last one on each worker.
        expected = cardinality if reading.mode == "OFF" or pipeline.keeps_count else -1
        splits = splits_of(dataset, by_file=reading.mode in STATIC)
        delivery = Delivery(
            weakref.ref(cluster),
            expected,
            reading.mode,
            job_name,
            reading.needs_infinite is not None,
            splits,
            reading.consumer,
            one_worker=refused is not None,
            cached=validation.keeps_workers(pipeline.semantics, reading.mode, semantics),
            shares=shares_of(dataset, reading.mode),
        )
        failure = delivery.failure(validation.require_workers(cluster))
        validation.print_delivery(cluster, reading.mode, pipeline.semantics, infinite, failure)
        read._tfd_service = ServiceReadOptions(
            delivery,
            dataset,
            transfer.compressed_by_choice,
            distribute_again,
            lambda: before.joined,
            captured,
            pipeline.semantics,
            warned=semantics != "tensorflow",
        )
        known = cluster.registered.get(key, Registered(-1, None))
        cluster.registered[key] = Registered(
            cardinality if pipeline.keeps_count else -1,
            splits_of(dataset),
            weakref.ref(read),
            buffers_of(dataset),
            pipeline.semantics,
            semantics,
            alone=known.alone_with(graph.variant_of(read), refused),
        )
        return watch(read, cluster.consumers, validation.listed_as(job_name), before)

    return Distributor(apply)


@_eagerly
def register(
    cluster: DataServiceProtocol,
    dataset: Any,
    dataset_id: str | None = None,
    compression: str | None = "auto",
    semantics: str = "checked",
) -> str:
    """Register a dataset with the service, for `from_dataset_id` in this or another process.

    Parameters
    ----------
    cluster : DataServiceProtocol
    dataset : tf.data.Dataset
    dataset_id : str, optional
        The id under which it is registered. The same dataset can be registered again. Default:
        the dispatcher chooses an id.
    compression : {"auto", "AUTO", "snappy", None}
        As in `distribute`.
    semantics : {"checked", "same", "tensorflow"}
        As in `distribute`, but ``"same"`` refuses every change. It also applies to
        `from_dataset_id` in this process.

    Returns
    -------
    str
        The dataset's id.

    Raises
    ------
    UsageError, NoWorkers, NotSerializable, DispatcherLost

    See Also
    --------
    tf.data.experimental.service.register_dataset
    """
    from tensorflow.data.experimental import service

    elements.check_compression(compression)
    check_dataset(dataset)
    spec = dataset.element_spec
    # Readers in other processes, and coordinated reads, cannot read by reference.
    by_reference = cluster.service_in_process and elements.uncompressible(spec) is not None
    transfer = elements.transfer_of(compression, spec, cluster.service_on_this_host, by_reference)
    prepared = validation.prepare(cluster, dataset, _REGISTERED_MODE, check_semantics(semantics))
    captured = captured_state.states_of(dataset, prepared.semantics)
    registered = validation.translated(
        lambda: service.register_dataset(
            cluster.service_target,
            graph.with_rebatch(dataset, prepared.semantics.ops),
            compression=transfer.compression,
            dataset_id=dataset_id,
        )
    )
    registered_id = str(registered.numpy().decode())
    known = cluster.registered.get(registered_id, Registered(-1, None))
    cluster.registered[registered_id] = Registered(
        int(dataset.cardinality()) if prepared.keeps_count else -1,
        splits_of(dataset),
        buffers=buffers_of(dataset),
        semantics=prepared.semantics,
        check=semantics,
        captured=captured,
        alone=known.alone,
        shares={mode: shares_of(dataset, mode) for mode in STATIC},
    )
    return registered_id


def from_dataset_id(
    cluster: DataServiceProtocol,
    processing_mode: Any,
    dataset_id: Any,
    element_spec: Any = None,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    cross_trainer_cache: Any = None,
    target_workers: str = "AUTO",
    semantics: str | None = None,
) -> Any:
    """Return a dataset that reads a registered one. See `distribute` for the other arguments.

    Parameters
    ----------
    cluster : DataServiceProtocol
    processing_mode : str or tf.data.experimental.service.ShardingPolicy
    dataset_id : str, bytes or int
        From `register`.
    element_spec : nested structure of tf.TypeSpec, optional
        Default: the specification that the dispatcher has.
    semantics : {"checked", "same", "tensorflow"}, optional
        As in `register`. Default: that of `register` in this process. For a dataset that another
        process has registered: ``"checked"``, with the graph that the dispatcher has.

    Returns
    -------
    tf.data.Dataset
        It is observed.

    Raises
    ------
    UsageError, NoWorkers, FinishedJob, DispatcherLost

    See Also
    --------
    tf.data.experimental.service.from_dataset_id
    """
    from tensorflow.data.experimental import service

    reading = ReadOptions(
        mode_of(processing_mode),
        job_name,
        consumer_index,
        num_consumers,
        max_outstanding_requests,
        data_transfer_protocol,
        cross_trainer_cache,
        target_workers,
    )
    reading.check_tags(cluster.service_in_process, cluster.worker_tags)
    validation.check_service(cluster)
    if reading.mode in STATIC:
        cluster.enable_static_sharding()
    if hasattr(dataset_id, "numpy"):
        dataset_id = dataset_id.numpy()
    plain_id = dataset_id.decode() if isinstance(dataset_id, bytes) else str(dataset_id)
    full_name = job_name and f"dataset_id=/{plain_id}/{job_name}"
    validation.check_job(cluster, reading, full_name)
    known = cluster.registered.get(plain_id)
    warned = None if known is None else _REGISTERED_MODE
    if known is None:
        known = Registered(-1, None, semantics=validation.external_dataset(cluster, plain_id))
    if semantics is not None:
        known = dataclasses.replace(known, check=check_semantics(semantics))
    if known.semantics is not None:
        validation.check_changes(cluster, known.semantics, reading.mode, known.check, warned)
    arguments = reading.tensorflow_arguments(cluster.service_in_process)
    read = validation.translated(
        lambda: service.from_dataset_id(
            service=cluster.service_target,
            dataset_id=plain_id,
            element_spec=element_spec,
            **arguments,
        )
    )
    by_reference = arguments["data_transfer_protocol"] == "local"
    elements.transfer_of("auto", read.element_spec, cluster.service_on_this_host, by_reference)
    coordinated = reading.consumer is not None  # which needs an infinite dataset
    validation.print_delivery(cluster, reading.mode, known.semantics, infinite=coordinated)
    checked = known.captured if known.check != "tensorflow" else ()
    refused, cached = None, False
    if known.semantics is not None:
        refused = validation.refused_later(known.semantics, reading.mode, known.check)
        cached = validation.keeps_workers(known.semantics, reading.mode, known.check)
    before = validation.BeforeReading(cluster, full_name, checked, refused, reading.mode)
    read._tfd_service = ServiceReadOptions(
        Delivery(
            weakref.ref(cluster),
            known.cardinality,
            reading.mode,
            job_name,
            splits=known.splits,
            consumer=reading.consumer,
            one_worker=refused is not None,
            cached=cached,
            shares=known.shares.get(reading.mode),
        ),
        joined=lambda: before.joined,
        captured=known.captured,
        pipeline=known.semantics,
        warned=known.check != "tensorflow",
    )
    cluster.registered[plain_id] = dataclasses.replace(
        known, read=weakref.ref(read), alone=known.alone_with(graph.variant_of(read), refused)
    )
    return watch(read, cluster.consumers, validation.listed_as(job_name), before)


@_eagerly
def save(
    cluster: DataServiceProtocol,
    dataset: Any,
    path: str,
    compression: str | None = "AUTO",
    timeout: float = 600.0,
    semantics: str = "checked",
    wait: bool = True,
) -> Saving:
    """Write a dataset to `path` on the data workers, and wait until it is complete.

    This needs ``Service(fault_tolerant=True)``. Read the result with
    ``tf.data.Dataset.load(path)``, or with ``load(path, wait=True)`` while it is written. The
    dataset can be distributed and read at the same time. Ctrl-C cancels the wait, not the writing.

    Parameters
    ----------
    cluster : DataServiceProtocol
    dataset : tf.data.Dataset
    path : str
        A directory that does not exist yet, on a file system shared by all workers.
    compression : {"AUTO", "GZIP", "SNAPPY", None}
        Default ``"AUTO"``.
    timeout : float
        Seconds to wait. Default 600. Workers receive the request with their next heartbeat, up to
        30 seconds later.
    semantics : {"checked", "same", "tensorflow"}
        As in `distribute`, but ``"same"`` refuses every change.
    wait : bool
        Whether to wait until the dataset is complete, with a line about the progress every 10
        seconds. Default true. Otherwise, call `Saving.wait` later.

    Returns
    -------
    Saving
        Reports the progress.

    Raises
    ------
    UsageError
        `path` exists, or the service keeps no journal.
    NoWorkers, NotSerializable, DispatcherLost
    DataError
        A worker failed to write.
    TimeLimit
        The dataset is not complete after `timeout` seconds. The workers keep writing.

    See Also
    --------
    tf.data.experimental.distributed_save
    """
    import tensorflow as tf

    if cluster.journal is None:
        raise UsageError(
            "saving failed: data workers can only save with a service that keeps a journal",
            fix="start the cluster with service=tfd.Service(fault_tolerant=True)",
        )
    check_seconds("timeout", timeout, 0)
    check_dataset(dataset)
    elements.check_datasets(dataset.element_spec)
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise UsageError(
            "saving failed: the dataset has no end", fix="omit repeat(), or call take() after it"
        )
    validation.prepare(cluster, dataset, "DYNAMIC", check_semantics(semantics))
    address = cluster.service_target.partition("://")[2]

    def request() -> None:
        try:
            tf.data.experimental.distributed_save(dataset, path, address, compression=compression)
        except tf.errors.AlreadyExistsError:
            raise  # a UsageError, with the same words as a failure to write
        except tf.errors.OpError as error:
            if "Failed to snapshot" in error.message:
                raise DataError(
                    f"saving to {path} failed: {plain(error.message)}",
                    fix="choose a path that the dispatcher and the data workers can write",
                ) from error
            raise

    validation.translated(request)
    splits = splits_of(dataset)
    saving = Saving(cluster, path, None if splits is None else splits.count)
    return saving.wait(timeout) if wait else saving
