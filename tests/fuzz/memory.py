"""Memory in which a sanitizer sees every access beyond the last byte.

Bytes and bytearrays of Python have a zero byte behind their own, which hides an access there.
"""

from __future__ import annotations

from array import array


def exact_memory(size_bytes: int, alignment: int = 1) -> memoryview:
    """Returns zeros on the heap, with nothing of the same block behind them."""
    others: list[array[int]] = []
    while True:
        made = array("B", b"\0") * size_bytes
        address, _ = made.buffer_info()
        if address % alignment == 0:
            return memoryview(made)
        others.append(made)  # Keep its place.


def at_end_of(memory: memoryview, data: bytes) -> memoryview:
    """Copies bytes to the end of some memory, or of new memory if that is too small."""
    if len(data) > len(memory):
        memory = exact_memory(len(data))
    part = memory[len(memory) - len(data) :]
    part[:] = data
    return part
