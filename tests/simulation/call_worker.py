"""A worker of simulated calls: its programs, and the shell around its machines.

Each step that may race with another thread is an event of its own, after a random pause. So a call
may end after it is in the table and before its request is written. A ``CANCEL`` may arrive while a
call is taken from its queue, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.simulation.timeline import Clock
from torchweft.engine.protocol import calls
from torchweft.engine.protocol.calls import (
    Action,
    AnsweredCall,
    CallClient,
    CallServer,
    Complete,
    KeptCall,
    OpenCall,
    ServedCall,
    has_awaited,
    nest,
)
from torchweft.engine.protocol.leaving import (
    BeginSettling,
    Left,
    OpenLeaving,
    Report,
    Retire,
    Send,
    Stage,
    Step,
)
from torchweft.engine.protocol.sessions import Unsent, UnsentMessages
from torchweft.engine.threads.reactor import FairQueue
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import NO_CREATION, Kind
from torchweft.errors import (
    CallCancelled,
    CallTimeout,
    NotInitialized,
    ProtocolError,
    WorkerLost,
)

if TYPE_CHECKING:
    from tests.simulation.call_world import CallWorld

LIMITS_S = (0.02, 0.5, 3.0, math.inf)
PATIENCE_S = 30.0
"""After this time a program gives up a call that is not nested."""
LONGEST_WORK_S = 2.0
LOOK_S = 0.3
DEEPEST = 3
POLL_S = 0.05
NUMBER_OF_NONE = 0


@dataclass(eq=False)
class Record:
    """The observer's record of one call.

    Attributes:
        deadline_s: When its time is up, by the clock of the caller.
        asked_s: The limit that its program gave it.
        left_s: The time that was left for its parent.
        was_due: Whether there was a connection by which to send it.
        was_closed_before: Whether it had ended when it was sent.
        was_owed: Whether it was sent before its caller noted that the callee was leaving.
        arrived_s: When the callee read it, by its clock.
        cancelled_s: When the callee learnt that it was given up, by its clock.
    """

    caller: int
    callee: int
    parent: Record | None
    limit_s: float
    deadline_s: float
    asked_s: float
    left_s: float = math.inf
    is_cancelled_by_user: bool = False
    was_due: bool = False
    was_sent: bool = False
    was_closed_before: bool = False
    was_owed: bool = False
    was_taken_back: bool = False
    arrived_s: float | None = None
    is_cancel_received: bool = False
    cancelled_s: float = math.inf
    was_refused: bool = False
    runs: int = 0
    told: Any = None
    was_told: bool = False
    is_closed: bool = False
    ends: int = 0
    outcome: Any = None

    def __repr__(self) -> str:
        return f"call of {self.caller} to {self.callee} with {self.limit_s:g} s"


class Request(NamedTuple):
    """A ``CALL``; ``creation`` is a number if the callee keeps the value."""

    number: int
    remaining_s: float
    record: Record | None
    depth: int
    creation: int = NO_CREATION


class Reply(NamedTuple):
    """A ``REPLY``."""

    number: int
    outcome: Any
    record: Record


class Cancel(NamedTuple):
    """A ``CANCEL``."""

    numbers: tuple[int, ...]


class Asked(OpenCall):
    """A call whose program is told of its end."""

    def __init__(
        self,
        record: Record,
        started_s: float,
        parent: ServedCall | None,
        depth: int,
        on_end: Callable[[], None],
    ) -> None:
        self.record = record
        self.depth = depth
        self.on_end = on_end
        self.worker = record.callee
        self.worker_name = f"worker{record.callee}"
        self.function = "function"
        self.timeout_s = record.limit_s
        self.started_s = started_s
        self.deadline_s = record.deadline_s
        self.parent = parent
        self.number = 0
        self.frame = self.error = self.on_done = None
        self.outcome: Any = None


class CallRequest:
    """The request of a call, which notes that it is taken back."""

    def __init__(self, world: CallWorld, peer: Peer, call: Asked) -> None:
        self._world = world
        self._peer = peer
        self._call = call

    def message(self, number: int) -> Any:
        record = self._call.record
        self._world.is_due(record)
        return Request(number, record.limit_s, record, self._call.depth)

    def take_back(self) -> None:
        record = self._call.record
        assert record.is_closed or self._peer.lost, f"{record} is open, and is not sent"
        record.was_taken_back = True


class Served(AnsweredCall):
    """A call of another worker, whose answers are messages."""

    def __init__(self, worker: Worker, peer: Peer, request: Request, arrived_s: float) -> None:
        super().__init__(peer, Frame(Kind.CALL, 0, request.number, b"", ()), arrived_s)
        self.worker: Any = worker
        self.request = request
        self.record = request.record
        self.context_id = 0
        self.owned = None
        self.was_told = False
        """Whether its function was told that no caller waits."""
        self.has_slot = False
        self.has_outcome = False
        self.is_referred = worker.world.chance.random() < 0.5

    def create(self, creation: int) -> int | None:
        if self.peer.is_forgotten:  # The owner of references has noted the loss.
            return None
        self.worker.world.creations.append(self)
        return creation

    def cancel(self) -> None:
        self.worker.world.cancels(self)
        super().cancel()

    def keep(self, result: Any, error: BaseException | None) -> None:
        self.worker.world.note("kept", self.owned)

    def not_delivered(self, failure: BaseException) -> BaseException:
        raise failure

    def failed_late(self) -> None:
        raise AssertionError("no function fails after its answer")

    def is_referred_to(self) -> bool:
        return self.is_referred


@dataclass(eq=False)
class Peer:
    """A worker's view of another worker, or of itself."""

    id: int
    name: str
    is_self: bool
    is_connected: bool
    served: dict[int, ServedCall] = field(default_factory=dict)
    lost: WorkerLost | None = None
    lost_s: float = math.inf
    is_retired: bool = False
    is_forgotten: bool = False
    unsent: UnsentMessages = field(default_factory=UnsentMessages)


class Worker:
    """One worker: its machines, its programs, and the shell between them.

    Attributes:
        writing: Records of calls in the table whose requests are being written.
        arrived: All calls that have arrived, by caller and number.
        is_strange: Whether it sends each call twice.
    """

    def __init__(self, world: CallWorld, worker_id: int, clock: Clock, size: int) -> None:
        self.world = world
        self.id = worker_id
        self.clock = clock
        self.chance = world.chance
        self.client: CallClient[Asked] = CallClient()
        self.server = CallServer()
        self.leaving = OpenLeaving()
        self.tasks = FairQueue(world.queue_limit, 1 << 30)
        self.running = 0
        self.unfinished: set[AnsweredCall] = set()
        self.watchers: tuple[Any, ...] = ()
        self.writing: set[Record] = set()
        self.arrived: dict[tuple[int, int], Served] = {}
        self.is_strange = self.is_closed = False
        self.peers = {
            peer: Peer(peer, f"worker{peer}", peer == worker_id, peer == worker_id)
            for peer in range(size)
        }
        self._asked: dict[tuple[int, int], Record] = {}
        self._creations = 0
        self._next_s = math.inf

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Schedules the next step, on some thread."""
        pause_s = self.world.longest_pause_s * self.chance.random() ** 2
        self.clock.later(pause_s, function, *arguments)

    def records_of(self, callee: int, numbers: tuple[int, ...]) -> list[Record]:
        known = [self._asked.get((callee, number)) for number in numbers]
        assert None not in known, f"worker {callee} is told of calls that it does not serve"
        return [record for record in known if record is not None]

    def stop(self) -> None:
        """Ends this worker abruptly."""
        self.is_closed = True
        self.clock.stop()

    def close(self) -> None:
        """Leaves at once: waiting calls get an error."""
        if self.is_closed:
            return
        self.is_closed = True
        for call in self.client.closed(NotInitialized("shut down")):
            self.world.closes(call)
            self._tell(call)
        self.world.end(self.id, "leaves")

    # The program

    def call_any(self) -> None:
        """Makes a call that is not nested."""
        if not self.is_closed and self.leaving.stage is Stage.MEMBER:
            self.start(None, 0, lambda: None)

    def create_any(self) -> None:
        """Creates a value at another worker, without waiting for it."""
        peer = self._choose()
        if not self.is_closed and peer is not None and peer.lost is None:
            self._creations += 1
            request = Request(NUMBER_OF_NONE, math.inf, None, DEEPEST, self._creations)
            self._post(peer, request)

    def _choose(self) -> Peer | None:
        peers = [peer for peer in self.peers.values() if not peer.is_retired]
        return self.chance.choice(peers) if peers else None

    def start(self, served: Served | None, depth: int, on_end: Callable[[], None]) -> None:
        """Makes a call; ``on_end`` is called when it has ended, or could not be made."""
        peer = self._choose()
        if peer is None:
            self.soon(on_end)
            return
        world, now_s = self.world, self.now_s
        asked_s = limit_s = self.chance.choice(LIMITS_S)
        parent: ServedCall | None = None
        if served is not None:
            try:
                parent, limit_s = nest(served, peer.name, "function", limit_s, now_s)
            except (CallCancelled, CallTimeout) as error:
                world.refused_to_nest(served, error, now_s)
                self.soon(on_end)
                return
        is_nested = parent is not None and served is not None
        record = Record(
            self.id,
            peer.id,
            served.record if served is not None and is_nested else None,
            limit_s,
            now_s + limit_s,
            asked_s,
        )
        world.records.append(record)
        world.note("calls", record)
        if served is not None and is_nested:
            world.nested(record, served, now_s)
        call = Asked(record, now_s, parent, depth, on_end)
        if parent is None:
            self.clock.later(PATIENCE_S, self._cancel, call)
        if self.chance.random() < 0.1:
            self.clock.later(self.chance.random(), self._cancel, call)
        self.soon(self._ask, peer, call)

    def _cancel(self, call: Asked) -> None:
        """Gives a call up for its program, once it has been made."""
        if not call.number:
            self.clock.later(self.world.longest_pause_s + 0.01, self._cancel, call)
        elif not call.record.is_closed and call.record not in self.writing:
            call.record.is_cancelled_by_user = True
            self._act(self.client.cancelled(call, CallCancelled("by its caller")))

    # As OpenCalls.ask

    def _ask(self, peer: Peer, call: Asked) -> None:
        self.writing.add(call.record)
        self.soon(self._add, peer, call, peer.is_connected and not peer.unsent)

    def _add(self, peer: Peer, call: Asked, is_sent: bool) -> None:
        request = CallRequest(self.world, peer, call)
        if peer.lost is not None and not is_sent:
            call.number = -1
            self.writing.discard(call.record)
            self._raise(call, peer.lost)
        elif is_sent:
            self._asked[peer.id, self.client.add(call)] = call.record
            self.soon(self._write, peer, call, request.message(call.number))
        else:
            self._asked[peer.id, self.client.keep(call)] = call.record
            kept = KeptCall(self.client, call, request, self._act)
            if self._keep(peer, kept):
                self.soon(self._opened, peer, call, False)
            else:
                self.soon(self._write, peer, call, kept.make())

    def _write(self, peer: Peer, call: Asked, request: Request) -> None:
        if peer.lost is not None and self.chance.random() < 0.5:
            if self.client.withdraw(call):
                self._raise(call, peer.lost)
            else:
                call.record.was_taken_back = True
            self.writing.discard(call.record)
            return
        self._send(peer, request)  # A connection that has just been lost may take it.
        self.soon(self._opened, peer, call, True)

    def _opened(self, peer: Peer, call: Asked, was_sent: bool) -> None:
        self.writing.discard(call.record)
        lost = peer.lost
        loss = None if lost is None else lambda: lost
        try:
            self._act(self.client.opened(call, was_sent=was_sent, loss=loss))
        except WorkerLost as error:
            self._raise(call, error)
            return
        if self.chance.random() < 0.2 and call.deadline_s < math.inf:
            # A thread waits for this call itself.
            delay_s = max(call.deadline_s - self.now_s, 0.0) + 1e-9
            self.clock.later(delay_s, self._time_out, call)
        self._wake_by(call.deadline_s)

    def _time_out(self, call: Asked) -> None:
        if self.now_s >= call.deadline_s:
            self._act(self.client.expire(self.now_s)[0])

    def _raise(self, call: Asked, error: WorkerLost) -> None:
        """Tells the maker of a call at once; the request is taken back."""
        if not call.record.was_sent:
            call.record.was_taken_back = True
        call.record.is_closed = True
        call.error = error
        self._tell(call)

    # As Sender.keep

    def _keep(self, peer: Peer, unsent: Unsent) -> bool:
        is_kept = peer.unsent.keep(unsent, is_linked=peer.is_connected)
        if is_kept and len(peer.unsent) == 1:
            self.world.connect(self.id, peer.id)
        return is_kept

    def connected(self, other: int) -> None:
        peer = self.peers[other]
        if peer.lost is None:
            peer.is_connected = True
            if peer.unsent:
                self.soon(self._flush, peer)

    def _flush(self, peer: Peer) -> None:
        if peer.lost is not None or not peer.unsent:
            return
        unsent = peer.unsent[0]
        if unsent.is_wanted():
            self.soon(self._make, peer, unsent)
        else:
            unsent.drop(None)
            self._flushed(peer)

    def _make(self, peer: Peer, unsent: Unsent) -> None:
        if peer.lost is not None:
            return
        try:
            message: Any = unsent.make()
        except CallCancelled as error:
            unsent.drop(error)
            self._flushed(peer)
            return
        record = message.record if isinstance(message, Request) else None
        if record is not None:
            self.writing.add(record)
        self.soon(self._write_kept, peer, message, record)

    def _write_kept(self, peer: Peer, message: Any, record: Record | None) -> None:
        if record is not None:
            self.writing.discard(record)
        if peer.lost is None:
            self._send(peer, message)
            self._flushed(peer)

    def _flushed(self, peer: Peer) -> None:
        peer.unsent.popleft()
        if peer.unsent:
            self.soon(self._flush, peer)

    # Messages

    def _post(self, peer: Peer, message: Any) -> None:
        if peer.lost is None and not self._keep(peer, Unsent(message)):
            self._send(peer, message)

    def _send(self, peer: Peer, message: Any) -> None:
        self.world.sent(self.id, peer.id, message)
        is_repeated = self.is_strange and isinstance(message, Request) and message.number
        self.world.send(self.id, peer.id, [message, message] if is_repeated else message)

    def take(self, source: int, message: Any) -> None:
        """Reads a message; does not block."""
        peer = self.peers[source]
        if peer.lost is not None:
            return
        if isinstance(message, list):
            for one in message:
                self.take(source, one)
        elif isinstance(message, Request):
            self._on_request(peer, message)
        elif isinstance(message, Reply):
            self._on_reply(peer.id, message)
        elif isinstance(message, Cancel):
            self.world.cancel_received(self.id, source, message.numbers)
            self._act_on_cancelled(self.server.cancel_received(peer, message.numbers))
        else:
            self._depart(self.leaving.received(source, message, []))

    def _on_request(self, peer: Peer, request: Request) -> None:
        try:
            served = Served(self, peer, request, self.now_s)
        except ProtocolError:
            self.world.note("turns away", self.id, peer.id)
            self.world.sever(self.id, peer.id)
            return
        if request.record is not None:
            request.record.arrived_s = self.now_s
            self.arrived[peer.id, request.number] = served
        waiting = self.tasks._queues.get(peer.id)
        waits = len(waiting.tasks) if waiting is not None else 0
        if self.tasks.offer((self._begin, served, request), peer.id, 1):
            self.soon(self._pump)
        else:
            assert waits >= self.world.queue_limit
            if served.record is not None:
                served.record.was_refused = True
            self.soon(self._refuse, served)

    def _on_reply(self, worker: int, reply: Reply) -> None:
        is_open = not reply.record.is_closed
        call = self.client.answered(worker, Frame(Kind.REPLY, 0, reply.number, b"", ()))
        assert (call is not None) == is_open, f"the answer of {reply.record} is lost"
        if call is None:
            self.world.note("late answer", reply.record)
        else:
            assert call.record is reply.record
            self.world.closes(call)
            call.outcome = reply.outcome
            self.soon(self._tell, call)

    # Actions of the client

    def _act(self, actions: list[Action[Asked]]) -> None:
        for action in actions:
            if isinstance(action, Complete):
                self.world.closes(action.call)
                self.soon(self._tell, action.call)
            else:
                self._post(self.peers[action.worker], Cancel(action.numbers))

    def _tell(self, call: Asked) -> None:
        self.world.ends(call, call.error if call.error is not None else call.outcome, self.now_s)
        call.on_end()

    def _wake_by(self, due_s: float) -> None:
        if due_s < self._next_s:
            self._next_s = due_s
            self.clock.later(max(due_s - self.now_s, 0.0) + 1e-9, self._look, due_s)

    def _look(self, due_s: float) -> None:
        if due_s == self._next_s:
            self._next_s = math.inf
            actions, next_s = self.client.expire(self.now_s)
            self._act(actions)
            self._wake_by(max(next_s, self.now_s + 1e-6))

    # Actions of the server

    def _act_on_cancelled(self, is_due: bool) -> None:
        if is_due:
            self.soon(self._cancel_nested)

    def _cancel_nested(self) -> None:
        parents = self.server.take_cancelled_parents()
        if parents:
            self._act(self.client.parents_cancelled(parents))

    def lose(self, worker: int) -> None:
        """Declares another worker lost."""
        peer = self.peers[worker]
        if peer.lost is not None:
            return
        peer.lost = WorkerLost("lost", worker=peer.name)
        peer.lost_s = self.now_s
        self.world.note("lost", self.id, worker)
        self._act(self.client.worker_lost(worker, lambda: WorkerLost("lost", worker=peer.name)))
        self.soon(self._on_lost, peer)

    def _on_lost(self, peer: Peer) -> None:
        self.leaving.member_lost(peer.id)
        peer.is_forgotten = True
        while peer.unsent:
            peer.unsent.popleft().drop(WorkerLost("lost", worker=peer.name))
        self._act_on_cancelled(self.server.caller_lost(peer))
        self._act_on_cancelled(self.server.creations_lost(self.unfinished.copy(), peer))

    # Running

    def _pump(self) -> None:
        while self.running < self.world.slots and self.tasks.ready:
            begin, served, request = self.tasks.popleft()
            self.running += 1
            served.has_slot = True
            self.soon(begin, served, request)

    def _begin(self, served: Served, request: Request) -> None:
        if not served.begins(request.creation, request.remaining_s, self.now_s):
            self.world.not_begun(served, self.now_s)
            self._free(served)
            return
        self.world.begins(served, self.now_s)
        ways = (self._work, self._work, self._poll, self._await, self._await_value, self._call_on)
        self.chance.choice(ways)(served)

    def _refuse(self, served: Served) -> None:
        request = served.request
        error = calls.too_many_waiting(f"worker{self.id}", served.peer.name)
        served.refuse(request.creation, request.remaining_s, self.now_s, error)
        self.world.note("refused", served.record)
        if self.now_s <= served.deadline_s:
            self.world.finished(served)

    def _free(self, served: Served) -> None:
        """Frees the thread of the function."""
        if served.has_slot:
            served.has_slot = False
            self.running -= 1
            self.soon(self._pump)

    def _outcome(self, served: Served, error: Exception | None = None) -> None:
        if not served.has_outcome:
            served.has_outcome = True
            served("result", error)
            self.world.finished(served)
            self._free(served)

    def reply(self, peer: Peer, number: int, result: Any, context_id: int) -> None:
        served = self.arrived[peer.id, number]
        assert served.record is not None
        outcome = result if isinstance(result, Exception) else object()
        self.world.answers(served.record, outcome)
        self._post(peer, Reply(number, outcome, served.record))

    def reply_error(self, peer: Peer, number: int, error: Any) -> None:
        self.reply(peer, number, error, 0)

    # Functions

    def _draw_work_s(self) -> float:
        return LONGEST_WORK_S * self.chance.random() ** 4

    def _work(self, served: Served) -> None:
        """Computes for a while, whatever happens."""
        error = ValueError("raised by the function") if self.chance.random() < 0.2 else None
        self.clock.later(self._draw_work_s(), self._outcome, served, error)

    def _poll(self, served: Served) -> None:
        """Computes until it learns that no caller waits."""
        if served.notice_unwanted(self.now_s):
            served.was_told = True
            if self.chance.random() < 0.5:
                self._call_on(served)  # The nested call will be refused.
            else:
                self._outcome(served)
        elif served.request.creation != NO_CREATION and self.chance.random() < 0.5:
            self._outcome(served)  # Otherwise it may run for ever.
        else:
            self.clock.later(LOOK_S, self._poll, served)

    def _await(self, served: Served) -> None:
        """Awaits something on the event loop, for ever or for a while."""
        self._free(served)
        served.on_cancel(lambda _: self.soon(self._outcome, served, CallCancelled("cancelled")))
        if self.chance.random() < 0.5:
            self.clock.later(self._draw_work_s(), self._outcome, served)

    def _await_value(self, served: Served) -> None:
        """Begins its work when a value is ready, or ends when that is in vain."""
        self._free(served)
        error = ValueError("could not be made") if self.chance.random() < 0.2 else None
        waiting = [served]

        def be_ready() -> None:
            if waiting:
                waiting.clear()
                self.soon(go_on)

        def go_on() -> None:
            if served.goes_on(error, self.now_s):
                self.world.goes_on(served, self.now_s)
                self._work(served)
            else:
                if error is None:
                    self.world.not_begun(served, self.now_s)
                served.has_outcome, served.was_told = True, served.was_cancelled
                self.world.finished(served)

        def give_up() -> None:
            if waiting:
                waiting.clear()
                self._outcome(served, CallCancelled("given up"))

        self.clock.later(self._draw_work_s(), be_ready)
        served.on_cancel(lambda _: self.soon(give_up))

    def _call_on(self, served: Served) -> None:
        """Calls other workers, waits for the ends of these calls, and perhaps calls again."""
        count = self.chance.choice((1, 1, 2)) if served.request.depth < DEEPEST else 0
        if not count or served.record is None:
            self._work(served)
            return
        self._free(served)  # A thread that waits for other workers takes no slot.
        is_detached = self.chance.random() < 0.1
        open_calls = [count]

        def on_end() -> None:
            open_calls[0] -= 1
            if not open_calls[0]:
                again = self._call_on if self.chance.random() < 0.2 else self._outcome
                self.soon(again, served)

        for _ in range(count):
            self.start(None if is_detached else served, served.request.depth + 1, on_end)

    # Leaving

    def leave(self) -> None:
        """Begins to leave; the worker ends when no other worker needs it."""
        self._depart(self.leaving.begin())
        for peer in self.peers.values():
            if not peer.is_self and peer.lost is None:
                self._depart(self.leaving.member_present(peer.id))
        self._observe()

    def _observe(self) -> None:
        is_idle = not (
            len(self.client)
            or self.running
            or self.tasks.ready
            or self.unfinished
            or self.writing
            or has_awaited(self.peers.values())
        )
        self._depart(self.leaving.observed(Report(is_idle, 0), is_settled=True))
        self.clock.later(POLL_S, self._observe)

    def _depart(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._post(self.peers[action.to], Step(action.step))
            elif isinstance(action, Retire):
                self.peers[action.worker].is_retired = True
            elif isinstance(action, Left):
                self.world.polite.add(self.id)
                self._close_later()
            else:
                assert isinstance(action, BeginSettling)

    def _close_later(self) -> None:
        """Leaves once its last messages have arrived."""
        is_flushed = not any(peer.unsent and peer.lost is None for peer in self.peers.values())
        then = self.close if is_flushed else self._close_later
        self.clock.later(10 * self.world.longest_delay_s, then)

    # The end

    def check_rest(self) -> None:
        """Checks that nothing is left."""
        assert not len(self.client), f"worker {self.id} waits for {len(self.client)} calls"
        assert not self.client._unsent, f"worker {self.id} keeps numbers of calls that have ended"
        assert not self.running, f"{self.running} functions of worker {self.id} do not end"
        assert not self.tasks.ready, f"calls of worker {self.id} never had their turn"
        assert not self.writing
        done = [call for call in self.unfinished if call.has_ended]
        assert not done, f"{len(done)} values are made, and worker {self.id} still waits for them"
        for peer in self.peers.values():
            assert not peer.served, f"calls of {peer.name} are still served at {self.id}"
            assert not peer.unsent, f"messages to {peer.name} are kept at {self.id}"
