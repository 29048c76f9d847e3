"""Who belongs to the group, as one worker knows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torchweft.agent.peers import Peer
from torchweft.arguments import did_you_mean, wrong_type
from torchweft.errors import DuplicateName, ProtocolError, UnknownWorker
from torchweft.ids import WorkerInfo
from torchweft.protocol.membership import ID_LIMIT, Registration

_NAMED = 16
"""How many workers an error names."""


class Members:
    """The workers of a group; thread-safe.

    A worker has an id, which names one life of it, and which the protocols go by; programs find it
    by name, rank or ``WorkerInfo``. Who was lost is still found, so that a call to it says so,
    until another takes its name. Who has left is not.

    Args:
        me: This worker.
        others: All others, as far as they are known.
        is_open: Whether workers may join and leave later. See ``docs/protocols/membership.md``.
    """

    def __init__(self, me: Registration, others: Iterable[Registration], *, is_open: bool) -> None:
        self.is_open = is_open
        self._main = me.main
        self._lock = threading.Lock()
        self._on_joined: list[Callable[[Peer], None]] = []
        self._by_name: dict[str, Peer] = {}
        self._by_rank: dict[int, Peer] = {}
        self.by_id: dict[int, Peer] = {}
        """All whom this worker has known, also those that are gone; to be read only."""
        self.me = Peer(me, main_by_name=True, is_self=True)
        for peer in [self.me, *map(self._make, others)]:
            self._enter(peer)

    def _make(self, registration: Registration) -> Peer:
        main_by_name = bool(self._main) and registration.main == self._main
        return Peer(registration, main_by_name=main_by_name, is_self=False)

    def _enter(self, peer: Peer) -> None:
        self.by_id[peer.id] = peer
        self._by_name[peer.name] = peer
        self._by_rank[peer.info.id] = peer

    def find(self, to: str | int | WorkerInfo) -> Peer:
        """Returns the worker that a name, rank or ``WorkerInfo`` means.

        Raises:
            UnknownWorker: There is none; says who there is.
        """
        try:
            if isinstance(to, str):
                return self._by_name[to]
            if isinstance(to, int):
                return self._by_rank[to]
            if isinstance(to, WorkerInfo):
                peer = self._by_name[to.name]
                if peer.info == to:
                    return peer
        except KeyError:
            pass
        raise self._unknown(to)

    def _unknown(self, to: object) -> Exception:
        if not isinstance(to, (str, int, WorkerInfo)):
            return wrong_type("to", to, "pass the name of a worker, its rank, or its WorkerInfo")
        present = self.present()
        known = ", ".join(f"{peer.name!r} ({peer.info.id})" for peer in present[:_NAMED])
        more = ", ..." if len(present) > _NAMED else ""
        opened = "; it is open, others may still join" if self.is_open else ""
        name = to.name if isinstance(to, WorkerInfo) else to
        guess = did_you_mean(name, [peer.name for peer in present]) if type(name) is str else ""
        return UnknownWorker(
            f"could not find destination {to!r}: there is no such worker{guess or ';'} "
            f"the group has {known}{more}{opened}"
        )

    def present(self) -> list[Peer]:
        """Returns the workers of the group by rank; of an open one, those that are not lost."""
        with self._lock:
            peers = sorted(self._by_rank.items())
        return [peer for _, peer in peers if peer.lost is None or not self.is_open]

    def known(self) -> list[Peer]:
        """Returns the workers that can be found by name: also those that are lost."""
        with self._lock:
            return list(self._by_name.values())

    def on_joined(self, callback: Callable[[Peer], None]) -> None:
        """Has ``callback`` run for every worker, those of now and those that join."""
        with self._lock:
            self._on_joined.append(callback)
            peers = list(self.by_id.values())
        for peer in peers:
            callback(peer)

    def join(self, registration: Registration) -> tuple[Peer, Peer | None]:
        """Takes up a worker of an open group.

        Returns:
            The worker, and, where its name or rank was another's, the former life.

        Raises:
            ProtocolError: The group is closed.
            DuplicateName: It has the name or rank of this worker.
        """
        with self._lock:
            known = self.by_id.get(registration.id)
            if known is not None:
                return known, None
            if not self.is_open or not 0 <= registration.id < ID_LIMIT:
                raise ProtocolError(f"there is no worker of id {registration.id}")
            former = self._by_name.get(registration.name) or self._by_rank.get(registration.rank)
            if former is self.me:
                raise DuplicateName(f"worker {self.me.name!r} (rank {self.me.info.id}) lives")
            if former is not None:
                self._forget(former)
            peer = self._make(registration)
            self._tell(peer)
            self._enter(peer)
        return peer, former

    def _tell(self, peer: Peer) -> None:
        """Has a worker known to all who want to know, before anybody can find it."""
        for callback in self._on_joined:
            callback(peer)

    def departed(self, worker: int) -> Peer:
        """Returns, as one that is lost, a worker that left an open group before this one came.

        Raises:
            ProtocolError: There cannot have been such a worker.
        """
        if not self.is_open or not 0 <= worker < ID_LIMIT:
            raise ProtocolError(f"a message names a worker of id {worker}; there never was one")
        peer = self._make(Registration(f"number-{worker}", worker, ()))
        peer.is_departing = True
        peer.declare_lost("")
        with self._lock:
            if worker not in self.by_id:
                self._tell(peer)
                self.by_id[worker] = peer
            return self.by_id[worker]

    def retire(self, peer: Peer) -> None:
        """Has a worker that leaves not be found any more."""
        with self._lock:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        if self._by_name.get(peer.name) is peer:
            del self._by_name[peer.name]
        if self._by_rank.get(peer.info.id) is peer:
            del self._by_rank[peer.info.id]
