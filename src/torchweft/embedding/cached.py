"""A lookup of rows that a cache may have: what is pulled, what is held, what is too old."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.embedding.cache import RowCache
from torchweft.embedding.lookup import Fetch, PulledRows, routed_of
from torchweft.embedding.pulled import Looked, Moved
from torchweft.embedding.pulling import Answer
from torchweft.embedding.routing import Router


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
        super().__init__(number, router, looked, routed_of(router, looked))
        self._cache = cache
        self._is_ahead = may_wait
        self._is_held = True
        keys = self.rows.keys
        self._wanted = cache.reserve(keys, ages.oldest, ages.now, may_wait=may_wait)
        self.fetch = self._fetch(keys[self._wanted])
        self._pulled = self._wanted
        self._pulls = len(self.fetch.keys)

    def _fetch(self, keys: Tensor) -> Fetch:
        cuts, _ = self._router.counted(keys)
        return Fetch(self.number, self._router, keys, cuts)

    def arrive(self, fetch: Fetch, answer: Answer, ages: Ages) -> None:
        """Takes rows over into the cache.

        Args:
            fetch: What was pulled.
            answer: The answers of the servers.
            ages: The ages at the time at which they were asked.
        """
        versions = torch.empty(len(fetch.keys), dtype=torch.int64, device="cpu")
        for _, server, begin, end in fetch.slices():
            versions[begin:end] = answer.versions[server]
        born = torch.full_like(versions, ages.now) if ages.counts_steps else versions
        self._cache.arrive(fetch.keys, fetch.gather(answer.values), born, versions)

    def late(self, ages: Ages) -> Fetch | None:
        """Returns what has to be pulled again, as it has become too old; None for nothing."""
        is_late = self._cache.too_old(self.rows.keys, ages.oldest)
        if not bool(is_late.any()):
            return None
        self._pulled = self._wanted | is_late
        fetch = self._fetch(self.rows.keys[is_late])
        self._pulls += len(fetch.keys)
        return fetch

    def take(self) -> tuple[Tensor, dict[str, int]]:
        """Returns the rows, and the oldest version of those from each server whose pull it lacks.

        A server counts the staleness of a pull itself, unless the pull was sent ahead.
        """
        values, versions = self._cache.take(self.rows.keys)
        self._cache.release(self.rows.keys)
        self._is_held = False
        self.version = int(versions.min()) if len(versions) else self.version
        oldest = {
            server: int(versions[begin:end].min())
            for _, server, begin, end in self.rows.slices()
            if self._is_ahead or not bool(self._wanted[begin:end].all())
        }
        return values, oldest

    def abandon(self) -> None:
        """Gives the rows up, if they were not taken."""
        if self._is_held:
            self._is_held = False
            self._cache.abandon(self.rows.keys, self._wanted)

    def _moved(self) -> list[Moved]:
        _, pulled = self._router.counted(self.rows.keys[self._pulled])
        again = self._pulls - int(self._pulled.sum())  # rows that were pulled twice
        size = self._router.dtype.itemsize + self._router.pulled_bytes
        found = []
        for moved, (number, _, _) in zip(super()._moved(), self.looked, strict=True):
            hits = moved.rows - pulled[number]
            found.append(moved._replace(pulled_bytes=pulled[number] * size, hits=hits))
        if again:
            found[0] = found[0]._replace(pulled_bytes=found[0].pulled_bytes + again * size)
        return found
