"""Injected faults: messages of chosen kinds that are not sent at first, or sent late.

PyTorch's tests name the kinds as PyTorch's messages; here each stands for the message of Weft with
the same purpose. A fault strikes when the message would leave this worker:

- A call that fails ends with an error, as if the connection had refused it. A ``remote`` that fails
  leaves a reference to a value that is never made.
- A message that keeps a count (of references, of autograd contexts) is lost, and sent again a
  little later, until it has been lost often enough.
- A call that is late leaves while its caller's time is running.

A worker without faults is not affected: methods are replaced only on the agent of the one worker
that is to have faults.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tests.conformance.shims.fault_plan import CALLS, CLEANUP, COUNTING, Plan, is_scripted
from tests.conformance.shims.late import Late
from torchweft.compat.rpc.references import RRef, when_made
from torchweft.engine.codec.objects import pack
from torchweft.engine.protocol.calls import function_name
from torchweft.engine.protocol.references import decode, encode
from torchweft.engine.protocol.sessions import Outgoing
from torchweft.engine.wire.frames import HEADER, Frame, encode_frame
from torchweft.engine.wire.messages import NO_CREATION, Kind
from torchweft.engine.worker.agent import Agent, Slot
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import ReferenceKeeper
from torchweft.errors import CallError, CallTimeout
from torchweft.ids import ReferenceId
from torchweft.rpc.calls import BACKWARD_FROM, FETCH, fail
from torchweft.rpc.codec import Request
from torchweft.rpc.worker import Worker

_RESEND_S = 0.05
"""Seconds until a lost message is sent again."""


class InjectedFault(CallError):
    """A message was not sent because a test asked for it to fail."""


class _Concerned:
    """A call for which the plan has a fault; it takes the place of the request.

    Attributes:
        request: The request.
        name: Its kind.
        creation: Number of the reference that it creates, or ``NO_CREATION``.
        function: Readable name of the function.
        arguments: Its arguments, as bytes.
    """

    def __init__(
        self,
        request: Request,
        name: str,
        creation: int,
        function: str,
        arguments: bytes,
    ) -> None:
        self.request = request
        self.name = name
        self.creation = creation
        self.function = function
        self.arguments = arguments
        self.take_back = request.take_back

    def message(self, number: int) -> Any:
        """Returns the message that ``Faults`` sends, with the number of the call."""
        return _Sending(self, number)

    def error(self, peer: Peer) -> InjectedFault:
        return InjectedFault(
            f"{self.name} failed intentionally: the call of {self.function} was not sent to "
            f"worker {peer.name!r}",
            worker=peer.name,
            call=self.function,
        )


class _Coming:
    """Stands among the values in the making: a request that makes one is sent later."""

    peer = None
    has_ended = True


class _Sending(NamedTuple):
    concerned: _Concerned
    number: int


class Faults:
    """Makes messages of one worker fail or be late, by ``plan``."""

    def __init__(self, worker: Worker, plan: Plan) -> None:
        agent: Agent = worker.agent
        self._worker = worker
        self._agent = agent
        self._plan = plan
        self._late = Late(f"weft-{agent.info.name}-faults")
        self.created: weakref.WeakValueDictionary[ReferenceId, _CreatedRRef]
        self.created = weakref.WeakValueDictionary()
        self._scripted: set[ReferenceId] = set()
        self._make_request = worker.encoder.request
        self._ask, self._send, self._post = agent.calls.ask, agent.sender.send, agent.sender.post
        self._close, self._write = agent.close, agent.sender.write
        self._ask_and_wait = agent.calls.ask_and_wait
        self._replace()

    def _replace(self) -> None:
        worker, agent = self._worker, self._agent
        agent.slots[_FAULTS] = self
        worker.reference_type = worker.decoder.reference_type = _CreatedRRef
        for holder, method in (
            (worker.encoder, self.request),
            (agent.calls, self.ask),
            (agent.calls, self.ask_and_wait),
            (agent.sender, self.send),
            (agent.sender, self.post),
            (agent, self.close),
            (agent.sender, self.write),
        ):
            setattr(holder, method.__name__, method)

    def close(self, limit_s: float) -> None:
        """Drops delayed messages, and closes the agent."""
        self._late.close()
        self._close(limit_s)

    # Calls

    def request(
        self,
        peer: Peer,
        function: Callable[..., Any] | bytes,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout_s: float,
        creation: int = NO_CREATION,
        span: bytes = b"",
    ) -> Any:
        """Does as ``Encoder.request``; marks the request if the plan concerns it."""
        request = self._make_request(peer, function, args, kwargs, timeout_s, creation, span)
        name = self._name_of(peer, function, args, creation)
        if name is None or not self._plan.concerns(name):
            return request
        called = function.decode() if isinstance(function, bytes) else function_name(function)
        arguments = pack((args, kwargs), main_by_name=peer.main_by_name).payload
        return _Concerned(request, name, creation, called, arguments)

    def _name_of(
        self, peer: Peer, function: Callable[..., Any] | bytes, args: Sequence[Any], creation: int
    ) -> str | None:
        if function in (BACKWARD_FROM, when_made):
            return None
        if function == FETCH:
            # A value that another worker created counts as Python's: its reference does not say.
            return CALLS[ReferenceId(*args[:3]) in self._scripted][2]
        scripted = is_scripted(function)
        if creation == NO_CREATION:
            return CALLS[scripted][0]
        if scripted:
            self._scripted.add(self._reference(peer, creation))
        return CALLS[scripted][1]

    def ask(
        self,
        peer: Peer,
        call: PendingCall,
        request: Any,
        *,
        may_block: bool = True,
    ) -> None:
        """Does as ``OpenCalls.ask``; a call that is to fail does so at once."""
        if isinstance(request, _Concerned) and self._takes(request, peer):
            request.take_back()
            self._agent.calls.fail(call, request.error(peer))
            return
        self._ask(peer, call, request, may_block=may_block)

    def ask_and_wait(
        self, peer: Peer, call: PendingCall, request: Any, decodes: tuple[Any, ...] = ()
    ) -> tuple[Any] | None:
        """Does as ``OpenCalls.ask_and_wait``, but sends a call that the plan concerns apart."""
        if not isinstance(request, _Concerned):
            return self._ask_and_wait(peer, call, request, decodes)
        self.ask(peer, call, request)
        self._agent.calls.wait(call)
        return None

    def send(self, peer: Peer, message: Any, *, may_block: bool = True) -> None:
        """Does as ``Agent.send``, but delays late messages, and does not send failing ones."""
        if not isinstance(message, _Sending):
            self._send(peer, message, may_block=may_block)
            return
        concerned = message.concerned
        is_creation = concerned.creation != NO_CREATION
        if is_creation and self._takes(concerned, peer):
            self._drop_creation(concerned, peer)
            return
        outgoing = concerned.request.message(message.number)
        delay_s = self._plan.delay_s(concerned.name)
        if not delay_s:
            self._send(peer, outgoing, may_block=may_block)
            return
        # A graceful shutdown waits for values that are being made.
        coming: Any = _Coming()
        self._worker.unfinished.add(coming)

        def send_late() -> None:
            try:
                self._send(peer, outgoing)
            finally:
                self._worker.unfinished.discard(coming)

        self._late.add(delay_s, send_late)

    def write(self, peer: Peer, message: Any, *, may_block: bool = True) -> None:
        """Does as ``Sender.write``; a message that the plan concerns goes to ``send``."""
        if isinstance(message, _Sending):
            self.send(peer, message)  # It is kept again, and sent after earlier messages.
        else:
            self._write(peer, message, may_block=may_block)

    def _takes(self, concerned: _Concerned, peer: Peer) -> bool:
        key = (peer.id, concerned.creation, concerned.function, concerned.arguments)
        return self._plan.takes(concerned.name, *key)

    def _drop_creation(self, concerned: _Concerned, peer: Peer) -> None:
        concerned.take_back()
        error = concerned.error(peer)
        reference = self._reference(peer, concerned.creation)
        handle = self.created.get(reference)
        if handle is not None:
            handle.fail_creation(error)
        if peer.is_self:
            self._worker.references.value_of(reference).resolve(None, error)
        else:
            self._worker.references.not_created(reference)

    def _reference(self, peer: Peer, creation: int) -> ReferenceId:
        return ReferenceId(self._agent.me.id, peer.id, creation)

    # Messages that keep counts

    def post(self, peer: Peer, message: Outgoing) -> None:
        """Does as ``Agent.post``, except for messages that the plan concerns."""
        kind = -1 if isinstance(message, Frame) else message[0][0]
        if kind == Kind.REFERENCES:
            self._post_references(peer, bytes(message[0][HEADER.size :]))  # type: ignore[index]
        elif kind != Kind.RELEASE_CONTEXT or self._may_leave(peer, CLEANUP, message):
            self._post(peer, message)

    def _post_references(self, peer: Peer, batch: bytes) -> None:
        leaving = []
        for message in decode(batch):
            name = COUNTING.get(type(message))
            frame = encode_frame(Kind.REFERENCES, 0, 0, encode([message]))
            if name is None or self._may_leave(peer, name, frame):
                leaving.append(message)
        if leaving:
            self._post(peer, encode_frame(Kind.REFERENCES, 0, 0, encode(leaving)))

    def _may_leave(self, peer: Peer, name: str, message: Any) -> bool:
        """Returns whether to send a message now; if not, schedules it for later."""
        if self._plan.takes(name, peer.id, bytes(message[0])):
            self._late.add(_RESEND_S, lambda: self.post(peer, message))
            return False
        delay_s = self._plan.delay_s(name)
        if delay_s:
            self._late.add(delay_s, lambda: self._post(peer, message))
        return not delay_s


_FAULTS: Slot[Faults] = Slot()


class _CreatedRRef(RRef[Any]):
    """A reference that a failed creation can find."""

    __slots__ = ()

    _of_creation = (CallTimeout, InjectedFault)

    @classmethod
    def from_created(
        cls, keeper: ReferenceKeeper, reference: ReferenceId, maker: str = ""
    ) -> _CreatedRRef:
        handle = cls.__new__(cls)
        handle._bind(keeper, reference, is_new=True, maker=maker)
        current().slots[_FAULTS].created[reference] = handle
        return handle

    def fail_creation(self, error: Exception) -> None:
        """Notes that the call that was to make the value was not sent."""
        self._created = torch.futures.Future()
        fail(self._created, error)
