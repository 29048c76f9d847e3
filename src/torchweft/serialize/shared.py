"""Records which memory of this process the user shares with other workers.

Tensors there must not be copied into a message, however small they are: the receiver must get the
same memory. The layer that lends the memory registers it here.
"""

from __future__ import annotations

ranges: dict[int, int] = {}
"""Start and end of every memory range that may hold shared tensors; usually empty."""


def holds(address: int) -> bool:
    """Whether a tensor that begins at ``address`` may be shared."""
    return any(start <= address < end for start, end in tuple(ranges.items()))
