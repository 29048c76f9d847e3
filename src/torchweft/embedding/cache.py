"""Rows that a trainer keeps: which stay, and how long they are valid. No I/O, no clock.

Rules of the file: a row is known by its key in a stack. *Born* is the age of a value: the version
of its server, or the trainer's own step in the asynchronous mode. A lookup passes three points. It
*reserves* its keys, and is told which of them to pull. Their values *arrive*. It *takes* the rows
and *releases* them, or it *abandons* them. Reserved rows are held; of the others, the policy keeps
as many as the cache has room for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchweft.embedding.lookup import Answer, Fetch, Looked, Moved, PulledRows, Request, Router
from torchweft.embedding.rows import put, take
from torchweft.errors import ConfigurationError

Policy = Literal["frequency", "recent"]
_POLICIES: Final = ("frequency", "recent")
_NEVER: Final = -(1 << 62)
_SOUGHT: Final = 64
"""A full cache seeks one row of so many at once, to drop them when there is no room."""

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
        size: How many rows to keep, beside those that are held.
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
        self._key_of = np.empty(0, np.int64)  # -1 where a slot is free
        self._born = np.empty(0, np.int64)  # of the values that are here
        self._coming = np.empty(0, np.int64)  # of the values that are here or on their way
        self._version = np.empty(0, np.int64)
        self._used = np.empty(0, np.int64)
        self._holders = np.empty(0, np.int32)
        self._free = np.empty(0, np.int64)
        self._victims = np.empty(0, np.int64)  # slots that the policy drops next, first ones first
        self._sought = 0  # the number of lookups when they were sought

    def __len__(self) -> int:
        return len(self._key_of) - len(self._free)

    def reserve(self, keys: Tensor, oldest: int, now: int, *, may_wait: bool) -> Tensor:
        """Holds rows for a lookup, and returns which of them it has to pull.

        Args:
            keys: The keys, each once.
            oldest: The smallest age that will do when the rows are used.
            now: The age that a row is expected to have if it is pulled now.
            may_wait: Whether rows will do that an earlier lookup has yet to receive.
        """
        found = keys.numpy()
        slots = self._slots(found)
        self._held += int(np.count_nonzero(self._holders[slots] == 0))
        self._holders[slots] += 1
        ages = self._coming if may_wait else self._born
        is_wanted = ages[slots] < oldest
        self._coming[slots[is_wanted]] = now
        return torch.from_numpy(is_wanted)

    def _slots(self, keys: Ints) -> Ints:
        """Returns the slots of keys; those that have none get one."""
        slots = self._slot_of[keys].astype(np.int64)
        new = np.flatnonzero(slots < 0)
        if len(new):
            if len(new) > len(self._free):
                self._grow(len(new))
            taken, self._free = self._free[: len(new)], self._free[len(new) :]
            slots[new] = taken
            self._slot_of[keys[new]] = taken
            self._key_of[taken] = keys[new]
            for ages in (self._born, self._coming, self._version):
                ages[taken] = _NEVER
            self._used[taken] = self._lookups
            self._holders[taken] = 0
        return slots

    def _grow(self, count: int) -> None:
        old = len(self._key_of)
        more = max(count, old // 2)

        def longer(array: NDArray[Any], value: int) -> NDArray[Any]:
            return np.concatenate([array, np.full(more, value, array.dtype)])

        self._key_of = longer(self._key_of, -1)
        self._born = longer(self._born, _NEVER)
        self._coming = longer(self._coming, _NEVER)
        self._version = longer(self._version, _NEVER)
        self._used = longer(self._used, 0)
        self._holders = longer(self._holders, 0)
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
        slots = self._slot_of[keys.numpy()].astype(np.int64)
        ages = born.numpy()
        is_younger = ages >= self._born[slots]
        if not is_younger.all():
            slots, ages = slots[is_younger], ages[is_younger]
            mask = torch.from_numpy(is_younger)
            values, versions = values[mask], versions[mask]
        put(self._values, torch.from_numpy(slots), values.contiguous())
        self._born[slots] = ages
        self._coming[slots] = np.maximum(self._coming[slots], ages)
        self._version[slots] = versions.numpy()

    def too_old(self, keys: Tensor, oldest: int) -> Tensor:
        """Returns which of some reserved rows are older than a lookup may use."""
        return torch.from_numpy(self._born[self._slot_of[keys.numpy()]] < oldest)

    def take(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies of reserved rows that are here, and their versions."""
        slots = self._slot_of[keys.numpy()].astype(np.int64)
        return take(self._values, torch.from_numpy(slots)), torch.from_numpy(self._version[slots])

    def release(self, keys: Tensor) -> None:
        """Ends the hold of a lookup that has used its rows."""
        found = keys.numpy()
        slots = self._slot_of[found].astype(np.int64)
        self._lookups += 1
        self._used[slots] = self._lookups
        if self._policy == "frequency":
            self._counts[found] += 1
        self._let_go(slots)

    def abandon(self, keys: Tensor, pulled: Tensor) -> None:
        """Ends the hold of a lookup that does not use its rows.

        Args:
            keys: The keys that it reserved.
            pulled: Which of them it was to pull; they do not arrive.
        """
        slots = self._slot_of[keys.numpy()].astype(np.int64)
        lost = slots[pulled.numpy()]
        self._coming[lost] = self._born[lost]
        self._let_go(slots)

    def _let_go(self, slots: Ints) -> None:
        self._holders[slots] -= 1
        idle = slots[self._holders[slots] == 0]
        self._held -= len(idle)
        self._drop(idle[self._born[idle] == _NEVER])
        surplus = len(self) - self._held - self._size
        if surplus > 0:
            self._drop(self._surplus(surplus))

    def _surplus(self, count: int) -> Ints:
        """Returns the slots of some rows that the policy drops, a positive number of them.

        Seeking them in all rows costs too much for each lookup. So more are sought than are dropped
        now; the others stay until there is no room, and if they are needed before, they are spared.
        """
        victims = self._victims
        is_idle = (self._key_of[victims] >= 0) & (self._holders[victims] == 0)
        victims = victims[is_idle & (self._used[victims] <= self._sought)]
        if len(victims) < count:
            victims = self._seek(max(count, self._size // _SOUGHT))
        self._victims = victims[count:]
        return victims[:count]

    def _seek(self, count: int) -> Ints:
        """Returns the slots of rows that the policy drops first, in that order."""
        slots = np.flatnonzero((self._key_of >= 0) & (self._holders == 0))
        score = self._used[slots]
        if self._policy == "frequency":
            score = (self._counts[self._key_of[slots]].astype(np.int64) << 32) + score
        self._sought = self._lookups
        first = np.argpartition(score, min(count, len(slots)) - 1)[:count]
        return slots[first[np.argsort(score[first], kind="stable")]]

    def _drop(self, slots: Ints) -> None:
        self._slot_of[self._key_of[slots]] = -1
        self._key_of[slots] = -1
        self._free = np.concatenate([self._free, slots])

    def clear(self) -> None:
        """Makes all values too old for any lookup; rows that are on their way are still awaited."""
        is_here = self._coming == self._born
        self._coming[is_here] = _NEVER
        self._born[:] = _NEVER
        self._drop(np.flatnonzero((self._key_of >= 0) & (self._holders == 0)))


def cache_of(cache: Cache, router: Router) -> RowCache:
    """Returns the cache of a stack."""
    stack = router.stack
    keys = len(stack.servers) * stack.stride
    rows = sum(each.config.rows for each in stack.members)
    return RowCache(keys, int(cache.share * rows), stack.dim, stack.dtype, cache.policy)


class Ages(NamedTuple):
    """The ages of rows, when a lookup pulls.

    Attributes:
        oldest: The smallest age that will do when the rows are used.
        now: The age that a row is expected to have if it is pulled now.
        counts_steps: Whether ages are steps of the trainer, rather than versions of servers.
    """

    oldest: int
    now: int
    counts_steps: bool


class CachedRows(PulledRows):
    """Rows, each once, of which some are in a cache.

    Args:
        number: Number of the stack.
        router: Routes its ids.
        looked: The tables that are looked up.
        cache: The cache of the stack.
        ages: The ages of the rows.
        may_wait: Whether rows will do that an earlier lookup has yet to receive.
    """

    def __init__(
        self,
        number: int,
        router: Router,
        looked: Sequence[Looked],
        cache: RowCache,
        ages: Ages,
        *,
        may_wait: bool,
    ) -> None:
        super().__init__(number, router, looked, router.route(looked))
        self._cache = cache
        self._ages = ages
        self._is_ahead = may_wait
        self._is_held = True
        keys = self.rows.keys
        self._wanted = cache.reserve(keys, ages.oldest, ages.now, may_wait=may_wait)
        self._pulled = self._wanted
        self._pulls = 0
        self._fetch(self._wanted)

    def _fetch(self, which: Tensor) -> None:
        """Sets which rows are asked for next."""
        keys = self.rows.keys[which]
        self._missing = Fetch(self.number, self._router, keys, self._router.counted(keys)[0])
        self._pulls += len(keys)

    def requests(self) -> Mapping[str, Request]:
        """Returns the rows to ask of each server, which the cache lacks."""
        return self._missing.requests()

    def arrive(self, answer: Answer, step: int) -> None:
        """Takes rows over into the cache."""
        fetch = self._missing
        versions = torch.empty(len(fetch.keys), dtype=torch.int64, device="cpu")
        for _, server, begin, end in fetch.slices():
            versions[begin:end] = answer.versions[server]
        born = torch.full_like(versions, self._ages.now) if self._ages.counts_steps else versions
        self._cache.arrive(fetch.keys, fetch.gather(answer.values), born, versions)

    def is_late(self, ages: Ages) -> bool:
        """Returns whether rows have become too old; these are asked for next."""
        is_late = self._cache.too_old(self.rows.keys, ages.oldest)
        if not bool(is_late.any()):
            return False
        self._ages, self._pulled = ages, self._wanted | is_late
        self._fetch(is_late)
        return True

    def take(self, step: int) -> dict[str, int]:
        """Takes the rows from the cache, for a step of the trainer.

        Returns:
            The oldest version of the rows from each server whose pull it lacks. A server counts the
            staleness of a pull itself, unless the pull was sent ahead.
        """
        self.values, versions = self._cache.take(self.rows.keys)
        self._cache.release(self.rows.keys)
        self._is_held = False
        self.version = int(versions.min()) if len(versions) else step
        return {
            server: int(versions[begin:end].min())
            for _, server, begin, end in self.rows.slices()
            if self._is_ahead or not bool(self._wanted[begin:end].all())
        }

    def abandon(self) -> None:
        """Gives the rows up, if they were not taken."""
        if self._is_held:
            self._is_held = False
            self._cache.abandon(self.rows.keys, self._wanted)

    @functools.cached_property
    def moved(self) -> list[Moved]:
        """What the lookup of each table moves: rows are pulled that the cache lacks."""
        _, pulled = self._router.counted(self.rows.keys[self._pulled])
        again = self._pulls - int(self._pulled.sum())  # rows that were pulled twice
        size = self._router.dtype.itemsize + self._router.pulled_bytes
        found = []
        for moved, (number, _, _) in zip(super().moved, self.looked, strict=True):
            hits, own = moved.rows - pulled[number], (pulled[number] + again) * size
            found.append(moved._replace(pulled_bytes=own, hits=hits))
            again = 0
        return found
