"""Pods of a job, with their states in replies of Kubernetes' API, which are not trusted."""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass
from typing import Any

from tfd_notebook.errors import AgentLost, LaunchError, TfdError
from tfd_notebook.launchers.client.kubernetes_api import QUOTA_FIX, ExecConnection, KubernetesApi
from tfd_notebook.launchers.client.kubernetes_jobs import CONTAINER
from tfd_notebook.launchers.client.session import Channel
from tfd_notebook.launchers.engine import POLL_SECONDS, Engine, HostState, Phase
from tfd_notebook.launchers.remote import RemoteHost, join_agent
from tfd_notebook.net import validation
from tfd_notebook.net.host import address_towards

_HANDSHAKE_SECONDS = 60.0
#: Seconds to wait for the final state of a pod whose process has ended.
_END_SECONDS = 8.0
_INDEX = "batch.kubernetes.io/job-completion-index"
#: Reasons of a waiting container that is not started again without a change.
_PERMANENT = (
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
)
_STARTING = ("", "ContainerCreating", "PodInitializing")
SHOW_FIX = "see kubectl describe pod"
_IMAGE_FIX = "check image=, and that the nodes may pull it, such as with a pull secret of "
_IMAGE_FIX += "service_account="
_FIXES = {
    "CreateContainerConfigError": "check volumes=, environment= and service_account=",
    "CreateContainerError": "check volumes= and environment=",
    "Error": "see the log of the pod, and set python= to one with tfd-notebook and TensorFlow",
    "Evicted": "increase resources=",
    "FailedCreate": QUOTA_FIX,
    "OOMKilled": "increase the memory in resources=, or start fewer tasks",
    "RunContainerError": "check python= and image=",
    "StartError": "check python= and image=",
    "Unschedulable": "request less with resources=, check node_selector= and tolerations=, or "
    "allow more time with tfd.Policy(start_timeout=...)",
}
_name = validation.matching(re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"), "a name")
_reason_of = validation.matching(re.compile(r"[A-Za-z0-9_.:,-]{0,1024}"), "a reason")
_index = validation.matching(re.compile(r"0|[1-9]\d{0,5}"), "the index of a pod")


class PodHost(RemoteHost):
    """A pod of a job, with an agent behind an exec connection."""

    def __init__(
        self, engine: Engine[PodHost], api: KubernetesApi, python: str, index: int, label: str
    ) -> None:
        super().__init__(label)
        self._engine, self._api, self._python, self.index = engine, api, python, index
        self._opening: ExecConnection | None = None
        self.closed = False

    def use(self, pod: Pod) -> None:
        """Connect to this pod."""
        self.pod, self.peer_address = pod, pod.address

    def connect(self, agent: str, start: bool) -> Channel:
        state = self._engine.state(self)
        if state.ends:
            raise self._lost(state, start)
        try:
            return self._connect(agent, start)
        except AgentLost as error:
            state = self._engine.await_end(self, _END_SECONDS)
            raise (self._lost(state, start) if state.ends else error) from None
        except (LaunchError, OSError) as error:
            # A pod that has just ended refuses the connection, or the process ends with it.
            seconds = _END_SECONDS if isinstance(error, OSError) else POLL_SECONDS
            if start and (state := self._engine.await_end(self, seconds)).ends:
                raise self._lost(state, start) from None
            raise

    def _connect(self, agent: str, start: bool) -> Channel:
        channel = self._api.open_exec(
            self.pod.name, CONTAINER, [self._python, *join_agent(agent, start)]
        )
        channel.has_ended = self._has_ended
        self._opening = channel
        # Close the channel of a pod that sends no handshake.
        watch = threading.Timer(_HANDSHAKE_SECONDS, channel.close)
        watch.start()
        try:
            self._engine.check()
            channel.open()
            self.read_handshake(channel, reconnect=not start)
            self._engine.check()
        except BaseException:
            channel.close()
            raise
        finally:
            watch.cancel()
            self._opening = None
        with contextlib.suppress(OSError):  # no route: the allow list has no address of this host
            self.own_address = address_towards(self.peer_address)
        return channel

    def _has_ended(self) -> bool:
        try:
            return self._engine.state(self).ends
        except (TfdError, OSError):
            return False

    def _lost(self, state: HostState, start: bool) -> LaunchError:
        if start:
            return self._engine.start_error(self, state)
        # The session keeps the text of the error only.
        return AgentLost(f"{self.label}: {state.reason}; {state.fix}")

    def interrupt(self) -> None:
        """Close a connection that is opening."""
        if (opening := self._opening) is not None:
            opening.close()

    def close(self) -> None:
        self.closed = True
        if all(host.closed for host in self._engine.hosts):
            self._engine.stop()


@dataclass(frozen=True)
class Pod(HostState):
    """The state of a pod, with its index in the job and its IP address."""

    name: str = ""
    index: int = 0
    address: str = ""


def parse(item: Any, owner: str) -> Pod | None:
    """Return the state of a pod; None if the object with the uid `owner` does not own it.

    Raises
    ------
    InvalidMessage
    """
    metadata, status = _record(item, "metadata"), _record(item, "status")
    owners = [_text(entry, "uid") for entry in _entries(metadata, "ownerReferences")]
    if owner not in owners:
        return None
    name = _name(metadata.get("name"), "name of a pod")
    index = int(_index(_record(metadata, "annotations").get(_INDEX), f"{_INDEX} of pod {name}"))
    address = status.get("podIP")
    address = validation.ip_address(address, "podIP") if address else ""
    state: dict[str, Any] = {}
    for container in _entries(status, "containerStatuses"):
        if container.get("name") == CONTAINER:
            state = _record(container, "state")
    code, reason = _ended(name, metadata, status, state)
    phase: Phase = "ended"
    if not reason and "running" in state and address:
        phase = "running"
    elif not reason:
        code, reason = _pending(name, status, _record(state, "waiting"))
        if code not in _PERMANENT:
            phase = "queued" if code == "Unschedulable" else "starting"
    return Pod(phase, reason, _fix(code), name, index, address)


def _fix(code: str) -> str:
    """Return the next step for a reason in the API's words; empty without a reason."""
    if "Image" in code:
        return _IMAGE_FIX
    return _FIXES.get(code, SHOW_FIX) if code else ""


def _ended(
    name: str, metadata: dict[str, Any], status: dict[str, Any], state: dict[str, Any]
) -> tuple[str, str]:
    """Return the reason of the end, and a sentence, or two empty strings."""
    terminated = _record(state, "terminated")
    phase = _text(status, "phase")
    is_deleted = metadata.get("deletionTimestamp") is not None
    if not (terminated or is_deleted or phase in ("Succeeded", "Failed")):
        return "", ""
    for condition in _entries(status, "conditions"):
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason = _reason(condition)
            return reason, _sentence(f"pod {name} was evicted ({reason})", condition)
    reason = _reason(terminated)
    if reason == "OOMKilled":
        return reason, f"pod {name} used more memory than its limit (OOMKilled)"
    if phase == "Failed" and (reason_of_pod := _reason(status)):
        return reason_of_pod, _sentence(f"pod {name} failed ({reason_of_pod})", status)
    if is_deleted:
        return "Deleted", f"pod {name} was deleted"
    code = terminated.get("exitCode")
    exit_status = f" with status {code}" if isinstance(code, int) else ""
    reason = reason or phase or "Ended"
    return reason, _sentence(f"pod {name} ended{exit_status} ({reason})", terminated)


def _pending(name: str, status: dict[str, Any], waiting: dict[str, Any]) -> tuple[str, str]:
    """Return the reason why a pod does not run yet, and a sentence."""
    reason = _reason(waiting)
    if reason not in _STARTING:
        return reason, _sentence(f"pod {name} is waiting ({reason})", waiting)
    for condition in _entries(status, "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _reason(condition), _sentence(f"pod {name} has no node", condition)
    return "", f"pod {name} is being created"


def event_message(reply: Any) -> tuple[str, str]:
    """Return message and fix of the last warning in a list of events, or two empty strings."""
    warnings = [item for item in _entries(reply, "items") if item.get("type") == "Warning"]
    if not warnings:
        return "", ""
    last = max(warnings, key=lambda item: _text(item, "lastTimestamp"))
    return _text(last, "message"), _fix(_reason(last))


def _sentence(start: str, record: dict[str, Any]) -> str:
    message = " ".join(_text(record, "message").split())[:600]
    return f"{start}: {message}" if message else start


def _reason(record: dict[str, Any]) -> str:
    return str(_reason_of(record.get("reason") or "", "reason"))


def _record(value: Any, key: str) -> dict[str, Any]:
    """Return an object in an object; empty if it is missing."""
    inner = value.get(key) if isinstance(value, dict) else None
    return {} if inner is None else _object(inner, key)


def _entries(value: Any, key: str) -> list[dict[str, Any]]:
    """Return a list of objects in an object; empty if it is missing."""
    inner = value.get(key) if isinstance(value, dict) else None
    checked: list[dict[str, Any]] = validation.listing(_object)(inner or [], key)
    return checked


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise validation.invalid(path, value, "an object")
    return value


def _text(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    return "" if value is None else validation.text(value, key)
