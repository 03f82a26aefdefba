"""``tfd.resolve()``: which cluster this notebook belongs to, and how its tasks are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfd_notebook import views
from tfd_notebook.cluster import registry
from tfd_notebook.errors import NotThere, ResolveError, TfdError, UsageError
from tfd_notebook.model.resolution import MOST_CHANGES, ResolutionSnapshot, RuleResult, changes
from tfd_notebook.resolution import detection, factory, suggestions

if TYPE_CHECKING:
    import pandas as pd

    from tfd_notebook.cluster.cluster import Cluster
    from tfd_notebook.resolvers.validation import Tasks


#: Longest description of tasks that is repeated in a cell.
_LONGEST = 200


def resolve(resolver: Any = "auto", **kw: Any) -> Resolution:
    """Find the cluster that this notebook belongs to, and look at its tasks.

    Rules look at where the notebook runs, and the first that fits decides: TF_CONFIG, SageMaker, a
    step or an allocation of Slurm, a TPU, a pod of Kubernetes, Spark, Ray, Jupyter servers that are
    configured, a Slurm that can be reached, this host. No metadata server is asked unless you name
    ``"tpu"`` or ``"gce"``, and nothing of Spark or Ray is imported.

    Parameters
    ----------
    resolver : str, ClusterResolver, mapping, ClusterSpec or Cluster
        Instead of the rules: ``"tf_config"``, ``"sagemaker"``, ``"slurm"``, ``"tpu"``,
        ``"kubernetes"``, ``"gce"``, ``"jupyter"``, ``"local"``, the path of a cluster file, a
        resolver of yours, or the tasks themselves. Default ``"auto"``: the rules.
    **kw
        Arguments of the resolver, such as ``jobs=`` for Kubernetes and Slurm.

    Returns
    -------
    Resolution

    Raises
    ------
    ResolveError
        What tells of the cluster is missing, or cannot be read.
    UsageError
        There is no such resolver, or it has no such argument.

    See Also
    --------
    tfd_notebook.resolvers
    """
    if resolver == "auto":
        considered, verdict = detection.detect(kw)
        made = factory.create_resolver(verdict.resolver, kw) if verdict.resolver else None
        again = suggestions.call("auto", kw)
        found = Resolution(made, considered, again, verdict.cell)
    elif isinstance(resolver, str):
        made = factory.create_resolver(resolver, kw)
        said = RuleResult("argument", "fired", f"you said {resolver!r}")
        found = Resolution(made, (said,), suggestions.call(resolver, kw))
    else:
        if kw:
            raise UsageError(
                f"{', '.join(kw)}: arguments go with the name of a resolver",
                fix="give them to the resolver itself",
            )
        said = RuleResult("argument", "fired", f"you gave a {type(resolver).__name__}")
        written = f"tfd.resolve({resolver!r})" if isinstance(resolver, dict) else ""
        short = 0 < len(written) <= _LONGEST
        again = written if short else "tfd.resolve(resolver)"
        found = Resolution(_from_argument(resolver), (said,), again)
    if found.resolver is not None:
        found.look()
    return found


def check_seconds(seconds: float) -> None:
    """Raise UsageError unless somebody can watch for so long, or so often."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise UsageError(f"{seconds!r} must be more than 0 seconds", fix="such as 60")


class Resolution:
    """A cluster that was found, or where one could be; shown, it is a table of its tasks.

    Made by `resolve`.

    Attributes
    ----------
    resolver : tf.distribute.cluster_resolver.ClusterResolver or None
        Who knows the tasks; None where nobody does yet, and `cell` is an offer.
    considered : tuple of Considered
        The rules that were looked at, each with what became of it and why.
    """

    def __init__(
        self,
        resolver: Any,
        considered: tuple[RuleResult, ...],
        again: str,
        offer: str = "",
    ) -> None:
        self.resolver = resolver
        self.considered = considered
        self._again = again
        self._offer = offer
        self._lock = threading.Lock()
        self._eyes: Any = None
        self._looked = False
        self._look = ResolutionSnapshot(
            self.rule, self._place(), time.time(), (), considered, cell=offer
        )

    @property
    def rule(self) -> str:
        """The rule that fired: ``"argument"``, ``"tf_config"``, ... ``"local"``."""
        return self.considered[-1].rule

    @property
    def cell(self) -> str:
        """What can be run next, as source."""
        return self._look.cell

    @property
    def last(self) -> ResolutionSnapshot:
        """The latest `ResolutionSnapshot`: ``tasks``, ``counts``, ``changes`` and more."""
        return self._look

    def cluster_spec(self) -> Any:
        """Return the ``tf.train.ClusterSpec`` of now.

        Raises
        ------
        ResolveError
            It is not known which tasks there are.
        """
        return self._present().cluster_spec()

    def attach(self, name: str = "found", connect: bool = True) -> Cluster:
        """Use the cluster: watch it, read from it, coordinate it; see `tfd_notebook.attach`.

        Parameters
        ----------
        name : str
            How it is called here. Default ``"found"``. A cluster of this process keeps its own.
        connect : bool
            Whether this process shall be able to coordinate its workers. Default true.
        """
        from tfd_notebook.cluster.attach import attach

        spec = self.cluster_spec()
        if own := self._own():
            known: Cluster = registry.clusters()[own]
            return known
        return attach(spec, name, connect=connect)

    def look(self) -> ResolutionSnapshot:
        """Ask for the tasks, and each of them who it is, all at the same time.

        Returns
        -------
        Look
            1,000 tasks take at most 4 s.

        Raises
        ------
        ResolveError
            It is not known which tasks there are.
        """
        return self._see(patient=False)

    def glance(self) -> ResolutionSnapshot:
        """Look again; what cannot be found out is in ``trouble``, with the tasks of the last time.

        Returns
        -------
        Look
        """
        return self._see(patient=True)

    def watch(
        self, seconds: float | None = None, every: float = 1.0
    ) -> Iterator[ResolutionSnapshot]:
        """Yield what is seen now, and then each time that something changed.

        What could not be found out is in ``trouble`` meanwhile, with the tasks of the last time.

        Parameters
        ----------
        seconds : float, optional
            For how long. Default: until the loop is left, or interrupted.
        every : float
            Seconds between the ends and begins of looks. Default 1.
        """
        check_seconds(every)
        if seconds is not None:
            check_seconds(seconds)
        self._present()
        end = None if seconds is None else time.monotonic() + seconds
        never = threading.Event()
        seen: ResolutionSnapshot | None = None
        while True:
            look = self.glance()
            if seen is None or (look.changes, look.trouble) != (seen.changes, seen.trouble):
                yield look
            seen = look
            left = every if end is None else min(every, end - time.monotonic())
            if left <= 0:
                return
            never.wait(left)

    def to_frame(self) -> pd.DataFrame:
        """Return the tasks as they were seen last, as a DataFrame.

        Its columns are ``job task address state identity accelerators latency_ms reason``.
        """
        return views.sightings_table(self._look).to_frame()

    def history(self) -> views.Table:
        """Return the ups and downs that were seen, as a table."""
        return views.changes_table(self._look)

    def close(self) -> None:
        """Close the connections to the tasks; the next look opens them anew."""
        with self._lock:
            if self._eyes is not None:
                self._eyes.close()

    def __repr__(self) -> str:
        return views.look_text(self._look)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return views.look_bundle(self._look)

    def _present(self) -> Any:
        if self.resolver is None:
            raise NotThere(
                f"{self.considered[-1].why}: no cluster was found", fix=self.cell.splitlines()[0]
            )
        return self.resolver

    def _see(self, patient: bool) -> ResolutionSnapshot:
        resolver = self._present()
        from tfd_notebook.resolution.task_probe import TaskProber

        with self._lock:
            if self._eyes is None:
                self._eyes = TaskProber(getattr(resolver, "may_be", _same))
            start, now, before = time.monotonic(), time.time(), self._look
            try:
                tasks = _tasks(resolver)
                seen, trouble = self._eyes.look(tasks), ""
            except TfdError as error:
                if not patient:
                    raise
                self._look = replace(before, time=now, trouble=error.what)
                return self._look
            new = changes(before.tasks, seen, now) if self._looked else ()
            self._looked = True
            offered = self._offer and not any(task.state == "alive" for task in seen)
            self._look = replace(
                before,
                place=self._place(),
                time=now,
                tasks=seen,
                seconds=time.monotonic() - start,
                changes=(*before.changes, *new)[-MOST_CHANGES:],
                trouble=trouble,
                cell=self._offer if offered else self._use(tasks),
            )
            return self._look

    def _own(self) -> str:
        """Return the name of the cluster of this process that this is; empty where it is none."""
        from tfd_notebook.resolvers.cluster import OwnResolver

        known = registry.clusters()
        own = isinstance(self.resolver, OwnResolver) and self.resolver.name in known
        return self.resolver.name if own else ""

    def _use(self, tasks: Tasks) -> str:
        if name := self._own():
            return suggestions.own(name)
        try:
            job, index = self.resolver.task_type, self.resolver.task_id
        except TfdError:
            job = index = None
        own = (job, index) if isinstance(job, str) and isinstance(index, int) else None
        kind = "tpu" if type(self.resolver).__name__ == "TPUResolver" else self.rule
        return suggestions.use(tasks, self._again, own, kind)

    def _place(self) -> str:
        if self.resolver is None:
            return ""
        kind = type(self.resolver).__name__
        given = "the tasks that were given" if kind == "SimpleClusterResolver" else kind
        return str(getattr(self.resolver, "place", given))


def _same(who: str | None, job: str, index: int) -> bool:
    return who is None or who == f"{job}:{index}"


def _tasks(resolver: Any) -> Tasks:
    """Return the tasks that any ClusterResolver knows."""
    from tfd_notebook.resolvers.base import Resolver
    from tfd_notebook.resolvers.validation import checked, tasks_of

    if isinstance(resolver, Resolver):
        return resolver.tasks()
    try:
        found = tasks_of(resolver.cluster_spec())
    except TfdError:
        raise
    except Exception as error:
        name = type(resolver).__name__
        raise ResolveError(
            f"{name} does not know its tasks: {type(error).__name__}: {error}",
            fix="see tfd.resolvers for one that names what is wrong",
        ) from error
    return checked(found, type(resolver).__name__)


def _from_argument(resolver: Any) -> Any:
    """Return the resolver that somebody meant."""
    import tensorflow as tf

    if isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
        return resolver
    if isinstance(resolver, (Mapping, tf.train.ClusterSpec)):
        return factory.of_mapping(resolver)
    own = getattr(resolver, "resolver", None)
    if isinstance(own, tf.distribute.cluster_resolver.ClusterResolver):
        return own
    raise UsageError(
        f"{resolver!r} resolves nothing",
        fix="give a name, a ClusterResolver, a ClusterSpec or a Cluster",
    )
