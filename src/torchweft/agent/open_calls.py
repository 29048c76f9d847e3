"""The calls that this worker has open, and the threads that wait for their answers."""

from __future__ import annotations

import math
import time
from _thread import get_ident
from collections.abc import Callable, Mapping, Set
from typing import Any

from torchweft.agent.calls import PendingCall
from torchweft.agent.peers import Peer
from torchweft.agent.receiving import Receiver
from torchweft.agent.sending import FirstContacts, Sender
from torchweft.agent.waiting import Spins, Waiter, Wanted, kinds_of
from torchweft.errors import NotInitialized
from torchweft.protocol.calls import (
    Action,
    CallClient,
    Complete,
    KeptCall,
    Request,
    ServedCall,
)
from torchweft.runtime import interrupts
from torchweft.runtime.reactor import Reactor
from torchweft.runtime.reports import log_exception
from torchweft.runtime.timers import Timers
from torchweft.wire.frames import Frame
from torchweft.wire.messages import Kind

_ANSWERS = kinds_of(Kind.REPLY)
OnDone = Callable[[PendingCall], None]


class OpenCalls:
    """The open calls of one worker. Thread-safe.

    Args:
        peers: The workers of the group, by id.
        reactor: Its threads complete calls.
        timers: End the calls that are past their deadlines, by ``expire``.
        first_contacts: Keeps requests to peers to which there is no connection yet.
        sender: Sends the requests.
        receiver: Passes answers that it reads to this object from here on.
        waiter: Lets threads wait for answers.
    """

    def __init__(
        self,
        peers: Mapping[int, Peer],
        reactor: Reactor,
        timers: Timers,
        first_contacts: FirstContacts,
        sender: Sender,
        receiver: Receiver,
        waiter: Waiter,
    ) -> None:
        self._peers = peers
        self._reactor = reactor
        self._timer = timers.add(self.expire)
        self._first_contacts = first_contacts
        self._sender = sender
        self._waiter = waiter
        receiver.on_replies(self.take_reply)
        self._client: CallClient[PendingCall] = CallClient()

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
                number = self._client.add(call)
                self._sender.send(peer, request.message(number), may_block=may_block)
            else:
                self._client.keep(call)
                kept = KeptCall(self._client, call, request, self._act)
                if not self._first_contacts.keep(peer, kept):
                    is_sent = True  # There is a connection by now.
                    self._sender.send(peer, kept.make())
        except BaseException:
            self._client.withdraw(call)
            raise
        parent = call.parent
        if peer.lost or call.error or (parent is not None and parent.was_cancelled):
            loss = peer.lost_error if peer.lost is not None else None
            self._act(self._client.opened(call, was_sent=is_sent, loss=loss))
        if call.deadline_s < self._timer.next_s:
            self._timer.wake_by(call.deadline_s)

    def ask_and_wait(self, peer: Peer, call: PendingCall, request: Request) -> None:
        """Does as ``ask`` and ``wait``; the answer wakes no other thread where that is possible."""
        lease = self._waiter.lease((peer,))
        if lease is None:
            self.ask(peer, call, request)
        else:
            try:
                self.ask(peer, call, request, may_block=False)
                self._read(lease, peer, call)
            finally:
                lease.release()
        if not (call.frame or call.error or call.is_done):
            self._wait_for_others(call)

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
        self, lease: Any, peer: Peer, call: PendingCall, *, may_complete: bool = True
    ) -> None:
        """Reads the answer of a call, and completes the call, unless that is left to others."""
        left = (self._complete_left, call, call.on_done)
        wanted = Wanted(_ANSWERS, call.number, call, left)

        def is_over() -> object:
            return call.frame or call.error or call.is_done or peer.lost

        is_there = self._waiter.read(
            lease, wanted, Spins.ANSWERS, call.deadline_s, is_over, call.unfinished
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

    def cancel_nested(self, parents: Set[ServedCall]) -> None:
        """Cancels the calls that were made in the course of ``parents``, calls of other workers."""
        self._act(self._client.parents_cancelled(parents))

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
        if call.on_done is not None:
            self._reactor.urgent.append((_run_on_done, call, None))
            return True
        call.finish()
        return True

    def fail_of_worker(self, peer: Peer) -> None:
        """Fails all calls to a worker that was lost."""
        self._act(self._client.worker_lost(peer.id, peer.lost_error))

    def fail_all(self, error: NotInitialized) -> None:
        """Fails all calls in this thread, because the other threads are ending."""
        for call in self._client.closed(error):
            _run_on_done(call, None)


def _run_on_done(call: PendingCall, _: object) -> None:
    call.finish()
    if call.on_done is not None:
        call.on_done(call)
