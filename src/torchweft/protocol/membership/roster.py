"""The workers of a group as one of them knows them: lives, and the names that programs use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from torchweft.errors import DuplicateName, ProtocolError
from torchweft.protocol.membership.registration import ID_LIMIT, Registration


class Life(Protocol):
    """What the roster needs to know of a worker."""

    @property
    def registration(self) -> Registration:
        """What it said of itself when it joined."""


L = TypeVar("L", bound=Life)


class Roster(Generic[L]):
    """Who belongs to a group: by id, which names one life, and by the names of programs.

    One that was lost is still found by name, so that a call to it says so, until another life takes
    its name. One that has left is not. Lookups in the tables are safe in any thread; everything
    else is not.

    Args:
        me: This worker.
        others: All others, as far as they are known.
        is_open: Whether workers may join and leave later.

    Attributes:
        by_id: All lives that this worker has known, also those that are over.
        by_name: The lives that programs find by name.
        by_rank: The lives that programs find by rank.
    """

    def __init__(self, me: L, others: Iterable[L], *, is_open: bool) -> None:
        self.is_open = is_open
        self.by_id: dict[int, L] = {}
        self.by_name: dict[str, L] = {}
        self.by_rank: dict[int, L] = {}
        self._me = me
        self._introduced: set[int] = set()
        for life in (me, *others):
            self.admit(life)

    def arrival(self, registration: Registration) -> tuple[L | None, tuple[L, ...]]:
        """Returns what a registration means; a new life is to be given to ``admit``.

        Returns:
            The life that has registered so before, or None for a new one; and the lives that had
            the name or the rank of a new one before, and are over.

        Raises:
            ProtocolError: The group is closed, or there is no such id.
            DuplicateName: It has the name or rank of this worker.
        """
        known = self.by_id.get(registration.id)
        if known is not None:
            return known, ()
        if not self.is_open or not 0 <= registration.id < ID_LIMIT:
            raise ProtocolError(f"there is no worker of id {registration.id}")
        former = self._namesakes(registration)
        if self._me in former:
            me = self._me.registration
            raise DuplicateName(f"worker {me.name!r} (rank {me.rank}) lives")
        return None, former

    def _namesakes(self, registration: Registration) -> tuple[L, ...]:
        of_name = self.by_name.get(registration.name)
        of_rank = self.by_rank.get(registration.rank)
        found = (of_name,) if of_name is of_rank else (of_name, of_rank)
        return tuple(life for life in found if life is not None)

    def is_replaced(self, registration: Registration) -> bool:
        """Returns whether a later life of its name or rank has introduced itself meanwhile.

        For a registration that was read from the store: its life is over then, as the later one has
        asked it.
        """
        return any(
            life.registration.id in self._introduced
            for life in self._namesakes(registration)
            if life.registration.id != registration.id
        )

    def admit(self, life: L, *, is_introduced: bool = False) -> None:
        """Takes up a new life, in the place of a former one of its name or rank.

        Args:
            life: The life.
            is_introduced: Whether it said itself that it has joined.
        """
        registration = life.registration
        if is_introduced:
            self._introduced.add(registration.id)
        for former in self._namesakes(registration):
            self.retire(former)
        self.by_id[registration.id] = life
        self.by_name[registration.name] = life
        self.by_rank[registration.rank] = life

    def may_have_been(self, worker: int) -> bool:
        """Returns whether there can have been a life of an id that this worker never knew."""
        return self.is_open and 0 <= worker < ID_LIMIT

    def retire(self, life: L) -> None:
        """Has a life that leaves, or is over, not be found by name or rank any more."""
        registration = life.registration
        self._introduced.discard(registration.id)
        if self.by_name.get(registration.name) is life:
            del self.by_name[registration.name]
        if self.by_rank.get(registration.rank) is life:
            del self.by_rank[registration.rank]
