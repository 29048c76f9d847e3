"""Leads a backward pass: does this worker's part, and waits until the pass is over everywhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchweft.autograd.codec import PassMode, PassName
from torchweft.autograd.component import PassEnded
from torchweft.autograd.contexts import Context
from torchweft.autograd.local_pass import LocalPass, Outgoing
from torchweft.autograd.pass_arguments import Roots
from torchweft.autograd.passes import LOOK_S, Item, Passes, PassPart
from torchweft.errors import AutogradError, NotInitialized, WorkerLost
from torchweft.protocol.backward import (
    Abort,
    Action,
    Complete,
    Driver,
    Fail,
    Failed,
    Participant,
    Progress,
    Send,
    Tell,
    failure_error,
)
from torchweft.protocol.observing.keys import Wait
from torchweft.threads.interrupts import Flag, is_of_handler
from torchweft.wire.frames import Frame
from torchweft.wire.messages import Kind
from torchweft.worker.calls import Spins, kinds_of
from torchweft.worker.peers import Peer

_PASS_KINDS = kinds_of(Kind.BACKWARD, Kind.GRADIENTS)


class LedPass(PassPart):
    """A pass that a thread of this worker leads; that thread reads the inbox.

    Args:
        passes: The passes of this worker.
        context: This worker's records.
        mode: How it is run on other workers.
        local: This worker's graphs, with the roots.
    """

    name: PassName
    local: LocalPass
    # The leading thread holds the connections for reading. If it blocked on a full socket while
    # the peer did the same, neither side would read.
    _may_block = False
    outcome: Complete | Fail | None = None
    _deadline_s: float | None = None
    _has_ended = False

    def __init__(self, passes: Passes, context: Context, mode: PassMode, local: LocalPass) -> None:
        me = passes.me
        super().__init__(passes, Participant(me, me), 0, context.id)
        self.inbox = deque[Item]()
        self.local = local
        self.driver = Driver(me)
        self._mode = mode
        self._context = context
        self._others: list[Peer] = []
        local.exchange = self._exchange

    # The inbox

    def put(self, item: Item) -> bool:
        """Puts an item into the inbox, and wakes the leading thread."""
        self.inbox.append(item)
        if self._signal is not None:
            self._signal.set()
        return False

    def take_all(self) -> list[Item]:
        """Removes and returns the items of the inbox."""
        inbox, items = self.inbox, []
        while inbox:
            items.append(inbox.popleft())
        return items

    def wait(self, limit_s: float) -> bool:
        """Blocks until an item is in the inbox; returns False if the time is up before."""
        # Publish the signal before checking the inbox: a concurrent ``put`` then sets it.
        signal = self._signal = Flag()
        return bool(self.inbox) or signal.wait(
            min(max(self._deadline() - time.monotonic(), 0.0), limit_s)
        )

    def _deadline(self) -> float:
        """Returns the deadline by ``time.monotonic``; the first call starts the timeout."""
        if self._deadline_s is None:
            self.waits_since_s = time.monotonic()
            self._deadline_s = self.waits_since_s + self._passes.timeout_s
        return self._deadline_s

    # The state

    @property
    def is_under_way(self) -> bool:
        """Whether the pass is not over: always, for a led one."""
        return True

    def awaited(self) -> set[int]:
        """Returns the other workers from which progress is still missing."""
        return self.driver.awaited_workers() - {self._agent.me.id}

    def shown(self) -> list[Wait]:
        """Returns the wait for ``Reactor.waiting``; nothing once the pass is over."""
        return [] if self._has_ended or self.outcome is not None else super().shown()

    def _finish_hooks(self, local: LocalPass) -> None:
        """Does nothing: the leading thread does so, unless it is interrupted."""

    def _is_of_caller(self, error: BaseException) -> bool:
        return not isinstance(error, Exception) or is_of_handler(error)

    # Leading

    def run(self, roots: Roots | Sequence[Tensor]) -> None:
        """Blocks until the pass is over everywhere.

        Args:
            roots: Where it starts.

        Raises:
            AutogradError: It failed.
        """
        try:
            try:
                self.local.start(roots)  # Its walk may reach messages of further workers.
                known = self._context.known_workers
                self._others = [*map(self._agent.peers.__getitem__, known)]
                self._register()
                self._run()
            finally:
                self._end()
        finally:
            if not self._has_ended:  # A signal handler has raised an error within ``_end``.
                self._end()

    def _register(self) -> None:
        """Gives the pass its number; from then on it gets messages."""
        passes, context_id = self._passes, self.key[1]
        with passes.lock:
            number = self.pass_id = self.local.pass_id = passes.new_id()
            oldest = number
            for other in passes.led.values():
                if other.key[1] == context_id:
                    oldest = min(oldest, other.pass_id)
            self.key = (number, context_id)
            self.name = PassName(context_id, number, oldest, self._mode)
            passes.led[number] = passes.parts[self.key] = self

    def _end(self) -> None:
        with self._passes.lock:
            self._passes.led.pop(self.pass_id, None)
            self._passes.parts.pop(self.key, None)
        self.local.close()
        self._has_ended = True

    def _run(self) -> None:
        try:
            self._lead()
            self.local.finish_hooks()
        except BaseException as error:
            self.send_all(self._follow_up(self.driver.cancel(error)))
            raise

    def _lead(self) -> None:
        sends = self._follow_up(self._work_off(()))
        while self.outcome is None:
            if self.inbox or self.local.is_averaging_due:
                self.send_all(sends)
                if self.outcome is None and self.local.is_averaging_due:
                    self.send_all(self._follow_up(self._average(self.local)))
            else:
                self._send_and_wait(sends)
            sends = self._follow_up(self._work_off(self.take_all()))
        if sends:
            self.send_all(sends)
        if isinstance(self.outcome, Fail):
            raise self._failure(self.outcome)

    def _send_and_wait(self, sends: Sequence[Action]) -> None:
        agent = self._agent
        lease = agent.waiter.lease(self._others)
        taken: list[tuple[Peer, Frame]] = []
        try:
            self.send_all(sends)
            if lease is not None and self.outcome is None:
                wanted = (_PASS_KINDS, self.pass_id, taken, None)
                agent.waiter.read(
                    lease, wanted, Spins.PASSES, self._deadline(), self._is_woken, self.shown
                )
        finally:
            if lease is not None:
                lease.release()
        for peer, frame in taken:
            agent.receiver.take(peer, frame)
        if not self.inbox and self.outcome is None:  # A failed send sets the outcome.
            self._wait_for_others()

    def _is_woken(self) -> bool:
        """Whether a wait has ended without a message that this thread has read."""
        return bool(self.inbox) or any(peer.lost is not None for peer in self._others)

    def _wait_for_others(self) -> None:
        """Waits for other threads to fill the inbox."""
        reactor = self._agent.reactor
        with reactor.waiting(self.shown):
            while not self.wait(LOOK_S):
                if reactor.is_closing:
                    raise NotInitialized("this worker shut down before a backward pass had ended")
                if time.monotonic() > self._deadline():
                    raise self._timeout_error()

    def _exchange(self, message_id: int, outgoing: list[Outgoing], progress: Progress) -> None:
        """Takes a turn of ``_lead`` within a run of torch's engine; see ``LocalPass.exchange``."""
        sends = self._follow_up(self.machine.worked(outgoing, progress))
        try:
            if self.inbox or self.outcome is not None:
                self.send_all(sends)
            else:
                self._send_and_wait(sends)
        except BaseException as error:  # Not an error of the graph that is running.
            raise PassEnded(error) from None
        if self.outcome is None:
            self.send_all(self._follow_up(self._receive_all()))
        if self.outcome is not None:
            raise PassEnded

    def _follow_up(self, actions: list[Action]) -> list[Action]:
        """Carries out actions for this worker; returns the messages for other workers."""
        sends: list[Action] = []
        for action in actions:  # The body appends to it.
            if type(action) is Send:
                if action.to_worker == self._passes.me:
                    actions += self._to_itself(action.message)
                else:
                    sends.append(action)
            elif type(action) is Tell:
                actions += self.driver.progressed(action.progress)
            elif type(action) is Complete or type(action) is Fail:
                self.outcome = action
        return sends

    def _to_itself(self, message: Any) -> list[Action]:
        """Takes a message from this worker to itself; returns the actions that follow at once."""
        if isinstance(message, Failed):
            return self.driver.failed(message)
        if isinstance(message, Abort):  # The inbox is not read any more.
            return self.machine.receive(self._passes.me, message)
        self.put((self._agent.me, message))
        return []

    def _take_failure(self, failed: Failed) -> list[Action]:
        return self.driver.failed(failed)

    def _worker_lost(self, peer: Peer) -> list[Action]:
        return self.driver.worker_lost(peer.id, peer.lost) or super()._worker_lost(peer)

    def _failed(self, actions: list[Action]) -> None:
        self.send_all(self._follow_up(actions))

    def _failure(self, fail: Fail) -> AutogradError:
        if isinstance(fail.error, bytes):
            fail = fail._replace(error=self._passes.envelopes.error_of(fail.error))
        name = self._agent.peers[fail.worker].name
        if isinstance(fail.error, WorkerLost):
            name = fail.error.worker or name  # Another worker may have noticed first.
        return failure_error(fail, name)
