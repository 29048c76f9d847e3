"""Reads the status of a JobSet and of its pods: plain functions of what the cluster answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchweft.launch.kubernetes_manifest import CONTAINER, Object

_ENDED = ("Completed", "Failed")
_USUAL = frozenset(("ContainerCreating", "PodInitializing", ""))
_LAST = "~"
"""Sorts after all moments."""


@dataclass(frozen=True)
class Failure:
    """The end of a worker's container that failed.

    Attributes:
        moment: When it ended, as the cluster writes it.
        worker: The worker's name.
        pod: Its pod.
        status: Its exit status.
        cause: The reason that the cluster gives, in words.
    """

    moment: str
    worker: str
    pod: str
    status: int
    cause: str


def end_of(status: Object) -> str | None:
    """Returns ``Completed`` or ``Failed`` for a JobSet's status; None if it goes on."""
    for condition in status.get("conditions", []):
        if condition.get("type") in _ENDED and condition.get("status") == "True":
            return str(condition["type"])
    return None


def state_of(status: Object) -> Object:
    """Returns the state of a pod's worker; empty if its container does not exist yet."""
    for container in status.get("containerStatuses") or []:
        if container["name"] == CONTAINER:
            state: Object = container.get("state") or {}
            return state
    return {}


def failure_of(worker: str, pod: Object, state: Object) -> Failure | None:
    """Returns how a worker's pod failed; None if it has not."""
    status = pod.get("status", {})
    name = pod["metadata"]["name"]
    ended = state.get("terminated")
    if ended and ended.get("exitCode"):
        code, reason = ended["exitCode"], ended.get("reason", "Error")
        because = "" if reason == "Error" else f" ({reason})"
        moment = ended.get("finishedAt") or _LAST
        return Failure(moment, worker, name, code, f"ended with exit code {code}{because}")
    if status.get("phase") == "Failed" and not ended:
        told = " ".join(filter(None, (status.get("reason"), status.get("message"))))
        return Failure(_LAST, worker, name, 1, f"failed: {told or _first_ended(status)}")
    return None


def _first_ended(status: Object) -> str:
    """Returns how the init container of a pod ended."""
    for container in status.get("initContainerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            return (
                f"its init container {container['name']!r} ended with exit code "
                f"{ended['exitCode']}; is torchweft in the image, and the interpreter on its path?"
            )
    return "no reason was given"


def troubles(status: Object) -> Iterator[tuple[str, str]]:
    """Returns why a pod does not start: reasons, and the same in words."""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = condition.get("reason", "")
            yield reason, f"{condition.get('message', 'it has no node')} ({reason})"
    containers = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason not in _USUAL:
            yield reason, f"{waiting.get('message') or container.get('image', '')} ({reason})"
