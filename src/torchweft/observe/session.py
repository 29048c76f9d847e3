"""By what an observer proves itself, and what this host knows of a worker that does not answer."""

from __future__ import annotations

from typing import NamedTuple

from torchweft.errors import ObserverRefused
from torchweft.reports import TlsOptions
from torchweft.secret import Secret

_STATES = {
    "T": "is stopped by a signal; kill -CONT {pid} lets it go on",
    "t": "is held by a debugger",
    "D": "waits for a device or a file system",
    "Z": "has ended",
}


def why_silent(failure: object, pid: int | None, timeout_s: float) -> str:
    """Returns why a worker did not answer, as the end of a sentence.

    Args:
        failure: The error with which the question ended.
        pid: The worker's process, if it is on this host.
        timeout_s: How long the question could take.
    """
    if isinstance(failure, ObserverRefused):
        return "has another secret than this observer"
    if not isinstance(failure, TimeoutError):
        return f"cannot be asked: {failure}"
    told = f"does not answer within {timeout_s:g} s"
    if pid is None:
        return told
    return f"{told}: {told_of(pid)}"


def told_of(pid: int) -> str:
    """Returns why a process does not answer, as a sentence."""
    state = _state_of(pid)
    if state in _STATES:
        return f"its process {pid} {_STATES[state].format(pid=pid)}"
    return (
        f"code in C keeps the interpreter of process {pid} busy; kill -USR1 {pid} has it write its "
        "stacks to its standard error"
    )


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped, by a signal or a debugger."""
    return _state_of(pid) in ("T", "t")


def _state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class Access(NamedTuple):
    """By what an observer proves itself.

    Attributes:
        secret: The secret of the group; None if it has none.
        tls: How connections over TCP are secured; None for no TLS.
    """

    secret: Secret | None = None
    tls: TlsOptions | None = None

    @classmethod
    def from_environment(cls) -> Access:
        """Returns the access that the environment describes, as for a worker.

        Raises:
            ConfigurationError: A variable, or a file that it names, does not work.
        """
        return cls(Secret.from_environment(), TlsOptions.from_environment())
