"""The members of the group, as one worker knows them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torchweft.agent.peers import Peer
from torchweft.arguments import did_you_mean, wrong_type
from torchweft.errors import DuplicateName, ProtocolError, UnknownWorker
from torchweft.ids import WorkerInfo
from torchweft.protocol.membership import Registration
from torchweft.protocol.membership.roster import Roster

_NAMED = 16
"""How many workers an error names."""


class Members:
    """The workers of a group; thread-safe.

    Protocols use a worker's id, which names one life of the worker; programs find workers by name,
    rank or ``WorkerInfo``. Lost workers stay in the directory, so that calls to them raise
    WorkerLost, until the name is reused. Departed workers are removed.

    Args:
        me: This worker.
        others: All other workers that are known.
        is_open: Whether workers may join and leave later. See ``docs/protocols/membership.md``.
    """

    def __init__(self, me: Registration, others: Iterable[Registration], *, is_open: bool) -> None:
        self.is_open = is_open
        self._main = me.main
        self._lock = threading.Lock()
        self._on_joined: list[Callable[[Peer], None]] = []
        self.me = Peer(me, main_by_name=True, is_self=True)
        self._roster = Roster(self.me, map(self._make, others), is_open=is_open)
        self._by_name, self._by_rank = self._roster.by_name, self._roster.by_rank
        self.by_id = self._roster.by_id
        """All lives that this worker has known, including ended lives; read-only."""

    def _make(self, registration: Registration) -> Peer:
        main_by_name = bool(self._main) and registration.main == self._main
        return Peer(registration, main_by_name=main_by_name, is_self=False)

    def find(self, to: str | int | WorkerInfo) -> Peer:
        """Returns the worker that a name, rank or ``WorkerInfo`` means.

        Raises:
            UnknownWorker: There is no such worker; the message lists the workers present.
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
        """Returns the workers of the group by rank; in an open group, without lost workers."""
        with self._lock:
            peers = sorted(self._by_rank.items())
        return [peer for _, peer in peers if peer.lost is None or not self.is_open]

    def known(self) -> list[Peer]:
        """Returns the workers that can be found by name, including lost workers."""
        with self._lock:
            return list(self._by_name.values())

    def on_joined(self, callback: Callable[[Peer], None]) -> None:
        """Has ``callback`` run for every known worker now, and for each that joins later."""
        with self._lock:
            self._on_joined.append(callback)
            peers = list(self.by_id.values())
        for peer in peers:
            callback(peer)

    def join(
        self, registration: Registration, *, is_introduced: bool = True
    ) -> tuple[Peer, tuple[Peer, ...]]:
        """Adds a worker of an open group.

        Args:
            registration: The registration of the worker.
            is_introduced: Whether the worker sent it; if not, it was read from the store.

        Returns:
            The worker, and the lives that had its name or its rank before.

        Raises:
            ProtocolError: The group is closed.
            DuplicateName: It has the name or rank of this worker, or of a worker that introduced
                itself after the stored registration was written.
        """
        with self._lock:
            if not is_introduced and self._roster.is_replaced(registration):
                raise DuplicateName("another worker of its name or rank has joined since")
            known, former = self._roster.arrival(registration)
            if known is not None:
                return known, ()
            peer = self._make(registration)
            self._tell(peer)
            self._roster.admit(peer, is_introduced=is_introduced)
        return peer, former

    def _tell(self, peer: Peer) -> None:
        """Runs the callbacks of ``on_joined`` for a worker, before it can be found."""
        for callback in self._on_joined:
            callback(peer)

    def departed(self, worker: int) -> Peer:
        """Returns, marked as lost, a worker that left an open group before this worker joined.

        Raises:
            ProtocolError: There cannot have been such a worker.
        """
        if not self._roster.may_have_been(worker):
            raise ProtocolError(f"a message names worker id {worker}, which never existed")
        peer = self._make(Registration(f"number-{worker}", worker, ()))
        peer.depart()
        peer.declare_lost("")
        with self._lock:
            if worker not in self.by_id:
                self._tell(peer)
                self.by_id[worker] = peer
            return self.by_id[worker]

    def retire(self, peer: Peer) -> None:
        """Removes a leaving worker from the directory."""
        with self._lock:
            self._roster.retire(peer)
