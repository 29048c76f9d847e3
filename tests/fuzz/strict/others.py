"""Messages in which a hostile member speaks of others: of their passes, values, calls and ends.

Each is well formed but for its numbers, which are near those that the workers use now. Making one
takes microseconds: it is a layout of numbers, around values that are encoded once.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from itertools import starmap
from typing import Any

import torch

from tests.fuzz.strict.trio import HONEST, VICTIM, Trio
from torchweft.autograd import codec
from torchweft.autograd.codec import PassMode, PassName
from torchweft.engine.codec import values
from torchweft.engine.codec.exceptions import pack_error
from torchweft.engine.codec.tensors import encode_tensors
from torchweft.engine.protocol import references
from torchweft.engine.protocol.backward import (
    CONNECTION,
    Abort,
    Discover,
    Failed,
    Gradients,
    Progress,
    Report,
    Settled,
)
from torchweft.engine.protocol.leaving import Step
from torchweft.engine.wire.frames import HEADER
from torchweft.engine.wire.messages import (
    ERROR_REPLY,
    NO_CREATION,
    NO_GRAD,
    HandedReference,
    Kind,
    encode_call,
    encode_ints,
    encode_reply,
    encode_texts,
    pass_span,
)
from torchweft.ids import WORKER_SHIFT, ReferenceId, scoped_id

_MODES = (PassMode(), PassMode(), PassMode(retain_graph=True), PassMode(True, True))
_MODES += (PassMode(for_inputs=True), PassMode(into_grad=True))
_EDGES = (-1, -2, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 48, 0)
_PROGRAM = b"tests.fuzz.strict.program:"
_STATEMENTS = (
    *(references.Hold, references.HoldAck, references.Gone, references.Drop, references.DropAck),
    *(references.NotCreated, references.Handed, references.NotHanded),
)
_KINDS_OF_INTEGERS = (
    *(Kind.CANCEL, Kind.PULLED, Kind.SUPPLY, Kind.UNSENT, Kind.DATA_BROKEN),
    *(Kind.RELEASE_CONTEXT, Kind.RELEASE_CONTEXT, Kind.RELEASE_MESSAGES, Kind.RELEASE_MESSAGES),
    Kind.ACKNOWLEDGED,
)
_OTHER_KINDS = tuple(
    kind for kind in Kind if kind not in (Kind.DUMP, Kind.STACKS)
)  # These two are questions, whose answers take long.


class Others:
    """Makes messages. The same random numbers and the same group make the same messages.

    Args:
        chance: The source of all decisions.
        trio: The group.
    """

    def __init__(self, chance: random.Random, trio: Trio) -> None:
        self.chance = chance
        self._trio = trio
        self._contexts = [scoped_id(VICTIM, 5), scoped_id(HONEST, 3)]
        self._made = 0
        ones = torch.ones(3, requires_grad=True)
        self._inside = [_inside(torch.ones(3)), _inside(ones * 2), _inside(ones), b""]
        self._of_tensors = values.NUMBER.pack(values.TUPLE, 1) + values.NUMBER.pack(
            values.TENSOR, 0
        )
        self._payloads = [_encoded((1,)), _encoded((None, "text")), _encoded(([],))]
        self._referring = [
            values.NUMBER.pack(values.TUPLE, 1) + values.NUMBER.pack(values.REFERENCE, 0)
        ]
        self._error = pack_error(ValueError("a lie"), "honest", is_plain=True)
        self._makers: tuple[Callable[[], bytes], ...] = (
            *[self._gradients] * 8,
            *[self._backward] * 8,
            *[self._call] * 3,
            *[self._references] * 8,
            *[self._integers] * 10,
            *(self._reply, self._reply, self._reply, self._span, self._span),
            *(self._step, self._other),
        )

    def message(self) -> bytes:
        """Returns one frame."""
        self._made += 1
        if self._made % 64 == 0:
            # A context of its own; it cannot know those of others.
            opener = self.chance.choice((HONEST, VICTIM, self._me))
            self._contexts[self.chance.randrange(2)] = scoped_id(opener, self._any(48))
        return self.chance.choice(self._makers)()

    def call_with_tensor(self) -> bytes:
        """Returns a call of its own, whose result is a tensor with a graph at the victim."""
        message_id = (self._me << WORKER_SHIFT) | 1
        name = _PROGRAM + b"identity"
        inside = self._inside[1]
        head = (30.0, NO_CREATION, 0, message_id, name, b"", ())
        return _frame(Kind.CALL, 0, 0, encode_call(*head, self._of_tensors, inside))

    def gradients_of(self, message_id: int, context_id: int, pass_id: int) -> bytes:
        """Returns gradients of such a result, in a pass and a context that may be made up."""
        name = PassName(context_id, pass_id, pass_id, PassMode(into_grad=True))
        head = codec.encode(name, Gradients(message_id, (), None))
        return _frame(Kind.GRADIENTS, name.mode.flags, pass_id, head + self._inside[0])

    # Numbers

    @property
    def _me(self) -> int:
        return self._trio.hostile

    def _any(self, bits: int) -> int:
        return self.chance.getrandbits(bits)

    def _near(self, now: int) -> int:
        """Returns a number near one that is in use, or at the edge of what fits."""
        if self.chance.random() < 0.02:
            return self.chance.choice(_EDGES) & _ALL
        return max(now + self.chance.randrange(-6, 7), 0)

    def _worker(self) -> int:
        chance = self.chance.random()
        if chance < 0.25:
            return HONEST
        if chance < 0.55:
            return VICTIM
        return self._me if chance < 0.97 else self.chance.choice((7, 399, 9999, 1 << 15))

    def _message_id(self) -> int:
        """Returns the number of a message of the honest worker, of the victim, or of its own."""
        engine = self._trio.victim.worker.engine
        choice = self.chance.random()
        if choice < 0.15 and engine.outside._sends:
            sent = list(engine.outside._sends)
            return sent[self._any(16) % len(sent)]
        worker = VICTIM if choice < 0.6 else self._worker()
        member = self._trio.honest if worker == HONEST else self._trio.victim
        latest = self._latest(member.worker.contexts.message_counter)
        return _signed((worker << WORKER_SHIFT) | self._near(latest))

    def _latest(self, counter: Any) -> int:
        """Returns the next number of a counter, without the worker; the counter stays as it is."""
        return int(counter.__reduce__()[1][0]) & ((1 << WORKER_SHIFT) - 1)

    def _pass(self) -> PassName:
        worker = self._worker()
        member = self._trio.honest if worker == HONEST else self._trio.victim
        number = self._near(self._latest(member.worker.engine.passes.numbers)) & (
            (1 << WORKER_SHIFT) - 1
        )
        pass_id = (worker << WORKER_SHIFT) | number
        oldest = _signed(pass_id + self.chance.choice((0, 0, 5, -pass_id - 1)))
        return PassName(self._context(), pass_id, oldest, self.chance.choice(_MODES))

    def _context(self) -> int:
        """Returns a context of its own making, or a guess."""
        chance = self.chance.random()
        if chance < 0.6:
            return self._contexts[self._any(1)]
        number = self._any(48) if chance < 0.8 else self._near(3)
        return _signed((self._worker() << WORKER_SHIFT) | number)

    def _reference(self) -> ReferenceId:
        """Returns a reference that the victim has, the next one that is made there, or any."""
        references = self._trio.victim.worker.references
        choice = self.chance.random()
        if choice < 0.4:
            live = [*references._values, *references._handles]
            if live:
                return live[self._any(16) % len(live)]
        made = self._trio.honest.worker.references._machine._held._next_number.get(VICTIM, 0)
        if choice < 0.6:
            return ReferenceId(HONEST, VICTIM, made + self._any(2))
        return ReferenceId(self._worker(), self._worker(), _signed(self._near(made)))

    def _token(self) -> int:
        seen = self._trio.victim.worker.references._machine._last_token
        return _signed(self._near(seen.get(HONEST, 0)))

    def _number_of_call(self) -> int:
        chance = self.chance.random()
        member = self._trio.victim if chance < 0.6 else self._trio.honest
        return self._near(member.agent.calls._client.total) & _ALL

    # Messages

    def _gradients(self) -> bytes:
        name = self._pass()
        progress = None
        if self.chance.random() < 0.4:
            progress = self._progress()
        recorded = 0 if self.chance.random() < 0.7 else self._message_id()
        message = Gradients(self._message_id(), (), progress)
        inside = self._inside[self._any(2)]
        control = codec.encode(name, message, recorded) + inside
        return _frame(Kind.GRADIENTS, name.mode.flags, name.pass_id, control)

    def _progress(self) -> Progress:
        made = [[self._message_id()] if self._any(1) else [] for _ in "1234"]
        return Progress(*made)

    def _backward(self) -> bytes:
        name = self._pass()
        choice = self._any(3)
        message: Any
        if choice < 2:
            message = Abort()
        elif choice == 2:
            message = Settled()
        elif choice == 3:
            message = Discover((self._message_id(),))
        elif choice < 6:
            message = Report(self._progress())
        else:
            operation = CONNECTION if self._any(1) else "an operation"
            message = Failed(self._worker(), operation, self._error)
        control = codec.encode(name, message)
        return _frame(Kind.BACKWARD, name.mode.flags, name.pass_id, control)

    def _call(self) -> bytes:
        chance = self.chance.random()
        handed: tuple[HandedReference, ...] = ()
        payload = self.chance.choice(self._payloads)
        if chance < 0.35:
            handed = (HandedReference(self._reference(), self._token()),)
            payload = self._referring[0]
        context_id = message_id = 0
        if self._any(1):
            context_id = NO_GRAD if chance < 0.05 else self._context() & _ALL
        if self._any(1):
            message_id = self._message_id() & _ALL
        creation = NO_CREATION if chance < 0.7 else _signed(self._near(3))
        name = _PROGRAM + (b"identity" if chance < 0.8 else b"Counter")
        inside = b""
        if not handed and self._any(1):
            payload, inside = self._of_tensors, self._inside[self._any(16) % 3]
        head = (30.0, creation, context_id, message_id, name, b"", handed)
        number = self._number_of_call() if creation == NO_CREATION else 0
        return _frame(Kind.CALL, 0, number, encode_call(*head, payload, inside))

    def _reply(self) -> bytes:
        number = self._number_of_call()
        if self._any(2) == 0:
            return _frame(Kind.REPLY, ERROR_REPLY, number, encode_reply(0, 0, (), self._error))
        head = (self._context() & _ALL, self._message_id() & _ALL)
        control = encode_reply(*head, (), self.chance.choice(self._payloads))
        return _frame(Kind.REPLY, 0, number, control)

    def _references(self) -> bytes:
        made = []
        for _ in range(1 + self._any(1)):
            kind = self.chance.choice(_STATEMENTS)
            if kind in (references.Handed, references.NotHanded):
                made.append(kind(self._token()))
            elif kind is references.NotCreated:
                made.append(kind(self._reference()))
            elif kind is references.Hold:
                made.append(kind(self._reference(), self._near(5) & 1023, self._token()))
            else:
                made.append(kind(self._reference(), self._near(5) & 1023))
        return _frame(Kind.REFERENCES, 0, 0, references.encode(made))

    def _integers(self) -> bytes:
        kind = self.chance.choice(_KINDS_OF_INTEGERS)
        made = self._message_id if kind is Kind.RELEASE_MESSAGES else self._context
        if kind not in (Kind.RELEASE_CONTEXT, Kind.RELEASE_MESSAGES):
            made = self._number_of_call
        numbers = [made() for _ in range(1 + self._any(1))]
        control = b"".join(starmap(_INTEGER.pack, [(each & _ALL,) for each in numbers]))
        return _frame(kind, 0, self._number_of_call(), control)

    def _step(self) -> bytes:
        step = self.chance.choice(list(Step)) if self._any(3) else self._any(5)
        arguments = [self.chance.choice((HONEST, VICTIM, self._me, 1)) for _ in range(self._any(2))]
        texts = encode_texts(["a lie"]) if self._any(1) else b""
        control = encode_ints(step, len(arguments), *arguments) + texts
        return _frame(Kind.SHUTDOWN, 0, 0, control)

    def _span(self) -> bytes:
        name = self._pass()
        return b"".join(pass_span(name.pass_id, name.context_id & _ALL, b"a lie"))

    def _other(self) -> bytes:
        content = self.chance.randbytes(self.chance.choice((0, 8, 16, 40)))
        return _frame(
            self.chance.choice(_OTHER_KINDS), self._any(5), self._number_of_call(), content
        )


_ALL = (1 << 64) - 1
_INTEGER = struct.Struct("<Q")


def _signed(number: int) -> int:
    """Returns a number of 64 bits as a field with a sign holds it."""
    number &= _ALL
    return number - (1 << 64) if number >> 63 else number


def _frame(kind: int, flags: int, number: int, control: bytes) -> bytes:
    return HEADER.pack(kind, flags, 0, len(control), number) + control


def _encoded(value: Any) -> bytes:
    return bytes(values.Encoder(True, ()).encode(value))


def _inside(tensor: torch.Tensor) -> bytes:
    inlined = encode_tensors([tensor])
    assert inlined is not None
    return inlined[0]
