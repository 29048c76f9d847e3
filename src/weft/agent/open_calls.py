"""The calls that this worker has open, and the threads that wait for their answers.

A thread that waits reads the connection on which the answer will come itself, unless another one
does so already: the answer then needs no hand-over from the thread that read it.
"""

from __future__ import annotations

import math
import time
from _thread import get_ident
from collections import defaultdict
from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from weft.agent.calls import PendingCall
from weft.agent.peers import Peer
from weft.agent.served_calls import ServedCall
from weft.errors import CallTimeout, NotInitialized
from weft.protocol.calls import CallTable
from weft.transport.link import READ_TICK_S, Link
from weft.wire.frames import Frame
from weft.wire.messages import Kind

if TYPE_CHECKING:
    from weft.agent.agent import Agent, Outgoing


class OpenCalls:
    """The open calls of one worker. Thread-safe.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._table: CallTable[PendingCall] = CallTable()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def total(self) -> int:
        """Grows with each call."""
        return self._table.total

    def ask(
        self,
        peer: Peer,
        call: PendingCall,
        message_of: Callable[[int], Outgoing],
        *,
        may_block: bool = True,
    ) -> None:
        """Opens ``call`` and sends its request; the answer completes it.

        Args:
            peer: Whom to ask.
            call: The call.
            message_of: Makes the frame, given the number of the call.
            may_block: Whether to wait until the socket has room; see ``Agent.send``.

        Raises:
            WorkerLost: The peer cannot be reached; the call is closed again.
            CallTimeout: There is no connection, and none could be made in time.
        """
        if peer.link is None and not peer.is_self:
            self._connect(peer, call)
        call.number = number = self._table.add(call)
        try:
            self._agent.send(peer, message_of(number), may_block=may_block)
        except BaseException:
            self._table.take(number)
            raise
        # Lost between the two, nobody would have failed this call.
        if peer.lost is not None and self._table.take(number) is not None:
            raise peer.lost_error()
        parent = call.parent
        if parent is not None and parent.was_cancelled:
            self.cancel(call, call.orphan_error())  # Who went through the calls did not see it.
        housekeeper = self._agent.housekeeper
        if housekeeper is not None and call.deadline_s < housekeeper.next_s:
            housekeeper.nudge(call.deadline_s)

    def _connect(self, peer: Peer, call: PendingCall) -> Link:
        """Makes the connection for a call, in no more time than the call has."""
        try:
            return self._agent.connect(peer, call.deadline_s)
        except CallTimeout as error:
            raise call.timeout_error() from error

    def ask_and_wait(
        self, peer: Peer, call: PendingCall, message_of: Callable[[int], Outgoing]
    ) -> None:
        """Like ``ask`` and ``wait``, with the answer read by this thread wherever possible."""
        link = None if peer.is_self else (peer.link or self._connect(peer, call))
        if link is None or not link.reading.acquire(False):
            self.ask(peer, call, message_of)
            self.wait(call)
            return
        # From here on this thread is the reader. Paused before the request goes out, the link
        # wakes no other thread when the answer comes.
        self._agent.reactor.pause_reading(link.read_fd)
        try:
            self.ask(peer, call, message_of, may_block=False)
            self._read_until_done(peer, link, call)
        finally:
            link.reading.release()
            self._agent.reactor.resume_reading(link.read_fd)
        # Done as well as outcome: whoever looks at the outcome takes it away.
        if not (call.frame or call.error or call.is_done):
            self.wait(call)

    def wait(self, call: PendingCall) -> None:
        """Blocks until ``call`` is done. Its outcome is in ``call.frame`` or ``call.error``.

        A call whose time is up is closed, with a ``CallTimeout`` as its error.
        """
        if not call.is_done:
            self._read_for(call)
        if not call.is_done:
            self._wait_for_others(call)
        if call.reader == get_ident() and call.on_done is not None:
            call.on_done(call)

    def _read_for(self, call: PendingCall) -> None:
        """Reads the link on which the answer will come, unless another thread does so already."""
        peer = self._agent.peers[call.worker]
        link = peer.link
        if link is None or not link.reading.acquire(blocking=False):
            return
        self._agent.reactor.pause_reading(link.read_fd)
        try:
            self._read_until_done(peer, link, call)
        finally:
            link.reading.release()
            self._agent.reactor.resume_reading(link.read_fd)

    def _read_until_done(self, peer: Peer, link: Link, call: PendingCall) -> None:
        """Reads a link, whose ``reading`` this thread has, until ``call`` is answered."""
        agent, spinning = self._agent, link.answer_spinning
        reactor = agent.reactor
        if spinning.is_worthwhile():
            agent.read(peer, link, may_block=False, awaited=call, spinning=spinning)
            if reactor.tasks.turns or reactor.urgent:
                reactor.wake()
            if call.frame:
                return
        # A read may take longer than what is left in the end; others read on then.
        limit_s = call.deadline_s - READ_TICK_S
        is_counted = reactor.begin_wait()
        try:
            while not (call.frame or call.error or call.is_done or peer.lost):
                if time.monotonic() > limit_s:
                    return
                agent.read(peer, link, may_block=True, awaited=call)
                if reactor.tasks.turns or reactor.urgent:
                    reactor.wake()
        finally:
            if is_counted:
                reactor.end_wait()

    def _wait_for_others(self, call: PendingCall) -> None:
        """Waits for another thread to complete ``call``, at most until its deadline."""
        is_counted = self._agent.reactor.begin_wait()
        try:
            if not call.wait(call.deadline_s - time.monotonic()):
                # Either it is taken here, and fails, or somebody took it and completes it now.
                self.expire(time.monotonic())
                call.wait(math.inf)
        finally:
            if is_counted:
                self._agent.reactor.end_wait()

    def expire(self, now_s: float) -> float:
        """Fails the calls whose time is up; a job of the housekeeper."""
        expired, earliest_s = self._table.take_expired(now_s)
        for call in expired:
            self.fail(call, call.timeout_error())
        self._tell_cancelled(expired)
        return earliest_s

    def fail(self, call: PendingCall, error: BaseException) -> None:
        """Completes a call, already taken from the table, with an error."""
        call.error = error
        if call.on_done is None:
            call.finish()
        else:
            self._agent.reactor.submit(_run_on_done, call)

    def cancel(self, call: PendingCall, error: BaseException) -> bool:
        """Gives up a call: it fails with ``error``. Returns False where it has ended already."""
        if self._table.take(call.number) is None:
            return False
        self.fail(call, error)
        self._tell_cancelled([call])
        return True

    def cancel_nested(self, parents: Set[ServedCall]) -> None:
        """Gives up the calls that were made in the course of some calls of other workers."""
        nested = self._table.take_where(lambda call: call.parent in parents)
        for call in nested:
            self.fail(call, call.orphan_error())
        self._tell_cancelled(nested)

    def _tell_cancelled(self, calls: list[PendingCall]) -> None:
        """Tells callees that nobody waits for these calls any more."""
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for call in calls:
            numbers[call.worker].append(call.number)
        for worker, cancelled in numbers.items():
            peer = self._agent.peers[worker]
            if peer.is_self or peer.link is not None:  # Else they were not sent.
                self._agent.post_ints(peer, Kind.CANCEL, *cancelled)

    def take_reply(self, frame: Frame, awaited: PendingCall | None) -> bool:
        """Gives an answer to the call that waits for it; returns False where none does any more.

        Args:
            frame: The answer.
            awaited: The call that this thread waits for.
        """
        call = self._table.take(frame.id)
        if call is None:
            return False
        call.frame = frame
        if call is awaited:
            if call.on_done is not None:
                call.reader = get_ident()
            call.finish()
        elif call.on_done is None:
            call.finish()
        else:
            self._agent.reactor.urgent.append((_run_on_done, call, None))
        return True

    def fail_of_worker(self, peer: Peer) -> None:
        """Fails all calls to a worker that was lost."""
        for call in self._table.take_of_worker(peer.id):
            self.fail(call, peer.lost_error())

    def fail_all(self, error: NotInitialized) -> None:
        """Fails all calls, in this thread: the others have ended."""
        for call in self._table.take_all():
            call.error = error
            _run_on_done(call, None)


def _run_on_done(call: PendingCall, _: object) -> None:
    call.finish()
    if call.on_done is not None:
        call.on_done(call)
