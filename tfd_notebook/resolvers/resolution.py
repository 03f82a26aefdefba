"""``tfd.resolve()``: the cluster that this notebook belongs to, and the state of its tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfd_notebook import views
from tfd_notebook.errors import NotThere, ResolveError, TfdError, UsageError
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.resolution import MAX_CHANGES, ResolutionSnapshot, RuleResult, changes
from tfd_notebook.model.spec import check_seconds
from tfd_notebook.net.task_probe import TaskProber, is_same_task
from tfd_notebook.resolvers import detection, factory, providers, suggestions
from tfd_notebook.resolvers.validation import checked, own_task, tasks_of, unlisted

if TYPE_CHECKING:
    import pandas as pd

    from tfd_notebook.resolvers.validation import Tasks


#: Maximum length of a mapping of tasks that a suggested cell repeats.
_MAX_LENGTH = 200


def resolve(resolver: Any = "auto", **kw: Any) -> Resolution:
    """Find the cluster that this notebook belongs to, and probe its tasks.

    Rules check the notebook's environment, and the first rule that matches decides. The order is:
    TF_CONFIG, SageMaker, a Slurm step or allocation, a TPU, a Kubernetes pod, Spark, Ray.
    Configured Jupyter servers, a Slurm controller and this host follow. No metadata server is
    queried unless you name ``"tpu"`` or ``"gce"``. Spark and Ray are not imported.

    Parameters
    ----------
    resolver : str, ClusterResolver, mapping, ClusterSpec or Cluster
        Instead of the rules: ``"tf_config"``, ``"sagemaker"``, ``"slurm"``, ``"tpu"``,
        ``"kubernetes"``, ``"gce"``, ``"jupyter"`` or ``"local"``. Or the path of a cluster file,
        your own resolver, or the tasks themselves. Default ``"auto"``: the rules.
    **kw
        Arguments of the resolver, such as ``jobs=`` for Kubernetes and Slurm.

    Returns
    -------
    Resolution

    Raises
    ------
    ResolveError
        The description of the cluster is missing or invalid, or its source does not respond.
    UsageError
        The resolver or one of its arguments is unknown.

    See Also
    --------
    tfd_notebook.resolvers
    """
    if resolver == "auto":
        considered, outcome = detection.detect(kw)
        created = factory.create_resolver(outcome.resolver, kw) if outcome.resolver else None
        call = suggestions.call("auto", kw)
        resolution = Resolution(created, considered, call, outcome.cell)
    elif isinstance(resolver, str):
        created = factory.create_resolver(resolver, kw)
        result = RuleResult("argument", "fired", f"you named {resolver!r}")
        resolution = Resolution(created, (result,), suggestions.call(resolver, kw))
    else:
        if kw:
            raise UsageError(
                f"invalid arguments {', '.join(kw)}: only the name of a resolver takes arguments",
                fix="pass them to the resolver itself",
            )
        result = RuleResult("argument", "fired", f"you passed a {type(resolver).__name__}")
        source = f"tfd.resolve({resolver!r})" if isinstance(resolver, dict) else ""
        is_short = 0 < len(source) <= _MAX_LENGTH
        call = source if is_short else "tfd.resolve(resolver)"
        resolution = Resolution(_from_argument(resolver), (result,), call)
    if resolution.resolver is not None:
        resolution.probe()
    return resolution


class Resolution(Handle):
    """The result of `resolve`: a cluster with its tasks, or a place for one.

    It displays as a table of the tasks.

    Attributes
    ----------
    resolver : tf.distribute.cluster_resolver.ClusterResolver or None
        The resolver that finds the tasks. None if `cell` is only a suggestion.
    considered : tuple of RuleResult
        The rules up to the one that fired, each with its outcome and reason.
    """

    def __init__(
        self,
        resolver: Any,
        considered: tuple[RuleResult, ...],
        call: str,
        suggestion: str = "",
    ) -> None:
        self.resolver = resolver
        self.considered = considered
        self._call = call
        self._suggestion = suggestion
        self._lock = threading.Lock()
        self._prober: TaskProber | None = None
        self._probed = False
        self._snapshot = ResolutionSnapshot(
            self.rule, self._place(), time.time(), (), considered, cell=suggestion
        )

    @property
    def rule(self) -> str:
        """The rule that fired: ``"argument"``, ``"tf_config"``, ... ``"local"``."""
        return self.considered[-1].rule

    @property
    def cell(self) -> str:
        """Code suggestion for the next cell."""
        return self._snapshot.cell

    @property
    def last(self) -> ResolutionSnapshot:
        """The latest `ResolutionSnapshot`: ``tasks``, ``counts``, ``changes`` and more."""
        return self._snapshot

    def cluster_spec(self) -> Any:
        """Return the current ``tf.train.ClusterSpec``.

        Raises
        ------
        ResolveError
            The tasks cannot be listed.
        """
        return self._require_resolver().cluster_spec()

    def attach(self, name: str = "found", connect: bool = True) -> Any:
        """Attach to the cluster, to watch it, read from it and coordinate it.

        Parameters
        ----------
        name : str
            Name of the cluster in this process. Default ``"found"``. A cluster of this process
            keeps its own name.
        connect : bool
            Whether this process connects to the workers, to coordinate them. Default true.

        Returns
        -------
        Cluster

        See Also
        --------
        tfd_notebook.attach
        """
        resolver = self._require_resolver()
        if own := self._own_name():
            return providers.clusters()[own]
        return providers.attach(resolver, name, connect)

    def probe(self, *, raises: bool = True) -> ResolutionSnapshot:
        """List the tasks, and probe all of them concurrently.

        Parameters
        ----------
        raises : bool
            Default true. If false and the tasks cannot be listed, ``trouble`` has the error, and
            ``tasks`` those of the previous time.

        Returns
        -------
        ResolutionSnapshot
            1,000 tasks take at most 4 s.

        Raises
        ------
        ResolveError
            The tasks cannot be listed.
        """
        resolver = self._require_resolver()
        with self._lock:
            if self._prober is None:
                may_be = getattr(resolver, "may_be", is_same_task)
                self._prober = TaskProber(may_be, self._own_task())
            start, now, before = time.monotonic(), time.time(), self._snapshot
            try:
                tasks = _tasks(resolver)
                statuses = self._prober.probe(tasks)
                trouble = unlisted(self._own_task(), tasks)
            except TfdError as error:
                if raises:
                    raise
                self._snapshot = replace(before, time=now, trouble=error.what)
                return self._snapshot
            new = changes(before.tasks, statuses, now) if self._probed else ()
            self._probed = True
            any_alive = any(status.state == "alive" for status in statuses)
            suggest_start = self._suggestion and not any_alive
            self._snapshot = replace(
                before,
                place=self._place(),
                time=now,
                tasks=statuses,
                seconds=time.monotonic() - start,
                changes=(*before.changes, *new)[-MAX_CHANGES:],
                trouble=trouble,
                cell=self._suggestion if suggest_start else self._use(tasks, any_alive),
            )
            return self._snapshot

    def watch(
        self, seconds: float | None = None, every: float = 1.0
    ) -> Iterator[ResolutionSnapshot]:
        """Yield the current snapshot, and then a snapshot after each change.

        If the tasks cannot be listed, ``trouble`` has the error, and ``tasks`` those of the
        previous time.

        Parameters
        ----------
        seconds : float, optional
            Duration of the watch. Default: no limit.
        every : float
            Seconds from the end of a probe to the start of the next one. Default 1.
        """
        check_seconds("every", every)
        if seconds is not None:
            check_seconds("seconds", seconds)
        self._require_resolver()
        end = None if seconds is None else time.monotonic() + seconds
        never = threading.Event()
        last: ResolutionSnapshot | None = None
        while True:
            snapshot = self.probe(raises=False)
            if last is None or (snapshot.changes, snapshot.trouble) != (last.changes, last.trouble):
                yield snapshot
            last = snapshot
            remaining = every if end is None else min(every, end - time.monotonic())
            if remaining <= 0:
                return
            never.wait(remaining)

    def to_frame(self) -> pd.DataFrame:
        """Return the tasks of the latest snapshot as a DataFrame.

        Its columns are ``job task address state identity accelerators latency_ms reason``.
        """
        return views.task_status_table(self._snapshot).to_frame()

    def history(self) -> views.Table:
        """Return the changes of the tasks as a table."""
        return views.changes_table(self._snapshot)

    def close(self) -> None:
        """Close the connections to the tasks. The next probe opens new ones."""
        with self._lock:
            if self._prober is not None:
                self._prober.close()

    def __repr__(self) -> str:
        return views.resolution_text(self._snapshot)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return views.resolution_bundle(self._snapshot)

    def _require_resolver(self) -> Any:
        if self.resolver is None:
            raise NotThere(f"no cluster: {self.considered[-1].why}", fix=self.cell.splitlines()[0])
        return self.resolver

    def _own_name(self) -> str:
        """Return the cluster's name if it is a cluster of this process, else an empty string."""
        # Imports TensorFlow.
        from tfd_notebook.resolvers.cluster import OwnResolver

        clusters = providers.clusters()
        is_own = isinstance(self.resolver, OwnResolver) and self.resolver.name in clusters
        return self.resolver.name if is_own else ""

    def _use(self, tasks: Tasks, any_alive: bool) -> str:
        if name := self._own_name():
            return f"cluster = tfd.clusters()[{name!r}]"
        kind = "tpu" if type(self.resolver).__name__ == "TPUResolver" else self.rule
        cell = suggestions.use(tasks, self._call, self._own_task(), kind)
        needs_task = not any_alive and "attach(" in cell
        return f"# start a task first, because none answers\n{cell}" if needs_task else cell

    def _own_task(self) -> tuple[str, int] | None:
        try:
            return own_task(self.resolver)
        except TfdError:
            return None

    def _place(self) -> str:
        if self.resolver is None:
            return ""
        kind = type(self.resolver).__name__
        default = "the named tasks" if kind == "SimpleClusterResolver" else kind
        return str(getattr(self.resolver, "place", default))


def _tasks(resolver: Any) -> Tasks:
    """Return the tasks of a ClusterResolver of any class."""
    # Imports TensorFlow.
    from tfd_notebook.resolvers.base import Resolver

    if isinstance(resolver, Resolver):
        return resolver.tasks()
    try:
        tasks = tasks_of(resolver.cluster_spec())
    except TfdError:
        raise
    except Exception as error:
        name = type(resolver).__name__
        raise ResolveError(
            f"{name}.cluster_spec() failed: {type(error).__name__}: {error}",
            fix="use a class of tfd.resolvers, whose errors name the cause",
        ) from error
    return checked(tasks, type(resolver).__name__)


def _from_argument(resolver: Any) -> Any:
    """Return the resolver for an argument of `resolve`."""
    import tensorflow as tf

    if isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
        return resolver
    if isinstance(resolver, (Mapping, tf.train.ClusterSpec)):
        return factory.of_mapping(resolver)
    own = getattr(resolver, "resolver", None)
    if isinstance(own, tf.distribute.cluster_resolver.ClusterResolver):
        return own
    raise UsageError(
        f"invalid resolver {resolver!r}",
        fix="pass a name, a ClusterResolver, a ClusterSpec or a Cluster",
    )
