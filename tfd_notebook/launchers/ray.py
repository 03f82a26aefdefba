"""``launcher="ray"``: tasks next to actors in a placement group of Ray."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook.agent.bridges import engine_worker
from tfd_notebook.errors import (
    LaunchError,
    StartTimeout,
    StateError,
    TfdError,
    Unsupported,
    UsageError,
)
from tfd_notebook.launchers.client.engine_workers import (
    HANDSHAKE_SECONDS,
    START_SECONDS,
    check_resources,
    hosts_of_workers,
    start_error,
)
from tfd_notebook.launchers.engine import EngineLauncher, Start
from tfd_notebook.launchers.remote import RemoteHost
from tfd_notebook.model.spec import check_count, check_text
from tfd_notebook.net import optional_packages

#: Ray truncates fractions.
_POLL_SECONDS = 1
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class Ray(EngineLauncher):
    """Actors of Ray: each starts an agent, which connects back to this process.

    The actors hold resources in a placement group until the cluster stops. An agent ends with its
    actor, with the cluster, or after the grace time without a connection to this process. Agents
    and this process communicate over an encrypted channel. Needs the extra ``ray``.

    Parameters
    ----------
    actors : int
        Number of actors, each in a separate bundle of the placement group. Default 1.
    resources : mapping of str to float
        Resources that Ray reserves for each, such as ``{"CPU": 4, "GPU": 1}``. ``memory`` is in
        bytes. Default: one CPU.
    strategy : {"SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"}
        How Ray distributes the actors over its nodes. Default ``"SPREAD"``.
    address : str, optional
        Address of this host at which the actors reach it. Default: that of Ray's node here.
    grace, place, secure, host, allow
        See `RemoteLauncher` and `Launcher`.
    """

    name: ClassVar[str] = "ray"
    summary: ClassVar[str] = "next to actors of Ray in a placement group (extra: ray)"
    ends_with: ClassVar[str] = "its kernel or its Ray actors"

    def __init__(
        self,
        actors: int = 1,
        *,
        resources: Mapping[str, float] | None = None,
        strategy: str = "SPREAD",
        address: str = "",
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        secure: bool = False,
        host: str | Mapping[str, str] = "",
        allow: Iterable[str] = (),
    ) -> None:
        check_count("actors", actors, minimum=1)
        resources = check_resources({"CPU": 1} if resources is None else resources)
        if "object_store_memory" in resources:
            raise UsageError("invalid resources: expected amounts without object_store_memory")
        if (gpus := resources.get("GPU", 0)) > 1 and gpus != int(gpus):
            raise UsageError(
                f"invalid resources 'GPU': {gpus}: expected a whole number, or less than 1"
            )
        if not any(resources.values()):
            raise UsageError("invalid resources: expected at least one above 0")
        if strategy not in _STRATEGIES:
            raise UsageError(
                f"invalid strategy {strategy!r}: expected one of {', '.join(_STRATEGIES)}"
            )
        self._actors, self._resources = actors, {k: v for k, v in resources.items() if v}
        self._strategy = strategy
        own = {
            "actors": actors,
            "resources": self._resources,
            "strategy": strategy,
            "address": address,
        }
        check_text("address", address)
        super().__init__(own, grace=grace, place=place, secure=secure, host=host, allow=allow)

    def start_hosts(self, start: Start) -> list[RemoteHost]:
        ray = optional_packages.load("ray", 'launcher "ray"', "ray")
        if not ray.is_initialized():
            raise StateError(
                "Ray is not initialized in this process", fix='ray.init("auto"), or ray.init()'
            )
        timeout = start.config.policy.start_timeout
        deadline = time.monotonic() + timeout
        try:
            if ray.util.client.ray.is_connected():
                raise Unsupported(
                    "actors of Ray's client (ray://) cannot be used", fix='ray.init("auto")'
                )
            actors = _Actors(ray, start.opened)
            for waiting in actors.place(start.config.name, self._bundles(), self._strategy):
                start.check()
                reason = self._reason(ray) if waiting else "Ray starts the actors"
                start.show(lambda *_, reason=reason: reason)
                if time.monotonic() > deadline:
                    raise StartTimeout(
                        f"Ray started no actors within {timeout:g} s: {reason}",
                        fix="request less with actors= or resources=, add nodes to Ray, or "
                        "allow more time with tfd.Policy(start_timeout=...)",
                    )
            address = self._own["address"] or ray.util.get_node_ip_address()
        except TfdError:
            raise
        except (TypeError, ValueError, ray.exceptions.RayError) as error:
            raise LaunchError(
                f"Ray refused the actors: {error}", fix="correct resources="
            ) from error
        return hosts_of_workers(
            lambda arguments: actors.start_bridges(arguments, start),
            bound=address,
            grace=self._grace,
            end_reason="its Ray actor has ended",
            opened=start.opened,
        )

    def _bundles(self) -> list[dict[str, float]]:
        return [dict(self._resources)] * self._actors

    def _reason(self, ray: Any) -> str:
        """Return a sentence with the resources that Ray lacks."""
        wanted = ", ".join(f"{kind} {amount:g}" for kind, amount in self._resources.items())
        total, free = ray.cluster_resources(), ray.available_resources()
        have = ", ".join(
            f"{kind} {free.get(kind, 0.0):g} of {total.get(kind, 0.0):g}"
            for kind in self._resources
        )
        return (
            f"Ray lacks resources for actors={self._actors} with {wanted} each ({self._strategy}); "
            f"free: {have}"
        )


class _Actors:
    """The actors of one cluster in their placement group.

    Parameters
    ----------
    ray : module
    opened : ExitStack
        Closing it ends the actors.
    """

    def __init__(self, ray: Any, opened: contextlib.ExitStack) -> None:
        self._ray = ray
        self._job = ray.get_runtime_context().get_job_id()
        self._group: Any = None
        self._actors: list[Any] = []
        opened.callback(self._release)

    def place(self, name: str, bundles: list[dict[str, float]], strategy: str) -> Iterator[bool]:
        """Start the actors. Yield True while Ray reserves resources, then False until they run."""
        ray = self._ray
        classes = [_with_resources(ray, bundle) for bundle in bundles]
        self._group = ray.util.placement_group(
            bundles, strategy, name=f"tfd-{name}-{uuid.uuid4().hex[:6]}"
        )
        self._check()
        while not self._group.wait(_POLL_SECONDS):
            yield True
            self._check()
        for index, (actor, bundle) in enumerate(zip(classes, bundles, strict=True)):
            scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            placed = actor.options(scheduling_strategy=scheduling)
            self._actors.append(placed.remote(bool(bundle.get("GPU"))))
        yield from self._until_ready([a.__ray_ready__.remote() for a in self._actors])

    def start_bridges(self, arguments: dict[str, Any], start: Start) -> Iterator[tuple[str, Any]]:
        """Start a bridge next to each actor, and yield its index and reply."""
        ray = self._ray
        calls = [actor.start_bridge.remote(arguments, HANDSHAKE_SECONDS) for actor in self._actors]
        deadline = time.monotonic() + START_SECONDS
        for _ in self._until_ready(calls):
            start.check()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"not all Ray actors started an agent within {START_SECONDS:g} s",
                    fix="see their logs in Ray's dashboard",
                )
        for index, call in enumerate(calls):
            try:
                reply = ray.get(call)
            except ray.exceptions.RayError as error:
                raise start_error(f"actor {index} of Ray", error) from error
            yield str(index), reply

    def _until_ready(self, calls: list[Any]) -> Iterator[bool]:
        """Yield False until all calls have a result or an error."""
        while calls:
            self._check()
            _, calls = self._ray.wait(calls, num_returns=len(calls), timeout=_POLL_SECONDS)
            if calls:
                yield False

    def _check(self) -> None:
        """Raise LaunchError after a shutdown, as Ray's functions would initialize it again."""
        if not self._ray.is_initialized():
            raise LaunchError("Ray was shut down during the start", fix="call ray.init() again")

    def _release(self) -> None:
        """End the actors; never raises."""
        ray = self._ray
        with contextlib.suppress(Exception):
            # Otherwise the actors ended with Ray, which these functions would initialize again.
            if not ray.is_initialized() or ray.get_runtime_context().get_job_id() != self._job:
                return
            for actor in self._actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)


def _with_resources(ray: Any, bundle: Mapping[str, float]) -> Any:
    """Return the class of an actor that needs the resources of a bundle."""
    others = dict(bundle)
    options: dict[str, Any] = {
        "num_cpus": others.pop("CPU", 0),
        "num_gpus": others.pop("GPU", 0),
    }
    if memory := others.pop("memory", 0):
        options["memory"] = memory
    return ray.remote(**options, resources=others)(engine_worker.Actor)
