"""Keys of calls and references, the same from all workers, and what a thread waits for."""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.ids import ReferenceId

CALL, GATHERING, PASS, VALUE, SHUTDOWN = "call", "gathering", "pass", "value", "shutdown"
MESSAGE = "message"
"""The kinds of waits."""


def call_key(caller: str, number: int) -> str:
    """Returns the key of a call whose caller waits for an answer."""
    return f"{caller}#{number}"


def reference_key(reference: ReferenceId) -> str:
    """Returns the name of a reference, the same at all workers."""
    return f"RRef({reference.creator}.{reference.number} of {reference.owner})"


def making_key(reference: str) -> str:
    """Returns the key of a call that makes a value."""
    return f"make {reference}"


@dataclass(frozen=True, slots=True)
class Wait:
    """What a thread waits for.

    Attributes:
        kind: One of the kinds above.
        key: Names the call, gathering, pass or value; empty for a shutdown.
        age_s: Seconds since the wait began.
        name: What it is, for people: ``"barrier"``.
        workers: The workers that are lacking, as far as this worker knows; in a gathering, all.
    """

    kind: str
    key: str
    age_s: float
    name: str
    workers: tuple[str, ...]
