"""The argument ``semantics`` of a stream, for a dataset that was distributed before."""

from __future__ import annotations

from typing import Any

from tfd_notebook._compat.tf_data import graph
from tfd_notebook._compat.tf_data.pipeline_model import Stage, nodes_of, stages_of
from tfd_notebook.data.bottleneck.usage import ServiceReadOptions
from tfd_notebook.data.consume.observe import check_dataset, watch
from tfd_notebook.data.service import graph_inspection, validation
from tfd_notebook.data.service.changes import check_semantics
from tfd_notebook.data.service.division import divide
from tfd_notebook.data.service.protocols import DataServiceProtocol
from tfd_notebook.errors import UsageError


def with_semantics(cluster: DataServiceProtocol, dataset: Any, semantics: str) -> Any:
    """Return `dataset`, or one in its place, after the check that `semantics` selects.

    Parameters
    ----------
    cluster : DataServiceProtocol
    dataset : tf.data.Dataset
        A dataset that reads no service has nothing to check.
    semantics : {"checked", "same", "tensorflow"}
        As in `distribute`, for the pipelines that `dataset` reads through the service.

    Raises
    ------
    UsageError
        Invalid argument, or another distribution of a shared job is necessary.
    DataChanged
        Elements would be joined with wrong ones, or lost.
    """
    check_dataset(dataset)
    if check_semantics(semantics) == "tensorflow":
        return dataset
    last = stages_of(dataset)
    replaced = {}
    for stage in last.walk():
        use = stage.service
        if use is None or use.pipeline is None:
            continue
        if semantics == "same" and use.origin is not None:
            if divide(use.origin, use.delivery.mode, cluster.service_in_process) is not None:
                replaced[id(stage)] = _distributed_again(use)
            continue
        known = use.delivery.mode if use.warned else None
        validation.check_changes(
            cluster, use.pipeline, use.delivery.mode, semantics, known, use.origin
        )
        use.warned = True
    if not replaced:
        return dataset
    read = _with_reads(dataset, last, replaced).with_options(dataset.options())
    return watch(read, cluster.consumers, before=validation.BeforeReading(cluster, None))


def _distributed_again(use: ServiceReadOptions) -> Any:
    """Return the pipeline that `use` reads, distributed so that its elements do not change."""
    if use.delivery.job_name is not None or use.delivery.consumer is not None:
        raise UsageError(
            'semantics="same" of a stream failed: its dataset reads a shared job, which has been '
            "distributed in another way",
            fix='pass semantics="same" to distribute, in each consumer of the job',
        )
    assert use.distribute_again is not None
    return use.distribute_again(use.origin, semantics="same")


def _with_reads(dataset: Any, last: Stage, replaced: dict[int, Any]) -> Any:
    """Return `dataset` with other datasets in place of some stages, by their ``id``."""
    if id(last) in replaced:
        return replaced[id(last)]
    from tfd_notebook._compat.tf_data.rebuild import rebuilt

    definition = graph_inspection.definition_of(dataset)
    stages = nodes_of(definition, last)
    reads = {
        name: (stage.dataset, replaced[id(stage)])
        for name, stage in stages.items()
        if id(stage) in replaced
    }
    datasets = {name: stage.dataset for name, stage in stages.items()}
    return rebuilt(dataset, definition, graph.end_of(definition), reads, datasets)
