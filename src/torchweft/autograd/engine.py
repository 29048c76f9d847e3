"""The shell of the backward pass: sends and receives its messages, and assigns work to threads.

The thread that reads a message puts it into the inbox of its pass. One thread at a time empties
the inbox, runs the ready nodes and sends the resulting messages. For a pass that this worker
leads, that is the thread that called ``backward``; for any other pass, a task of the reactor.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor

from torchweft import knobs
from torchweft.agent.agent import Agent, Slot
from torchweft.agent.current import current
from torchweft.agent.peers import Peer
from torchweft.agent.tensor_messages import TensorMessages
from torchweft.agent.waiting import Spins, Wanted, kinds_of
from torchweft.autograd import refusals
from torchweft.autograd.codec import (
    CONTEXT_AT,
    Envelopes,
    PassMode,
    PassName,
    decode,
    numbers_of_gradients,
)
from torchweft.autograd.component import PassEnded
from torchweft.autograd.contexts import Contexts
from torchweft.autograd.data_parallel import AVERAGING, watch
from torchweft.autograd.gradients import Gradients
from torchweft.autograd.local_engine import OF_TORCH, operation_of
from torchweft.autograd.local_pass import LocalPass, Outgoing
from torchweft.autograd.outside import OutsideRecords
from torchweft.autograd.pass_arguments import InputGradients, Roots
from torchweft.autograd.passes import LOST, LedPassState, PassState, PassWaits, Unreachable
from torchweft.autograd.records import OF_ANOTHER_CONTEXT, RAN_INTO
from torchweft.errors import AutogradError, NotInitialized, WorkerLost
from torchweft.free_threading import shared_count
from torchweft.ids import scoped_id, worker_of
from torchweft.protocol import backward as protocol
from torchweft.protocol.backward import (
    Abort,
    Apply,
    Close,
    Complete,
    Fail,
    Failed,
    Participant,
    Progress,
    Send,
    Tell,
)
from torchweft.protocol.entitlement import check_gradients, check_pass_message
from torchweft.protocol.numbers import Tombstones
from torchweft.runtime import device_streams
from torchweft.runtime.interrupts import is_of_handler
from torchweft.runtime.reports import OpenWait, log_exception
from torchweft.serialize.reading import TRUSTING, Reader
from torchweft.wire.frames import Buffer, Frame
from torchweft.wire.messages import Kind, decode_ints, decode_pass_span

_REMEMBERED_PASSES = 4096

_PASS_KINDS = kinds_of(Kind.BACKWARD, Kind.GRADIENTS)
_LOOK_S = 0.5
"""How often the thread that leads a pass checks whether the worker has shut down."""


class PassWatcher:
    """Is told of the backward passes of one worker; does nothing unless a method is overridden."""

    def pass_runs(self, context_id: int) -> contextlib.AbstractContextManager[object]:
        """Returns a block around a pass that this worker leads."""
        return contextlib.nullcontext()

    def part_runs(
        self, local: LocalPass, work: Callable[[], tuple[list[Outgoing], Progress]]
    ) -> tuple[list[Outgoing], Progress]:
        """Runs ``work``, a step of this worker's part of a pass, and returns its result."""
        return work()

    def messages_before(self, peer: Peer, name: PassName) -> list[Buffer]:
        """Returns the bytes of messages that stand before the next one of a pass to a worker."""
        return []

    def take_span(self, key: tuple[int, int], context: bytes) -> None:
        """Takes the numbers of a pass and its context, and its span, from another worker."""


class _Leading:
    """Lives as long as the function that leads a pass runs."""


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
        self._release_due_s = math.inf
        self._left: deque[int] = deque()
        """Contexts whose blocks may have ended without a release; filled by finalizers."""
        self._timer = agent.timers.add(self.tick)
        self._batch_s = knobs.REFERENCE_BATCH_S.get()
        self._timeout_s = knobs.BACKWARD_TIMEOUT_S.get()
        self._waits = PassWaits(agent, self._timeout_s)
        self._agent = agent
        self.envelopes = Envelopes(agent, tensor_messages, self.contexts, self.outside, reader)
        self.watchers: Sequence[PassWatcher] = ()
        self._me = agent.me.id
        self._pass_numbers = shared_count(1)
        self._lock = threading.RLock()
        self._states: dict[tuple[int, int], PassState] = {}
        """By the numbers of passes and of their contexts."""
        self._led: dict[int, LedPassState] = {}
        self._passes_of: dict[int, list[int]] = {}
        self._ended = Tombstones(_REMEMBERED_PASSES)
        watch()
        refusals.watch(self)
        if device_streams.HAS_CUDA:
            device_streams.allow_leaves_of_other_streams()
        agent.receiver.on(Kind.BACKWARD, self._on_message, inline=True, check=self._check_message)
        agent.receiver.on(
            Kind.GRADIENTS, self._on_message, inline=True, check=self._check_gradients
        )
        agent.receiver.on(Kind.PASS_SPAN, self._on_span, inline=True)
        agent.receiver.on(Kind.RELEASE_CONTEXT, self._on_release, inline=True)
        agent.receiver.on(Kind.RELEASE_MESSAGES, self._on_release_messages, inline=True)

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
        """Runs a backward pass, and blocks until it is over everywhere.

        Args:
            context_id: The context.
            roots: Where it starts.
            mode: How it is run.
            gradients: Table for gradients of this worker's leaves; by default the context's.
            input_gradients: Collects the gradients of certain tensors.
            retains_here: Whether this worker's graphs must survive, even if others' need not.
        """
        with contextlib.ExitStack() as watched:
            for each in self.watchers:
                watched.enter_context(each.pass_runs(context_id))
            self._run(context_id, roots, mode, gradients, input_gradients, retains_here)

    def _run(
        self,
        context_id: int,
        roots: Roots | Sequence[Tensor],
        mode: PassMode,
        gradients: Gradients | None,
        input_gradients: InputGradients | None,
        retains_here: bool,
    ) -> None:
        context = self.contexts.get(context_id)
        here = mode._replace(retain_graph=True) if retains_here else mode
        local = LocalPass(context, here, gradients, input_gradients, self.outside)
        local.start(roots)
        leading = _Leading()  # Ends with this function, wherever the main thread is interrupted.
        try:
            led = self._begin_to_lead(context_id, mode, local, leading)
            others = [*map(self._agent.peers.__getitem__, context.known_workers)]
            local.exchange = partial(self._exchange_leading, led, others)
            try:
                self._lead(led, others)
                local.finish_hooks()
            except BaseException as error:
                self._send_all(led, self._follow_up(led, led.driver.cancel(error)))
                raise
            finally:
                with self._lock:
                    del self._led[led.pass_id], self._states[led.key]
        finally:
            local.close()

    def run_into_grad(self, roots: Roots | Sequence[Tensor], mode: PassMode) -> None:
        """Runs a pass outside of contexts that adds to ``.grad`` of leaves on all workers."""
        # A context for this pass alone: releasing it removes the pass from all workers.
        context = OpenContext(self)
        try:
            self.run(context.id, roots, mode._replace(into_grad=True))
        finally:
            context.end()

    def gradients_of(
        self, context_id: int, roots: Roots, inputs: Sequence[Tensor], mode: PassMode
    ) -> list[Tensor | None]:
        """Returns the gradients of tensors of this worker; see ``torchweft.autograd.grad``.

        Args:
            context_id: The context.
            roots: Where the passes start.
            inputs: The tensors, which require grad.
            mode: How the passes are run; has ``for_inputs``.
        """
        refusals.check_inside(self, roots.edges, inputs)
        input_gradients = InputGradients(self.contexts.get(context_id), inputs)
        self.run_all(context_id, roots, mode, input_gradients)
        return input_gradients.results()

    def run_all(
        self,
        context_id: int,
        roots: Roots,
        mode: PassMode,
        input_gradients: InputGradients,
        gradients: Gradients | None = None,
        retains_here: bool = False,
    ) -> None:
        """Runs a pass from roots, and the passes that continue where it ended; see ``run``."""
        if input_gradients.goes_on:  # Several passes may run the same nodes.
            mode = mode._replace(retain_graph=True)
        for start in itertools.chain([roots], input_gradients.further_roots()):
            self.run(
                context_id,
                start,
                mode,
                gradients=gradients,
                input_gradients=input_gradients,
                retains_here=retains_here,
            )

    def release(self, context_id: int, told_by: int | None = None) -> None:
        """Releases a context here, and tells the other workers that know it, except ``told_by``."""
        for worker in self.contexts.release(context_id, told_by):
            if worker != told_by:
                self._post(worker, Kind.RELEASE_CONTEXT, context_id)
        with self._lock:
            if self.contexts.find(context_id) is not None:
                return  # ``told_by`` has no say in it.
            passes = self._passes_of.pop(context_id, ())
            states = self._take_out([*((each, context_id) for each in passes), *self._abandoned()])
        for state in states:
            state.close()
        self.contexts.notified(context_id)

    def release_later(self, context_id: int) -> None:
        """Releases a context soon, in another thread. For finalizers: it only enqueues."""
        self._left.append(context_id)
        self._release_soon()

    def _leading_ended(self, _: object) -> None:
        """Notes the end of a function that led a pass; it may have been interrupted before."""
        if self._led:
            self._release_soon()

    def _abandoned(self) -> list[tuple[int, int]]:
        """Returns the led passes whose threads were interrupted before they had removed them."""
        return [led.key for led in list(self._led.values()) if led.leading() is None]

    def _close_abandoned(self, _: object, __: object) -> None:
        with self._lock:
            states = self._take_out(self._abandoned())
        for state in states:
            state.close()

    def _take_out(self, keys: Sequence[tuple[int, int]]) -> list[PassState]:
        """Removes passes, whose parts the caller must close; it has the lock."""
        states = [self._states.pop(key, None) for key in keys]
        for pass_id, _ in keys:
            self._led.pop(pass_id, None)
        return [state for state in states if state is not None]

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
        with self._lock:
            states = list(self._states.values())
        return sum([state.is_under_way for state in states])

    def open_waits(self) -> list[OpenWait]:
        """Returns the passes in which this worker waits for other workers."""
        with self._lock:
            states = list(self._states.values())
        return self._waits.open_in(states)

    # Leading

    def _begin_to_lead(
        self, context_id: int, mode: PassMode, local: LocalPass, leading: _Leading
    ) -> LedPassState:
        with self._lock:
            pass_id = scoped_id(self._me, next(self._pass_numbers))
            oldest_id = pass_id
            for other in self._led.values():
                if other.name.context_id == context_id:
                    oldest_id = min(oldest_id, other.pass_id)
            name = PassName(context_id, pass_id, oldest_id, mode)
            local.pass_id = pass_id
            led = LedPassState(self._me, name, local, self._timeout_s)
            led.leading = ref(leading, self._leading_ended)
            self._led[pass_id] = self._states[led.key] = led
            return led

    def _lead(self, led: LedPassState, others: Sequence[Peer]) -> None:
        """Does this worker's part and waits for other workers until the pass is over."""
        sends = self._follow_up(led, self._work_off(led, ()))
        while led.outcome is None:
            if led.inbox or led.local.is_averaging_due:
                self._send_all(led, sends)
                if led.outcome is None and led.local.is_averaging_due:
                    self._send_all(led, self._follow_up(led, self._average(led, led.local)))
            else:
                self._send_and_wait(led, sends, others)
            sends = self._follow_up(led, self._work_off(led, led.take_all()))
        if sends:
            self._send_all(led, sends)
        if isinstance(led.outcome, Fail):
            raise self._failure(led.outcome)

    def _send_and_wait(
        self, led: LedPassState, sends: Sequence[Send], others: Sequence[Peer]
    ) -> None:
        agent = self._agent
        lease = agent.waiter.lease(others)
        taken: list[tuple[Peer, Frame]] = []
        try:
            self._send_all(led, sends)
            if lease is not None and led.outcome is None:
                wanted = Wanted(_PASS_KINDS, led.pass_id, taken)
                agent.waiter.read(
                    lease, wanted, Spins.PASSES, led.deadline_s(), partial(_is_over, led, others)
                )
        finally:
            if lease is not None:
                lease.release()
        for peer, frame in taken:
            agent.receiver.take(peer, frame)
        if not led.inbox and led.outcome is None:  # A failed send sets the outcome.
            self._wait_for_others(led)

    def _exchange_leading(
        self,
        led: LedPassState,
        others: Sequence[Peer],
        message_id: int,
        outgoing: list[Outgoing],
        progress: protocol.Progress,
    ) -> None:
        """Takes a turn of ``_lead`` within a run of torch's engine; see ``LocalPass.exchange``."""
        sends = self._follow_up(led, led.machine.worked(outgoing, progress))
        try:
            if led.inbox or led.outcome is not None:
                self._send_all(led, sends)
            else:
                self._send_and_wait(led, sends, others)
        except BaseException as error:  # Not an error of the graph that is running.
            raise PassEnded(error) from None
        if led.outcome is None:
            self._send_all(led, self._follow_up(led, self._receive_all(led, led.take_all())))
        if led.outcome is not None:
            raise PassEnded

    def _wait_for_others(self, led: LedPassState) -> None:
        """Waits for other threads to fill the inbox."""
        is_counted = self._agent.reactor.begin_wait()
        try:
            while not led.wait(_LOOK_S):
                if self._agent.reactor.is_closing:
                    raise NotInitialized("this worker shut down before a backward pass had ended")
                if time.monotonic() > led.deadline_s():
                    raise self._waits.timeout_error(led)
        finally:
            if is_counted:
                self._agent.reactor.end_wait()

    def _follow_up(self, led: LedPassState, actions: list[protocol.Action]) -> list[Send]:
        """Carries out actions for this worker; returns the messages for other workers."""
        sends: list[Send] = []
        for action in actions:  # The body appends to it.
            if type(action) is Send:
                if action.to_worker == self._me:
                    actions += led.to_itself(self._agent.me, action.message)
                else:
                    sends.append(action)
            elif type(action) is Tell:
                actions += led.driver.progressed(action.progress)
            elif type(action) is Complete or type(action) is Fail:
                led.outcome = action
        return sends

    def _failure(self, fail: Fail) -> AutogradError:
        if isinstance(fail.error, bytes):
            fail = fail._replace(error=self.envelopes.error_of(fail.error))
        name = self._agent.peers[fail.worker].name
        if isinstance(fail.error, WorkerLost):
            name = fail.error.worker or name  # Another worker may have noticed first.
        return protocol.failure_error(fail, name)

    # Taking part

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        at = CONTEXT_AT[frame.kind]
        key = (frame.id, int.from_bytes(frame.control[at : at + 8], "little"))
        state = self._states.get(key) or self._new_state(key, peer, frame)
        if state is None:
            self.envelopes.discard(peer, frame)
        elif state.put((peer, frame)):
            self._agent.reactor.tasks.append((self._take_items, state, None), peer.id)

    def _on_span(self, peer: Peer, frame: Frame) -> None:
        context_id, context = decode_pass_span(frame.control)
        for each in self.watchers:
            each.take_span((frame.id, context_id), context)

    def _new_state(self, key: tuple[int, int], peer: Peer, frame: Frame) -> PassState | None:
        """Creates this worker's part in a pass.

        Returns:
            The part; None if the pass is over or its leader is lost, or if this worker has no part
            in it for all that ``peer`` can say.
        """
        pass_id, context_id = key
        driver = worker_of(pass_id)
        if frame.kind == Kind.GRADIENTS:
            _, message_id, _ = numbers_of_gradients(frame.control)
            context = self.contexts.find(context_id)
            is_inside = context is not None and context.send(message_id) is not None
            if not is_inside and self.outside.send(message_id) is None:
                return None
        elif peer.id != driver:
            return None
        with self._lock:
            is_over = key in self._ended or driver == self._me
            leader = self._agent.peers.get(driver)
            if is_over or leader is None or leader.lost is not None:
                return None
            return self._states.setdefault(
                key, PassState(Participant(self._me, driver), pass_id, context_id)
            )

    def _check_message(self, peer: Peer, frame: Frame) -> None:
        _, message = decode(frame.id, frame.flags, frame.control)
        check_pass_message(self._me, peer.id, frame.id, message)

    def _check_gradients(self, peer: Peer, frame: Frame) -> None:
        context_id, message_id, recorded_id = numbers_of_gradients(frame.control)
        context = self.contexts.find(context_id)
        record = None if context is None else context.send(message_id)
        if record is None:
            record = self.outside.send(message_id)
        to_worker = None if record is None else record.to_worker
        check_gradients(self._me, peer.id, message_id, recorded_id, to_worker)

    def _take_items(self, state: PassState, _: object) -> None:
        while items := state.take_all():
            self._send_all(state, self._work_off(state, items))
            if state.local is not None and state.local.is_averaging_due:
                self._send_all(state, self._average(state, state.local))

    def _exchange(
        self,
        state: PassState,
        message_id: int,
        outgoing: list[Outgoing],
        progress: protocol.Progress,
    ) -> None:
        """Exchanges messages within a run of torch's engine; see ``LocalPass.exchange``."""
        self._send_all(state, state.machine.worked(outgoing, progress))
        if not (state.inbox or state.machine.is_over or state.is_closed):
            self._wait_in_gate(state, message_id)
        if state.inbox:  # Else, the next message would schedule another task.
            self._send_all(state, self._receive_all(state, state.take_all()))
        if state.machine.is_over or state.is_closed:
            raise PassEnded

    def _wait_in_gate(self, state: PassState, message_id: int) -> None:
        """Waits for an item in the inbox, which other threads fill, or for the end of the pass.

        Raises:
            BackwardTimeout: Nothing came in time; names the worker.
        """
        assert state.name is not None
        context = self.contexts.get(state.name.context_id)
        send = context.send(message_id) or self.outside.send(message_id)
        state.awaited = None if send is None else send.to_worker
        state.waits_since_s = time.monotonic()
        is_counted = self._agent.reactor.begin_wait()
        try:
            while not (state.wait(_LOOK_S) or state.is_closed):
                if self._agent.reactor.is_closing:
                    raise PassEnded
                if time.monotonic() > state.waits_since_s + self._timeout_s:
                    raise self._waits.timeout_error(state)
        finally:
            state.awaited = None
            if is_counted:
                self._agent.reactor.end_wait()

    def _receive_all(
        self, state: PassState, items: Iterable[tuple[Peer, object]]
    ) -> list[protocol.Action]:
        actions: list[protocol.Action] = []
        for peer, item in items:
            actions += self._receive(state, peer, item)
        return actions

    def _work_off(
        self, state: PassState, items: Iterable[tuple[Peer, object]]
    ) -> list[protocol.Action]:
        """Handles received items, runs ready nodes, and returns the resulting actions."""
        actions: list[protocol.Action] = []
        try:
            for peer, item in items:
                actions += self._receive(state, peer, item)
            if state.local is not None and not state.machine.is_over:
                actions += state.machine.worked(*self._work(state.local))
        except PassEnded as ended:
            if ended.error is not None:
                raise ended.error from ended.error.__cause__
        except BaseException as error:  # Hooks and functions of the program can raise any error.
            if isinstance(state, LedPassState) and _is_of_caller(error):
                raise
            operation = operation_of(error)
            if operation == OF_TORCH and RAN_INTO in str(error):
                error = AutogradError(OF_ANOTHER_CONTEXT)
            actions += state.machine.failed(operation, error)
        return actions

    def _average(self, state: PassState, local: LocalPass) -> list[protocol.Action]:
        """Has DDP average gradients; may block until its other ranks do the same."""
        is_counted = self._agent.reactor.begin_wait()
        try:
            return state.machine.worked((), local.average())
        except BaseException as error:
            if isinstance(state, LedPassState) and _is_of_caller(error):
                raise
            return state.machine.failed(AVERAGING, error)
        finally:
            if is_counted:
                self._agent.reactor.end_wait()

    def _receive(self, state: PassState, peer: Peer, item: object) -> list[protocol.Action]:
        if item is LOST:
            return state.worker_lost(peer)
        message: Any = item
        if type(item) is Unreachable:
            if state.local is not None:
                state.local.forget(item.message_ids)
            return []
        if type(item) is Frame:
            name, message = self.envelopes.open(peer, item)
            if state.name is None:
                state.name = name
        if type(message) is Failed:
            return state.driver.failed(message) if isinstance(state, LedPassState) else []
        if state.local is None and type(message) is not Abort:
            self._begin(state)
        actions = state.machine.receive(peer.id, message)
        if actions and type(actions[0]) is Apply:  # It comes alone.
            state.apply(actions[0].message)
            return []
        return actions

    def _work(self, local: LocalPass) -> tuple[list[Outgoing], Progress]:
        work = local.work
        for each in self.watchers:
            work = partial(each.part_runs, local, work)
        return work()

    def _begin(self, state: PassState) -> None:
        """Prepares for the first message of a pass that another worker leads."""
        name = state.name
        assert name is not None
        leader = worker_of(name.pass_id)
        context = self.contexts.get_or_create(name.context_id, leader)
        state.local = LocalPass(context, name.mode, outside=self.outside)
        state.local.pass_id = name.pass_id
        state.local.exchange = partial(self._exchange, state)
        with self._lock:
            passes = self._passes_of.setdefault(name.context_id, [])
            older = self._take_older(name, passes) if passes else ()
            passes.append(name.pass_id)
        for each in older:
            each.close()
        # Raises if the context was released in between: nothing would close this part then.
        self.contexts.get(name.context_id)

    def _take_older(self, name: PassName, passes: list[int]) -> list[PassState]:
        """Removes parts in passes that have ended, as a later pass of their leader implies."""
        older: list[PassState] = []
        for pass_id in list(passes):
            if pass_id < name.oldest_id and worker_of(pass_id) == worker_of(name.pass_id):
                passes.remove(pass_id)
                key = (pass_id, name.context_id)
                self._ended.add(key)
                state = self._states.pop(key, None)
                if state is not None:
                    older.append(state)
        return older

    def _end(self, state: PassState) -> None:
        """Releases a part, done or not; later messages of the pass are dropped."""
        with self._lock:
            self._states.pop(state.key, None)
            self._ended.add(state.key)
            if state.name is not None:
                passes = self._passes_of.get(state.name.context_id, [])
                if state.pass_id in passes:
                    passes.remove(state.pass_id)
                if not passes:
                    self._passes_of.pop(state.name.context_id, None)
        state.close()

    # Sending

    def _send_all(self, state: PassState, actions: Iterable[protocol.Action]) -> None:
        """Sends messages, in one write for each worker: every write wakes a thread there."""
        by_worker: dict[int, list[protocol.Message]] = {}
        for action in actions:
            if isinstance(action, Send):
                by_worker.setdefault(action.to_worker, []).append(action.message)
            elif isinstance(action, Close):
                self._end(state)
        for worker, messages in by_worker.items():
            try:
                self._send(state, self._agent.peers[worker], messages)
            except Exception as error:
                if is_of_handler(error):
                    raise
                failed = state.machine.failed(operation_of(error), error)
                if isinstance(state, LedPassState):
                    self._send_all(state, self._follow_up(state, failed))
                else:
                    self._send_all(state, failed)

    def _send(self, state: PassState, peer: Peer, messages: Sequence[protocol.Message]) -> None:
        assert state.name is not None
        buffers = self.envelopes.encode(peer, state.name, messages)
        for each in self.watchers:
            buffers = [*each.messages_before(peer, state.name), *buffers]
        if type(messages[0]) in (Failed, Abort):
            self._agent.sender.post(peer, buffers)  # A lost worker need not receive it.
        else:
            # The leading thread holds the connections for reading. If it blocked on a full
            # socket while the peer did the same, neither side would read.
            self._agent.sender.send(peer, buffers, may_block=not isinstance(state, LedPassState))

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
        if self._release_due_s > now_s and not (self._release_due_s == math.inf and self._has_due):
            return self._release_due_s
        # Reset first: a message that becomes unreachable concurrently must schedule another tick.
        self._release_due_s = math.inf
        for worker, message_ids in self.outside.take_ended().items():
            self._post(worker, Kind.RELEASE_MESSAGES, *message_ids)
        while self._left:
            # A task, since freeing a graph may run any code and take long.
            self._agent.reactor.submit_task(self._release_left, self._left.popleft())
        if self._abandoned():
            self._agent.reactor.submit_task(self._close_abandoned, None)
        return self._release_due_s

    @property
    def _has_due(self) -> bool:
        """Whether there is something for ``tick``: a finalizer that asks may be interrupted."""
        return bool(self.outside.has_ended or self._left or self._abandoned())

    def _release_left(self, context_id: int, _: object) -> None:
        self.release(context_id)

    def _on_release_messages(self, peer: Peer, frame: Frame) -> None:
        message_ids = decode_ints(frame.control)
        # As above: freeing a graph may run any code.
        self._agent.reactor.tasks.append((self._drop_sends, peer.id, message_ids), peer.id)

    def _drop_sends(self, worker: int, message_ids: Sequence[int]) -> None:
        self.outside.drop_sends(message_ids, worker)
        self._forget(message_ids)

    def _forget(self, message_ids: Sequence[int]) -> None:
        """Has parts of passes let go of the graphs behind messages whose records were dropped.

        A part lasts as long as its context: whoever keeps that open would keep graphs of others.
        """
        with self._lock:
            states = list(self._states.values())
        me = self._agent.me
        for state in states:
            local = state.local  # A part without one has yet to look at the records.
            if isinstance(state, LedPassState) or local is None:
                continue
            if local.may_keep(message_ids) and state.put((me, Unreachable(message_ids))):
                self._agent.reactor.submit_task(self._take_items, state)

    def peer_lost(self, peer: Peer) -> None:
        """Tells all passes that a worker was lost; drops the graphs behind messages sent to it."""
        with self._lock:
            states = list(self._states.values())
        for state in states:
            if state.put((peer, LOST)):
                self._agent.reactor.submit_task(self._take_items, state)
        self._forget(self.outside.worker_lost(peer.id))  # Freeing a graph may run any code.
        # Nobody else would release them. The tasks follow those of the passes that it took part in.
        for context_id in self.contexts.opened_by(peer.id):
            self._agent.reactor.submit_task(self._release_left, context_id)


def _is_of_caller(error: BaseException) -> bool:
    """Whether an error is of the thread that leads a pass, as a signal, and not of the pass."""
    return not isinstance(error, Exception) or is_of_handler(error)


def _is_over(led: LedPassState, others: Sequence[Peer]) -> bool:
    """Whether a wait of a leading thread has ended without a message that it has read."""
    return bool(led.inbox) or any(peer.lost is not None for peer in others)


class OpenContext:
    """A context that this worker opens, and that is released with this object at the latest.

    The main thread may be interrupted at any step, also between the end of a block and the release
    of its context; see ``runtime.interrupts``.
    """

    id = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.id = engine.contexts.new_id()
        engine.contexts.get_or_create(self.id)

    def end(self) -> None:
        """Releases the context here and on the other workers that know it."""
        self._engine.release(self.id)
        self.id = 0

    def __del__(self) -> None:
        if self.id:
            self._engine.release_later(self.id)


ENGINE: Slot[Engine] = Slot()


def current_engine() -> Engine:
    """Returns the engine of this process's worker.

    Raises:
        NotInitialized: This process is not a worker.
    """
    return current().slots[ENGINE]
