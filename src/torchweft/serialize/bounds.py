"""Bounds on values that an enemy may have made: on their unfolded size, and the cost of their keys.

Few bytes can stand for a large value. A nest of lists each of which holds the one before twice has
``2 ** depth`` leaves, and an expanded tensor (stride 0) has as many elements as its shape says. The
value itself takes little memory; a function that walks, copies or prints it takes time and memory
without end. So a strict worker bounds the *unfolded size* of each value: its size if each container
and each tensor were written out in full wherever it stands. It may be ``UNFOLDING`` times the bytes
received; a small message may unfold to ``UNFOLDED_FLOOR_BYTES``.

Keys of sets and dicts cost time with the square of their number if their hashes collide. The hashes
of numbers and tuples are public, and keys whose hashes differ can collide as well: they share their
way through the table. So the processor time is bounded, not the number of equal hashes. Honest keys
take a hundredth of the bound. A time can be wrong once (a machine that stops for a moment), so a
slow step counts only if looking the same keys up again is slow, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import thread_time

from torch import Tensor

from torchweft.errors import SerializationError

UNFOLDING = 64
"""How many times larger than the received bytes a value may be when it is unfolded."""
UNFOLDED_FLOOR_BYTES = 4 << 20
"""The unfolded size that a value of any message may have."""
CONTAINER_BYTES = 64
"""What a list, set or dict takes beside its content."""

KEYS_AT_ONCE = 16
"""Keys that go into a set or dict between two looks at the time."""
_USUAL_KEY_S = 5e-6
"""Processor time of a key up to which a step is not looked at further: honest ones take 0.1 us."""
_KEYS_FLOOR_S = 0.05
_KEY_BYTE_S = 0.1e-6
"""Processor time that all keys of a message may take beyond that, and more for each byte."""


def unfolded_limit(payload_bytes: int, tensors: Sequence[Tensor]) -> int:
    """Returns how large a value may be when it is unfolded, and checks its tensors.

    Args:
        payload_bytes: The bytes of its message without the memory of tensors.
        tensors: The tensors of the message, each once.

    Raises:
        SerializationError: The tensors have more elements than the value may have.
    """
    storages: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    limit_bytes = _limit(payload_bytes + sum(storages.values()))
    if dense_bytes(tensors) > limit_bytes:
        raise too_large(limit_bytes)
    return limit_bytes


def limit_of_repetition(payload_bytes: int, tensors: Iterable[Tensor]) -> int:
    """Returns the same for tensors of which each may have any size, once.

    They have been checked already, or are gradients, whose shapes the receiver knows.
    """
    return _limit(payload_bytes) + dense_bytes(tensors)


def _limit(received_bytes: int) -> int:
    return max(UNFOLDED_FLOOR_BYTES, UNFOLDING * received_bytes)


def dense_bytes(values: Iterable[object]) -> int:
    """Returns what the tensors among some values would take, each written out."""
    # ``nbytes`` overflows.
    return sum([each.numel() * each.itemsize for each in values if isinstance(each, Tensor)])


def too_large(limit_bytes: int) -> SerializationError:
    """Returns the error for a value whose unfolded size is beyond its limit."""
    return SerializationError(
        f"a value would take more than {limit_bytes} bytes if what it has in several places "
        "(lists, sets, dicts, tensors) and its expanded tensors (stride 0) were written out; a "
        f"strict worker takes values of {UNFOLDING} times the bytes that it received, and of "
        f"{UNFOLDED_FLOOR_BYTES >> 20} MiB: send copies (copy.deepcopy, tensor.contiguous()), or "
        "repeat and expand in the remote function"
    )


class KeyTimes:
    """Bounds the processor time that the keys of one message take.

    Args:
        size_bytes: The bytes of the message.
    """

    __slots__ = ("_left_s",)

    def __init__(self, size_bytes: int) -> None:
        self._left_s = _KEYS_FLOOR_S + size_bytes * _KEY_BYTE_S

    def add(
        self,
        keys: Sequence[object],
        add: Callable[[int, int], object],
        has: Callable[[object], object],
    ) -> None:
        """Adds keys to a set or dict, some at once.

        Args:
            keys: The keys.
            add: Adds those from one place to another.
            has: Looks a key up in the set or dict.

        Raises:
            SerializationError: The keys collide, and have taken too long.
        """
        for start in range(0, len(keys), KEYS_AT_ONCE):
            end = min(start + KEYS_AT_ONCE, len(keys))
            began_s = thread_time()
            add(start, end)
            took_s = thread_time() - began_s
            if took_s > _USUAL_KEY_S * KEYS_AT_ONCE:
                began_s = thread_time()
                for key in keys[start:end]:
                    has(key)
                self._left_s -= min(took_s, thread_time() - began_s)
                if self._left_s < 0:
                    raise SerializationError(
                        f"the keys of a set or dict of {len(keys)} collide: their hashes are equal "
                        "or lead to the same places; send them as a list, or as texts"
                    )
