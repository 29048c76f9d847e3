"""A worker's state of one backward pass, and the inbox for its received messages."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from torchweft.agent.agent import Agent
from torchweft.agent.peers import Peer
from torchweft.autograd.codec import PassName
from torchweft.autograd.local_pass import LocalPass
from torchweft.errors import BackwardTimeout
from torchweft.protocol.backward import (
    Abort,
    Action,
    Complete,
    Discover,
    Driver,
    Fail,
    Failed,
    Gradients,
    Message,
    Participant,
    Settled,
)
from torchweft.runtime import device_streams
from torchweft.runtime.device_streams import Mark
from torchweft.runtime.interrupts import Flag
from torchweft.runtime.reports import OpenWait, log_exception, names_of

LOST: Final = "lost"
"""Inbox item for a worker's loss. All others are frames, or this worker's own messages."""


class Unreachable(NamedTuple):
    """Inbox item for messages outside of contexts that have become unreachable."""

    message_ids: Sequence[int]


Item = tuple[Peer, object]


class PassState:
    """A worker's part in a pass that another worker leads.

    Args:
        machine: Decides what to send.
        pass_id: The pass.
        context_id: Its context.
    """

    name: PassName | None = None
    local: LocalPass | None = None
    is_closed = False
    awaited: int | None = None
    """The worker whose gradients a gate waits for, if the state is no led one."""
    waits_since_s = math.inf
    """When this worker began to wait, by ``time.monotonic``; a leading one, for the first time."""
    _is_at_work = False
    _signal: Flag | None = None

    def __init__(self, machine: Participant, pass_id: int, context_id: int) -> None:
        self.machine = machine
        self.pass_id = pass_id
        self.key = (pass_id, context_id)
        """Names the pass: a worker that takes no part in the context does not know it."""
        self.inbox: list[Item] = []
        self._mark: Mark | None = None
        """The end of the GPU work of the thread that handled the items before."""
        self._lock = threading.RLock()

    def put(self, item: Item) -> bool:
        """Puts an item into the inbox; returns whether the caller must schedule its handling."""
        with self._lock:
            self.inbox.append(item)
            was_at_work, self._is_at_work = self._is_at_work, True
        if self._signal is not None:
            self._signal.set()
        return not was_at_work

    def take_all(self) -> list[Item]:
        """Empties the inbox. After an empty result the next ``put`` must schedule the handling."""
        with self._lock:
            items, self.inbox = self.inbox, []
            self._is_at_work = bool(items)
            if device_streams.HAS_CUDA:
                # The next items may be another thread's, before this one's task has ended.
                if items:
                    device_streams.wait(self._mark)
                    self._mark = None
                else:
                    self._mark = device_streams.mark()
        return items

    @property
    def is_under_way(self) -> bool:
        """Whether this worker works on the pass, or waits for more of its messages."""
        return self._is_at_work or (self.local is not None and self.local.is_waiting)

    def wait(self, limit_s: float) -> bool:
        """Blocks until an item is in the inbox or the pass is over; returns False if none is.

        Args:
            limit_s: The longest time.
        """
        # Publish the signal before checking the inbox: a concurrent ``put`` then sets it.
        signal = self._signal = Flag()
        if not (self.inbox or self.is_closed):
            signal.wait(limit_s)
        return bool(self.inbox)

    def close(self) -> None:
        """Ends this part, done or not; a thread that waits in a gate of it goes on."""
        self.is_closed = True
        if self._signal is not None:
            self._signal.set()
        if self.local is not None:
            if not self.machine.is_over:
                self._finish_hooks(self.local)
            self.local.close()

    def _finish_hooks(self, local: LocalPass) -> None:
        try:
            local.finish_hooks()
        except Exception:
            log_exception("a hook of several tensors raised after the pass")

    def apply(self, message: Gradients | Discover | Settled) -> None:
        """Delivers a message to the pass on this worker."""
        local = self.local
        assert local is not None
        if isinstance(message, Gradients):
            local.arrive(message.message_id, message.gradients)
        elif isinstance(message, Discover):
            local.announce(message.message_ids, message.parts)
        else:
            local.settle()

    def worker_lost(self, peer: Peer) -> list[Action]:
        """Notes the loss of a worker."""
        return self.machine.worker_lost(peer.id, peer.lost)


class LedPassState(PassState):
    """A worker's part in a pass that one of its threads leads; that thread reads the inbox.

    Args:
        worker: This worker.
        name: The pass.
        local: This worker's graphs, with the roots.
        timeout_s: How long it may wait for other workers.
    """

    name: PassName
    local: LocalPass
    inbox: deque[Item]  # type: ignore[assignment]
    outcome: Complete | Fail | None = None
    leading: Callable[[], object] = object
    """Returns None once the function that leads the pass has ended."""
    _deadline_s: float | None = None

    def __init__(self, worker: int, name: PassName, local: LocalPass, timeout_s: float) -> None:
        super().__init__(Participant(worker, worker), name.pass_id, name.context_id)
        self.inbox = deque()
        self.name = name
        self.local = local
        self.driver = Driver(worker)
        self._timeout_s = timeout_s

    def _finish_hooks(self, local: LocalPass) -> None:
        """Does nothing: the leading thread does so, unless it is interrupted."""

    @property
    def is_under_way(self) -> bool:
        """Whether the pass is not over: always, for a led part."""
        return True

    def put(self, item: Item) -> bool:
        """Puts an item into the inbox, and wakes the leading thread."""
        self.inbox.append(item)
        if self._signal is not None:
            self._signal.set()
        return False

    def take_all(self) -> list[Item]:
        """Removes and returns the items of the inbox."""
        inbox = self.inbox
        return [inbox.popleft() for _ in range(len(inbox))]

    def deadline_s(self) -> float:
        """Returns the deadline by ``time.monotonic``; the first call starts the timeout."""
        if self._deadline_s is None:
            self.waits_since_s = time.monotonic()
            self._deadline_s = self.waits_since_s + self._timeout_s
        return self._deadline_s

    def wait(self, limit_s: float) -> bool:
        """Blocks until an item is in the inbox; returns False if the time is up before."""
        # Publish the signal before checking the inbox: a concurrent ``put`` then sets it.
        signal = self._signal = Flag()
        return bool(self.inbox) or signal.wait(
            min(max(self.deadline_s() - time.monotonic(), 0.0), limit_s)
        )

    def to_itself(self, me: Peer, message: Message) -> list[Action]:
        """Takes a message from this worker to itself; returns the actions that follow at once."""
        if isinstance(message, Failed):
            return self.driver.failed(message)
        if isinstance(message, Abort):  # The inbox is not read any more.
            return self.machine.receive(me.id, message)
        self.put((me, message))
        return []

    def worker_lost(self, peer: Peer) -> list[Action]:
        """Notes the loss of a worker."""
        return self.driver.worker_lost(peer.id, peer.lost) or super().worker_lost(peer)


class PassWaits:
    """The waits of one worker's parts of passes. Thread-safe.

    Args:
        agent: The worker's agent.
        timeout_s: How long a pass may wait.
    """

    def __init__(self, agent: Agent, timeout_s: float) -> None:
        self._agent = agent
        self._timeout_s = timeout_s

    def open_in(self, states: Iterable[PassState]) -> list[OpenWait]:
        """Returns those of some passes in which this worker waits for other workers."""
        return [
            OpenWait(
                ("backward", state.pass_id), state.waits_since_s, partial(self._text_of, state)
            )
            for state in states
            if self._awaited_in(state)
        ]

    def _awaited_in(self, state: PassState) -> set[int]:
        if isinstance(state, LedPassState):
            return state.driver.awaited_workers() - {self._agent.me.id}
        return set() if state.awaited is None else {state.awaited}

    def _names_awaited(self, state: PassState) -> tuple[str, ...]:
        return tuple([self._agent.peers[each].name for each in sorted(self._awaited_in(state))])

    def _text_of(self, state: PassState) -> str:
        return f"in a backward pass for {names_of(self._names_awaited(state))}"

    def timeout_error(self, state: PassState) -> BackwardTimeout:
        """Returns the error of a pass that has waited too long; it names the workers."""
        missing = self._names_awaited(state)
        whom = "another thread of this worker"
        if missing:
            whom = f"{names_of(missing)}, or for workers that were called from there,"
        return BackwardTimeout(
            f"a backward pass has waited {self._timeout_s:g} s (WEFT_BACKWARD_TIMEOUT_S) for "
            f"{whom} and has ended; raise the variable if a pass may take longer",
            worker=missing[0] if missing else "",
            operation="waiting for the pass",
            missing=missing,
        )
