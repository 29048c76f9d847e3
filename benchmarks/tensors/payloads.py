"""The payloads: number and size of tensors, sent one way, there and back, or overlapping."""

from __future__ import annotations

from typing import Literal, NamedTuple

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNITS = {GIB: "GiB", MIB: "MiB", KIB: "KiB", 1: "B"}

IN_FLIGHT = 4

Way = Literal["one way", "echo", "in flight"]


class Payload(NamedTuple):
    """The tensors that one call carries.

    Attributes:
        way: ``one way`` (the answer is empty), ``echo`` (the answer has the same tensors), or
            ``in flight`` (one way, and several calls overlap).
        size_bytes: Size of each tensor.
        tensors: Number of tensors in a call.
    """

    way: Way
    size_bytes: int
    tensors: int = 1

    @property
    def name(self) -> str:
        """Name of its work: ``one way 16 MiB``, or ``one way 100 x 1 KiB``."""
        unit = next(unit for unit in UNITS if self.size_bytes >= unit)
        many = "" if self.tensors == 1 else f"{self.tensors} x "
        return f"{self.way} {many}{self.size_bytes // unit} {UNITS[unit]}"

    @property
    def call_bytes(self) -> int:
        """Bytes of all tensors of a call, in one direction."""
        return self.tensors * self.size_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that a call moves in both directions together."""
        return self.call_bytes * (2 if self.way == "echo" else 1)

    @property
    def overlapping(self) -> int:
        """Number of such calls that are made at once."""
        return IN_FLIGHT if self.way == "in flight" else 1


ONE_WAY = tuple(
    Payload("one way", size)
    for size in (KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
)
ECHO = tuple(Payload("echo", size) for size in (KIB, MIB, 16 * MIB, GIB, 256 * MIB))
OVERLAPPING = tuple(Payload("in flight", size) for size in (MIB, 16 * MIB, 256 * MIB))
HUNDRED = tuple(Payload("one way", size, 100) for size in (KIB, 64 * KIB, MIB))
PAYLOADS = (*ONE_WAY, *ECHO, *OVERLAPPING, *HUNDRED)
POWERS = tuple(Payload("one way", 1 << exponent) for exponent in range(3, 31))
"""Every power of two from 8 bytes to 1 GiB."""
MEASURED = tuple(dict.fromkeys((*PAYLOADS, *POWERS)))
