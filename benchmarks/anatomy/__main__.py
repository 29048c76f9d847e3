"""Times every part of a small call by itself; see the README beside this file.

Each part runs repeatedly in one process, with all its data in the caches; the best of several
series counts. A real call is slower than the sum: each part runs once, then another process uses
the caches, and threads must be woken. The line "the rest" shows the difference.
"""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import torchweft
from benchmarks.calls.work import echo
from benchmarks.machine import describe_machine
from torchweft import rpc
from torchweft.engine.codec.functions import name_of, resolve
from torchweft.engine.codec.tensors import decode_tensors, encode_tensors
from torchweft.engine.codec.values import decode, encode
from torchweft.engine.protocol.calls import CallClient
from torchweft.engine.threads.reactor import FairQueue, Reactor
from torchweft.engine.wire.frames import Buffer, FrameParser, encode_frame
from torchweft.engine.wire.messages import Kind, encode_reply
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.rpc import serving
from torchweft.rpc.serving import Call
from torchweft.rpc.worker import WORKER, Worker

SERIES, REPEATS = 7, 2000
CALLS = 4000


class Part(NamedTuple):
    """One part of a call: its side, its description, its number of system calls, its function."""

    side: str
    name: str
    system_calls: int
    run: Callable[[], object]


def main() -> int:
    """Prints the times of the parts of a call and of whole calls."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    with torchweft.cluster(workers=1):
        timed = [(part, best_us(part.run)) for part in parts()]
        totals = {"one core": call_us()}
        if len(cores) > 1:
            move_worker(cores[1])
            totals["a core each"] = call_us()
    print_report(timed, totals)
    return 0


def best_us(run: Callable[[], object]) -> float:
    """Returns the time of ``run`` with all its data in the caches."""
    best_s = math.inf
    for _ in range(SERIES):
        begin = time.perf_counter()
        for _ in range(REPEATS):
            run()
        best_s = min(best_s, (time.perf_counter() - begin) / REPEATS)
    return best_s * 1e6


def call_us() -> float:
    """Returns the median time of real calls."""
    tensor, seconds = torch.ones(2), []
    for _ in range(CALLS):
        begin = time.perf_counter()
        rpc.rpc_sync("worker0", echo, args=(tensor,))
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[CALLS // 2] * 1e6


def move_worker(core: int) -> None:
    """Moves all threads of the worker to a core."""
    pid = rpc.rpc_sync("worker0", os.getpid)
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def parts() -> list[Part]:
    """Returns the parts in the order in which a call runs them."""
    agent = current()
    worker, peer = agent.slots[WORKER], agent.find("worker0")
    tensor = torch.ones(2)
    rpc.rpc_sync("worker0", echo, args=(tensor,))
    request = worker.encoder.request(peer, echo, (tensor,), {}, 60.0)
    sent = b"".join(bytes(piece) for piece in request.message(1))  # type: ignore[arg-type]
    inlined = encode_tensors([tensor])
    assert inlined is not None
    [answer] = encode_frame(Kind.REPLY, 0, 1, encode_reply(0, 0, (), b"", inlined[0]))
    return [
        *_requests(agent, worker, peer, tensor, request),
        *_system(agent, peer, sent, "caller"),
        *_serving(worker, peer, sent, tensor),
        *_answers(agent, worker, peer, answer),
    ]


def _requests(
    agent: Agent, worker: Worker, peer: Peer, tensor: torch.Tensor, request: Any
) -> list[Part]:
    table: CallClient[PendingCall] = CallClient()

    def open_and_close() -> None:
        table.pop(table.add(PendingCall(peer.id, peer.name, echo, 60.0)), None)

    return [
        Part("caller", "find the worker and the name of the function", 0, lambda: (
            current(), agent.find("worker0"), name_of(echo, True))),
        Part("caller", "arguments to bytes", 0, lambda: (
            encode((tensor,), [], True), encode_tensors([tensor]))),
        Part("caller", "head and frame", 0, lambda: request.message(1)),
        Part("caller", "open the call, and close it again", 0, open_and_close),
    ]  # fmt: skip


def _system(agent: Agent, peer: Peer, sent: bytes, side: str) -> list[Part]:
    assert peer.link is not None
    fd, reactor = peer.link.read_fd, agent.reactor

    return [
        Part(side, "arm the connection again", 1, lambda: reactor.resume_reading(fd)),
        Part(side, "send, and receive as much (nobody is woken)", 2, _sending(sent)),
    ]


def _sending(sent: bytes) -> Callable[[], object]:
    ours, theirs = socket.socketpair()
    buffer = bytearray(1 << 17)
    return lambda: (ours.send(sent), theirs.recv_into(buffer))


def _serving(worker: Worker, peer: Peer, sent: bytes, tensor: torch.Tensor) -> list[Part]:
    parse = _parsing(sent)
    [frame] = parse()
    reactor = Reactor("anatomy", 1, FairQueue(100, 1 << 20))

    def queue_and_run() -> None:
        reactor.tasks.append((_nothing, None, None), 1)
        reactor._work()

    name = name_of(echo, True)
    assert name is not None

    silent: Any = _Silent(peer)

    def serve() -> None:
        call = Call(silent, frame, time.monotonic())
        call.worker, call.owned = worker, None
        serving._serve(worker, silent, call)

    serve()
    check_answer(silent.sent)

    return [
        Part("callee", "wait for an event that is there, arm it, receive", 3, _waiting(sent)),
        Part("callee", "bytes to a frame", 0, parse),
        Part("callee", "queue the call and take it", 0, queue_and_run),
        Part("callee", "head, arguments and function; run it; result to bytes", 0, serve),
        Part("callee", "  of that: arguments from bytes", 0, _decoding(tensor)),
        Part("callee", "  of that: the function from its name", 0, lambda: resolve(name)),
    ]


def _answers(agent: Agent, worker: Worker, peer: Peer, answer: Buffer) -> list[Part]:
    parse = _parsing(answer)
    [frame] = parse()
    call = PendingCall(peer.id, peer.name, echo, 60.0)

    def result() -> object:
        call.frame = frame
        return worker.result_of(call)

    return [
        Part("caller", "bytes of the answer to a frame", 0, parse),
        Part("caller", "result from bytes", 0, result),
    ]


def check_answer(sent: bytes) -> None:
    """Raises ValueError for an answer that is not the result of the call.

    A failed call is answered as well, but its time says nothing about a successful call.
    """
    [frame] = _parsing(sent)()
    if frame.kind != Kind.REPLY or frame.flags:
        raise ValueError(f"the call was answered by frame {frame!r}, which is no small result")


class _Silent:
    """A stand-in for a peer that stores the answer instead of sending it."""

    def __init__(self, peer: Peer) -> None:
        self.id, self.name, self.receiver, self.is_self = peer.id, peer.name, 1, False
        self.lost = self.server = None
        self.device_maps = peer.device_maps
        self.link = self
        self.served: dict[int, Call] = {}
        self.sent = b""

    def send(self, parts: list[bytes], may_block: bool) -> None:
        """Stores the answer."""
        self.sent = b"".join(parts)


def _nothing(*_: object) -> None:
    """Serves as an empty task."""


def _decoding(tensor: torch.Tensor) -> Callable[[], object]:
    inlined = encode_tensors([tensor])
    payload = encode((tensor,), [], True)
    assert inlined is not None
    assert payload is not None
    inside = inlined[0]
    return lambda: decode(payload, decode_tensors(inside, 0)[0], ())


def _parsing(data: Buffer) -> Callable[[], Any]:
    parser = FrameParser(memoryview, 1 << 17, 1 << 20, 1 << 20)  # type: ignore[arg-type]

    def parse() -> Any:
        parser.space()[0][: len(data)] = data
        return parser.received(len(data))

    return parse


def _waiting(sent: bytes) -> Callable[[], object]:
    ours, theirs = socket.socketpair()
    ours.send(sent)
    epoll, fd = select.epoll(), theirs.fileno()
    armed = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
    epoll.register(fd, armed)
    buffer = bytearray(1 << 17)

    def wait() -> None:
        epoll.poll(-1, 1)
        theirs.recv_into(buffer, 0, socket.MSG_PEEK)
        epoll.modify(fd, armed)

    return wait


def print_report(timed: list[tuple[Part, float]], totals: dict[str, float]) -> None:
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    print(f"{machine}\n\n| side | part | system calls | us |\n|---|---|---:|---:|")
    for part, us in timed:
        print(f"| {part.side} | {part.name} | {part.system_calls or ''} | {us:.2f} |")
    known_us = sum(us for part, us in timed if not part.name.startswith(" "))
    # The callee sends its answer in the same way as the caller its request.
    known_us += next(us for part, us in timed if part.name.startswith("send"))
    print(f"| both | sum of the parts, with the callee's send | | {known_us:.2f} |")
    for name, us in totals.items():
        print(f"| both | a whole call, {name}: median | | {us:.2f} |")
        rest = "the rest: cold caches, threads woken, what is between"
        print(f"| both | {rest} | | {us - known_us:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
