"""What is sent: how many tensors of which size, one way, there and back, or overlapping."""

from __future__ import annotations

from typing import Literal, NamedTuple

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNITS = {GIB: "GiB", MIB: "MiB", KIB: "KiB"}

IN_FLIGHT = 4

Way = Literal["one way", "echo", "in flight"]


class Payload(NamedTuple):
    """What one call carries.

    Attributes:
        way: ``one way`` (answered by nothing), ``echo`` (answered by the same), or ``in flight``
            (one way, and several calls overlap).
        size_bytes: Of each tensor.
        tensors: How many a call carries.
    """

    way: Way
    size_bytes: int
    tensors: int = 1

    @property
    def name(self) -> str:
        """What its work is called: ``one way 16 MiB``, or ``one way 100 x 1 KiB``."""
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
        """How many such calls are made at once."""
        return IN_FLIGHT if self.way == "in flight" else 1


ONE_WAY = tuple(
    Payload("one way", size)
    for size in (KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
)
ECHO = tuple(Payload("echo", size) for size in (KIB, MIB, 16 * MIB, GIB, 256 * MIB))
OVERLAPPING = tuple(Payload("in flight", size) for size in (MIB, 16 * MIB, 256 * MIB))
HUNDRED = tuple(Payload("one way", size, 100) for size in (KIB, 64 * KIB, MIB))
PAYLOADS = (*ONE_WAY, *ECHO, *OVERLAPPING, *HUNDRED)
