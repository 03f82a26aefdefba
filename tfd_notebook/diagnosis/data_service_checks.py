"""What can be wrong with a tf.data service, as its addresses tell."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tfd_notebook.errors import TfdError
from tfd_notebook.launchers.diagnostics import VERSIONS
from tfd_notebook.model.diagnostics import Finding, check, kind
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Endpoint, TaskState
from tfd_notebook.net import probe
from tfd_notebook.net.host import why_unreached
from tfd_notebook.net.probe import Probe
from tfd_notebook.resolvers.diagnostics import SILENT, advertised, is_loopback, shared_ports

_ASK_SECONDS = 2.0
#: Workers that a finding names.
_SHOWN = 3

NO_WORKERS = kind(
    "TFD811",
    "error",
    "dispatcher without workers",
    "whoever reads waits for ever for an element that nobody makes",
)
LEFT = kind(
    "TFD812",
    "warning",
    "workers that left",
    "the dispatcher still sends readers there, and what they had prepared is lost",
)


@dataclass(frozen=True)
class Service:
    """A dispatcher and its data workers, as they answered.

    Parameters
    ----------
    address : str
    dispatcher : Probe
    workers : mapping of str to Probe
        By the address that the dispatcher knows.
    ours : bool
        Whether a cluster of this process runs it.
    rows : mapping of str to TaskRow
        The data workers of that cluster, by address.
    """

    address: str
    dispatcher: Probe
    workers: Mapping[str, Probe]
    ours: bool = False
    rows: Mapping[str, TaskRow] = field(default_factory=dict)

    @classmethod
    def asked(
        cls,
        address: str,
        ours: bool = False,
        removed: Collection[str] = (),
        rows: Iterable[TaskRow] = (),
    ) -> Service:
        """Ask the dispatcher at ``"host:port"``, and all workers that it knows.

        Parameters
        ----------
        address : str
        ours : bool
            Whether a cluster of this process runs it. Default false.
        removed : collection of str
            Addresses of workers that a scale-in removed: the dispatcher keeps them, and an error
            server on their ports answers readers.
        rows : iterable of TaskRow
            The data workers of the cluster that runs it.
        """
        address = str(Endpoint.parse(address))
        found = probe.probe(address, _ASK_SECONDS, expect="dispatcher")
        workers: tuple[str, ...] = ()
        if found.kind == "dispatcher":
            with contextlib.suppress(TfdError):  # it has just ended
                known = probe.dispatcher_workers(address, _ASK_SECONDS)
                workers = tuple(at for at in known if at not in removed)
        answers = probe.probe_many(workers, _ASK_SECONDS)
        known_rows = {row.address: row for row in rows}
        return cls(address, found, dict(zip(workers, answers, strict=True)), ours, known_rows)

    @property
    def place(self) -> str:
        """What it is called."""
        return f"dispatcher at {self.address}"

    @property
    def living(self) -> list[str]:
        """The addresses of workers that answer."""
        return [address for address, found in self.workers.items() if _works(found)]


def _works(found: Probe) -> bool:
    return found.alive and found.kind == "data_worker"


@check("service")
def silent(seen: Service) -> Iterator[Finding]:
    """Find a dispatcher that does not answer."""
    found = seen.dispatcher
    if not found.alive or found.kind != "dispatcher":
        who = f"a {found.kind} answers" if found.alive else f"{found.state}, {found.reason}"
        yield SILENT.found(f"no dispatcher: {who}", "start it, or correct its address", seen.place)


@check("service")
def no_workers(seen: Service) -> Iterator[Finding]:
    """Find a dispatcher without any worker that answers."""
    if seen.dispatcher.kind != "dispatcher" or seen.living:
        return
    if not seen.workers:
        fix = "cluster.scale(data_workers=2), or start workers with its address"
        yield NO_WORKERS.found("it has no data worker", fix, seen.place)
        return
    said = [_unanswered(address, found, seen) for address, found in seen.workers.items()]
    more = f", and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    yield NO_WORKERS.found(
        f"none of its data workers answers: {'; '.join(what for what, _ in said[:_SHOWN])}{more}",
        said[0][1],
        seen.place,
    )


def _unanswered(address: str, found: Probe, seen: Service) -> tuple[str, str]:
    """Return why a worker does not answer, and what to do."""
    row = seen.rows.get(address)
    if row is not None and row.state in (TaskState.RESTARTING, TaskState.STARTING):
        reason = f" ({row.reason})" if row.reason else ""
        return (
            f"{row.task} at {address} is {row.state}{reason}",
            f"wait until it is ready; cluster.logs({row.task!r}) shows what ended it",
        )
    if found.alive:
        return f"{address}: a {found.kind} answers there", "start the workers again"
    if found.state == "refused":
        fix = "cluster.scale(data_workers=2), or start workers with its address"
        return f"{address}: {found.reason}", fix
    return why_unreached(address, found, "" if row is None else row.open_to)


@check("service")
def left(seen: Service) -> Iterator[Finding]:
    """Find workers that the dispatcher knows and that are gone."""
    gone = [f"{at} ({found.state})" for at, found in seen.workers.items() if not _works(found)]
    if gone and seen.living:
        yield LEFT.found(
            f"{len(gone)} of {len(seen.workers)} data workers do not answer: {', '.join(gone[:3])}",
            "start them again at their addresses, or read anew with those that are left",
            seen.place,
        )


@check("service")
def addresses(seen: Service) -> Iterator[Finding]:
    """Find workers that other hosts cannot reach, and ports that are shared."""
    named = {f"data_worker at {address}": address for address in seen.workers}
    remote = not is_loopback(Endpoint.parse(seen.address).host)
    yield from advertised(named, seen.place, others=remote)
    yield from shared_ports({"dispatcher": seen.address, **named}, seen.place)


@check("service")
def versions(seen: Service) -> Iterator[Finding]:
    """Find a dispatcher that speaks another version than the TensorFlow of this process."""
    theirs = seen.dispatcher.version
    # Only TensorFlow's own dispatcher tells which version it speaks, so one is started.
    if seen.ours or theirs is None or "tensorflow" not in sys.modules:
        return
    from tfd_notebook.data.service.servers import Dispatcher

    own = Dispatcher()
    try:
        mine = probe.probe(own.target, _ASK_SECONDS, expect="dispatcher").version
    finally:
        own.stop()
    if mine is not None and mine != theirs:
        yield VERSIONS.found(
            f"the dispatcher speaks version {theirs} of the service, this process {mine}",
            "have the same TensorFlow there and here",
            seen.place,
        )
