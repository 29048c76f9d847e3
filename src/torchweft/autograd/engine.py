"""Distributed autograd of one worker: its contexts, its passes, and what it releases."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from torchweft import knobs
from torchweft.autograd import data_parallel, refusals
from torchweft.autograd.codec import Envelopes, PassMode, decode, ids_in
from torchweft.autograd.contexts import Contexts, Gradients, current_id, set_current_id
from torchweft.autograd.graph import InputGradients, Roots
from torchweft.autograd.local_pass import LocalPass
from torchweft.autograd.outside import OutsideRecords
from torchweft.autograd.passes import LOST, LedPass, Passes, Unreachable
from torchweft.engine.codec.reading import TRUSTING, Reader
from torchweft.engine.protocol.backward import (
    check_gradients,
    check_pass_message,
    check_released,
)
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.reports import OpenWait, log_exception
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind, decode_ints, decode_pass_span
from torchweft.engine.worker import current as of_process
from torchweft.engine.worker.agent import Agent, Slot
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.tensor_messages import TensorMessages
from torchweft.ids import worker_of


class Engine:
    """Distributed autograd of one worker. Thread-safe.

    Args:
        agent: The worker's agent; the engine handles its autograd messages.
        tensor_messages: Encodes and decodes the gradients.
        reader: Reads the errors of other workers.
    """

    def __init__(
        self, agent: Agent, tensor_messages: TensorMessages, reader: Reader = TRUSTING
    ) -> None:
        self.contexts = Contexts(agent.me.id, is_lost=self._is_lost)
        self.outside = OutsideRecords(agent.me.id, self.contexts.message_counter)
        self.outside.on_ended = self._release_soon
        self.envelopes = Envelopes(agent, tensor_messages, self.contexts, self.outside, reader)
        self.passes = Passes(agent, self.contexts, self.outside, self.envelopes)
        self._agent = agent
        self._me = agent.me.id
        self._release_due_s = math.inf
        self._left: deque[int] = deque()
        """Contexts whose blocks may have ended without a release; filled by finalizers."""
        self._timer = agent.timers.add(self.tick)
        self._batch_s = knobs.REFERENCE_BATCH_S.get()
        data_parallel.watch()
        refusals.watch(self)
        if device_streams.HAS_CUDA:
            device_streams.allow_leaves_of_other_streams()
        on = agent.receiver.on
        on(Kind.BACKWARD, self._on_message, inline=True)
        on(Kind.GRADIENTS, self._on_gradients, inline=True)
        on(Kind.PASS_SPAN, self._on_span, inline=True)
        on(Kind.RELEASE_CONTEXT, self._on_release, inline=True)
        on(Kind.RELEASE_MESSAGES, self._on_release_messages, inline=True)

    # For programs on this worker

    def name_of(self, worker: int) -> str:
        """Returns the name of a worker."""
        return self._agent.peers[worker].name

    def backward(
        self, context_id: int, roots: Sequence[Tensor], *, retain_graph: bool = False
    ) -> None:
        """Runs a pass from scalars into the context; see ``torchweft.autograd.backward``."""
        self.run(context_id, roots, PassMode(bool(retain_graph)))

    def run(
        self,
        context_id: int,
        roots: Roots | Sequence[Tensor],
        mode: PassMode,
        *,
        gradients: Gradients | None = None,
        input_gradients: InputGradients | None = None,
        retains_here: bool = False,
    ) -> None:
        """Runs a backward pass, and the passes that continue where it ended. Blocks until done.

        Args:
            context_id: The context.
            roots: Where it starts.
            mode: How it is run.
            gradients: Table for gradients of this worker's leaves; by default the context's.
            input_gradients: Collects the gradients of certain tensors.
            retains_here: Whether this worker's graphs must survive, even if others' need not.
        """
        starts: Iterable[Roots | Sequence[Tensor]] = (roots,)
        if input_gradients is not None and input_gradients.goes_on:
            mode = mode._replace(retain_graph=True)  # Several passes may run the same nodes.
            starts = itertools.chain(starts, input_gradients.further_roots())
        here = mode._replace(retain_graph=True) if retains_here else mode
        context = self.contexts.get(context_id)
        for start in starts:
            local = LocalPass(context, here, gradients, input_gradients, self.outside)
            led = LedPass(self.passes, context, mode, local)
            if not self.passes.watchers:
                led.run(start)
                continue
            with contextlib.ExitStack() as watched:
                for each in self.passes.watchers:
                    watched.enter_context(each.pass_runs(context_id))
                led.run(start)

    def run_into_grad(self, roots: Roots | Sequence[Tensor], mode: PassMode) -> None:
        """Runs a pass outside of contexts that adds to ``.grad`` of leaves on all workers."""
        # A context for this pass alone: releasing it removes the pass from all workers.
        context = OpenContext(self)
        try:
            self.run(context.id, roots, mode._replace(into_grad=True))
        finally:
            context.end()

    def release(self, context_id: int, told_by: int | None = None) -> None:
        """Releases a context here, and tells the other workers that know it, except ``told_by``."""
        for worker in self.contexts.release(context_id, told_by):
            if worker != told_by:
                self._post(worker, Kind.RELEASE_CONTEXT, context_id)
        if self.contexts.find(context_id) is not None:
            return  # ``told_by`` has no say in it.
        self.passes.end_in(context_id)
        self.contexts.notified(context_id)

    def release_later(self, context_id: int) -> None:
        """Releases a context soon, in another thread. For finalizers: it only enqueues."""
        self._left.append(context_id)
        self._release_soon()

    def _post(self, worker: int, kind: Kind, *numbers: int) -> None:
        """Sends numbers to a worker that is there; a failure concerns that worker alone."""
        peer = self._agent.peers.get(worker)
        if peer is None or peer.lost is not None:
            return
        try:
            self._agent.sender.post_ints(peer, kind, *numbers)
        except Exception:
            log_exception("worker %r could not be told what to release", peer.name)

    def _is_lost(self, worker: int) -> bool:
        peer = self._agent.peers.get(worker)
        return peer is not None and peer.lost is not None

    def count_passes(self) -> int:
        """Returns how many backward passes are under way here, including those led elsewhere."""
        return sum([part.is_under_way for part in self.passes.all()])

    def open_waits(self) -> list[OpenWait]:
        """Returns the passes in which this worker waits for other workers."""
        return [
            OpenWait(("backward", part.pass_id), part.waits_since_s, part.whom_it_awaits)
            for part in self.passes.all()
            if part.awaited()
        ]

    # Messages

    def _on_span(self, peer: Peer, frame: Frame) -> None:
        context_id, context = decode_pass_span(frame.control)
        for each in self.passes.watchers:
            each.take_span((frame.id, context_id), context)

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        _, message, *_ = decode(frame.kind, frame.id, frame.flags, frame.control)
        check_pass_message(self._me, peer.id, frame.id, message)
        self.passes.on_message(peer, frame)

    def _on_gradients(self, peer: Peer, frame: Frame) -> None:
        context_id, message_id, recorded_id, _ = ids_in(frame.control)
        record = self.outside.find(message_id, self.contexts.find(context_id))
        to_worker = None if record is None else record.to_worker
        check_gradients(self._me, peer.id, message_id, recorded_id, to_worker)
        self.passes.on_message(peer, frame)

    # Releases and lost workers

    def _on_release(self, peer: Peer, frame: Frame) -> None:
        context_id, *_ = decode_ints(frame.control, least=1)
        # A task, since freeing a graph may run any code and take long.
        # Not ``submit``: the thread that reads this runs it next; no other thread need wake.
        self._agent.reactor.tasks.append((self.release, context_id, peer.id), peer.id)

    def _release_soon(self) -> None:
        """Schedules ``tick``; called by finalizers."""
        due_s = time.monotonic() + self._batch_s
        if due_s < self._release_due_s:
            self._release_due_s = due_s
            self._timer.wake_by(due_s)

    def tick(self, now_s: float) -> float:
        """Tells senders which of their messages are unreachable here; a job of the timers."""
        # A finalizer that asks for a release may be interrupted before it has set the time.
        is_unscheduled = self._release_due_s == math.inf and (self.outside.ended or self._left)
        if self._release_due_s > now_s and not is_unscheduled:
            return self._release_due_s
        # Reset first: a message that becomes unreachable concurrently must schedule another tick.
        self._release_due_s = math.inf
        for worker, message_ids in self.outside.take_ended().items():
            self._post(worker, Kind.RELEASE_MESSAGES, *message_ids)
        while self._left:
            # A task, since freeing a graph may run any code and take long.
            self._agent.reactor.submit_task(self.release, self._left.popleft())
        return self._release_due_s

    def _on_release_messages(self, peer: Peer, frame: Frame) -> None:
        message_ids = decode_ints(frame.control)
        check_released(self._me, peer.id, message_ids)
        # As above: freeing a graph may run any code.
        self._agent.reactor.tasks.append((self._drop_sends, peer.id, message_ids), peer.id)

    def _drop_sends(self, worker: int, message_ids: Sequence[int]) -> None:
        self.outside.drop_sends(message_ids, worker)
        self._forget(message_ids)

    def _forget(self, message_ids: Sequence[int]) -> None:
        """Has parts of passes let go of the graphs behind messages whose records were dropped.

        A part lasts as long as its context: whoever keeps that open would keep graphs of others.
        """
        me = self._agent.me
        for part in self.passes.all():
            local = part.local  # A part without one has yet to look at the records.
            if isinstance(part, LedPass) or local is None:
                continue
            if local.may_keep(message_ids) and part.put((me, Unreachable(message_ids))):
                self._agent.reactor.submit_task(part.work_off_all)

    def peer_lost(self, peer: Peer) -> None:
        """Tells all passes that a worker was lost; drops the graphs behind messages sent to it."""
        for part in self.passes.all():
            if part.put((peer, LOST)):
                self._agent.reactor.submit_task(part.work_off_all)
        self._forget(self.outside.worker_lost(peer.id))  # Freeing a graph may run any code.
        # Nobody else would release them. The tasks follow those of the passes that it took part in.
        for context_id in self.contexts.ids():
            if worker_of(context_id) == peer.id:
                self._agent.reactor.submit_task(self.release, context_id)


class OpenContext:
    """A context that this worker opens, and that is released with this object at the latest.

    The main thread may be interrupted at any step, also between the end of a block and the release
    of its context; see ``threads.interrupts``.
    """

    id = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._around = current_id()
        self.id = engine.contexts.new_id()
        engine.contexts.get_or_create(self.id)

    def end(self) -> None:
        """Releases the context here and on the other workers that know it."""
        self._engine.release(self.id)
        self.id = 0

    def __del__(self) -> None:
        if self.id:
            if current_id() == self.id:  # Interrupted before it could leave its block.
                set_current_id(self._around)
            self._engine.release_later(self.id)


ENGINE: Slot[Engine] = Slot()


def current_engine() -> Engine:
    """Returns the engine of this process's worker.

    Raises:
        NotInitialized: This process is not a worker.
    """
    return (of_process.here or of_process.current()).slots[ENGINE]
