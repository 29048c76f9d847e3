"""Who belongs to a group: how workers join it, how they know each other, and how they leave.

A *closed* group has a number of workers and a leader, rank 0: all join together and leave together.
An *open* group has neither: workers come and go one by one. Both are the same machines as far as
they can be:

``registration``
    What a worker says of itself, and whether workers fit together.
``joining``
    What a worker writes to the rendezvous store, reads and waits for, in which order.
``roster``
    The lives that a worker knows, and by which names programs find them.
``leaving``
    When a worker may go: alone, or as one of a closed group.
``leader``
    When a closed group is quiet, so that all may go.

``docs/protocols/membership.md`` has the messages, the guarantees and the scenarios.
"""

from torchweft.protocol.membership.registration import (
    FIRST_LATER_ID,
    HAS_SECRET,
    HOST,
    ID_LIMIT,
    IS_FAR,
    NETWORK,
    PYTHON,
    STRICT,
    VERSIONS,
    Directory,
    Registration,
    assemble,
    differences,
    versions_of,
    why_apart,
    why_not_by_value,
)

__all__ = [
    "Registration",
    "Directory",
    "assemble",
    "why_apart",
    "differences",
    "versions_of",
    "why_not_by_value",
    "FIRST_LATER_ID",
    "ID_LIMIT",
    "STRICT",
    "HOST",
    "NETWORK",
    "IS_FAR",
    "HAS_SECRET",
    "VERSIONS",
    "PYTHON",
]
