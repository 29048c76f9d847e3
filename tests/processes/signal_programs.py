"""Programs in which signal handlers raise or call, run as scripts by ``test_signals``.

Each prints a line with what it counted.
"""

from __future__ import annotations

import gc
import itertools
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import torchweft
from tests.thorough import examples
from torchweft import autograd, rpc
from torchweft.errors import CallCancelled, SerializationError
from torchweft.optim import DistributedOptimizer

RAISED = examples(150)
CALLS_OF_HANDLER = examples(400)


class Alarm(Exception):
    """What the handler raises: no ``BaseException``, so any ``except Exception`` would take it."""


def echo(value: Any) -> Any:
    return value


def scale(value: Tensor, by: float) -> Tensor:
    return value * by


def call() -> None:
    assert rpc.rpc_sync("worker0", echo, args=((2, "a"),)) == (2, "a")


def call_with_tensor() -> None:
    assert rpc.rpc_sync("worker0", echo, args=(torch.ones(3),)).sum() == 3


def call_with_large() -> None:
    assert len(rpc.rpc_sync("worker0", echo, args=(b"x" * 700_000,))) == 700_000


def future() -> None:
    assert rpc.rpc_async("worker0", echo, args=(1,)).wait() == 1


def reference() -> None:
    assert rpc.remote("worker0", echo, args=(1,)).to_here() == 1


def fail(reason: str) -> None:
    raise KeyError(reason)


def text_of_error(work: Callable[[], object]) -> str:
    try:
        work()
    except (KeyError, SerializationError) as error:
        return str(error)
    return "no error"


def error() -> None:
    assert "no key" in text_of_error(lambda: rpc.rpc_sync("worker0", fail, args=("no key",)))


def refusal() -> None:
    parts = [1, {"lock": threading.Lock()}]
    text = text_of_error(lambda: rpc.rpc_sync("worker0", echo, args=(parts,)))
    assert "args[0][1]['lock']" in text, text


def backward() -> None:
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync("worker0", scale, args=(x, 2.0)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def total(reference: rpc.RRef[Tensor]) -> Tensor:
    return reference.local_value().sum()


def step() -> None:
    if not OPTIMIZERS:
        made = rpc.remote("worker0", parameter)
        OPTIMIZERS.append((made, DistributedOptimizer(torch.optim.SGD, [made], lr=0.1)))
    made, optimizer = OPTIMIZERS[0]
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker0", total, args=(made,))])
        optimizer.step(context_id)


OPTIMIZERS: list[Any] = []


def outcomes() -> None:
    found = rpc.rpc_all(["worker0", "worker0"], echo, (1,), return_exceptions=True)
    assert found == [1, 1], found


def numbers() -> Iterator[int]:
    yield from itertools.count()


def stream() -> None:
    """Values may be lost at an interrupt, and their order is kept."""
    if not STREAMS:
        STREAMS.append(rpc.merged([rpc.stream("worker0", numbers, ahead=2)]))
    try:
        (one, first), (_, second) = next(STREAMS[0]), next(STREAMS[0])
    except (CallCancelled, StopIteration):
        STREAMS.clear()  # An interrupt came while it asked for a value.
    else:
        assert first < second
        assert STREAMS[0].streams == [one]


STREAMS: list[Any] = []


WORK: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        call,
        call_with_tensor,
        call_with_large,
        future,
        reference,
        error,
        refusal,
        backward,
        step,
        outcomes,
        stream,
    )
}


def raising(work: Callable[[], None]) -> str:
    """Interrupts work at random moments by a handler that raises; counts what arrives."""
    raised = 0

    def handler(*_: object) -> None:
        nonlocal raised
        raised += 1
        raise Alarm

    moments = random.Random(7)
    arrived, wrong = 0, set[str]()

    def ignore(swallowed: Any) -> None:
        """Counts what the interpreter drops, in a finalizer or a callback of a weak reference."""
        nonlocal dropped
        dropped += isinstance(swallowed.exc_value, Alarm)

    dropped = 0
    sys.unraisablehook = ignore
    signal.signal(signal.SIGALRM, handler)
    while raised < RAISED:
        before = raised
        try:
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(20e-6, 3e-3))
            while raised == before:
                work()
        except Alarm:
            arrived += 1
        except Exception as error:
            wrong.add("".join(traceback.format_exception(error)))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    work()
    told = f"{arrived + dropped} arrived or were dropped in a finalizer"
    return f"{raised} raised, {told}, wrong: {sorted(wrong)}"


def calling(work: Callable[[], None]) -> str:
    """Has a handler call while the main thread works."""
    called, sent = 0, list[torchweft.Future[int]]()

    def handler(*_: object) -> None:
        nonlocal called
        called += 1
        rpc.remote("worker0", echo, args=(called,))
        sent.append(rpc.rpc_async("worker0", echo, args=(called,)))
        signal.setitimer(signal.ITIMER_REAL, 0.0007)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0007)
    while called < CALLS_OF_HANDLER:
        work()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    assert called >= CALLS_OF_HANDLER
    assert [each.wait() for each in sent] == list(range(1, called + 1))
    return "the handler has called"


class Session:
    """Tells a worker of its end; in a cycle, so that the collector ends it, wherever that runs."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        rpc.rpc_async("worker0", echo, args=(1,))


def collecting(work: Callable[[], None]) -> str:
    """Has finalizers call under the garbage collector, in several threads."""

    def repeat() -> None:
        for _ in range(100):
            Session()
            work()

    gc.set_threshold(30, 2, 2)
    threads = [threading.Thread(target=repeat, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    gc.set_threshold(700, 10, 10)
    return f"{sum(thread.is_alive() for thread in threads)} threads wait"


PROGRAMS = {
    raising: list(WORK),
    calling: list(WORK),
    collecting: ["call", "call_with_tensor", "backward"],
}
"""The programs, and what is worked at in each of them."""


def main() -> None:
    with torchweft.cluster(workers=1):
        rpc.rpc_sync("worker0", echo, args=(1,))
        for program, works in PROGRAMS.items():
            for work in works:
                print(program.__name__, work, program(WORK[work]), flush=True)
    print("left", flush=True)


if __name__ == "__main__":
    main()
