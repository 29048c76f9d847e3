"""Several workers in one process, joined by a list of messages delivered in a seeded order."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.autograd.codec import PassMode
from torchweft.autograd.component import PassEnded, operation_of
from torchweft.autograd.contexts import Context, Gradient
from torchweft.autograd.graph import InputGradients, Roots, roots_of
from torchweft.autograd.local_pass import LocalPass, Outgoing
from torchweft.autograd.outside import OutsideRecords
from torchweft.engine.codec.tensors import (
    PARAMETER,
    REQUIRES_GRAD,
    as_memory,
    describe,
    read,
    rebuild,
)
from torchweft.engine.protocol import backward as protocol
from torchweft.errors import AutogradError

Parameters = dict[tuple[int, str], Tensor]
OnMessage = Callable[[protocol.Driver, protocol.Message], list[protocol.Action]]


def flags_of(tensor: Tensor) -> int:
    """Returns the flags that a receiver needs to record a tensor."""
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    return flags | PARAMETER if isinstance(tensor, torch.nn.Parameter) else flags


class World:
    """The workers that a test program computes on: their parameters, and sends between them."""

    def __init__(self) -> None:
        self.parameters: Parameters = {}

    def parameter(self, worker: int, name: str, *shape: int) -> Tensor:
        """Returns a worker's parameter; every world gives it the same initial value."""
        key = (worker, name)
        if key not in self.parameters:
            generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.parameters[key] = torch.nn.Parameter(value)
        return self.parameters[key]

    def send(self, source: int, destination: int, *tensors: Tensor) -> list[Tensor]:
        """Moves tensors from one worker to another."""
        raise NotImplementedError

    def gradients(self) -> dict[tuple[int, str], Tensor]:
        """Returns the gradients that backward passes left, as dense tensors."""
        raise NotImplementedError


class SingleProcess(World):
    """Runs the program in one process with plain autograd."""

    def send(self, source: int, destination: int, *tensors: Tensor) -> list[Tensor]:
        # Copies, so that hooks and in-place operations affect the received tensor only. Tensors
        # without a graph keep sharing memory among themselves.
        plain = iter(copy.deepcopy([tensor for tensor in tensors if not tensor.requires_grad]))
        return [tensor.clone() if tensor.requires_grad else next(plain) for tensor in tensors]

    def gradients(self) -> dict[tuple[int, str], Tensor]:
        return {
            key: dense(value.grad)
            for key, value in self.parameters.items()
            if value.grad is not None
        }


class Cluster(World):
    """Runs workers with contexts over a network that reorders and repeats messages."""

    def __init__(self, worker_count: int = 3, seed: int = 0, repeats: float = 0.1) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.repeats = repeats
        self.contexts = [Context(7, worker) for worker in range(worker_count)]
        self.messages: Counter[type] = Counter()
        self.outside: list[OutsideRecords] = []
        """The workers' records outside of contexts; empty if they keep none."""

    def count(self, message: protocol.Message) -> None:
        """Counts a message of a pass."""
        self.messages[type(message)] += 1

    def send(self, source: int, destination: int, *tensors: Tensor) -> list[Tensor]:
        message_id = self.contexts[source].record_send(tensors, destination)
        table, buffers = describe(tensors)
        memory = [bytearray(as_memory(buffer)) for buffer in buffers]
        received, flags = rebuild(read(table), memory)
        flags = flags or bytes(len(received))
        return self.contexts[destination].record_receive(message_id, source, received, flags)

    def gradients(self) -> dict[tuple[int, str], Tensor]:
        found = [context.get_gradients() for context in self.contexts]
        return {
            (worker, name): dense(found[worker][value])
            for (worker, name), value in self.parameters.items()
            if value in found[worker]
        }

    def backward(
        self,
        roots: Sequence[Tensor],
        driver: int = 0,
        *,
        grad_tensors: Sequence[Tensor | None] | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
        on_message: OnMessage | None = None,
    ) -> None:
        """Runs one pass to its end; raises its error, if any."""
        mode = PassMode(retain_graph or create_graph, create_graph)
        given = roots if grad_tensors is None else roots_of(roots, grad_tensors)
        _Pass(self, driver, mode, on_message).run(given)

    def grad(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        grad_outputs: Sequence[Tensor | None] | None = None,
        driver: int = 0,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> list[Tensor | None]:
        """Returns the gradients of tensors of one worker; None for unused tensors."""
        retain = create_graph if retain_graph is None else retain_graph
        mode = PassMode(retain, create_graph, for_inputs=True)
        input_gradients = InputGradients(self.contexts[driver], inputs)
        roots = roots_of(outputs, grad_outputs, what="output")
        if input_gradients.goes_on:
            mode = mode._replace(retain_graph=True)
        for start in itertools.chain([roots], input_gradients.further_roots()):
            _Pass(self, driver, mode, input_gradients=input_gradients).run(start)
        return input_gradients.results()


class _OnTheWay(NamedTuple):
    """A message in transit; its gradients share no memory with either worker."""

    source: int
    destination: int
    message: protocol.Message
    recorded_id: int
    flags: list[int]


@dataclass
class _Pass:
    cluster: Cluster
    driver_id: int
    mode: PassMode
    on_message: OnMessage | None = None
    input_gradients: InputGradients | None = None
    network: list[_OnTheWay] = field(default_factory=list)
    is_complete: bool = False

    def __post_init__(self) -> None:
        contexts = self.cluster.contexts
        self.driver = protocol.Driver(self.driver_id)
        self.locals = [
            LocalPass(
                context,
                self.mode,
                input_gradients=self.input_gradients if context.worker == self.driver_id else None,
                outside=self.cluster.outside[context.worker] if self.cluster.outside else None,
            )
            for context in contexts
        ]
        self.participants = [
            protocol.Participant(context.worker, self.driver_id) for context in contexts
        ]
        self.turns = [Turns() for _ in contexts]
        for worker, local in enumerate(self.locals):
            local.exchange = functools.partial(self.exchange, worker)

    def run(self, roots: Roots | Sequence[Tensor]) -> None:
        try:
            self.lead(roots)
            self.deliver_all()
        finally:
            for turns in self.turns:
                turns.end()

    def exchange(
        self, worker: int, _: int, outgoing: list[Outgoing], progress: protocol.Progress
    ) -> None:
        """Sends what a worker has to send in a gate, and ends its turn."""
        self.carry_out(worker, self.participants[worker].worked(outgoing, progress))
        self.turns[worker].pause()

    def lead(self, roots: Roots | Sequence[Tensor]) -> None:
        self.locals[self.driver_id].start(roots)
        self.work(self.driver_id)

    def deliver_all(self) -> None:
        chance = self.cluster.random
        while self.network:
            place = chance.randrange(len(self.network))
            on_the_way = self.network[place]
            if chance.random() >= self.cluster.repeats:
                self.network.pop(place)
                self.cluster.count(on_the_way.message)
            self.deliver(on_the_way)
            # A worker may process arrived messages only after further messages arrive.
            if chance.random() < 0.7 or not self.network:
                for worker in range(len(self.participants)):
                    self.work(worker)
        assert self.is_complete, "nothing is on the way, and the pass has not ended"

    def deliver(self, on_the_way: _OnTheWay) -> None:
        source, destination, message, *_ = on_the_way
        if self.on_message is not None:
            self.carry_out(self.driver_id, self.on_message(self.driver, message))
        if isinstance(message, protocol.Failed):
            self.carry_out(destination, self.driver.failed(message))
        else:
            actions = self.participants[destination].receive(source, self.arrived(on_the_way))
            self.carry_out(destination, actions)

    def leave(self, source: int, send: protocol.Send) -> None:
        """Sends a message; gradients with a graph are recorded like any other message."""
        message, recorded_id, flags = send.message, 0, list[int]()
        if isinstance(message, protocol.Gradients):
            tensors = [each for each in message.gradients if isinstance(each, Tensor)]
            flags = [flags_of(tensor) for tensor in tensors]
            if self.mode.create_graph:
                recorded_id = self.cluster.contexts[source].record_send(tensors, send.to_worker)
            copies = [_copied(gradient) for gradient in message.gradients]
            message = replace(message, gradients=copies)
        self.network.append(_OnTheWay(source, send.to_worker, message, recorded_id, flags))

    def arrived(self, on_the_way: _OnTheWay) -> protocol.Message:
        """Returns a message as its receiver gets it, without any object of the sender."""
        source, destination, message, recorded_id, flags = on_the_way
        if not isinstance(message, protocol.Gradients):
            made: protocol.Message = pickle.loads(pickle.dumps(message))
            return made
        gradients = [_copied(each) for each in message.gradients]
        progress = pickle.loads(pickle.dumps(message.progress))
        message = replace(message, gradients=gradients, progress=progress)
        if recorded_id:
            tensors = [each for each in message.gradients if isinstance(each, Tensor)]
            context = self.cluster.contexts[destination]
            received = iter(context.record_receive(recorded_id, source, tensors, flags))
            message.gradients = [
                next(received) if isinstance(each, Tensor) else each for each in message.gradients
            ]
        return message

    def carry_out(self, worker: int, actions: Sequence[protocol.Action]) -> None:
        for action in actions:
            if isinstance(action, protocol.Send):
                self.guarded(worker, functools.partial(self.leave, worker, action))
            elif isinstance(action, protocol.Tell):
                self.carry_out(worker, self.driver.progressed(action.progress))
            elif isinstance(action, protocol.Complete):
                self.is_complete = True
            elif isinstance(action, protocol.Fail):
                self.network.clear()
                raise protocol.failure_error(action, f"worker{action.worker}")
            elif isinstance(action, protocol.Close):
                self.locals[worker].close()
            else:
                self.guarded(worker, functools.partial(self.apply, worker, action.message))

    def apply(self, worker: int, message: protocol.Message) -> None:
        local = self.locals[worker]
        if isinstance(message, protocol.Gradients):
            local.arrive(message.message_id, message.gradients)
        elif isinstance(message, protocol.Discover):
            local.announce(message.message_ids, message.parts)
        else:
            local.settle()

    def work(self, worker: int) -> None:
        def run() -> None:
            try:
                outcome = self.locals[worker].work()
            except PassEnded:  # The pass has failed on another worker, which has told this one.
                return
            self.carry_out(worker, self.participants[worker].worked(*outcome))

        if not self.is_complete:
            self.turns[worker].take(lambda: self.guarded(worker, run), self.may_wait(worker))

    def may_wait(self, worker: int) -> bool:
        """Returns whether the next work of a worker may have to wait in a gate."""
        local = self.locals[worker]
        return local._is_settled and local.is_waiting

    def guarded(self, worker: int, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            if isinstance(error, AutogradError) and error.worker:
                raise  # ends the pass for its caller
            actions = self.participants[worker].failed(operation_of(error), error)
            self.carry_out(worker, actions)


class Turns:
    """Runs functions that may pause, in a thread of their own, while the caller waits.

    So the workers of a cluster take turns, and a test with a seed has one order of steps.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._goes_on = threading.Semaphore(0)
        self._is_over = threading.Semaphore(0)
        self._is_ending = False
        self._error: BaseException | None = None

    def take(self, function: Callable[[], None], may_pause: bool) -> None:
        """Goes on with what has paused, or else runs ``function``; until it pauses or ends."""
        if self._thread is not None:
            self._goes_on.release()
        elif not may_pause:
            function()
            return
        else:
            self._thread = threading.Thread(target=self._run, args=(function,))
            self._thread.start()
        self._is_over.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        self._thread = None
        self._is_over.release()

    def pause(self) -> None:
        """Ends the turn; called in the thread of a function that may pause."""
        assert threading.current_thread() is self._thread, "it was not expected to wait"
        self._is_over.release()
        self._goes_on.acquire()
        if self._is_ending:
            raise _Ended

    def end(self) -> None:
        """Ends a function that has paused."""
        thread, self._is_ending = self._thread, True
        if thread is not None:
            self._goes_on.release()
            thread.join()


class _Ended(BaseException):
    """Ends the thread of a function that has paused."""


def _copied(gradient: Gradient) -> Gradient:
    return gradient.detach().clone() if isinstance(gradient, Tensor) else gradient


def dense(gradient: Tensor) -> Tensor:
    """Returns a gradient as an ordinary tensor."""
    return gradient.to_dense() if gradient.is_sparse else gradient


Program = Callable[[World], Sequence[Tensor]]


def expected_gradients(program: Program, passes: int = 1) -> dict[tuple[int, str], Tensor]:
    """Returns the gradients that plain autograd computes for a program."""
    world = SingleProcess()
    roots = list(program(world))
    for _ in range(passes):
        torch.autograd.backward(roots, retain_graph=True)
    return world.gradients()


def assert_equal_gradients(
    actual: dict[tuple[int, str], Tensor], expected: dict[tuple[int, str], Tensor]
) -> None:
    """Checks that both have the same parameters, with equal gradients."""
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-12, atol=1e-12, msg=f"{key}")


def check(program: Program, seed: int = 0, *, passes: int = 1) -> Cluster:
    """Runs a program on a cluster and checks its gradients against plain autograd."""
    cluster = Cluster(seed=seed)
    roots = list(program(cluster))
    for _ in range(passes):
        cluster.backward(roots, retain_graph=passes > 1)
    assert_equal_gradients(cluster.gradients(), expected_gradients(program, passes))
    return cluster
