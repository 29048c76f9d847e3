"""The other workers as one worker sees them: how to reach each, and whether it is still there.

``Members`` is the directory of the group.

The device maps between two workers determine the device on which a sent tensor arrives. Calls
follow the caller's map for the callee. Answers follow its inverse, so the callee must know
the map of the caller; workers register their maps. Gradients go against the direction of the
message whose tensors they belong to.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchweft.arguments import did_you_mean, wrong_type
from torchweft.deaths import cause_of
from torchweft.engine.channels.channel import Held, Ways
from torchweft.engine.io.link import Link
from torchweft.engine.protocol.calls import ServedCall
from torchweft.engine.protocol.connecting import Connecting, Patience, State, Terms
from torchweft.engine.protocol.registration import HOST as HOST_FACT
from torchweft.engine.protocol.registration import Registration, Roster
from torchweft.engine.protocol.sessions import UnsentMessages
from torchweft.errors import (
    DuplicateName,
    ProtocolError,
    SerializationError,
    UnknownWorker,
    WorkerLost,
)
from torchweft.ids import ReferenceId, WorkerInfo

DeviceMap = Mapping[torch.device, torch.device]
Place = Callable[[torch.device], torch.device]
"""Returns the receiver's device for the device of a tensor at its sender."""

HOST = torch.device("cpu")
_UNMAPPED = ("cpu", "meta")
"""Types of devices that need no entry in a map. (Tensors on ``meta`` stay in their process.)"""


class DeviceMaps:
    """The maps between this worker and one other worker, or this worker itself. Immutable.

    Args:
        worker: Name of the other worker.
        own: This worker's map for the other; None if it has none.
        others: The other worker's map for this one; None if it has none.
        refuses_unmapped: Whether tensors on a GPU cannot be sent without a map, as in
            ``torch.distributed.rpc``. Otherwise they arrive on the device of the same name.

    Attributes:
        is_any: Whether one of the workers has a map for the other.
        is_identity: Whether all tensors go to the device of the same name; ``forward`` and ``back``
            then return each device, and never raise.
        answers_on_host: Whether answers cannot have tensors on a GPU, as there is no map for them.
        moves_host_of_calls: Whether tensors on the CPU arrive on another device in calls.
        moves_host_of_answers: The same for the answers to the other worker's calls.
    """

    def __init__(
        self,
        worker: str,
        own: DeviceMap | None = None,
        others: DeviceMap | None = None,
        *,
        refuses_unmapped: bool = False,
    ) -> None:
        self._worker = worker
        self._refuses_unmapped = refuses_unmapped
        inverse = None if others is None else {there: here for here, there in others.items()}
        # A worker without a map refuses as one with an empty map.
        missing: DeviceMap | None = {} if refuses_unmapped else None
        self._forward = missing if own is None else own
        self._back = missing if inverse is None else inverse
        self.is_any = own is not None or others is not None
        self.is_identity = not self.is_any and not refuses_unmapped
        self.answers_on_host = refuses_unmapped and others is None
        self.moves_host_of_calls = (self._forward or {}).get(HOST, HOST) != HOST
        self.moves_host_of_answers = (self._back or {}).get(HOST, HOST) != HOST

    def forward(self, device: torch.device) -> torch.device:
        """Returns the other worker's device for a tensor in a call, a post or a stream to it.

        Raises:
            SerializationError: The map has no such device.
        """
        return self._placed(device, self._forward, "Request")

    def back(self, device: torch.device) -> torch.device:
        """Returns the other worker's device for a tensor in the answer to its call.

        Raises:
            SerializationError: The inverse of its map has no such device.
        """
        return self._placed(device, self._back, "Response")

    def moves_host(self, is_back: bool) -> bool:
        """Returns whether tensors on the CPU arrive on another device, in answers or in calls."""
        return self.moves_host_of_answers if is_back else self.moves_host_of_calls

    def check(self, tensors: Iterable[Tensor], is_back: bool) -> None:
        """Raises SerializationError unless all tensors may be sent; see ``forward``."""
        place = self.back if is_back else self.forward
        for tensor in tensors:
            place(tensor.device)

    def _placed(self, device: torch.device, known: DeviceMap | None, kind: str) -> torch.device:
        if known is None:
            return device
        placed = known.get(device)
        if placed is not None:
            return placed
        if device.type in _UNMAPPED:
            return device
        raise self._unmapped(device, known, kind)

    def _unmapped(self, device: torch.device, known: DeviceMap, kind: str) -> SerializationError:
        worker = self._worker
        if kind == "Request":
            whose, adding = f"device map for {worker!r}", f"device {device} to it"
        else:
            whose = f"device map of worker {worker!r} for this worker"
            adding = f"the device there that stands for {device} here"
        listed = ", ".join(map(str, known)) or "no device"
        missing = (
            f"{kind} device mapping is not available for destination {worker}: a tensor is on "
            f"{device}, and the {whose} has {listed}"
        )
        if self._refuses_unmapped:
            text = (
                "TensorPipe RPC backend only supports CPU tensors by default: send tensor.cpu(), "
                "or map the device by `set_device_map` on `TensorPipeRpcBackendOptions`. "
                f"{missing}"
            )
        else:
            text = f"{missing}; send tensor.cpu(), or add {adding} (device_maps)"
        return SerializationError(text, worker=worker)


IDENTITY = DeviceMaps("")
"""The maps between two workers that have none."""


def maps_between(
    me: Registration, other: Registration, *, refuses_unmapped: bool = False
) -> DeviceMaps:
    """Returns the maps between this worker and another, from the registrations of both.

    Args:
        me: This worker's registration.
        other: The other worker's registration; this worker's own for messages to itself.
        refuses_unmapped: See ``DeviceMaps``.
    """
    own = me.devices.maps.get(other.name)
    others = other.devices.maps.get(me.name)
    if own is None and others is None and not refuses_unmapped:
        return IDENTITY
    return DeviceMaps(
        other.name, _devices(own), _devices(others), refuses_unmapped=refuses_unmapped
    )


def _devices(names: Mapping[str, str] | None) -> DeviceMap | None:
    if names is None:
        return None
    return {torch.device(here): torch.device(there) for here, there in names.items()}


_NAMED = 16


def _not_set(*_: object) -> NoReturn:
    raise AssertionError("nothing encodes messages for this worker yet")


class Peer:
    """One worker of the group, seen from another (or from itself).

    The side that first needs the connection makes it; ``connecting`` decides how. ``link`` and
    ``lost``, which every message needs, are plain attributes, set as the state machine says.

    Args:
        registration: The registration with which the peer joined.
        main_by_name: Whether both workers run the same main program, so that its functions are sent
            by name.
        is_self: Whether it is this worker.
        device_maps: Where tensors arrive that are sent to it.
    """

    def __init__(
        self,
        registration: Registration,
        *,
        main_by_name: bool,
        is_self: bool,
        device_maps: DeviceMaps = IDENTITY,
    ) -> None:
        self.registration = registration
        self.device_maps = device_maps
        self.info = registration.info
        self.id = registration.id
        self.name = registration.name
        self.main_by_name = main_by_name
        self.receiver = int(main_by_name)
        """As for ``values.encode``."""
        self.is_self = is_self
        self.ways = Ways(self.name)
        """The channels to and from it; there are none before the first connection."""
        self.held = Held()
        self.link: Link | None = None
        self.unsent = UnsentMessages()
        self.lost: WorkerLost | None = None
        self.looked_s = 0.0
        """When this worker last looked whether the peer is there, without a connection to it."""
        self.kept: dict[str, Any] = {}
        """What channels keep of the peer, by their names."""
        self.moved: Counter[str] = Counter()
        """Bytes of tensors that did not go over the link, as ``"sent shm"``."""
        self.served: dict[int, ServedCall] = {}
        """Calls of the peer that this worker has received and not ended, by their numbers."""
        # Set by ``Encoder``. What is kept of a peer is kept here, so that it goes with the peer.
        self.pack: Callable[..., Any] = _not_set
        """Packs values that are not simple for the peer."""
        self.pickle: Callable[..., Any] = _not_set
        """Does the same for values that are known to need a pickle."""
        self.not_by_value = ""
        """Why functions cannot travel by value to the peer; empty if they can."""
        self.home_of: Callable[[Any], ReferenceId | None] = _not_set
        """Returns the id of a reference to a value of the peer; None for other values."""
        self.server: tuple[Any, ...] | None = None
        """What the native twin takes to serve calls of the peer; None if it does not."""
        self.connecting = Connecting(self.id, self.name)
        """State machine of the connection; to be used with ``state_lock``."""
        self.state_lock = threading.RLock()
        self.dial_lock = threading.Lock()
        """Held by the thread that carries out the steps of the first connection."""
        self.first_contact = threading.Lock()
        """Held by the thread that connects, and then sends the messages that are kept."""
        self.linked = threading.Event()
        """Set when there is a first connection, or never will be."""

    def adopt(self, link: Link, terms: Terms | None, patience: Patience) -> str:
        """Installs the connection to the peer; returns the obstacle, or an empty string."""
        with self.state_lock:
            obstacle = self.connecting.adopt(time.monotonic(), terms, patience)
            if not obstacle:
                self.link = link
        return obstacle

    @property
    def host(self) -> str:
        """What its host is known by, the same for all workers of a host; else its own name."""
        return str(self.registration.facts.get(HOST_FACT, self.name))

    @property
    def is_over(self) -> bool:
        """Whether the peer is lost, or has left."""
        return self.lost is not None

    @property
    def is_linked(self) -> bool:
        """Whether there is a connection to the peer, which has not ended."""
        return self.connecting.state is State.LINKED

    @property
    def has_left(self) -> bool:
        """Whether the peer left an open group before it ended, so that its end is no loss."""
        return self.connecting.state is State.LEFT

    def depart(self) -> None:
        """Records that the peer leaves an open group, so that its end is not a loss."""
        with self.state_lock:
            self.connecting.depart()

    def declare_lost(self, cause: str) -> WorkerLost | None:
        """Marks the peer as lost; returns the error for waiting threads, None if lost already.

        Waits a few milliseconds for the launcher's note if that may tell the cause.
        """
        connecting = self.connecting
        if not connecting.knows_cause:
            cause = cause_of(self.registration.facts, cause)
        with self.state_lock:
            known = connecting.lose(cause)
            if known is None:
                return None
            since = time.time()
            clock = time.strftime("%H:%M:%S", time.localtime(since))
            who = f"worker {self.name!r} (rank {self.info.id})"
            if self.has_left:
                text = f"{who} has left the group at {clock}"
            else:
                text = f"{who} is lost since {clock}: {known}"
            self.lost = WorkerLost(text, worker=self.name, since=since, cause=known)
            self.linked.set()
            return self.lost

    def lost_error(self) -> WorkerLost:
        """Returns the error for uses of a lost or leaving peer.

        It is a fresh copy, so that tracebacks of many raisers do not mix.
        """
        lost = self.lost
        if lost is None:  # It has said that it leaves, and answers earlier calls until it has left.
            text = f"worker {self.name!r} (rank {self.info.id}) is leaving the group"
            return WorkerLost(text, worker=self.name, since=time.time())
        return type(lost)(str(lost), worker=lost.worker, since=lost.since, cause=lost.cause)


class Members:
    """The workers of a group; thread-safe.

    Protocols use a worker's id, which names one life of the worker; programs find workers by name,
    rank or ``WorkerInfo``. Lost workers stay in the directory, so that calls to them raise
    WorkerLost, until the name is reused, or, in an open group, many more are lost. Departed workers
    are removed.

    Args:
        me: This worker.
        others: All other workers that are known.
        is_open: Whether workers may join and leave later. See ``docs/protocols/membership.md``.
        refuses_unmapped: Whether this worker sends tensors on a GPU only by device maps.
    """

    def __init__(
        self,
        me: Registration,
        others: Iterable[Registration],
        *,
        is_open: bool,
        refuses_unmapped: bool = False,
    ) -> None:
        self.is_open = is_open
        self._main = me.main
        self._maps_with = partial(maps_between, me, refuses_unmapped=refuses_unmapped)
        self._lock = threading.RLock()
        self._on_joined: list[Callable[[Peer], None]] = []
        self.me = Peer(me, main_by_name=True, is_self=True, device_maps=self._maps_with(me))
        self._roster = Roster(self.me, map(self._make, others), self.departed, is_open=is_open)
        self.by_name, self._by_rank = self._roster.by_name, self._roster.by_rank
        self.by_id = self._roster.by_id
        """The lives by id; one that is over and forgotten is found as departed. Read-only."""

    def _make(self, registration: Registration) -> Peer:
        main_by_name = bool(self._main) and registration.main == self._main
        return Peer(
            registration,
            main_by_name=main_by_name,
            is_self=False,
            device_maps=self._maps_with(registration),
        )

    def find(self, to: str | int | WorkerInfo) -> Peer:
        """Returns the worker that a name, rank or ``WorkerInfo`` means.

        Raises:
            UnknownWorker: There is no such worker; the message lists the workers present.
            WorkerLost: ``to`` is the ``WorkerInfo`` of a worker that leaves or has left.
        """
        try:
            if isinstance(to, str):
                return self.by_name[to]
            if isinstance(to, int):
                return self._by_rank[to]
        except KeyError:
            pass
        if isinstance(to, WorkerInfo):
            peer = self.by_name.get(to.name)
            if peer is not None and peer.info == to:
                return peer
            with self._lock:
                former = self._roster.former(to.name, to.id)
            if former is not None:
                raise former.lost_error()
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

    def replaced(self) -> set[int]:
        """Returns the ids of the lives whose name another life has by now."""
        with self._lock:
            lives = list(self.by_id.values())
            return {each.id for each in lives if self.by_name.get(each.name, each) is not each}

    def known(self) -> list[Peer]:
        """Returns the workers that can be found by name, including lost workers."""
        with self._lock:
            return list(self.by_name.values())

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
        if self._roster.is_forgotten(registration.id):
            return self.departed(registration.id), ()
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

    def claimed(self, registration: Registration) -> list[Peer]:
        """Returns the workers that would be over if a worker of an open group were added.

        Raises:
            ProtocolError: The group is closed.
            DuplicateName: It has the name or rank of this worker.
        """
        if self._roster.is_forgotten(registration.id):
            return []
        with self._lock:
            _, former = self._roster.arrival(registration)
        return [peer for peer in former if not peer.is_over]

    def _tell(self, peer: Peer) -> None:
        """Runs the callbacks of ``on_joined`` for a worker, before it can be found."""
        for callback in self._on_joined:
            callback(peer)

    def departed(self, worker: int) -> Peer:
        """Returns, marked as lost, a worker that left before this worker joined, or long ago.

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
                self._roster.remember(peer)
            return self.by_id[worker]

    def lose(self, peer: Peer) -> None:
        """Notes that a worker is lost. Of many in an open group, the earliest are forgotten."""
        with self._lock:
            self._roster.lose(peer)

    def retire(self, peer: Peer) -> None:
        """Removes a leaving worker from the directory."""
        with self._lock:
            self._roster.retire(peer)
