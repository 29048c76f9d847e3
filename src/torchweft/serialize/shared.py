"""Which memory of this process the user shares with other workers.

Tensors there must not be copied into a message, however small they are: the receiver is to get
the same memory. The layer that lends it says here where it is.
"""

from __future__ import annotations

ranges: dict[int, int] = {}
"""Start and end of every memory that may hold shared tensors; mostly there is none."""


def holds(address: int) -> bool:
    """Whether a tensor that begins there may be a shared one."""
    return any(start <= address < end for start, end in tuple(ranges.items()))
