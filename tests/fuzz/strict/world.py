"""A strict worker without sockets and threads: its handlers run at once, in this thread.

All of its code is that of a worker in production, from the received frame to the bytes of the
answer. Only connections, the reactor's threads, and the event loop are replaced below.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any
from unittest import mock

import torch

from tests.fuzz.strict import program
from torchweft.autograd.engine import ENGINE
from torchweft.engine.codec.reading import make_reader
from torchweft.engine.codec.registry import remotely_callable
from torchweft.engine.protocol.registration import STRICT, Registration
from torchweft.engine.threads.reactor import Reactor
from torchweft.engine.threads.reports import LongWaits
from torchweft.engine.wire.frames import HEADER_BYTES, Buffer, Frame
from torchweft.engine.wire.messages import HandedReference, decode_call
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker.agent import Agent, Protection
from torchweft.engine.worker.peers import Members, Peer
from torchweft.errors import ProtocolError, WorkerLost
from torchweft.nn import owner
from torchweft.optim import local
from torchweft.optim.local import GroupPart
from torchweft.rpc import RpcBackendOptions, RRef, serving
from torchweft.rpc.codec import Request
from torchweft.rpc.collective import GATHERINGS, Gatherings
from torchweft.rpc.sources import SOURCES, Sources
from torchweft.rpc.worker import WORKER, Worker

ME, SENDER, OTHER = 0, 1, 2
LIMIT_S = 0.005
HANDED = 8
"""How many references to each value of the worker may come in messages."""


class _Link:
    """A connection whose other end accepts everything and sends nothing."""

    read_fd = -1
    native = None
    reading = threading.Lock()

    def send(self, message: list[Buffer], *, may_block: bool) -> None:
        for part in message:
            assert len(bytes(part)) < 1 << 22, "a short message has a long answer"

    def hold(self, parts: list[Buffer]) -> int:
        self.send(parts, may_block=False)
        return 0

    def flush(self) -> None: ...


class _Tasks(list[Any]):
    """Waiting tasks of all senders, in one list."""

    ready = 0

    def append(self, task: Any, sender: int = 0) -> None:
        super().append(task)

    def offer(self, task: Any, sender: int, size_bytes: int) -> bool:
        self.append(task)
        return True


class World:
    """A worker, and the references to its values that the sender has been given."""

    def __init__(self) -> None:
        registrations = [
            Registration(name, number, (), facts={STRICT: True})
            for number, name in enumerate(("me", "sender", "other"))
        ]
        options = RpcBackendOptions(
            strict=True, callables=program.CALLABLES, rpc_timeout=LIMIT_S, secret=None
        )
        options.check()
        members = Members(registrations[ME], registrations[1:], is_open=False)
        with mock.patch.object(Reactor, "_spawn"):
            self.agent = Agent(Protection.of_run("a token of this run"), members, [], 4, LIMIT_S)
        self.agent.reactor.tasks = _Tasks()  # type: ignore[assignment]
        reader = make_reader(None, True, "me", options.callables)
        self.worker = Worker(self.agent, options.reference_type, reader)
        serving.install(self.worker)
        self.agent.slots[WORKER] = self.worker
        self.agent.slots[ENGINE] = self.worker.engine
        self.gatherings = self.agent.slots[GATHERINGS] = Gatherings(self.agent, LongWaits("worker"))
        self.sources = self.agent.slots[SOURCES] = Sources(self.agent, lambda source: None)
        self.agent.when_lost = self._peer_lost
        self._stop_at_the_edges()
        current_agent.install(self.agent)
        self.sender = self.agent.peers[SENDER]
        self._make_values()

    def _stop_at_the_edges(self) -> None:
        agent, link = self.agent, _Link()
        for number in (SENDER, OTHER):
            agent.peers[number].link = link  # type: ignore[assignment]
        for name, stub in (
            ("ask", self._ask),
            ("ask_and_wait", self._ask),
        ):
            setattr(agent.calls, name, stub)
        agent.connect_all = lambda *args, **kwargs: None  # type: ignore[method-assign]
        agent.links.end = lambda link: None  # type: ignore[method-assign, assignment]
        self.worker.coroutines.run = self._run  # type: ignore[method-assign]

    def _ask(self, peer: Peer, call: Any, request: Any, **_: Any) -> None:
        """Checks a call that this worker makes, and lets it fail."""
        if not peer.is_self:
            assert isinstance(request, Request), f"a message had {request!r} asked elsewhere"
            (start, *_) = request.message(1)
            _, _, name, _ = decode_call(start[HEADER_BYTES:])
            name = name or b"a function by value"
            assert remotely_callable.has(name.decode()), f"a message had {name!r} called elsewhere"
        raise WorkerLost("nobody is there", worker=peer.name)

    def _run(
        self, coroutine: Coroutine[Any, Any, Any], context_id: int, on_done: Callable[..., None]
    ) -> None:
        try:
            coroutine.send(None)
            coroutine.close()
            on_done(None, asyncio.CancelledError("it would wait"))
        except StopIteration as result:
            on_done(result.value, None)
        except BaseException as error:
            on_done(None, error)

    def _make_values(self) -> None:
        torch.manual_seed(1)
        made = owner.create(program.Net, (), {}, "cpu")
        module = made.local_value()
        owner._made()[module] = None
        parameters = [RRef(each) for each in module.parameters()]
        parts = [GroupPart(0, {"lr": 0.1}, [0, 1], parameters)]
        placed = local.place(None, torch.optim.Adam, (), {}, parts)
        values = (
            program.Trap(),
            program.Hidden(),
            program.Counter(),
            torch.ones(2, 2),
            [1],
            "text",
        )
        self.handles = [made, *parameters, placed.optimizer, *map(RRef, values)]
        self.kept = values
        self.addresses = [tuple(each.id) for each in self.handles]
        self.handed: list[HandedReference] = []
        for handle in self.handles:
            for _ in range(HANDED):
                self.handed.append(self.worker.references.hand_on(handle.id, self.sender))

    # Messages

    def receive(self, frame: Frame) -> Exception | None:
        """Handles a frame, and all work that follows; returns why the frame was refused."""
        if self.sender.lost is not None:
            raise self.sender.lost
        try:
            self.agent.receiver.dispatch(self.sender, frame)
        except ProtocolError as error:
            self.agent.lose(self.sender, "nonsense")
            refusal: Exception | None = error
        else:
            refusal = None
        self._work()
        return refusal if self.sender.lost is None else ProtocolError("it is turned away")

    def _work(self) -> None:
        reactor = self.agent.reactor
        for _ in range(1000):
            queue: Any = reactor.urgent or reactor.tasks
            if not queue:
                break
            task = queue.pop() if queue is reactor.urgent else queue.pop(0)
            function, first, second = task
            Context().run(function, first, second)  # as the reactor does
        else:
            raise AssertionError("a message has work without end")
        for source in self.sources.open():
            while source.is_asked and source.answer_next():
                pass
        self.worker.references.tick(time.monotonic() + 1)
        self.agent.calls.expire(time.monotonic() + 60)

    def _peer_lost(self, peer: Peer) -> None:
        self.worker.tensor_messages.peer_lost(peer)
        self.gatherings.peer_lost(peer)
        self.worker.engine.peer_lost(peer)
        self.agent.calls.caller_lost(peer)
        self.sources.peer_lost(peer)
        self.worker.references.peer_lost(peer)
        self.agent.calls.end_creations(self.worker.unfinished, peer)

    def tell_error(self, content: bytes) -> BaseException:
        """Reads an error as the worker does if it comes as an answer."""
        return self.worker.reader.unpack_error(content)

    def close(self) -> None:
        """Ends the worker."""
        current_agent.install(None)
        self.handles.clear()
        self.worker.has_left = True
        with contextlib.suppress(Exception):
            self.gatherings.close()
        self.worker.references.close()
        self.sources.close(0.0)
        self.worker.close(1.0)
        for number in (SENDER, OTHER):
            self.agent.peers[number].link = None
        self.agent.close(1.0)
