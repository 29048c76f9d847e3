"""What a hostile member says about others, and an honest member that must not notice."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchweft import autograd, rpc
from torchweft.autograd import codec
from torchweft.autograd.codec import PassMode, PassName
from torchweft.engine.codec import values
from torchweft.engine.codec.tensors import encode_tensors
from torchweft.engine.protocol.backward import Abort, Gradients, Message
from torchweft.engine.protocol.leaving import Step
from torchweft.engine.wire.frames import encode_frame
from torchweft.engine.wire.messages import (
    NO_CREATION,
    Kind,
    encode_call,
    encode_ints,
    encode_reply,
)
from torchweft.engine.worker.current import current
from torchweft.errors import WorkerLost
from torchweft.ids import scoped_id

LIMIT_S = 20.0
HONEST, VICTIM, LIAR = "honest", "victim", "liar"
RANKS = {HONEST: 0, VICTIM: 1, LIAR: 2}
_LIES_S = 1.5
_PAUSE_S = 0.005
_MOST = 60


def join(name: str, method: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    options = rpc.RpcBackendOptions(
        init_method=method, init_timeout=LIMIT_S, rpc_timeout=LIMIT_S, strict=name == VICTIM
    )
    rank = RANKS[name]
    rpc.init_rpc(name, rank=rank, world_size=len(RANKS), rpc_backend_options=options)


# The victim


@rpc.register
def triple(tensor: Tensor) -> Tensor:
    return tensor * 3


@rpc.register
def give_back(value: int) -> int:
    return value


@rpc.register
def ask_honest(value: int) -> int:
    return rpc.rpc_sync(HONEST, answer_slowly, args=(value,))


@rpc.register
class Counter:
    def __init__(self) -> None:
        self.count = 0

    @rpc.expose
    def add(self) -> int:
        self.count += 1
        return self.count


# The honest member


@rpc.register
def answer_slowly(value: int) -> int:
    time.sleep(0.02)
    return value


def work(least_s: float) -> int:
    """Uses the victim for a while, and checks all results; returns how often."""
    end_s, rounds = time.monotonic() + least_s, 0
    while time.monotonic() < end_s:
        rounds += 1
        assert rpc.rpc_sync(VICTIM, ask_honest, args=(rounds,)) == rounds
        counter = rpc.remote(VICTIM, Counter)
        assert [counter.rpc_sync().add() for _ in "12"] == [1, 2]
        weight = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(VICTIM, triple, args=(weight * 2,)).sum()
            time.sleep(_PAUSE_S)
            autograd.backward(context_id, [loss])
            assert autograd.get_gradients(context_id)[weight].tolist() == [6.0] * 3
        autograd.backward(rpc.rpc_sync(VICTIM, triple, args=(weight * 2,)).sum())
        assert weight.grad is not None
        assert weight.grad.tolist() == [6.0] * 3
    return rounds


def graphs_kept() -> int:
    """Waits until no graphs of messages are kept; returns how many there are at last."""
    from torchweft.rpc.worker import current_worker

    end_s = time.monotonic() + LIMIT_S / 2
    while (count := current_worker().engine.outside.count()[0]) and time.monotonic() < end_s:
        time.sleep(_PAUSE_S)
    return count


# The liar


def tell(lie: str) -> str:
    """Tells the victim a lie until it is turned away, or for a while; returns how that ends."""
    agent = current()
    victim = agent.members.find(VICTIM)
    rpc.rpc_sync(VICTIM, give_back, args=(1,))
    end_s = time.monotonic() + _LIES_S
    while time.monotonic() < end_s and victim.lost is None:
        for frame in LIES[lie]():
            with contextlib.suppress(WorkerLost):
                agent.sender.post(victim, [frame])
        time.sleep(_PAUSE_S)
    try:
        rpc.rpc_sync(VICTIM, give_back, args=(1,), timeout=LIMIT_S)
    except WorkerLost:
        return "turned away"
    return "without effect"


def _frame(kind: Kind, flags: int, number: int, control: bytes) -> bytes:
    return b"".join(encode_frame(kind, flags, number, control))


def _step(step: Step) -> Iterator[bytes]:
    yield _frame(Kind.SHUTDOWN, 0, 0, encode_ints(int(step), 0))


def _answers() -> Iterator[bytes]:
    for number in range(1, _MOST):
        control = encode_reply(0, 0, (), values.Encoder(True, ()).encode(-1))
        yield _frame(Kind.REPLY, 0, number, control)


def _call(message_id: int = 0, references: bytes = b"", count: int = 0) -> bytes:
    name, payload = b"tests.processes.lies:give_back", values.Encoder(True, ()).encode((1,))
    (content, _) = (
        encode_tensors([torch.ones(3, requires_grad=True) * 2]) if message_id else (b"", 0)
    )
    parts = name, b"", (), references + bytes(payload), content
    control = bytearray(encode_call(30.0, NO_CREATION, 0, 0, *parts))
    # The head is written anew: it has numbers that a worker does not write.
    head = struct.Struct("<dqQQIIII")
    fields = (30.0, NO_CREATION, 0, message_id, len(name), 0, count, len(payload))
    head.pack_into(control, 0, *fields)
    number = (1 << 40) + int(time.monotonic() * 1e6)
    return _frame(Kind.CALL, 0, number, bytes(control))


def _reference() -> Iterator[bytes]:
    yield _call(references=struct.pack("<qqqq", RANKS[LIAR], RANKS[HONEST], -2, 1), count=1)


def _large_message() -> Iterator[bytes]:
    yield _call(message_id=(1 << 63) + 7)


def _message_of_another() -> Iterator[bytes]:
    yield _call(message_id=scoped_id(RANKS[HONEST], 3))


def _passes(message: Callable[[], Message]) -> Iterator[bytes]:
    for number in range(1, _MOST):
        pass_id = scoped_id(RANKS[HONEST], number)
        name = PassName(pass_id, pass_id, pass_id, PassMode())
        yield _frame(Kind.BACKWARD, 0, pass_id, codec.encode(name, message()))


def _gradients() -> Iterator[bytes]:
    content, _ = encode_tensors([torch.full((3,), 1000.0)]) or (b"", 0)
    for number in range(1, _MOST):
        pass_id = scoped_id(RANKS[LIAR], number)
        context_id = scoped_id(RANKS[HONEST], number)
        for message in (number, number + 1, number * 2):
            name = PassName(context_id, pass_id, pass_id, PassMode(retain_graph=True))
            head = codec.encode(name, Gradients(scoped_id(RANKS[VICTIM], message), ()))
            yield _frame(Kind.GRADIENTS, name.mode.flags, pass_id, head + content)


def _releases() -> Iterator[bytes]:
    for number in range(1, _MOST):
        context_id = scoped_id(RANKS[HONEST], number)
        yield _frame(Kind.RELEASE_CONTEXT, 0, 0, encode_ints(context_id))


def _messages_of_others() -> Iterator[bytes]:
    yield _frame(Kind.RELEASE_MESSAGES, 0, 0, encode_ints(scoped_id(RANKS[HONEST], 1)))


LIES: dict[str, Callable[[], Iterator[bytes]]] = {
    "rank 0 closes the group": lambda: _step(Step.CLOSE),
    "rank 0 has all drop their references": lambda: _step(Step.SETTLE),
    "the answer to a call of another": _answers,
    "a reference to a value of another, of number -2": _reference,
    "a message of number 2**63": _large_message,
    "a message of another": _message_of_another,
    "passes of another are given up": lambda: _passes(Abort),
    "gradients of messages to another": _gradients,
    "contexts of another are over": _releases,
    "messages of another are not needed": _messages_of_others,
}
WITHOUT_EFFECT = {"passes of another are given up", "contexts of another are over"}
"""Lies about passes and contexts whose numbers the liar does not know: it names none that exist."""
