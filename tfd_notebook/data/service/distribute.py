"""Datasets through the tf.data service of a cluster.

These functions do what those of ``tf.data.experimental.service`` do, and first what a notebook
needs: they refuse what would hang or lose data, take the user's Python functions to the workers,
choose defaults for where consumer and workers run, and leave a dataset that is watched.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from tfd_notebook._compat.tf_data import graph
from tfd_notebook._compat.tf_data.pipeline_model import buffers_of, splits_of
from tfd_notebook.data.consume.observe import check_dataset, watch
from tfd_notebook.data.service import validation
from tfd_notebook.data.service.options import STATIC, ReadOptions, compression_of, mode_of
from tfd_notebook.data.service.protocols import DataServiceProtocol, Registered
from tfd_notebook.data.service.usage import Delivery, ServiceReadOptions
from tfd_notebook.errors import DataError, TimeLimit, UsageError


def distribute(
    host: DataServiceProtocol,
    processing_mode: Any,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    compression: str | None = "auto",
    cross_trainer_cache: Any = None,
    target_workers: str = "AUTO",
) -> Callable[[Any], Any]:
    """Return a function for ``Dataset.apply`` that has the data workers make the dataset.

    Parameters
    ----------
    host : ServiceHost
        The cluster; not passed to the method of a cluster that has the same name.
    processing_mode : str or tf.data.experimental.service.ShardingPolicy
        ``"off"``, ``"dynamic"``, ``"file"``, ``"data"``, ``"file_or_data"``, ``"hint"``,
        ``"parallel_epochs"`` (which is off) or ``"distributed_epoch"`` (which is dynamic).
    job_name : str, optional
        Consumers that give the same name share one job. Default: a job of one's own.
    consumer_index, num_consumers : int, optional
        For coordinated reads: `num_consumers` consumers take elements in turn.
    max_outstanding_requests : int, optional
        Most elements under way at a time. Default: TensorFlow's choice.
    data_transfer_protocol : str, optional
        Default: ``"local"`` if the workers live in this process (``"grpc"`` for a coordinated
        read, which ``"local"`` cannot serve), else TensorFlow's choice.
    compression : {"auto", "AUTO", "snappy", None}
        ``"auto"`` (default) does not compress on one host and leaves it to TensorFlow
        (``"AUTO"``) between hosts.
    cross_trainer_cache : tf.data.experimental.service.CrossTrainerCache, optional
    target_workers : {"AUTO", "ANY", "LOCAL"}
        Which workers to read from. Default ``"AUTO"``.

    Returns
    -------
    callable
        Takes a ``tf.data.Dataset`` and returns one, watched by ``host.consumers``. Where each
        epoch is known to deliver each element once, its cardinality is exact, and an epoch that
        is cut short raises an error. A dataset that a ``tf.function``, or the function of
        ``interleave`` or ``flat_map``, makes is distributed as TensorFlow does it: it is not
        watched, and its cardinality is unknown.

    Raises
    ------
    UsageError, NoWorkers, NotSerializable, FinishedJob, DispatcherLost
        Here or when the function is called; nothing is left to hang.

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
    compression_of(compression, on_this_host=True)

    def again(dataset: Any, compression: str | None = compression) -> Any:
        return distribute(
            host,
            processing_mode,
            max_outstanding_requests=max_outstanding_requests,
            data_transfer_protocol=data_transfer_protocol,
            compression=compression,
            target_workers=target_workers,
        )(dataset)

    def through_service(dataset: Any) -> Any:
        from tensorflow.data.experimental import service

        validation.check_job(host, reading, job_name)
        arguments = reading.tensorflow_arguments(host.service_in_process)
        return validation.translated(
            lambda: dataset.apply(
                service.distribute(
                    service=host.service_target,
                    compression=compression_of(compression, host.service_on_this_host),
                    **arguments,
                )
            )
        )

    def apply(dataset: Any) -> Any:
        import tensorflow as tf

        check_dataset(dataset)
        if graph.is_traced(dataset):
            validation.prepare_traced(host, dataset, reading.mode)
            validation.print_delivery(host, reading.mode)
            with warnings.catch_warnings():
                # TensorFlow warns of its own call, and of nothing that the caller can change.
                warnings.filterwarnings("ignore", "To make it possible to preserve tf.data options")
                return through_service(dataset)
        # A function that is being traced may use a dataset from outside, and for how long it does
        # is not known.
        lasting = job_name is not None or not tf.executing_eagerly()
        with tf.init_scope():
            return apply_outside(dataset, lasting)

    def apply_outside(dataset: Any, lasting: bool) -> Any:
        from tensorflow.data.experimental import assert_cardinality

        found = validation.prepare(host, dataset, reading.mode, lasting=lasting)
        cardinality = int(dataset.cardinality())
        validation.check_endless(reading, cardinality)
        read = through_service(dataset)
        key = graph.service_id(read)
        if (
            reading.mode == "DYNAMIC"
            and found.keeps_count
            and cardinality >= 0
            and job_name is None
            and target_workers != "LOCAL"
            and host.policy.on_loss == "raise"
        ):
            read = read.apply(assert_cardinality(cardinality))
        validation.print_delivery(host, reading.mode)
        before = validation.BeforeReading(host, job_name)
        compressed = compression_of(compression, host.service_on_this_host) is not None
        # Stages that count for themselves, such as batch, give each worker a last one of its own.
        expected = cardinality if reading.mode == "OFF" or found.keeps_count else -1
        endless = reading.needs_infinite is not None
        splits = splits_of(dataset)
        delivery = Delivery(weakref.ref(host), expected, reading.mode, job_name, endless, splits)
        read._tfd_service = ServiceReadOptions(
            delivery, dataset, compressed, again, lambda: before.joined
        )
        host.registered[key] = Registered(
            cardinality if found.keeps_count else -1,
            splits,
            weakref.ref(read),
            buffers_of(dataset),
        )
        return watch(read, host.consumers, validation.listed_as(job_name), before)

    return apply


def register(
    host: DataServiceProtocol,
    dataset: Any,
    dataset_id: str | None = None,
    compression: str | None = "auto",
) -> str:
    """Register a dataset with the service, for `from_dataset_id` here or in another process.

    Parameters
    ----------
    host : ServiceHost
    dataset : tf.data.Dataset
    dataset_id : str, optional
        The id to register it under; the same dataset can be registered again. Default: one that
        the dispatcher chooses.
    compression : {"auto", "AUTO", "snappy", None}
        As in `distribute`.

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

    chosen = compression_of(compression, host.service_on_this_host)
    prepared = validation.prepare(host, dataset, "OFF")
    registered = validation.translated(
        lambda: service.register_dataset(
            host.service_target, dataset, compression=chosen, dataset_id=dataset_id
        )
    )
    found = str(registered.numpy().decode())
    host.registered[found] = Registered(
        int(dataset.cardinality()) if prepared.keeps_count else -1,
        splits_of(dataset),
        buffers=buffers_of(dataset),
    )
    return found


def from_dataset_id(
    host: DataServiceProtocol,
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
) -> Any:
    """Return a dataset that reads a registered one; the other arguments are `distribute`'s.

    Parameters
    ----------
    host : ServiceHost
    processing_mode : str or tf.data.experimental.service.ShardingPolicy
    dataset_id : str, bytes or int
        From `register`.
    element_spec : nested structure of tf.TypeSpec, optional
        Default: what the dispatcher knows of the dataset.

    Returns
    -------
    tf.data.Dataset
        Watched by ``host.consumers``.

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
    validation.check_host(host)
    if reading.mode in STATIC:
        host.enable_static_sharding()
    if hasattr(dataset_id, "numpy"):
        dataset_id = dataset_id.numpy()
    plain_id = dataset_id.decode() if isinstance(dataset_id, bytes) else str(dataset_id)
    full_name = job_name and f"dataset_id=/{plain_id}/{job_name}"
    validation.check_job(host, reading, full_name)
    read = validation.translated(
        lambda: service.from_dataset_id(
            service=host.service_target,
            dataset_id=plain_id,
            element_spec=element_spec,
            **reading.tensorflow_arguments(host.service_in_process),
        )
    )
    validation.print_delivery(host, reading.mode)
    before = validation.BeforeReading(host, full_name)
    known = host.registered.get(plain_id, Registered(-1, None))
    read._tfd_service = ServiceReadOptions(
        Delivery(weakref.ref(host), known.cardinality, reading.mode, job_name, splits=known.splits),
        joined=lambda: before.joined,
    )
    host.registered[plain_id] = dataclasses.replace(known, read=weakref.ref(read))
    return watch(read, host.consumers, validation.listed_as(job_name), before)


def save(
    host: DataServiceProtocol,
    dataset: Any,
    path: str,
    compression: str | None = "AUTO",
    timeout: float = 600.0,
) -> None:
    """Have the data workers write a dataset to `path`, and return when it is there.

    Read it with ``tf.data.Dataset.load(path)``. Ctrl-C ends the wait, not the writing.

    Parameters
    ----------
    host : ServiceHost
        It needs ``Service(fault_tolerant=True)``.
    dataset : tf.data.Dataset
    path : str
        A directory that does not exist yet, on a file system that all workers share.
    compression : {"AUTO", "GZIP", "SNAPPY", None}
        Default ``"AUTO"``.
    timeout : float
        Seconds to wait. Default 600. Workers hear of the task with their next heartbeat, up to
        30 seconds later.

    Raises
    ------
    UsageError
        `path` exists, or the service keeps no journal.
    NoWorkers, NotSerializable, DispatcherLost
    DataError
        A worker could not write.
    TimeLimit
        It is not complete after `timeout` seconds; the workers go on.

    See Also
    --------
    tf.data.experimental.distributed_save
    """
    import tensorflow as tf

    if host.journal is None:
        raise UsageError(
            "the workers can only save with a service that keeps a journal",
            fix="start the cluster with service=tfd.Service(fault_tolerant=True)",
        )
    validation.prepare(host, dataset, "DYNAMIC")
    address = host.service_target.partition("://")[2]
    validation.translated(
        lambda: tf.data.experimental.distributed_save(
            dataset, path, address, compression=compression
        )
    )
    deadline = time.monotonic() + timeout
    while not tf.io.gfile.exists(f"{path}/DONE"):
        if tf.io.gfile.exists(f"{path}/ERROR"):
            with tf.io.gfile.GFile(f"{path}/ERROR") as file:
                raise DataError(f"saving to {path} failed: {file.read().strip()}")
        validation.live_workers(host)
        if time.monotonic() > deadline:
            raise TimeLimit(
                f"{path} is not complete after {timeout:g} s",
                fix="the workers go on: it is complete when it holds a file DONE",
            )
        time.sleep(0.1)
