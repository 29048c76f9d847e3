"""The calls that this worker has open, and the threads that wait for their answers.

``OpenCalls`` is the I/O shell of ``CallClient`` and ``CallServer`` of
``torchweft.engine.protocol.calls``: it also ends the calls that other workers have given up.

In the native twin the waiting thread itself reads the connections on which messages will come,
unless another thread already does. A message then needs no hand-over between threads. Messages for
other threads are handed to the reactor. In the plain twin, threads of the reactor read everything,
and the waiting thread sleeps until one of them has put the message where it looks.
"""

from __future__ import annotations

import math
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from enum import IntEnum
from time import monotonic
from typing import Any

from torchweft.engine.protocol.calls import (
    Action,
    AnsweredCall,
    CallClient,
    CallServer,
    Complete,
    KeptCall,
    Named,
    OpenCall,
    Request,
    ServedCall,
)
from torchweft.engine.threads import interrupts
from torchweft.engine.threads.reactor import Parts, Reactor
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.threads.timers import Timers
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import ERROR_REPLY, Kind, decode_ints
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.receiving import Receiver
from torchweft.engine.worker.sending import Sender
from torchweft.errors import NotInitialized
from torchweft.native import native


class PendingCall(OpenCall):
    """One open call, for which threads can wait.

    The thread that takes the call out of the call table completes it once, with the answer's frame
    or with an error. ``on_done``, if set, then runs as a task, or in the waiting thread if that
    thread read the answer itself.
    """

    __slots__ = ("_done", "kept", "notes", "watchers")

    notes: dict[Any, Any]
    """What watchers keep with the call; unset if there are none."""

    def __init__(
        self,
        worker: int,
        worker_name: str,
        function: Named,
        timeout_s: float,
        on_done: Callable[[PendingCall], None] | None = None,
        parent: ServedCall | None = None,
    ) -> None:
        self.worker = worker
        self.worker_name = worker_name
        self.function = function
        self.timeout_s = timeout_s
        self.started_s = started_s = monotonic()
        self.deadline_s = started_s + timeout_s
        self.on_done = on_done
        self.parent = parent
        self.number = 0
        self.kept: object = None
        self.watchers: Sequence[Any] = ()
        self.frame: Frame | None = None
        self.error: BaseException | None = None
        self._done = done = allocate_lock()
        done.acquire()

    @property
    def is_done(self) -> bool:
        """Whether the call was completed, with an answer or an error."""
        return not self._done.locked()

    @property
    def has_failed(self) -> bool:
        """Whether it was completed without an answer, or with that of an error."""
        return self.frame is None or self.frame.flags & ERROR_REPLY != 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call was made."""
        return time.monotonic() - self.started_s

    def unfinished(self) -> list[PendingCall]:
        """Returns the call itself until it is done; for ``Reactor.waiting``."""
        return [] if self.is_done else [self]

    def finish(self) -> None:
        """Wakes the waiting threads. The outcome is in ``frame`` or ``error`` by now."""
        for each in self.watchers:
            each.call_ends(self)
        try:
            self._done.release()
        except RuntimeError:  # Another thread has done it.
            pass

    def wait(self, timeout_s: float) -> bool:
        """Blocks until done or for ``timeout_s``; returns whether it is done."""
        return interrupts.wait_for(self._done, timeout_s)


class Spins(IntEnum):
    """For what a thread spins before it sleeps: each kind adapts to its own waits."""

    NEVER = -1
    ANSWERS = 0
    PASSES = 2


Wanted = tuple[int, int, object, tuple[Callable[..., None], Any, Any] | None]
"""The messages for which a thread waits: a bit set of their kinds; the number in their frames; what
gets them, a list, or an object with a ``frame``; and a task for the
reactor that is due if this thread cannot go on with the message, as a signal handler has raised."""


def kinds_of(*kinds: Kind) -> int:
    """Returns a bit set of kinds of messages."""
    return sum(1 << kind for kind in kinds)


class Waiter:
    """Lets threads of one worker wait for messages. Thread-safe.

    Args:
        reactor: Reads the connections that no waiting thread reads.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor

    def lease(self, peers: Sequence[Peer]) -> Any:
        """Returns the right to read the connection of a worker; release it in any case.

        Take it before sending what will be answered, so that the answer wakes no other thread.

        Returns:
            The lease; None if another thread reads the connection or handles what was read, for
            more than one worker, or in the plain twin: then wait for other threads.
        """
        link = peers[0].link if len(peers) == 1 else None
        if native is None or link is None or link.native is None:
            return None
        lease = native.Lease.take(link.native)
        try:
            # What this thread waits for may be among it. Only a wait for others would notice.
            if lease is None or not (link.incoming or link.handling.locked()):
                return lease
        except BaseException:
            if lease is not None:
                lease.release()  # Else the link is unread for as long as the traceback lives.
            raise
        lease.release()
        return None

    def read(
        self,
        lease: Any,
        wanted: Wanted,
        spins: Spins,
        deadline_s: float,
        is_over: Callable[[], object],
        parts: Parts,
        wake_fd: int = -1,
    ) -> bool:
        """Reads until a wanted message is there; returns False if this thread is to wait otherwise.

        Args:
            lease: The right to read.
            wanted: The messages.
            spins: What the thread spins for.
            deadline_s: By the clock of ``time.monotonic``.
            is_over: Whether the wait has ended otherwise; asked now and then.
            parts: What the thread waits for, as ``Reactor.waiting`` takes it.
            wake_fd: An eventfd that has ``is_over`` asked; -1 for none.
        """
        taken = lease.wait(*wanted, spins, 0.0, wake_fd)
        if taken or is_over():
            return bool(taken > 0)
        with self._reactor.waiting(parts):
            while not taken and not is_over() and monotonic() < deadline_s:
                taken = lease.wait(*wanted, -1, deadline_s, wake_fd)
        return bool(taken > 0)


_ANSWERS = kinds_of(Kind.REPLY)
OnDone = Callable[[PendingCall], None]


class OpenCalls:
    """The open calls of one worker. Thread-safe.

    Args:
        peers: The workers of the group, by id.
        reactor: Its threads complete calls.
        timers: End the calls that are past their deadlines, by ``expire``.
        sender: Sends the requests.
        receiver: Passes answers, and messages that cancel calls, to this object from here on.
        waiter: Lets threads wait for answers.
    """

    def __init__(
        self,
        peers: Mapping[int, Peer],
        reactor: Reactor,
        timers: Timers,
        sender: Sender,
        receiver: Receiver,
        waiter: Waiter,
    ) -> None:
        self._peers = peers
        self._reactor = reactor
        self._timer = timers.add(self.expire)
        self._sender = sender
        self._waiter = waiter
        receiver.on_replies(self.take_reply)
        receiver.on(Kind.CANCEL, self._on_cancel, inline=True)
        self._client: CallClient[PendingCall] = CallClient()
        self._server = CallServer()

    def __len__(self) -> int:
        return len(self._client)

    def all(self) -> list[PendingCall]:
        """Returns the calls that have not ended."""
        return self._client.all()

    @property
    def total(self) -> int:
        """Grows with each call."""
        return self._client.total

    def ask(
        self,
        peer: Peer,
        call: PendingCall,
        request: Request,
        *,
        may_block: bool = True,
    ) -> None:
        """Opens ``call`` and sends its request; the answer completes it.

        If there is no connection yet, the request is sent once there is one. If no connection is
        made in time, or the peer turns out to be lost, the call ends with that error.

        Args:
            peer: The callee.
            call: The call.
            request: Makes the frame. It is taken back later if this method has returned and the
                frame is never sent.
            may_block: Whether to wait until the socket has room; see ``Sender.send``.

        Raises:
            WorkerLost: The peer is lost; the call is closed again.
        """
        is_sent = peer.is_self or (peer.link is not None and not peer.unsent)
        try:
            if is_sent:
                message = request.message(self._client.add(call))
                if peer.is_self:
                    self._sender.send(peer, message)
                else:
                    self._sender.write(peer, message, may_block=may_block)
            else:
                self._client.keep(call)
                kept = KeptCall(self._client, call, request, self._act)
                if not self._sender.keep(peer, kept):
                    is_sent = True  # There is a connection by now.
                    self._sender.send(peer, kept.make())
        except BaseException:
            self._client.withdraw(call)
            raise
        self._opened(peer, call, is_sent)

    def _opened(self, peer: Peer, call: PendingCall, was_sent: bool) -> None:
        parent = call.parent
        if peer.lost or call.error or (parent is not None and parent.was_cancelled):
            loss = peer.lost_error if peer.lost is not None else None
            self._act(self._client.opened(call, was_sent=was_sent, loss=loss))
        if call.deadline_s < self._timer.next_s:
            self._timer.wake_by(call.deadline_s)

    def ask_and_wait(
        self, peer: Peer, call: PendingCall, request: Request, decodes: tuple[Any, ...] = ()
    ) -> tuple[Any] | None:
        """Does as ``ask`` and ``wait``; the answer wakes no other thread where that is possible.

        Args:
            peer: The callee.
            call: The call.
            request: Makes the frame.
            decodes: What the native twin takes to decode a usual answer; empty if it may not.

        Returns:
            The decoded result, alone in a tuple; None if the outcome is in the call.
        """
        link, lease = peer.link, None
        is_usual = link is not None and link.serves and link.watcher is None
        spins = Spins.ANSWERS
        try:
            if is_usual and not (peer.unsent or call.watchers):
                asked = self._ask_natively(peer, link, call, request, decodes)
                if asked is None or type(asked) is tuple:
                    return asked
                lease, asked, spins = asked or None, None, Spins.NEVER
                self._opened(peer, call, True)
            else:
                lease = self._waiter.lease((peer,))
                self.ask(peer, call, request, may_block=lease is None)
            if lease is not None:
                self._read(lease, peer, call, spins)
        finally:
            if lease is not None:
                lease.release()  # Else the link is unread for as long as a traceback lives.
        if not (call.frame or call.error or call.is_done):
            self._wait_for_others(call)
        return None

    def _ask_natively(
        self, peer: Peer, link: Any, call: PendingCall, request: Request, decodes: tuple[Any, ...]
    ) -> Any:
        """Sends a request, and looks for the answer for a moment, in one step of the native twin.

        Returns:
            The decoded result, alone in a tuple; None if the answer is in the call; the right to
            read the link if none has come; or False if another thread reads it.

        Raises:
            BaseException: A signal handler has raised it while the result was decoded.
        """
        number = self._client.add(call)
        try:
            message = request.message(number)
            try:
                calls = self._client.entries
                asked = native.Lease.ask(link.native, number, call, message, calls, decodes)
            except OSError as error:
                raise self._sender.failed(peer, error) from error
            if asked is False:
                self._sender.write(peer, message)
            elif isinstance(asked, BaseException):
                if interrupts.is_of_handler(asked):
                    raise asked
                asked = None  # It comes again.
            elif asked and type(asked) is not tuple:
                link.mend()  # It may be full.
        except BaseException:
            asked = None  # Else the link is unread for as long as the traceback lives.
            self._client.withdraw(call)
            raise
        return asked

    def wait(self, call: PendingCall, *, may_complete: bool = True) -> None:
        """Blocks until ``call`` is done. Its outcome is in ``call.frame`` or ``call.error``.

        A call past its deadline is closed, with a ``CallTimeout`` as its error.

        Args:
            call: The call.
            may_complete: Whether ``on_done`` may run in the main thread, where it may be
                interrupted. Must be False if ``on_done`` runs callbacks of the program.
        """
        peer = self._peers[call.worker]
        lease = None if call.is_done else self._waiter.lease((peer,))
        if lease is not None:
            may_complete = may_complete or get_ident() != interrupts.main_id
            try:
                self._read(lease, peer, call, may_complete=may_complete)
            finally:
                lease.release()
        if not call.is_done:
            self._wait_for_others(call)

    def _read(
        self,
        lease: Any,
        peer: Peer,
        call: PendingCall,
        spins: Spins = Spins.ANSWERS,
        *,
        may_complete: bool = True,
    ) -> None:
        """Reads the answer of a call, and completes the call, unless that is left to others."""
        done = call._done

        def is_over() -> object:
            return call.frame or call.error or peer.lost or not done.locked()

        left = (self._complete_left, call, call.on_done)
        wanted = (_ANSWERS, call.number, call, left)

        is_there = self._waiter.read(
            lease, wanted, spins, call.deadline_s, is_over, call.unfinished
        )
        link, frame = peer.link, call.frame
        if is_there and link is not None and link.watcher is not None and frame is not None:
            link.watcher.received(frame)  # One that another thread has read is noted there.
        if is_there and may_complete:
            if call.on_done is not None:
                lease.give_up()  # Completing it may wait for tensors, whose news come here.
            if self._client.pop(call.number, None) is not None:
                call.finish()
                if call.on_done is not None:
                    call.on_done(call)
            lease.settle()

    def _complete_left(self, call: PendingCall, on_done: OnDone | None) -> None:
        """Completes a call whose answer was read by a thread that did not go on, or not to the end.

        So ``on_done`` may have begun before.
        """
        if self._client.pop(call.number, None) is not None or not call.is_done:
            call.finish()
        if on_done is not None:
            on_done(call)

    def _wait_for_others(self, call: PendingCall) -> None:
        """Waits for another thread to complete ``call``."""
        with self._reactor.waiting(call.unfinished):
            if not call.wait(call.deadline_s - time.monotonic()):
                # Either the call ends here, or another thread completes it now.
                self.expire(time.monotonic())
                call.wait(math.inf)

    def expire(self, now_s: float) -> float:
        """Fails the calls that are past their deadlines; a timer job."""
        actions, earliest_s = self._client.expire(now_s)
        self._act(actions)
        return earliest_s

    def fail(self, call: PendingCall, error: BaseException) -> None:
        """Completes a call that is not open with an error."""
        call.error = error
        self._act([Complete(call)])

    def cancel(self, call: PendingCall, error: BaseException) -> bool:
        """Cancels a call, which fails with ``error``. Returns False if it has ended already."""
        actions = self._client.cancelled(call, error)
        self._act(actions)
        return bool(actions)

    def _act(self, actions: list[Action[PendingCall]]) -> None:
        for action in actions:
            try:
                self._carry_out(action)
            except Exception:  # The calls are no more in the table: nobody would end the others.
                log_exception("a call could not be ended")

    def _carry_out(self, action: Action[PendingCall]) -> None:
        if not isinstance(action, Complete):
            peer = self._peers[action.worker]
            self._sender.post_ints(peer, Kind.CANCEL, *action.numbers)
        elif action.call.on_done is None:
            action.call.finish()
        else:
            self._reactor.submit(_run_on_done, action.call)

    def take_reply(self, worker: int, frame: Frame) -> bool:
        """Gives an answer to the call that waits for it; returns False if none waits any more.

        Args:
            worker: The worker that sent the answer.
            frame: The answer.

        Raises:
            ProtocolError: The call was made to another worker.
        """
        call = self._client.answered(worker, frame)
        if call is None:
            return False
        if call.on_done is None:
            call.finish()
        else:
            self._reactor.urgent.append((_run_on_done, call, None))
        return True

    def fail_of_worker(self, peer: Peer) -> None:
        """Fails all calls to a worker that was lost."""
        self._act(self._client.worker_lost(peer.id, peer.lost_error))

    def fail_all(self, error: NotInitialized) -> None:
        """Fails all calls in this thread, because the other threads are ending."""
        for call in self._client.closed(error):
            _run_on_done(call, None)

    # Calls of other workers, some of which have calls of this worker nested in them

    def _on_cancel(self, peer: Peer, frame: Frame) -> None:
        self._cancel_nested_soon(self._server.cancel_received(peer, decode_ints(frame.control)))

    def caller_lost(self, peer: Peer) -> None:
        """Cancels the calls of a worker that gets no result any more."""
        self._cancel_nested_soon(self._server.caller_lost(peer))

    def end_creations(self, making: set[AnsweredCall], peer: Peer) -> None:
        """Cancels calls that make values for a lost worker, unless others refer to the values.

        The owner of the values must have been told of the loss.
        """
        self._cancel_nested_soon(self._server.creations_lost(making.copy(), peer))

    def _cancel_nested_soon(self, is_due: bool) -> None:
        if is_due:
            self._reactor.submit(self._cancel_nested)

    def _cancel_nested(self, _: object = None, __: object = None) -> None:
        parents = self._server.take_cancelled_parents()
        if parents:
            self._act(self._client.parents_cancelled(parents))


def _run_on_done(call: PendingCall, _: object) -> None:
    call.finish()
    if call.on_done is not None:
        call.on_done(call)


current_call: ContextVar[ServedCall | None] = ContextVar("weft_served_call", default=None)
"""The call that the running code serves. An asyncio task inherits it from its creator."""
