"""State of the pods of a job, from the replies of Kubernetes' API, which are not trusted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tfd_notebook.launchers.client.kubernetes_api import QUOTA_FIX
from tfd_notebook.net import validation

#: Name of the container with the agent.
CONTAINER = "agent"
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


@dataclass(frozen=True)
class Pod:
    """The state of a pod.

    Parameters
    ----------
    name : str
    index : int
        Its index in the job.
    running : bool
        True if its process runs.
    address : str
        Its IP address, or an empty string.
    reason : str
        Reason of its state in the API's words, such as ``"OOMKilled"``.
    pending : str
        Why it does not run yet, as a sentence, or an empty string.
    ended : str
        Why it cannot run any more, as a sentence, or an empty string.
    """

    name: str
    index: int
    running: bool = False
    address: str = ""
    reason: str = ""
    pending: str = ""
    ended: str = ""

    @property
    def lacks_node(self) -> bool:
        """True if no node can run it."""
        return self.reason == "Unschedulable"

    @property
    def needs_user(self) -> bool:
        """True if it waits for something that does not change without the user."""
        return self.reason in _PERMANENT

    @property
    def fix(self) -> str:
        """The next step for its state."""
        if "Image" in self.reason:
            return _IMAGE_FIX
        return _FIXES.get(self.reason, "see kubectl describe pod")


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
    reason, ended = _ended(name, metadata, status, state)
    if ended:
        return Pod(name, index, address=address, reason=reason, ended=ended)
    if "running" in state and address:
        return Pod(name, index, running=True, address=address)
    reason, pending = _pending(name, status, _record(state, "waiting"))
    return Pod(name, index, address=address, reason=reason, pending=pending)


def missing(name: str, index: int) -> Pod:
    """Return the state of a pod that the API does not have any more."""
    return Pod(name, index, reason="Deleted", ended=f"pod {name} was deleted")


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
    return reason, _sentence(f"pod {name} ended{exit_status} ({reason or phase})", terminated)


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
    """Return reason and message of the last warning in a list of events, or two empty strings."""
    warnings = [item for item in _entries(reply, "items") if item.get("type") == "Warning"]
    if not warnings:
        return "", ""
    last = max(warnings, key=lambda item: _text(item, "lastTimestamp"))
    return _reason(last), _text(last, "message")


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
