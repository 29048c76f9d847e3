"""Rows that a trainer keeps: which stay, and how long they are valid. No I/O, no clock.

Rules of the file: a row is known by its key in a stack. *Born* is the age of a value: the version
of its server, or the trainer's own step in the asynchronous mode. A lookup passes three points. It
*reserves* its keys, and is told which of them to pull. Their values *arrive*. It *takes* the rows
and *releases* them, or it *abandons* them. Reserved rows are held; of the others, the policy keeps
as many as the cache has room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchweft.embedding.layout import Stack
from torchweft.embedding.rows import put, take
from torchweft.errors import ConfigurationError

Policy = Literal["frequency", "recent"]
_POLICIES: Final = ("frequency", "recent")
_NEVER: Final = -(1 << 62)
_SLACK: Final = 128
"""A full cache has up to one row of so many more or fewer than its size, and drops the difference
at once: seeking rows to drop costs too much for each lookup."""
_SLOT: Final = np.dtype(
    [(name, np.int64) for name in ("key", "born", "coming", "version", "used", "holders")]
)
"""The key of a slot, or -1 where it is free; the age of the values that are here; that of those
which are here or on their way; the version of their server; the last lookup that used them; and how
many lookups hold them."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Cache:
    """Which rows a trainer keeps between lookups; see ``Tables``.

    Args:
        share: The rows that are kept, as a share of all rows of the tables on servers; 0 keeps only
            rows that batches of a stream are waiting for.
        policy: ``"frequency"`` keeps the rows that most lookups needed, ``"recent"`` those that
            were needed last.
        steps: For the asynchronous mode, and only there: in how many of its steps a trainer uses a
            row after the step in which it pulled the row.

    Raises:
        ConfigurationError: A value cannot work.
    """

    share: float = 0.1
    policy: Policy = "frequency"
    steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.share, (int, float)) or not 0 <= self.share <= 1:
            raise ConfigurationError(f"the share of a cache is {self.share!r}; it is from 0 to 1")
        if self.policy not in _POLICIES:
            raise ConfigurationError(
                f"the policy of a cache is {self.policy!r}; use one of {', '.join(_POLICIES)}"
            )
        if self.steps is not None and (type(self.steps) is not int or self.steps < 0):
            raise ConfigurationError(f"steps of a cache is {self.steps!r}; pass a number of steps")


class RowCache:
    """Rows of one stack; not thread-safe.

    Args:
        keys: Number of keys.
        size: About how many rows to keep, beside those that are held.
        dim: Number of columns.
        dtype: Type of the values.
        policy: Which rows stay.
    """

    def __init__(
        self, keys: int, size: int, dim: int, dtype: torch.dtype, policy: Policy = "frequency"
    ) -> None:
        self._size = size
        self._policy = policy
        self._slot_of = np.full(keys, -1, np.int32)
        self._counts = np.zeros(keys if policy == "frequency" else 0, np.int32)
        self._values = torch.empty(0, dim, dtype=dtype, device="cpu")
        self._lookups = 0
        self._held = 0
        self._slots = np.empty(0, _SLOT)
        self._free = np.empty(0, np.int64)

    @classmethod
    def of_stack(cls, cache: Cache, stack: Stack) -> RowCache:
        """Returns the cache of a stack."""
        keys = len(stack.servers) * stack.stride
        rows = sum(each.config.rows for each in stack.members)
        return cls(keys, int(cache.share * rows), stack.dim, stack.dtype, cache.policy)

    def __len__(self) -> int:
        return len(self._slots) - len(self._free)

    def reserve(self, keys: Tensor, oldest: int, now: int, *, may_wait: bool) -> Tensor:
        """Holds rows for a lookup, and returns which of them it has to pull.

        Args:
            keys: The keys, each once.
            oldest: The smallest age that will do when the rows are used.
            now: The age that a row is expected to have if it is pulled now.
            may_wait: Whether rows will do that an earlier lookup has yet to receive.
        """
        slots = self._slots_for(keys.numpy())
        holders = self._slots["holders"]
        self._held += int(np.count_nonzero(holders[slots] == 0))
        holders[slots] += 1
        is_wanted = self._slots["coming" if may_wait else "born"][slots] < oldest
        self._slots["coming"][slots[is_wanted]] = now
        return torch.from_numpy(is_wanted)

    def _slots_for(self, keys: Ints) -> Ints:
        """Returns the slots of keys; those that have none get one."""
        slots = self._slot_of[keys].astype(np.int64)
        new = np.flatnonzero(slots < 0)
        if len(new):
            if len(new) > len(self._free):
                self._grow(len(new))
            taken, self._free = self._free[: len(new)], self._free[len(new) :]
            slots[new] = taken
            self._slot_of[keys[new]] = taken
            self._slots[taken] = (0, _NEVER, _NEVER, _NEVER, self._lookups, 0)
            self._slots["key"][taken] = keys[new]
        return slots

    def _grow(self, count: int) -> None:
        old = len(self._slots)
        more = max(count, old // 2)
        free = np.full(more, -1, np.int64).astype(_SLOT)
        self._slots = np.concatenate([self._slots, free])
        self._free = np.concatenate([self._free, np.arange(old, old + more)])
        self._values = torch.cat(
            [self._values, self._values.new_empty(more, self._values.shape[1])]
        )

    def arrive(self, keys: Tensor, values: Tensor, born: Tensor, versions: Tensor) -> None:
        """Sets the values of reserved rows, unless younger ones are here.

        Args:
            keys: The keys, each once.
            values: Their rows.
            born: Their ages.
            versions: The versions of their servers.
        """
        slots = self._slots_of(keys)
        ages = born.numpy()
        is_younger = ages >= self._slots["born"][slots]
        if not is_younger.all():
            slots, ages = slots[is_younger], ages[is_younger]
            mask = torch.from_numpy(is_younger)
            values, versions = values[mask], versions[mask]
        put(self._values, torch.from_numpy(slots), values.contiguous())
        self._slots["born"][slots] = ages
        self._slots["coming"][slots] = np.maximum(self._slots["coming"][slots], ages)
        self._slots["version"][slots] = versions.numpy()

    def _slots_of(self, keys: Tensor) -> Ints:
        """Returns the slots of reserved keys."""
        slots: Ints = self._slot_of[keys.numpy()].astype(np.int64)
        return slots

    def too_old(self, keys: Tensor, oldest: int) -> Tensor:
        """Returns which of some reserved rows are older than a lookup may use."""
        return torch.from_numpy(self._slots["born"][self._slots_of(keys)] < oldest)

    def take(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies of reserved rows that are here, and their versions."""
        slots = self._slots_of(keys)
        versions = torch.from_numpy(self._slots["version"][slots])
        return take(self._values, torch.from_numpy(slots)), versions

    def release(self, keys: Tensor) -> None:
        """Ends the hold of a lookup that has used its rows."""
        slots = self._slots_of(keys)
        self._lookups += 1
        self._slots["used"][slots] = self._lookups
        if self._policy == "frequency":
            self._counts[keys.numpy()] += 1
        self._let_go(slots)

    def abandon(self, keys: Tensor, pulled: Tensor) -> None:
        """Ends the hold of a lookup that does not use its rows.

        Args:
            keys: The keys that it reserved.
            pulled: Which of them it was to pull; they do not arrive.
        """
        slots = self._slots_of(keys)
        lost = slots[pulled.numpy()]
        self._slots["coming"][lost] = self._slots["born"][lost]
        self._let_go(slots)

    def _let_go(self, slots: Ints) -> None:
        self._slots["holders"][slots] -= 1
        idle = slots[self._slots["holders"][slots] == 0]
        self._held -= len(idle)
        self._drop(idle[self._slots["born"][idle] == _NEVER])
        surplus, slack = len(self) - self._held - self._size, self._size // _SLACK
        if surplus > slack:
            self._drop(self._first_to_go(surplus + slack))

    def _first_to_go(self, count: int) -> Ints:
        """Returns the slots of rows that the policy drops first."""
        slots = self._idle()
        score = self._slots["used"][slots]
        if self._policy == "frequency":
            score = (self._counts[self._slots["key"][slots]].astype(np.int64) << 32) + score
        return slots[np.argpartition(score, min(count, len(slots)) - 1)[:count]]

    def _idle(self) -> Ints:
        return np.flatnonzero((self._slots["key"] >= 0) & (self._slots["holders"] == 0))

    def _drop(self, slots: Ints) -> None:
        self._slot_of[self._slots["key"][slots]] = -1
        self._slots["key"][slots] = -1
        self._free = np.concatenate([self._free, slots])

    def clear(self) -> None:
        """Makes all values too old for any lookup; rows that are on their way are still awaited."""
        is_here = self._slots["coming"] == self._slots["born"]
        self._slots["coming"][is_here] = _NEVER
        self._slots["born"] = _NEVER
        self._drop(self._idle())
