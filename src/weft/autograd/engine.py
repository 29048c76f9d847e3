"""The shell of the backward pass: messages in and out, and who runs what on which thread.

The thread that calls ``backward`` leads the pass: it runs this worker's own part and, where only
one other worker takes part, reads that worker's answers straight from the socket. All other work
of a pass runs as tasks. What is for the driver never runs a graph, so the thread that reads a
connection handles it at once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from weft import knobs
from weft.agent.agent import Agent
from weft.agent.parcels import ParcelService
from weft.agent.peers import Peer
from weft.autograd import codec
from weft.autograd.contexts import Contexts
from weft.autograd.failures import operation_of
from weft.autograd.graph import LocalPass, Outgoing
from weft.errors import AutogradError, NotInitialized, WorkerLost
from weft.ids import scoped_id, worker_of
from weft.protocol import backward as protocol
from weft.protocol.backward import PassKey
from weft.protocol.tombstones import Tombstones
from weft.serialize.exceptions import pack_error, unpack_error
from weft.serialize.objects import pack, unpack
from weft.wire.frames import Buffer, Frame, encode_frame
from weft.wire.messages import Kind, decode_ints, encode_ints

_REMEMBERED_PASSES = 4096


class Engine:
    """Distributed autograd of one worker. Thread-safe.

    Args:
        agent: The worker's agent; the engine handles its autograd messages.
        parcels: Seals and opens the gradients.
    """

    def __init__(self, agent: Agent, parcels: ParcelService) -> None:
        self.contexts = Contexts(agent.info.id)
        self._agent = agent
        self._parcels = parcels
        self._me = agent.info.id
        self._pass_numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._led: dict[PassKey, _LedPass] = {}
        self._parts: dict[PassKey, _Part] = {}
        self._ended = Tombstones(_REMEMBERED_PASSES)
        agent.on(Kind.BACKWARD, self._on_instruction, inline=False)
        agent.on(Kind.BACKWARD_ANSWER, self._on_answer, inline=True)
        agent.on(Kind.GRADIENTS, self._sort_gradients, inline=True)
        agent.on(Kind.RELEASE_CONTEXT, self._on_release, inline=True)
        agent.on_lost(self._on_lost)

    # For users of this worker

    def backward(
        self,
        context_id: int,
        roots: Sequence[Tensor],
        *,
        retain_graph: bool = False,
        fast: bool = False,
    ) -> None:
        """Runs a backward pass; see ``weft.autograd.backward``."""
        context = self.contexts.get(context_id)
        local = LocalPass(context)
        frontier = local.walk_roots(roots)
        key = PassKey(context_id, scoped_id(self._me, next(self._pass_numbers)))
        driver = protocol.Driver(key, self._me, retain_graph)
        led = _LedPass(driver)
        part = _Part(protocol.Participant(key, self._me, self._me, context.known_workers), local)
        with self._lock:
            self._led[key] = led
            self._parts[key] = part
        try:
            known = context.known_workers
            with led.lock:
                actions = driver.start_fast(known) if fast else driver.start(frontier)
            self._drive(led, actions)
            self._lead(led)
        except BaseException as error:
            self._cancel(led, error)
            raise
        finally:
            with self._lock:
                self._led.pop(key, None)
            self._close(key, part)

    def release(self, context_id: int, told_by: int | None = None) -> None:
        """Lets go of a context here, and tells the workers that know it."""
        for worker in self.contexts.release(context_id) - {told_by}:
            peer = self._agent.peers[worker]
            self._agent.post_ints(peer, Kind.RELEASE_CONTEXT, context_id)

    # Leading

    def _lead(self, led: _LedPass) -> None:
        """Does this worker's part, and waits, until the pass is over."""
        deadline_s = time.monotonic() + knobs.BACKWARD_TIMEOUT_S.get()
        while not led.outcome:
            self._do_own_part(led)
            self._post_held(led)
            if led.outcome or led.own_messages:
                continue
            if not self._agent.calls.wait_for_signal(led.signal, self._only_peer(led), deadline_s):
                error = AutogradError("a backward pass took longer than WEFT_BACKWARD_TIMEOUT_S")
                self._cancel(led, error)
            led.signal.clear()
        outcome = led.outcome[0]
        if isinstance(outcome, protocol.Fail):
            raise self._failure(outcome)

    def _cancel(self, led: _LedPass, error: BaseException) -> None:
        with led.lock:
            actions = led.driver.cancel(error)
        self._drive(led, actions)

    def _do_own_part(self, led: _LedPass) -> None:
        while led.own_messages:
            self._take_part(self._me, led.own_messages.popleft())
        while led.own_gradients:
            self._on_gradients(*led.own_gradients.popleft())

    def _only_peer(self, led: _LedPass) -> Peer | None:
        others = [worker for worker in led.driver.participants if worker != self._me]
        return self._agent.peers[others[0]] if len(others) == 1 else None

    def _failure(self, fail: protocol.Fail) -> AutogradError:
        if isinstance(fail.error, bytes):
            fail.error = unpack_error(fail.error)
        name = self._agent.peers[fail.worker].name
        if isinstance(fail.error, WorkerLost):
            name = fail.error.worker or name  # Another worker may have noticed first.
        return protocol.failure_error(fail, name)

    def _drive(self, led: _LedPass, actions: Iterable[protocol.Action]) -> None:
        """Carries out what the driver of a pass asks for."""
        for action in actions:
            if isinstance(action, protocol.Send):
                if action.to_worker == self._me:
                    led.own_messages.append(action.message)
                elif isinstance(action.message, protocol.Run) and not action.message.fast:
                    # Nothing can run there before gradients come, and the first come from here.
                    led.held[action.to_worker] = action.message
                else:
                    self._post(Kind.BACKWARD, action.to_worker, action.message)
            else:
                assert isinstance(action, (protocol.Complete, protocol.Fail))
                led.outcome.append(action)
        # The leader looks again: there may be work for it, or more workers to listen to.
        led.signal.set()

    def _post_held(self, led: _LedPass) -> None:
        """Sends the messages that no gradients of this worker went along with."""
        while led.held:
            self._post(Kind.BACKWARD, *led.held.popitem())

    def _on_answer(self, peer: Peer, frame: Frame) -> None:
        self._tell_driver(peer.id, codec.decode(frame.control))

    def _tell_driver(self, source: int, message: protocol.Message) -> None:
        led = self._led.get(message.key)
        if led is None:
            return
        with led.lock:
            actions = led.driver.receive(source, message)
        self._drive(led, actions)

    # Taking part

    def _on_instruction(self, peer: Peer, frame: Frame) -> None:
        self._take_part(peer.id, codec.decode(frame.control))

    def _sort_gradients(self, peer: Peer, frame: Frame) -> None:
        """Leaves gradients for a pass of this worker to the thread that leads it."""
        context_id, pass_id, _ = decode_ints(self._parcels.read(frame).head)
        led = self._led.get(PassKey(context_id, pass_id))
        if led is None:
            self._agent.reactor.tasks.append((self._on_gradients, peer, frame))
        else:
            led.own_gradients.append((peer, frame))
            led.signal.set()

    def _on_gradients(self, peer: Peer, frame: Frame) -> None:
        context_id, pass_id, message_id = decode_ints(self._parcels.read(frame).head)
        key = PassKey(context_id, pass_id)
        try:
            parcel = self._parcels.open(peer, frame)
            gradients = unpack(parcel.payload, parcel.tensors(detached=True), ())
        except Exception as error:
            self._report(key, error)
            return
        self._take_part(peer.id, protocol.Gradients(key, message_id, gradients))

    def _take_part(self, source: int, message: protocol.Message) -> None:
        try:
            part = self._part_of(message.key)
        except AutogradError as error:  # The context has been released meanwhile.
            self._report(message.key, error)
            return
        if part is None:
            return
        with part.lock:
            actions = part.machine.receive(source, message)
        self._participate(part, actions)

    def _report(self, key: PassKey, error: Exception) -> None:
        """Tells the driver of a pass that it cannot go on, whatever this worker's part in it."""
        driver = worker_of(key.pass_id)
        failed = protocol.Failed(key, self._me, operation_of(error), error)
        if driver == self._me:
            self._tell_driver(self._me, failed)
        else:
            self._post(Kind.BACKWARD_ANSWER, driver, failed)

    def _part_of(self, key: PassKey) -> _Part | None:
        """Returns this worker's part in a pass, made now if the pass is new; None if it is over."""
        part = self._parts.get(key)
        if part is not None:
            return part
        with self._lock:
            driver = worker_of(key.pass_id)
            if key.pass_id in self._ended or self._agent.peers[driver].lost is not None:
                return None
            if key not in self._parts:
                context = self.contexts.get_or_create(key.context_id)
                known = context.known_workers
                machine = protocol.Participant(key, self._me, driver, known)
                self._parts[key] = _Part(machine, LocalPass(context))
            return self._parts[key]

    def _participate(self, part: _Part, actions: Iterable[protocol.Action]) -> None:
        """Carries out what a participant asks for, and what follows from that."""
        todo = deque(actions)
        while todo:
            try:
                if isinstance(todo[0], protocol.Send):
                    self._send_all(_take_sends(todo))
                else:
                    todo.extend(self._carry_out(part, todo.popleft()))
            except Exception as error:
                operation = operation_of(error)
                with part.lock:
                    todo.extend(part.machine.failed(operation, error))

    def _carry_out(self, part: _Part, action: protocol.Action) -> list[protocol.Action]:
        if isinstance(action, protocol.Close):
            self._close(part.machine.key, part)
            return []
        if isinstance(action, protocol.Walk):
            frontier = part.local.walk_sends(action.message_ids)
            with part.lock:
                return part.machine.walked(action.round, frontier)
        if isinstance(action, protocol.Start):
            outgoing = part.local.run(
                retain_graph=action.retain_graph,
                fast=action.fast,
                answer_late=functools.partial(self._answer_late, part.machine.key),
            )
        else:
            assert isinstance(action, protocol.Execute)
            outgoing = []
            for message_id, gradients in action.arrived:
                assert isinstance(gradients, list)
                outgoing += part.local.gradients_arrived(message_id, gradients)
        is_done = part.local.is_done
        with part.lock:
            return part.machine.executed(outgoing, is_done)

    def _send_all(self, messages: Mapping[int, Sequence[protocol.Message]]) -> None:
        """Sends messages of a participant, those to one worker at once: a write wakes somebody."""
        for worker, batch in messages.items():
            if worker == self._me:
                for message in batch:
                    self._tell_driver(self._me, message)
            elif isinstance(batch[0], protocol.Gradients):
                self._send_with_gradients(worker, batch)
            else:
                for message in batch:
                    self._post(Kind.BACKWARD_ANSWER, worker, message)

    def _send_with_gradients(self, to_worker: int, batch: Sequence[protocol.Message]) -> None:
        peer = self._agent.peers[to_worker]
        buffers: list[Buffer] = []
        led = self._led.get(batch[0].key)
        if led is not None and (held := led.held.pop(to_worker, None)) is not None:
            buffers += self._framed(Kind.BACKWARD, held)
        for message in batch:
            if isinstance(message, protocol.Gradients):
                buffers += self._sealed(peer, message)
            else:
                buffers += self._framed(Kind.BACKWARD_ANSWER, message)
        self._agent.send(peer, buffers)

    def _sealed(self, peer: Peer, message: protocol.Gradients) -> list[Buffer]:
        packed = pack(message.gradients, main_by_name=True)
        head = encode_ints(*message.key, message.message_id)
        sealed = self._parcels.seal(
            peer, Kind.GRADIENTS, 0, 0, head, packed.payload, packed.tensors
        )
        assert not isinstance(sealed, Frame)  # Nobody records messages to oneself.
        return sealed

    def _answer_late(self, key: PassKey, outgoing: Outgoing) -> None:
        to_worker, message_id, gradients = outgoing
        # Who is lost waits for nothing, and this thread has a message to hand over.
        with contextlib.suppress(ConnectionError, NotInitialized):
            message = protocol.Gradients(key, message_id, gradients)
            self._send_with_gradients(to_worker, [message])

    def _post(self, kind: Kind, to_worker: int, message: protocol.Message) -> None:
        self._agent.post(self._agent.peers[to_worker], self._framed(kind, message))

    def _framed(self, kind: Kind, message: protocol.Message) -> list[Buffer]:
        if isinstance(message, protocol.Failed) and isinstance(message.error, BaseException):
            message.error = pack_error(message.error, self._agent.info.name)
        return encode_frame(kind, 0, 0, codec.encode(message))

    def _close(self, key: PassKey, part: _Part) -> None:
        with self._lock:
            self._parts.pop(key, None)
            self._ended.add(key.pass_id)
        part.local.close()

    # The world outside

    def _on_release(self, peer: Peer, frame: Frame) -> None:
        (context_id,) = decode_ints(frame.control)
        # The end of a graph may run any code, and takes its time.
        # Not ``submit``: the thread that reads this does it next, no other need wake for it.
        self._agent.reactor.tasks.append((self.release, context_id, peer.id))

    def _on_lost(self, peer: Peer) -> None:
        for led in list(self._led.values()):
            with led.lock:
                actions = led.driver.worker_lost(peer.id, peer.lost)
            self._drive(led, actions)
        for part in list(self._parts.values()):
            with part.lock:
                actions = part.machine.worker_lost(peer.id)
            self._participate(part, actions)


class _LedPass:
    """A pass that a thread of this worker leads."""

    def __init__(self, driver: protocol.Driver) -> None:
        self.driver = driver
        self.lock = threading.Lock()
        self.signal = threading.Event()
        self.own_messages: deque[protocol.Message] = deque()
        self.own_gradients: deque[tuple[Peer, Frame]] = deque()
        self.held: dict[int, protocol.Message] = {}
        self.outcome: list[protocol.Complete | protocol.Fail] = []


class _Part:
    """This worker's part in a pass."""

    def __init__(self, machine: protocol.Participant, local: LocalPass) -> None:
        self.machine = machine
        self.local = local
        self.lock = threading.Lock()


def _take_sends(todo: deque[protocol.Action]) -> dict[int, list[protocol.Message]]:
    """Takes the messages that come first, by the worker that they go to."""
    messages: dict[int, list[protocol.Message]] = {}
    while todo and isinstance(action := todo[0], protocol.Send):
        messages.setdefault(action.to_worker, []).append(action.message)
        todo.popleft()
    return messages
