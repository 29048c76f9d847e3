"""One worker's view of its group: the lives, and the names that programs use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from torchweft.errors import DuplicateName, ProtocolError
from torchweft.protocol.membership.registration import ID_LIMIT, Registration


class Life(Protocol):
    """The part of a worker that the roster needs."""

    @property
    def registration(self) -> Registration:
        """The worker's registration."""


L = TypeVar("L", bound=Life)


class Roster(Generic[L]):
    """The members of a group by id, which names one life, and by the names that programs use.

    Lost workers are still found by name, so that calls to them raise WorkerLost, until another life
    takes the name. Departed workers are not. Lookups in the tables are thread-safe; all other
    methods are not.

    Args:
        me: This worker.
        others: All other workers known so far.
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
        """Looks up the life of a registration; a new life is to be given to ``admit``.

        Returns:
            The known life with this id, or None for a new life; and the former lives with the name
            or rank of a new life, which are over.

        Raises:
            ProtocolError: The group is closed, or there is no such id.
            DuplicateName: The registration has the name or rank of this worker.
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

        For registrations read from the store: the life is then over, since the later life asked it
        and got no answer.
        """
        return any(
            life.registration.id in self._introduced
            for life in self._namesakes(registration)
            if life.registration.id != registration.id
        )

    def admit(self, life: L, *, is_introduced: bool = False) -> None:
        """Adds a new life in place of former lives of its name or rank.

        Args:
            life: The life.
            is_introduced: Whether the life itself said that it has joined.
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
        """Returns whether an id may be of a life that this worker never knew."""
        return self.is_open and 0 <= worker < ID_LIMIT

    def retire(self, life: L) -> None:
        """Stops a life that leaves, or is over, from being found by name or rank."""
        registration = life.registration
        self._introduced.discard(registration.id)
        if self.by_name.get(registration.name) is life:
            del self.by_name[registration.name]
        if self.by_rank.get(registration.rank) is life:
            del self.by_rank[registration.rank]
