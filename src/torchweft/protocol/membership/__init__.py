"""Group membership: how workers join, know each other, and leave.

A *closed* group has a number of workers and a leader, rank 0: all join together and leave together.
An *open* group has neither: workers come and go one by one. Both kinds share these machines as far
as possible:

``registration``
    A worker's description of itself, and whether workers fit together.
``joining``
    The order in which a worker writes, reads and waits for keys of the rendezvous store.
``roster``
    The lives that a worker knows, and the names by which programs find them.
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
