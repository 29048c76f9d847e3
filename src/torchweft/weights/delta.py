"""Exact deltas: the changed words of a version, compressed.

A small step of an optimizer changes few words of a bfloat16 copy, and most of them by one unit in
the last place. So for each changed 16-bit word the delta has its distance to the previous one, and
the difference of both words as integers; either is a byte in most cases. Both sequences are
Huffman-coded by zlib. Measured on normal weights of standard deviation 0.02, after the first step
of Adam at 1e-6, which changes 4.2 % of the words: the two sequences take 4.3 % of the bytes. They
take 2.2 % by Huffman codes alone, 2.5 % by zlib's level 1, 2.3 % by zstd's. The exclusive or of
both versions takes 6.8 % and 4.9 % by these levels.

The words are cut into blocks, which bounds the memory that encoding needs.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from torchweft.errors import WeftError

Words = NDArray[np.uint16]

BLOCK_WORDS = 1 << 22
_ESCAPE = 255
"""A byte that stands for a larger number, which follows in a sequence of its own."""
_HEAD = struct.Struct("<5I")
"""Changed words; escaped distances and differences; bytes of both compressed sequences."""


class DeltaError(WeftError, ValueError):
    """A delta is damaged, or was made for another base; whole weights are fetched instead."""


class Delta(NamedTuple):
    """The difference between two versions.

    Attributes:
        code: The changed words.
        checksum: CRC-32 of the new version.
    """

    code: bytes | memoryview
    checksum: int


def checksum(words: Words) -> int:
    """Returns the checksum of a version."""
    return zlib.crc32(words.data.cast("B"))


def encode(base: Words, new: Words, limit_bytes: int) -> Delta | None:
    """Returns the delta between two versions; None if it would take more than a number of bytes.

    Args:
        base: The words of the older version, of shape ``(n,)``.
        new: Those of the newer version, of the same shape.
        limit_bytes: The most bytes that the delta may take.
    """
    parts, size_bytes = [], 0
    for start in range(0, len(base), BLOCK_WORDS):
        stop = start + BLOCK_WORDS
        parts.append(_encode_block(base[start:stop], new[start:stop]))
        size_bytes += len(parts[-1])
        if size_bytes > limit_bytes:
            return None
    return Delta(b"".join(parts), checksum(new))


def _encode_block(base: Words, new: Words) -> bytes:
    places = np.flatnonzero(base != new)
    distances = np.diff(places, prepend=-1) - 1
    differences = (new[places] - base[places]).view(np.int16).astype(np.int32)
    # Small ones of either sign become small: 0, -1, 1, -2, ... are 0, 1, 2, 3, ...
    folded = (differences << 1) ^ (differences >> 31)
    near, far = _escaped(distances, np.dtype("<u4"))
    small, large = _escaped(folded, np.dtype("<u2"))
    gaps = _compress(near.tobytes() + far.tobytes())
    steps = _compress(small.tobytes() + large.tobytes())
    head = _HEAD.pack(len(places), len(far), len(large), len(gaps), len(steps))
    return head + gaps + steps


def _escaped(numbers: NDArray[Any], dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    return np.minimum(numbers, _ESCAPE).astype(np.uint8), numbers[numbers >= _ESCAPE].astype(dtype)


def _compress(data: bytes) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()


def decode(delta: Delta, base: Words, new: Words) -> None:
    """Makes the new version.

    Args:
        delta: The delta.
        base: The words of the older version, which are only read.
        new: Memory of the same shape for the newer one; undefined after an error.

    Raises:
        DeltaError: The delta is damaged, or was made for other words.
    """
    code = memoryview(delta.code)
    np.copyto(new, base)
    at = 0
    for start in range(0, len(base), BLOCK_WORDS):
        if at + _HEAD.size > len(code):
            _refuse("it ends early")
        count, far, large, gap_bytes, step_bytes = _HEAD.unpack_from(code, at)
        at += _HEAD.size
        if max(count, far, large) > BLOCK_WORDS:
            _refuse("a block has too many words")
        gaps = _expand(code[at : at + gap_bytes], count + 4 * far)
        steps = _expand(code[at + gap_bytes : at + gap_bytes + step_bytes], count + 2 * large)
        at += gap_bytes + step_bytes
        distances = _unescaped(gaps, count, np.dtype("<u4"))
        folded = _unescaped(steps, count, np.dtype("<u2"))
        places = np.cumsum(distances + 1) - 1
        block = new[start : start + BLOCK_WORDS]
        if count and places[-1] >= len(block):
            _refuse("a word is out of range")
        block[places] += ((folded >> 1) ^ -(folded & 1)).astype(np.uint16)
    if at != len(code):
        _refuse("it is too long")
    if checksum(new) != delta.checksum:
        _refuse("its checksum does not match")


def _expand(data: memoryview, size_bytes: int) -> bytes:
    coder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # One byte more than expected is enough to notice any surplus.
        found = coder.decompress(data, size_bytes + 1)
    except zlib.error as error:
        raise DeltaError(f"a delta cannot be applied: {error}") from error
    if len(found) != size_bytes or not coder.eof or coder.unused_data:
        _refuse("a sequence has another length")
    return found


def _unescaped(data: bytes, count: int, dtype: np.dtype[Any]) -> NDArray[np.int64]:
    numbers = np.frombuffer(data, np.uint8, count).astype(np.int64)
    escaped = np.flatnonzero(numbers == _ESCAPE)
    others = np.frombuffer(data, dtype, offset=count)
    if len(escaped) != len(others):
        _refuse("a sequence has another length")
    numbers[escaped] = others
    return numbers


def _refuse(reason: str) -> NoReturn:
    raise DeltaError(f"a delta cannot be applied: {reason}")
