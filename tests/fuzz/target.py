"""A target: one decoder, its permitted behaviour with any bytes, and valid bytes to start from."""

from __future__ import annotations

import random
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

Bare = Callable[[bytes], bool]
"""Decodes bytes, and returns whether they were accepted; may raise any error of a refusal."""

_SAMPLED = 64
"""One of this many inputs is decoded with its memory measured, which takes ten times as long."""
_BASE_BYTES = 1 << 20
"""A frame's header and the lengths in it may take half of it."""
_FACTOR = 256
"""A JSON list of empty lists takes about 64 bytes of memory for each byte of it."""


@dataclass(frozen=True)
class Target:
    """One decoder.

    Attributes:
        name: Its name.
        run: Decodes the bytes and asserts what must hold. Returns the error with which they were
            refused, which is of a documented type, or None if they were accepted. Any error that
            it raises is a finding.
        seeds: Returns valid inputs, and inputs near them that were once accepted wrongly.
        words: Pieces that random bytes hardly ever contain.
        length_limit: Longest input that is worth the time.
        json_from: Where a JSON text begins in an input; None where there is none.
        make: Makes an input by a grammar; half of all inputs are made so.
        begin: Creates the state that the target keeps between inputs; its memory does not count.
        end: Releases the state that the target keeps between inputs.
        bare: Makes what gives bytes to the twin in C alone, in a fraction of the time of ``run``;
            None where there is no such twin. Its state lasts for a lot of inputs.
    """

    name: str
    run: Callable[[bytes], Exception | None]
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()
    length_limit: int = 512
    json_from: int | None = None
    make: Callable[[random.Random], bytes] | None = None
    begin: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    bare: Callable[[], AbstractContextManager[Bare]] | None = None

    def check(self, data: bytes) -> Exception | None:
        """Runs the target on one input, now and then with its memory measured."""
        if zlib.crc32(data) % _SAMPLED:
            return self.run(data)
        return self.check_memory(data)

    def check_memory(self, data: bytes) -> Exception | None:
        """Runs the target on one input and asserts that its size bounds the memory taken.

        The error refers to this frame, which holds the error. The garbage collector will find both
        with all that the error's frames hold, as it does where a program keeps an error.
        """
        self.begin()
        limit_bytes = _BASE_BYTES + _FACTOR * len(data)
        tracemalloc.start()
        try:
            refusal = self.run(data)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes <= limit_bytes, (
            f"{len(data)} bytes made {self.name} take {peak_bytes} bytes of memory"
        )
        return refusal
