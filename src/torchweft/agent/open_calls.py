"""The calls that this worker has open, and the threads that wait for their answers.

A waiting thread itself reads the connection on which the answer will come, unless another thread
already does. The answer then needs no hand-over between threads.
"""

from __future__ import annotations

import math
import time
from _thread import get_ident
from collections.abc import Mapping, Set

from torchweft.agent.calls import READING, MainReader, PendingCall
from torchweft.agent.peers import Peer
from torchweft.agent.receiving import Receiver
from torchweft.agent.sending import FirstContacts, Sender
from torchweft.errors import NotInitialized
from torchweft.protocol.calls import (
    Action,
    CallClient,
    Complete,
    Completion,
    KeptCall,
    Request,
    ServedCall,
    own_answer,
)
from torchweft.runtime import interrupts
from torchweft.runtime.reactor import Reactor
from torchweft.runtime.reports import log_exception
from torchweft.runtime.stacks import all_stacks
from torchweft.runtime.timers import Timers
from torchweft.transport.link import READ_TICK_S, Link
from torchweft.wire.frames import Frame
from torchweft.wire.messages import Kind


class OpenCalls:
    """The open calls of one worker. Thread-safe.

    Args:
        peers: The workers of the group, by id.
        reactor: Its threads complete calls.
        timers: End the calls that are past their deadlines, by ``expire``.
        first_contacts: Keeps requests to peers to which there is no connection yet.
        sender: Sends the requests.
        receiver: Reads the answers, and passes them to this object from here on.
    """

    def __init__(
        self,
        peers: Mapping[int, Peer],
        reactor: Reactor,
        timers: Timers,
        first_contacts: FirstContacts,
        sender: Sender,
        receiver: Receiver,
    ) -> None:
        self._peers = peers
        self._reactor = reactor
        self._timer = timers.add(self.expire)
        self._first_contacts = first_contacts
        self._sender = sender
        self._receiver = receiver
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
        """Like ``ask`` and ``wait``, with the answer read by this thread wherever possible.

        The thread is the one that has made ``call``.
        """
        if call.thread == interrupts.main_id:
            consumed: list[int] = []
            self._ask_and_wait_in_main(peer, call, request, consumed)
            if consumed and self._client.pop(call.number, None) is not None:
                call.finish()
            return
        self._ask_and_read(peer, call, call, request)
        # Check ``is_done`` too: reading the outcome clears it.
        if not (call.frame or call.error or call.is_done):
            self.wait(call)

    def wait(self, call: PendingCall, *, may_complete: bool = True) -> None:
        """Blocks until ``call`` is done. Its outcome is in ``call.frame`` or ``call.error``.

        A call past its deadline is closed, with a ``CallTimeout`` as its error.

        Args:
            call: The call.
            may_complete: Whether ``on_done`` may run in the main thread, where it may be
                interrupted. Must be False if ``on_done`` runs callbacks of the program.
        """
        if get_ident() == interrupts.main_id:
            if may_complete and not call.is_done:
                self._complete_in_main(call)
            else:
                self._wait_in_main(call)
            return
        if not call.is_done:
            # The reader is not the call: several threads may wait for one future.
            self._ask_and_read(self._peers[call.worker], call, object())
        if not call.is_done:
            self._wait_for_others(call)
        if call.reader == get_ident() and call.on_done is not None:
            call.on_done(call)

    def _ask_and_read(
        self, peer: Peer, call: PendingCall, reader: object, request: Request | None = None
    ) -> None:
        """Opens a call, if there is a request; reads its answer, unless another thread reads."""
        link = peer.link
        if link is None or link.readers.setdefault(0, reader) is not reader:
            if request is not None:
                self.ask(peer, call, request)
            return
        # Pause the link before the request is sent, so that the answer wakes no other thread.
        self._reactor.pause_reading(link.read_fd)
        try:
            if request is not None:
                self.ask(peer, call, request, may_block=False)
            self._read_until_done(peer, link, call)
        finally:
            link.readers.pop(0)
            self._reactor.resume_reading(link.read_fd)

    def _complete_in_main(self, call: PendingCall) -> None:
        """Does what ``wait`` does, in the main thread, which may be interrupted at any step.

        The future of a call outlives an interrupted wait: another thread then completes it.
        """
        on_done = call.on_done
        if on_done is None:
            self._wait_in_main(call)
            return
        completion = Completion(call, on_done)
        self._client.completions[call.number] = completion
        try:
            peer = self._peers[call.worker]
            self._ask_and_wait_in_main(peer, call, None, completion.consumed)
            if self._client.take_consumed(completion):
                call.finish()
                on_done(call)
        except BaseException:
            self._leave_completion(completion)
            raise
        self._client.completions.pop(call.number, None)

    def _leave_completion(self, completion: Completion[PendingCall]) -> None:
        """Hands a call over to another thread. Interruptible at any step, and repeatable."""
        if self._client.interrupted(completion):
            self._reactor.submit(self._complete_interrupted, completion)

    def _complete_interrupted(self, completion: Completion[PendingCall], _: object) -> None:
        call = self._client.resume(completion)
        if call is not None:
            if not call.is_done:
                call.finish()
            completion.on_done(call)

    def mend(self) -> None:
        """Recovers calls and links at which the main thread was interrupted."""
        for completion in self._client.abandoned(is_waiting):
            self._reactor.submit(self._complete_interrupted, completion)
        for peer in list(self._peers.values()):
            link = peer.link
            if link is None:
                continue
            reader = link.readers.get(0) if link.taken_by is None else link.taken_by
            if isinstance(reader, MainReader) and not is_waiting(reader.owner):
                self._receiver.give_back(peer, link, reader)
            link.wake_writer()

    def _ask_and_wait_in_main(
        self,
        peer: Peer,
        call: PendingCall,
        request: Request | None,
        consumed: list[int],
    ) -> None:
        """Waits for an answer in the main thread, which may be interrupted at any step.

        The main thread reads only its own answers; a reactor thread reads all other data.

        Args:
            peer: The callee.
            call: The call. If its answer was ``consumed``, the call is still in the table.
            request: Opens the call; None if the call is open.
            consumed: Takes the sizes of the data read, once no other thread will read that data.
        """
        link = peer.link
        if link is None or not link.may_be_interrupted:
            if request is not None:
                self.ask(peer, call, request)
            self._wait_in_main(call)
            return
        reactor, reader, is_reader = self._reactor, MainReader(READING), False
        reader.owner = call
        try:
            is_reader = link.readers.setdefault(0, reader) is reader
            if is_reader:
                link.taken_by = reader
                reactor.pause_reading(link.read_fd)
            else:
                self._receiver.take_from_interrupted(peer, link)
            if request is not None:
                self.ask(peer, call, request, may_block=False)
            if is_reader:
                self._read_own(peer, link, call, reader, consumed)
                # ``give_back``, inlined.
                reader.release(link.readers)
                if link.pending:
                    self._receiver.read_pending(peer, link)
                else:
                    reactor.resume_reading(link.read_fd)
                link.taken_by = None
        except BaseException:
            self._receiver.give_back(peer, link, reader)
            link.wake_writer()
            raise
        if not (consumed or call.error or call.is_done):
            self._wait_in_main(call)

    def _read_own(
        self, peer: Peer, link: Link, call: PendingCall, reader: MainReader, consumed: list[int]
    ) -> None:
        """Reads until ``call`` is answered, or other data arrives."""
        spinning = link.answer_spinning
        look = spinning.begin() if spinning.is_worthwhile() else None
        if self._reactor.unarmed:
            self._reactor.arm_unarmed()
        # Another thread may have read the answer before, though the task that ends the call waits.
        while not (call.frame or call.error or call.is_done or peer.lost):
            frames = link.receive_own(reader, may_block=look is None)
            if not frames:
                if frames is None or time.monotonic() > call.deadline_s - READ_TICK_S:
                    return
                if look is not None and not look.goes_on():
                    look = None
                continue
            own = own_answer(frames, call.number)
            if own is None:
                return  # The next reader handles all these frames.
            answer, pulled = own
            for frame in pulled:
                peer.held.release(int.from_bytes(frame.control[:8], "little"))
            if answer is not None:
                call.frame = answer
                link.end_own(frames, reader, consumed)
                if look is not None:
                    spinning.succeeded()
                return
            link.end_own(frames, reader, [])

    def _wait_in_main(self, call: PendingCall) -> None:
        """Waits, in the main thread, for another thread to complete ``call``."""
        self._reactor.arm_unarmed()
        self._wait_until_done(call, may_be_interrupted=True)

    def _read_until_done(self, peer: Peer, link: Link, call: PendingCall) -> None:
        """Reads a link, as the thread in its ``readers``, until ``call`` is answered."""
        receiver, spinning = self._receiver, link.answer_spinning
        reactor = self._reactor
        if spinning.is_worthwhile():
            receiver.read(peer, link, may_block=False, awaited=call, spinning=spinning)
            if reactor.tasks.ready or reactor.urgent:
                reactor.wake()
            if call.frame:
                return
        # A read may take longer than the time that is left; other threads read on then.
        limit_s = call.deadline_s - READ_TICK_S
        is_counted = reactor.begin_wait()
        try:
            while not (call.frame or call.error or call.is_done or peer.lost):
                if time.monotonic() > limit_s:
                    return
                receiver.read(peer, link, may_block=True, awaited=call)
                if reactor.tasks.ready or reactor.urgent:
                    reactor.wake()
        finally:
            if is_counted:
                reactor.end_wait()

    def _wait_for_others(self, call: PendingCall) -> None:
        """Waits for another thread to complete ``call``."""
        is_counted = self._reactor.begin_wait()
        try:
            self._wait_until_done(call, may_be_interrupted=False)
        finally:
            if is_counted:
                self._reactor.end_wait()

    def _wait_until_done(self, call: PendingCall, *, may_be_interrupted: bool) -> None:
        if call.wait(call.deadline_s - time.monotonic()):
            return
        now_s = time.monotonic()
        self._act(self._client.wait_ended(call, now_s, may_be_interrupted=may_be_interrupted))
        # Either the call has ended here, or another thread completes it now.
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

    def take_reply(self, worker: int, frame: Frame, awaited: PendingCall | None) -> bool:
        """Gives an answer to the call that waits for it; returns False if none waits any more.

        Args:
            worker: The worker that sent the answer.
            frame: The answer.
            awaited: The call that this thread waits for.

        Raises:
            ProtocolError: The call was made to another worker.
        """
        call = self._client.answered(worker, frame)
        if call is None:
            return False
        if call is awaited:
            call.reader = get_ident()
        elif call.on_done is not None:
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


def is_waiting(owner: object) -> bool:
    """Whether some thread waits for ``owner``, and will give back the links that it reads."""
    return any(
        step.f_code in WAITING and any(each is owner for each in step.f_locals.values())
        for stack in all_stacks().values()
        for step in stack
    )


WAITING = {
    method.__code__
    for method in (
        OpenCalls.ask_and_wait,
        OpenCalls._ask_and_wait_in_main,
        OpenCalls._complete_in_main,
    )
}
"""The code of the functions that take links in the main thread, and give them back."""


def _run_on_done(call: PendingCall, _: object) -> None:
    call.finish()
    if call.on_done is not None:
        call.on_done(call)
