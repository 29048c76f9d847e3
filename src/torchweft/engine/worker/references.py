"""The I/O shell of the reference protocol: owned values, handles, the machine's events and actions.

See ``docs/protocols/references.md`` for the protocol. A finalizer may run at any point of any
thread, even while that thread holds the lock of this module. So it only appends to a queue, which
the timer thread empties a little later. Messages of the protocol are collected for the same short
time and sent as one frame per peer.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from torch.autograd.profiler import record_function

from torchweft import knobs
from torchweft.engine.codec.objects import register_external
from torchweft.engine.codec.registry import has_callable_methods
from torchweft.engine.protocol import references as protocol
from torchweft.engine.protocol.references import Message, References, decode, encode
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.engine.threads.interrupts import Flag
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import HandedReference, Kind
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.current import current, is_forked
from torchweft.engine.worker.peers import Peer
from torchweft.errors import NotInitialized, OwnerLost, ReferenceGone, WeftError
from torchweft.ids import ReferenceId, WorkerInfo

_log = logging.getLogger("torchweft")


class OwnedValue:
    """A value that this worker owns, perhaps still being made.

    It becomes a value or an error once; waiting threads and callbacks wait for that.
    """

    __slots__ = (
        "_callbacks",
        "_lock",
        "_ready",
        "error",
        "guard",
        "is_being_made",
        "mark",
        "value",
        "was_asked_for",
    )

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.mark: Mark | None = None
        """The end of the GPU work that makes the value; readers use the value by it."""
        self.is_being_made = self.was_asked_for = False
        self.guard: Any = None
        """Reports the error if no caller retrieves it."""
        self._callbacks: list[Callable[[OwnedValue], None]] | None = []
        self._lock = threading.RLock()
        self._ready = Flag()

    @property
    def is_ready(self) -> bool:
        """Whether it is a value or an error by now."""
        return self._callbacks is None

    def resolve(
        self, value: Any, error: BaseException | None = None, *, runs_callbacks: bool = True
    ) -> None:
        """Makes it a value or an error, once, and runs the waiting callbacks unless told not to."""
        with self._lock:
            callbacks = self._callbacks
            if callbacks is None:
                return
            if device_streams.HAS_CUDA and error is None:
                self.mark = device_streams.mark()
            self.value, self.error = value, error
            self._callbacks = None  # Last: readers that find it ready take no lock.
        self._ready.set()
        if runs_callbacks:
            for callback in callbacks:
                callback(self)

    def when_ready(self, callback: Callable[[OwnedValue], None]) -> None:
        """Calls ``callback`` with this object, now or as soon as it is ready."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback(self)

    def forget(self, callback: Callable[[OwnedValue], None]) -> bool:
        """Takes back ``when_ready``; returns False if the callback is no longer pending."""
        with self._lock:
            if self._callbacks is None or callback not in self._callbacks:
                return False
            self._callbacks.remove(callback)
            return True

    def wait(self, timeout_s: float) -> bool:
        """Blocks until ready or for ``timeout_s``; returns whether it is ready."""
        return self._ready.wait(timeout_s)


_Outcome = tuple[list[OwnedValue], list[tuple[OwnedValue, WeftError]]]
"""The values that were released, and those that get an error in place of a value."""


class ReferenceKeeper:
    """All remote references of one worker: those it holds and the values it owns. Thread-safe.

    Args:
        agent: The worker's agent; the keeper handles its ``REFERENCES`` messages.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._machine = References(agent.me.id, knobs.REFERENCE_ARRIVAL_S.get())
        self._batch_s = knobs.REFERENCE_BATCH_S.get()
        self._lock = threading.RLock()
        self._values: dict[ReferenceId, OwnedValue] = {}
        self._handles: defaultdict[ReferenceId, int] = defaultdict(int)
        self._confirmed: set[ReferenceId] = set()
        self._dead: dict[ReferenceId, WeftError] = {}
        self._sites: dict[ReferenceId, tuple[CodeType, int, str]] = {}
        self._outgoing: defaultdict[int, list[Message]] = defaultdict(list)
        self._orphans: list[tuple[OwnedValue, WeftError]] = []
        self._ended: deque[ReferenceId] = deque()
        self._only_here: deque[tuple[float, ReferenceId]] = deque()
        """Values that only handles of this worker keep, and when to look why."""
        self._due_s = math.inf
        self.before_flush: Callable[[], None] = lambda: None
        """Sends messages that must precede the messages of the protocol."""
        self._timer = agent.timers.add(self.tick)
        agent.receiver.on(Kind.REFERENCES, self._on_message, inline=True)
        agent.members.on_joined(self._peer_joined)

    # Values of this worker

    def own(self, value: Any) -> ReferenceId:
        """Registers a value of this worker; returns a new reference to it, with one handle."""
        reference, owned = self.create_here()
        owned.resolve(value)
        return reference

    def create_here(self) -> tuple[ReferenceId, OwnedValue]:
        """Returns a reference, with one handle, to a value that is yet to be made here."""
        owned = OwnedValue()
        with self._lock:
            reference = self._machine.owned()
            self._values[reference] = owned
            self._handles[reference] += 1
        return reference, owned

    def created(self, reference: ReferenceId) -> OwnedValue | None:
        """Records that another worker's call to make a value has arrived.

        Returns:
            Where to put the value; None if it must not be made (again).
        """
        with self._lock:
            if not self._machine.created(reference):
                return None
            owned = self._values.get(reference)
            if owned is None:
                owned = OwnedValue()
                # A call to this worker itself finds no value if its reference has been dropped.
                if reference.creator != self._me:
                    self._values[reference] = owned
            owned.is_being_made = True
        self._settle()
        return owned

    def value_of(self, reference: ReferenceId, *, is_use: bool = True) -> OwnedValue:
        """Returns the value that this worker owns under ``reference``, perhaps still to be made.

        Args:
            reference: The reference.
            is_use: Whether the caller reports an error in place of the value.

        Raises:
            ReferenceGone: The value was released.
        """
        with self._lock:
            owned = self._values.get(reference)
            if owned is None:
                if not self._machine.is_awaited(reference):
                    raise ReferenceGone(
                        f"the value of {self.describe(reference)} was released; keep a reference "
                        "to it alive"
                    )
                # The request came before the call that makes the value: calls have no order.
                owned = self._values[reference] = OwnedValue()
            if is_use:
                owned.was_asked_for = True
                if owned.guard is not None:
                    owned.guard.was_seen = True
            return owned

    # References of this worker

    def creating(self, owner: Peer) -> ReferenceId:
        """Returns a reference to a value that a call to ``owner`` will make; counts one handle."""
        reference = None
        try:
            with self._lock:
                reference = self._machine.creating(owner.id)
                self._handles[reference] += 1
            return reference
        except BaseException:  # The main thread was interrupted.
            if reference is not None:
                self.not_created(reference)
                self.end_handle(reference)
            raise

    def not_created(self, reference: ReferenceId) -> None:
        """Takes back ``creating``: the call could not be sent."""
        self._feed(self._machine.not_created, reference)

    def note_site(self, reference: ReferenceId, site: tuple[CodeType, int, str]) -> None:
        """Records where a reference was made, by code and line, and what made it."""
        self._sites[reference] = site

    def end_handle(self, reference: ReferenceId) -> None:
        """Records that a handle is gone. For finalizers: it only enqueues."""
        self._ended.append(reference)
        self._wake_by()

    def hand_on(self, reference: ReferenceId, to: Peer) -> HandedReference:
        """Begins to hand ``reference`` to worker ``to``; the result travels in the message."""
        handed = None
        try:
            with self._lock:
                handed = HandedReference(reference, self._machine.hand_on(reference, to.id))
            return handed
        except BaseException:  # The main thread was interrupted.
            if handed is not None:
                self.undeliverable(handed, to)
            raise

    def undeliverable(self, handed: HandedReference, to: Peer) -> None:
        """Takes back ``hand_on``: the message could not be sent."""
        self._feed(self._machine.undeliverable, *handed, to.id)

    def received(self, handed: HandedReference, sender: Peer) -> bool:
        """Records a reference that came in a message; returns whether it counts as a handle."""
        owner = handed.reference.owner
        if owner not in self.agent.peers:
            self.peer_lost(self.agent.members.departed(owner))
        return self._counted(handed.reference, self._machine.received, *handed, sender.id)

    def came_home(self, reference: ReferenceId) -> bool:
        """Records a reference to an own value in a call whose caller keeps its own handle.

        Returns:
            Whether the reference counts as a handle.
        """
        return self._counted(reference, self._machine.came_home, reference)

    def refused(self, handed: HandedReference, sender: Peer) -> None:
        """Records a reference in a message that will not be read."""
        self._feed(self._machine.refused, *handed, sender.id)

    def is_owned(self, reference: ReferenceId) -> bool:
        """Whether this worker owns a value that is still referred to."""
        return reference in self._values

    def is_confirmed(self, reference: ReferenceId) -> bool:
        """Whether the owner has confirmed that it counts this worker as a user."""
        return reference in self._confirmed or reference.owner == self.agent.me.id

    def check_alive(self, reference: ReferenceId) -> None:
        """Raises an error if the value is lost or was released."""
        error = self._dead.get(reference)
        if error is not None:
            # Raise a copy: the traceback of the kept error would keep frames alive.
            raise copy.copy(error)

    def state_of(self, reference: ReferenceId) -> str:
        """Returns what is the matter with a value, as far as this worker knows; else nothing."""
        dead, owned = self._dead.get(reference), self._values.get(reference)
        if dead is not None:
            return "lost with its owner" if isinstance(dead, OwnerLost) else "released"
        if owned is None:
            return ""
        if owned.error is not None:
            return f"failed by {type(owned.error).__name__}"
        return "" if owned.is_ready else "being made"

    # Shutdown

    def close(self) -> None:
        """Fails threads that wait here for a value that is not made: this worker leaves."""
        gone = NotInitialized(f"worker {self.agent.info.name!r} shut down before the value came")
        with self._lock:
            waiting = [owned for owned in self._values.values() if not owned.is_ready]
        for owned in waiting:
            owned.resolve(None, gone, runs_callbacks=False)

    def begin_settling(self) -> None:
        """Drops all handles; references that are left once settled are leaks."""
        with self._lock:
            self._count_ended()
            self._machine.drop_all()
        self._settle()
        self.flush()

    def is_settled(self) -> bool:
        """Whether no message waits to be sent, or for an answer of another worker."""
        with self._lock:
            return self._machine.is_settled() and not self._outgoing

    def counts(self) -> dict[str, int]:
        """Returns the counts of owned values and of held references to other workers' values."""
        with self._lock:
            held = sum(1 for leak in self._machine.leaks() if leak.reference.owner != self._me)
            return {"owned": len(self._values), "held": held}

    def reference_of(self, owned: OwnedValue) -> ReferenceId | None:
        """Returns the reference to a value that this worker owns; None if it was released."""
        with self._lock:
            found = [each for each, value in self._values.items() if value is owned]
        return found[0] if found else None

    def inventory(self) -> tuple[dict[ReferenceId, OwnedValue], list[ReferenceId]]:
        """Returns the values that this worker owns, and the references that it holds to others'."""
        with self._lock:
            held = [each for each in self._handles if each.owner != self._me]
            return dict(self._values), held

    def site(self, reference: ReferenceId) -> str:
        """Returns where a reference was made, and by what; empty if on another worker."""
        site = self._sites.get(reference)
        return f"{self._site(reference)} by {site[2] or 'RRef'}" if site else ""

    def census(self) -> protocol.Census:
        """Returns how many references there are, by their states in the protocol."""
        with self._lock:
            return self._machine.census()

    def report_held(self) -> list[str]:
        """Returns a line for every value of another worker to which there are handles here."""
        with self._lock:
            self._count_ended()
            leaks = self._machine.leaks()
        self._settle()
        held = [leak for leak in leaks if leak.handles and leak.reference.owner != self._me]
        return [f"{leak.reference} made at {self._site(leak.reference)}" for leak in held]

    def report_leaks(self) -> list[str]:
        """Returns a line for every reference that something still keeps alive."""
        with self._lock:
            leaks = self._machine.leaks()
        return [
            f"{leak.reference} made at {self._site(leak.reference)}: "
            f"{leak.handles} handles, {leak.handovers} messages, users {list(leak.users)}"
            for leak in leaks
        ]

    def _site(self, reference: ReferenceId) -> str:
        site = self._sites.get(reference)
        return f"{site[0].co_filename}:{site[1]}" if site else "another worker"

    def describe(self, reference: ReferenceId) -> str:
        """Returns a description of a reference for its user: what made it, and where."""
        site = self._sites.get(reference)
        if site is None:
            creator = self.agent.peers.get(reference.creator)
            return "an RRef" if creator is None else f"an RRef of worker {creator.name!r}"
        maker = f" by {site[2]}" if site[2] else ""
        return f"the RRef made{maker} at {self._site(reference)}"

    def describe_use(self, reference: ReferenceId, method: str) -> str:
        """Returns the name of a call of a method on a reference, for messages."""
        return f"{method}() of {self.describe(reference)}"

    # Events and actions

    @property
    def _me(self) -> int:
        return self.agent.me.id

    def _feed(self, event: Callable[..., object], *values: Any) -> None:
        """Feeds an event to the machine and carries out its actions."""
        with self._lock:
            event(*values)
        self._settle()

    def _counted(self, reference: ReferenceId, event: Callable[..., bool], *values: Any) -> bool:
        """Feeds the arrival of a reference; returns whether it counts as a handle."""
        with self._lock:
            is_counted = event(*values)
            if is_counted:
                self._handles[reference] += 1
        self._settle()
        return is_counted

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        messages = decode(frame.control)
        # A thread with the lock may be in a signal handler that waits for an answer on this
        # connection, so that its reader must not wait for the lock. Order is of no importance.
        if not self._lock.acquire(blocking=False):
            self.agent.receiver.postpone(self._take_messages, peer, messages)
            return
        try:
            self._take_messages(peer, messages)
        finally:
            self._lock.release()

    def _take_messages(self, peer: Peer, messages: Sequence[Message]) -> None:
        with self._lock:
            for message in messages:
                self._machine.message(peer.id, message)
        self._settle()

    def _peer_joined(self, peer: Peer) -> None:
        if peer.lost is None:
            with self._lock:
                self._machine.peer_joined(peer.id)

    def peer_lost(self, peer: Peer) -> None:
        """Gives up the references that a lost worker held, and the values that it owned."""
        with self._lock:
            self._machine.peer_lost(peer.id)
            self._outgoing.pop(peer.id, None)
            orphans = [
                owned
                for reference, owned in self._values.items()
                if reference.creator == peer.id and not owned.is_being_made
            ]
        self._settle()
        for owned in orphans:
            owned.resolve(None, peer.lost_error())

    def tick(self, now_s: float) -> float:
        """Performs due work; a timer job, which waits for no lock."""
        # As in ``_on_message``: the answer may need the other jobs, which arm connections.
        if not self._lock.acquire(blocking=False):
            return now_s + self._batch_s
        try:
            # Reset first: a handle dropped concurrently must schedule another tick.
            self._due_s = math.inf
            self._machine.tick(now_s)
            self._count_ended()
            outcome, outgoing = self._take_outcome(), self._take_outgoing()
        finally:
            self._lock.release()
        self._carry_out(outcome)
        self._send(outgoing)
        while self._only_here and self._only_here[0][0] <= now_s:
            _, reference = self._only_here.popleft()
            self.agent.reactor.submit_task(self._look_into, reference)
        return self._due_s

    def _look_into(self, reference: ReferenceId, _: object) -> None:
        """Names a value in the log that keeps itself by a reference to itself; a task."""
        owned = self._values.get(reference)
        if owned is not None and reference in self._handles and _holds(owned.value, reference):
            _log.warning(
                "the value of %s, a %s, holds a reference to itself: no other worker uses it, and "
                "it is kept until it drops that reference, or the group ends. An object that needs "
                "a reference to itself for a call makes one there, by rpc.RRef(self)",
                self.describe(reference),
                type(owned.value).__qualname__,
            )

    def _count_ended(self) -> None:
        while self._ended:
            reference = self._ended.popleft()
            # Of a handle that was made as the main thread was interrupted, nothing is known.
            with contextlib.suppress(KeyError):
                self._machine.handle_dropped(reference)
            self._handles[reference] -= 1
            if self._handles[reference] <= 0:
                self._forget(reference)

    def _forget(self, reference: ReferenceId) -> None:
        """Drops the state that only handles of this worker use."""
        del self._handles[reference]
        self._confirmed.discard(reference)
        self._dead.pop(reference, None)
        if reference not in self._values:
            self._sites.pop(reference, None)

    def _settle(self) -> None:
        """Carries out the actions of the state machine."""
        with self._lock:
            outcome = self._take_outcome()
        self._carry_out(outcome)

    def _take_outcome(self) -> _Outcome:
        actions = self._machine.take_actions()
        released = [value for action in actions if (value := self._act(action)) is not None]
        orphans, self._orphans = self._orphans, []
        return released, orphans

    def _carry_out(self, outcome: _Outcome) -> None:
        """Ends values, without the lock: their destruction and their callbacks may run any code."""
        if self._outgoing:
            self._wake_by()
        released, orphans = outcome
        for owned, error in orphans:
            owned.resolve(None, error)
        released.clear()

    def _act(self, action: protocol.Action) -> OwnedValue | None:
        if isinstance(action, protocol.Send):
            self._outgoing[action.to].append(action.message)
        elif isinstance(action, protocol.ReleaseValue):
            self._sites.pop(action.reference, None)
            return self._values.pop(action.reference, None)
        elif isinstance(action, protocol.OnlyHere):
            self._only_here.append((time.monotonic() + _LOOKS_AFTER_S, action.reference))
        elif isinstance(action, protocol.Confirmed):
            if action.reference in self._handles:
                self._confirmed.add(action.reference)
        elif isinstance(action, protocol.ValueGone):
            gone = ReferenceGone(f"{self.describe(action.reference)} has no value any more")
            self._dead[action.reference] = gone
            owned = self._values.pop(action.reference, None)
            if owned is not None:
                self._orphans.append((owned, gone))
        elif isinstance(action, protocol.OwnerLost):
            self._dead[action.reference] = self.owner_lost(action.reference)
        return None

    def owner_lost(self, reference: ReferenceId) -> OwnerLost:
        """Returns the error of a reference whose owner is lost."""
        lost = self.agent.peers[reference.owner].lost
        assert lost is not None
        return OwnerLost(
            f"the value of {self.describe(reference)} is lost with its owner: {lost}",
            worker=lost.worker,
            since=lost.since,
            cause=lost.cause,
        )

    def _wake_by(self) -> None:
        due_s = time.monotonic() + self._batch_s
        if due_s < self._due_s:
            self._due_s = due_s
            self._timer.wake_by(due_s)

    def flush(self) -> None:
        """Sends the messages collected so far."""
        with self._lock:
            outgoing = self._take_outgoing()
        self._send(outgoing)

    def _take_outgoing(self) -> Mapping[int, list[Message]]:
        outgoing, self._outgoing = self._outgoing, defaultdict(list)
        return outgoing

    def _send(self, outgoing: Mapping[int, list[Message]]) -> None:
        self.before_flush()
        for to, messages in outgoing.items():
            try:
                frame = encode_frame(Kind.REFERENCES, 0, 0, encode(messages))
                self.agent.sender.post(self.agent.peers[to], frame)
            except Exception:  # The messages to the others go out nevertheless.
                log_exception("messages about references to worker %d could not be sent", to)


_LOOKS_AFTER_S = 1.0
"""How long handles on this worker may outlive those of others before the value is looked into."""
_MOST_LOOKED_AT = 10_000
_LEADS_AWAY = (type, ModuleType, FunctionType, CodeType, FrameType)
"""Objects that lead to those of the whole program."""


def _holds(value: object, reference: ReferenceId) -> bool:
    """Whether a value leads to a handle of a reference, among its first 10,000 objects."""
    seen, todo = {id(value)}, deque([value])
    while todo and len(seen) < _MOST_LOOKED_AT:
        for each in gc.get_referents(todo.popleft()):
            if isinstance(each, Handle) and each.id == reference:
                return True
            if id(each) not in seen and not isinstance(each, _LEADS_AWAY):
                seen.add(id(each))
                todo.append(each)
    return False


# Handles: one worker's uses of values that live on some worker. ``torchweft.rpc.RRef`` adds the
# calls that a program makes with a handle.

H = TypeVar("H", bound="Handle")
_WEFT = __name__.partition(".")[0] + "."


@has_callable_methods
class Handle:
    """A use of a value, counted from its beginning until the handle is dropped."""

    __slots__ = ("__weakref__", "_keeper", "id", "value_type")

    id: ReferenceId
    value_type: type
    """The class of the value; set only if ``remote`` was called with that class."""
    _keeper: ReferenceKeeper

    @classmethod
    def from_received(cls: type[H], keeper: ReferenceKeeper, reference: ReferenceId) -> H:
        """Wraps a reference for which ``keeper`` has counted a handle."""
        handle = cls.__new__(cls)
        handle._bind(keeper, reference, is_new=False)
        return handle

    @classmethod
    def from_created(
        cls: type[H], keeper: ReferenceKeeper, reference: ReferenceId, maker: str = ""
    ) -> H:
        """Wraps a new reference to the result of the function ``maker``."""
        handle = cls.__new__(cls)
        handle._bind(keeper, reference, is_new=True, maker=maker)
        return handle

    def _bind(
        self, keeper: ReferenceKeeper, reference: ReferenceId, *, is_new: bool, maker: str = ""
    ) -> None:
        self.id = reference
        self._keeper = keeper
        if is_new:
            # The program's own frame, not that of Weft code which it called.
            frame = sys._getframe(2)
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
                _WEFT
            ):
                frame = frame.f_back
            keeper.note_site(reference, (frame.f_code, frame.f_lineno, maker))

    def __del__(self) -> None:
        try:
            self._keeper.end_handle(self.id)
        except AttributeError:
            pass  # Never bound: the constructor raised.

    def agent(self) -> Agent:
        """Returns the current agent, if the reference is of its group.

        Raises:
            NotInitialized: This process is no longer a worker.
            ReferenceGone: The reference is of a former group; its number may name another value.
        """
        try:
            agent = current()
        except NotInitialized:
            if is_forked():
                raise
            raise NotInitialized(
                "the group of this reference has been shut down, and the value is gone with it; "
                "fetch what is still needed by to_here() before the shutdown"
            ) from None
        if agent is not self._keeper.agent:
            raise ReferenceGone("this reference belongs to a group that has been shut down")
        return agent

    def __eq__(self, other: object) -> bool:
        """Whether both refer to the same value: its class and its own ``==`` are of no matter."""
        if not isinstance(other, Handle):
            return NotImplemented
        return self.id == other.id and self._keeper is other._keeper

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        kind = getattr(self, "value_type", None)
        about = "" if kind is None else f": {kind.__qualname__}"
        state = self._keeper.state_of(self.id)
        return f"RRef({self.address()}{about}{', ' if state else ''}{state})"

    def address(self) -> str:
        """Returns the number of the reference and the owner, for messages. Never raises."""
        number = f"{self.id.creator}.{self.id.number}"
        owner = self._keeper.agent.peers.get(self.id.owner)
        if owner is None:
            return f"{number} on worker number {self.id.owner}"
        return f"{number} on {owner.name!r}"

    def end_event(self, event: record_function) -> None:
        """Ends the profiler's event of the call that makes the value."""
        event.__exit__(None, None, None)

    check_travels = agent
    """Called before the reference is handed on; a subclass may refuse that by raising."""

    def owner(self) -> WorkerInfo:
        """Returns the worker that owns the value."""
        return self.agent().peers[self.id.owner].info

    def owner_name(self) -> str:
        """Returns the name of the worker that owns the value."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether this worker owns the value."""
        return self.id.owner == self.agent().me.id

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to count this worker as a user of the value."""
        return self._keeper.is_confirmed(self.id)


register_external(Handle)
