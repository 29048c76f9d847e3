"""Changes valid bytes in ways that find mistakes in decoders of binary messages.

The first check of a decoder refuses random bytes. A valid message gets deeper if one length, flag
or count is changed, if it contains a piece of another message, or if its end is missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tests.fuzz.json_mutating import change_json
from tests.fuzz.target import Target

_EDGES = (0, 1, 2, 7, 8, 9, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
_LARGE_EDGES = (1 << 32, (1 << 36) + 1, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_WIDTHS = (1, 2, 4, 8)
_SIZES = (1, 1, 2, 4, 8, 16, 32, 64)
_DELTAS = (0, 0, 1, -1, 8, -8, 2, -16)


class Mutator:
    """Makes new inputs out of known inputs.

    Args:
        chance: The source of all decisions; the same random numbers make the same inputs.
        target: The target of the inputs.
    """

    def __init__(self, chance: random.Random, target: Target) -> None:
        self._chance = chance
        self._words = target.words
        self._length_limit = target.length_limit
        self._json_from = target.json_from
        self._steps: list[Callable[[bytearray, bytes], None]] = [
            self._change_byte,
            self._change_bit,
            self._write_edge,
            self._write_edge,
            self._write_length,
            self._write_length,
            self._wake_by,
            self._wake_by,
            self._cut,
            self._remove,
            self._repeat,
            self._insert,
            self._splice,
        ]
        if self._words:
            self._steps += [self._put_word, self._put_word]

    def mutate(self, data: bytes, other: bytes) -> bytes:
        """Returns ``data`` with a few changes, perhaps with a piece of ``other`` in it."""
        if self._json_from is not None and self._chance.random() < 0.7:
            text = change_json(self._chance, data[self._json_from :])
            if text is not None:
                return (data[: self._json_from] + text)[: self._length_limit]
        changed = bytearray(data)
        for _ in range(self._chance.choice((1, 1, 1, 2, 2, 3, 5))):
            self._chance.choice(self._steps)(changed, other)
        return bytes(changed[: self._length_limit])

    def _place(self, data: bytearray, width: int = 0) -> int:
        return self._chance.randrange(max(len(data) - width, 0) + 1)

    def _change_byte(self, data: bytearray, _: bytes) -> None:
        if data:
            data[self._place(data, 1)] = self._chance.randrange(256)

    def _change_bit(self, data: bytearray, _: bytes) -> None:
        if data:
            data[self._place(data, 1)] ^= 1 << self._chance.randrange(8)

    def _write(self, data: bytearray, place: int, width: int, number: int) -> None:
        number &= (1 << 8 * width) - 1
        data[place : place + width] = number.to_bytes(width, "little")

    def _write_edge(self, data: bytearray, _: bytes) -> None:
        width = self._chance.choice(_WIDTHS)
        edges = _EDGES + _LARGE_EDGES if width == 8 else _EDGES
        self._write(data, self._place(data, width), width, self._chance.choice(edges))

    def _write_length(self, data: bytearray, _: bytes) -> None:
        """Writes a number that a length or count could have: the following bytes, in some unit."""
        width = self._chance.choice(_WIDTHS)
        place = self._place(data, width)
        rest = len(data) - place - width
        unit = self._chance.choice((1, 1, 1, 4, 8, 9, 25, 32))
        self._write(data, place, width, rest // unit + self._chance.choice((0, 0, -1, 1, -8, 8)))

    def _wake_by(self, data: bytearray, _: bytes) -> None:
        """Adds a small amount to an existing number."""
        width = self._chance.choice(_WIDTHS)
        place = self._place(data, width)
        number = int.from_bytes(data[place : place + width], "little")
        self._write(data, place, width, number + self._chance.choice((-8, -2, -1, 1, 1, 2, 8, 256)))

    def _cut(self, data: bytearray, _: bytes) -> None:
        del data[self._place(data) :]

    def _remove(self, data: bytearray, _: bytes) -> None:
        place = self._place(data)
        del data[place : place + self._chance.choice((1, 1, 4, 8, 16, 32))]

    def _repeat(self, data: bytearray, _: bytes) -> None:
        start = self._place(data)
        piece = data[start : start + self._chance.choice((1, 4, 8, 16, 64))]
        place = self._place(data)
        data[place:place] = piece * self._chance.choice((1, 1, 2, 16))

    def _insert(self, data: bytearray, _: bytes) -> None:
        place = self._place(data)
        data[place:place] = self._chance.randbytes(self._chance.choice((1, 2, 4, 8, 24)))

    def _splice(self, data: bytearray, other: bytes) -> None:
        if not other:
            return
        start = self._chance.randrange(len(other))
        end = self._chance.randrange(start, len(other)) + 1
        place = self._place(data)
        replaced = self._chance.choice((0, end - start, len(data)))
        data[place : place + replaced] = other[start:end]

    def _put_word(self, data: bytearray, _: bytes) -> None:
        word = self._chance.choice(self._words)
        place = self._place(data)
        data[place : place + self._chance.choice((0, len(word)))] = word


class Varier:
    """Makes many inputs near a known input, in a small part of the time that ``Mutator`` takes.

    Each random decision is a byte of one large draw. To allocate numbers would take longer than the
    change itself under a sanitizer, and the interpreter keeps those of a byte.

    Args:
        chance: The source of all decisions; the same random numbers make the same inputs.
        target: The target of the inputs.
    """

    def __init__(self, chance: random.Random, target: Target) -> None:
        self._chance = chance
        self._length_limit = target.length_limit
        self._pieces = [
            edge.to_bytes(width, "little")
            for width in _WIDTHS
            for edge in (*_EDGES, *_LARGE_EDGES)
            if edge < 1 << 8 * width
        ]
        # As many words as numbers, so that half of the pieces are words.
        count = len(self._pieces) if target.words else 0
        self._pieces += [target.words[place % len(target.words)] for place in range(count)]
        self._steps: tuple[Callable[[bytearray, bytes, int, int], None], ...] = (
            *(_set_byte, _set_byte, _flip_bit, _flip_bit, _add, _add),
            *(self._write_piece, self._write_piece, self._write_piece, self._insert_piece),
            *(_write_rest, _write_rest, _remove, _cut, _repeat, _splice),
        )

    def vary(self, data: bytes, other: bytes, count: int) -> Iterator[bytes]:
        """Yields inputs near ``data``: half with one change, the rest with one more than before."""
        steps, limit = self._steps, self._length_limit
        changed = bytearray(data)
        draw = iter(self._chance.randbytes(4 * count))
        for step, place, fine, number in zip(draw, draw, draw, draw, strict=True):
            if step & 16:
                changed = bytearray(data)
            at = (place * (len(changed) + 1) + fine) >> 8
            steps[step & 15](changed, other, min(at, len(changed)), number)
            del changed[limit:]
            yield bytes(changed)

    def _piece(self, number: int) -> bytes:
        return self._pieces[number * len(self._pieces) >> 8]

    def _write_piece(self, data: bytearray, _: bytes, at: int, number: int) -> None:
        piece = self._piece(number)
        data[at : at + len(piece)] = piece

    def _insert_piece(self, data: bytearray, _: bytes, at: int, number: int) -> None:
        data[at:at] = self._piece(number)


def _set_byte(data: bytearray, _: bytes, at: int, number: int) -> None:
    data[at : at + 1] = (number,)


def _flip_bit(data: bytearray, _: bytes, at: int, number: int) -> None:
    if at < len(data):
        data[at] ^= 1 << (number & 7)


def _add(data: bytearray, _: bytes, at: int, number: int) -> None:
    if at < len(data):
        data[at] = (data[at] + _DELTAS[number & 7]) & 255


def _write_rest(data: bytearray, _: bytes, at: int, number: int) -> None:
    """Writes how many bytes follow, or nearly as many."""
    width = _WIDTHS[number & 3]
    rest = max(len(data) - at - width + _DELTAS[number >> 2 & 7], 0)
    data[at : at + width] = rest.to_bytes(8, "little")[:width]


def _remove(data: bytearray, _: bytes, at: int, number: int) -> None:
    del data[at : at + _SIZES[number & 7]]


def _cut(data: bytearray, _: bytes, at: int, number: int) -> None:
    del data[at:]


def _repeat(data: bytearray, _: bytes, at: int, number: int) -> None:
    piece = data[at : at + _SIZES[number & 7]]
    data[at:at] = piece * _SIZES[number >> 3 & 3]


def _splice(data: bytearray, other: bytes, at: int, number: int) -> None:
    start = number * len(other) >> 8
    replaced = _SIZES[number & 7] if number & 8 else len(data)
    data[at : at + replaced] = other[start : start + replaced]
