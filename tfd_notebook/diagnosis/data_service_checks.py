"""Checks of a tf.data service by probes of its addresses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tfd_notebook.cluster.watchdog import JOURNAL_FIX, JOURNAL_WARN_BYTES
from tfd_notebook.data.service.servers import Dispatcher
from tfd_notebook.errors import TfdError
from tfd_notebook.launchers.diagnostics import VERSIONS
from tfd_notebook.model.diagnostics import Finding, check, kind
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Endpoint, TaskState
from tfd_notebook.net import probe
from tfd_notebook.net.host import why_unreached
from tfd_notebook.net.probe import Probe
from tfd_notebook.net.task_probe import status_of
from tfd_notebook.resolvers.diagnostics import NO_ANSWER, advertised, is_loopback, shared_ports

_PROBE_SECONDS = 2.0
#: Maximum number of workers that a finding names.
_MAX_NAMES = 3

NO_WORKERS = kind(
    "TFD811",
    "error",
    "dispatcher without workers",
    "a reader waits indefinitely, because a dispatcher itself produces no elements",
)
MISSING_WORKERS = kind(
    "TFD812",
    "warning",
    "workers that left",
    "readers keep trying their addresses, and the elements that they had prepared are lost",
)
LARGE_JOURNAL = kind(
    "TFD817",
    "warning",
    "large journal",
    "it fills the disk, and a restarted dispatcher reads all of it before it answers",
)
MANY_EPOCHS = kind(
    "TFD818",
    "warning",
    "many open epochs",
    "each keeps its pipeline, with its buffers, on every data worker",
)
#: Number of open epochs that is reported.
_MANY_EPOCHS = 100


@dataclass(frozen=True)
class Service:
    """Results of probes of a dispatcher and its data workers.

    Parameters
    ----------
    address : str
    dispatcher : Probe
    workers : mapping of str to Probe
        By the address that is registered at the dispatcher.
    own : bool
        Whether a cluster of this process runs the service. Default false.
    rows : mapping of str to TaskRow
        The data workers of that cluster, by address.
    journal_bytes : int, optional
        Size of that cluster's journal. None if it is unknown.
    """

    address: str
    dispatcher: Probe
    workers: Mapping[str, Probe]
    own: bool = False
    rows: Mapping[str, TaskRow] = field(default_factory=dict)
    journal_bytes: int | None = None

    @classmethod
    def inspect(
        cls,
        address: str,
        own: bool = False,
        removed: Collection[str] = (),
        rows: Iterable[TaskRow] = (),
        journal_bytes: int | None = None,
    ) -> Service:
        """Probe the dispatcher at ``"host:port"``, and all workers that are registered there.

        Parameters
        ----------
        address : str
        own : bool
            Whether a cluster of this process runs the service. Default false.
        removed : collection of str
            Addresses of workers that a scale-in removed. The dispatcher keeps them, and an error
            server on their ports answers readers.
        rows : iterable of TaskRow
            The data workers of the cluster that runs the service.
        journal_bytes : int, optional
            Size of that cluster's journal.
        """
        address = str(Endpoint.parse(address))
        dispatcher = probe.probe(address, _PROBE_SECONDS, expect="dispatcher")
        workers: tuple[str, ...] = ()
        if dispatcher.kind == "dispatcher":
            with contextlib.suppress(TfdError):  # The dispatcher has ended since the probe.
                registered = probe.dispatcher_workers(address, _PROBE_SECONDS)
                workers = tuple(worker for worker in registered if worker not in removed)
        results = dict(zip(workers, probe.probe_many(workers, _PROBE_SECONDS), strict=True))
        by_address = {row.address: row for row in rows}
        return cls(address, dispatcher, results, own, by_address, journal_bytes)

    @property
    def place(self) -> str:
        """The name of the service in findings."""
        return f"dispatcher at {self.address}"

    @property
    def running(self) -> list[str]:
        """The addresses of the workers that respond."""
        return [address for address, result in self.workers.items() if _responds(result)]

    @property
    def open_epochs(self) -> int:
        """The number of epochs that data workers process, or keep for a consumer."""
        tasks = [task for result in self.workers.values() for task in result.tasks]
        return len({task.iteration_id for task in tasks})


def _responds(result: Probe) -> bool:
    return status_of("data_worker", 0, result).state == "alive"


@check("service")
def silent(service: Service) -> Iterator[Finding]:
    """Report a dispatcher that does not respond."""
    status = status_of("dispatcher", 0, service.dispatcher)
    if status.state != "alive":
        cause = status.reason if service.dispatcher.alive else f"{status.state}, {status.reason}"
        fix = "start it, or correct its address"
        if service.own:
            fix = "see cluster.logs('dispatcher:0'), then cluster.restart('dispatcher:0')"
        yield NO_ANSWER.finding(f"no dispatcher: {cause}", fix)


@check("service")
def no_workers(service: Service) -> Iterator[Finding]:
    """Report a dispatcher without a worker that responds."""
    if service.dispatcher.kind != "dispatcher" or service.running:
        return
    if not service.workers:
        fix = "cluster.scale(data_workers=2), or start workers with its address"
        yield NO_WORKERS.finding("it has no data worker", fix)
        return
    causes = [_unanswered(address, result, service) for address, result in service.workers.items()]
    more = f", and {len(causes) - _MAX_NAMES} more" if len(causes) > _MAX_NAMES else ""
    listing = "; ".join(cause for cause, _ in causes[:_MAX_NAMES])
    yield NO_WORKERS.finding(f"none of its data workers responds: {listing}{more}", causes[0][1])


def _unanswered(address: str, result: Probe, service: Service) -> tuple[str, str]:
    """Return why a worker does not respond, and the fix."""
    row = service.rows.get(address)
    if row is not None and row.state in (TaskState.RESTARTING, TaskState.STARTING):
        reason = f" ({row.reason})" if row.reason else ""
        return (
            f"{row.task} at {address} is {row.state}{reason}",
            f"wait until it is ready; cluster.logs({row.task!r}) shows what ended it",
        )
    if result.alive:
        return f"{address}: {status_of('data_worker', 0, result).reason}", "start the workers again"
    if result.state == "refused":
        fix = "cluster.scale(data_workers=2), or start workers with its address"
        return f"{address}: {result.reason}", fix
    return why_unreached(address, result, "" if row is None else row.open_to)


@check("service")
def missing_workers(service: Service) -> Iterator[Finding]:
    """Report registered workers that do not respond."""
    silent = {
        address: result for address, result in service.workers.items() if not _responds(result)
    }
    tasks = [service.rows[address].task for address in silent if address in service.rows]
    missing = [
        f"{service.rows[address].task} at {address} ({result.state})"
        if address in service.rows
        else f"{address} ({result.state})"
        for address, result in silent.items()
    ]
    if missing and service.running:
        yield MISSING_WORKERS.finding(
            f"{len(missing)} of {len(service.workers)} data workers do not respond: "
            f"{', '.join(missing[:_MAX_NAMES])}",
            f"cluster.restart({tasks[0]!r})"
            if service.own and tasks
            else "start them again at their addresses, or read again from the remaining ones",
        )


@check("service")
def addresses(service: Service) -> Iterator[Finding]:
    """Report workers that other hosts cannot reach, and ports that several servers share."""
    named = {f"data_worker at {address}": address for address in service.workers}
    remote = not is_loopback(Endpoint.parse(service.address).host)
    yield from advertised(named, remote=remote)
    yield from shared_ports({"dispatcher": service.address, **named})


@check("service")
def large_journal(service: Service) -> Iterator[Finding]:
    """Report a large journal of a cluster of this process."""
    size = service.journal_bytes
    if size is not None and size > JOURNAL_WARN_BYTES:
        yield LARGE_JOURNAL.finding(
            f"the dispatcher's journal is {size / 1e9:.1f} GB, and {service.open_epochs} epochs "
            "are open",
            JOURNAL_FIX,
        )


@check("service")
def many_epochs(service: Service) -> Iterator[Finding]:
    """Report data workers that hold many epochs."""
    if service.open_epochs >= _MANY_EPOCHS:
        yield MANY_EPOCHS.finding(
            f"the data workers hold {service.open_epochs} open epochs",
            "cluster.jobs() lists them; read loops to their end or delete their iterators. The "
            "dispatcher discards an epoch that has no reader: "
            "Service(dispatcher_config=DispatcherConfig(job_gc_timeout_ms=...)) sets the time",
        )


@check("service")
def versions(service: Service) -> Iterator[Finding]:
    """Report a dispatcher whose protocol version differs from this process's TensorFlow."""
    version = service.dispatcher.version
    # TensorFlow has no API for its version of the protocol, so a dispatcher is started.
    if service.own or version is None or "tensorflow" not in sys.modules:
        return

    dispatcher = Dispatcher()
    try:
        own = probe.probe(dispatcher.target, _PROBE_SECONDS, expect="dispatcher").version
    finally:
        dispatcher.stop()
    if own is not None and own != version:
        yield VERSIONS.finding(
            f"the dispatcher uses protocol version {version}, and this process version {own}",
            "install the same TensorFlow version for both",
        )
