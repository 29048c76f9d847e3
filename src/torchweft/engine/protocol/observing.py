"""What a worker notes for observers: waits, and numbers of its components.

The keys of calls and references are the same from all workers. ``torchweft.observe`` makes reports
of these.
"""

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


@dataclass(frozen=True, slots=True)
class NumberRow:
    """A row of a ``NumberTable``.

    Attributes:
        labels: What the numbers are of: one text for each of the table's ``labels``.
        numbers: By name, which heads the column. A name that ends with ``bytes`` is of bytes, one
            that ends with ``share`` is a part of 1.
        histograms: By name, how often each value was observed; values are whole numbers as text.
    """

    labels: tuple[str, ...]
    numbers: dict[str, float]
    histograms: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class NumberTable:
    """Numbers that a component of a worker tells observers; see ``tell_numbers``.

    Attributes:
        title: What they are of. Tables of all workers with one title are shown as one.
        labels: The heads of the columns of labels.
        rows: The rows.
    """

    title: str
    labels: tuple[str, ...]
    rows: tuple[NumberRow, ...]
