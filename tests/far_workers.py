"""Workers on separate hosts, and their functions for the tests of failing networks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.contract.processes.functions import wait_until
from tests.contract.processes.hosts import Host, enter
from tests.internal import overridden
from tests.open_workers import OpenWorkers
from torchweft import rpc, secret
from torchweft.errors import RendezvousError, WorkerLost

STORE_PORT = 29_400
LIMIT_S = 15.0

_futures: dict[str, Any] = {}
_ended_s: dict[str, float] = {}
_told: list[tuple[WorkerLost, float]] = []
_begun: set[str] = set()
_gates: dict[str, threading.Event] = {}
_counter = 0
_lock = threading.Lock()


class Ending(NamedTuple):
    """The outcome and time of a call's end, by the clock that a machine's processes share."""

    value: Any
    error: BaseException | None
    at_s: float


class FarWorkers:
    """A closed group with a worker on each host; ``worker0`` hosts the rendezvous.

    Args:
        warm: Starts the processes.
        hosts: One for each worker.
        folder: Gets the file with the secret.
        settings: Environment variables of all workers.
        options: Options of all workers.
    """

    def __init__(
        self,
        warm: OpenWorkers,
        hosts: list[Host],
        folder: Path,
        settings: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._warm = warm
        self.names = [f"worker{rank}" for rank in range(len(hosts))]
        self._alive = set(self.names)
        secret_file = folder / "secret"
        if not secret_file.exists():
            secret.write_new(secret_file)
        meeting = f"tcp://{hosts[0].address}:{STORE_PORT}"
        environment = {
            "WEFT_SECRET_FILE": str(secret_file),
            # No CMA: a user's processes may read each other's memory even across namespaces.
            **overridden(settings, CMA_FROM_BYTES=1 << 60, STRIPED_FROM_BYTES=1 << 19),
        }
        try:
            for rank, host in enumerate(hosts):
                place = (host.namespace, environment, rank, len(hosts))
                told = {"listen": host.address, "init_method": meeting, "init_timeout": LIMIT_S}
                warm.begin(self.names[rank], join, *place, {**told, **options})
            for name in self.names:
                warm.result(name)
        except BaseException:
            self.close()
            raise

    def __getattr__(self, action: str) -> Any:
        return getattr(self._warm, action)

    def kill(self, name: str) -> None:
        self._alive.discard(name)
        self._warm.kill(name)

    def call_each_other(self) -> None:
        """Has each of two workers make a call that the other one does not answer."""
        first, second = self.names
        for here, there in ((first, second), (second, first)):
            self.do(here, begin, "held", there, hold, here)
        for here, there in ((first, second), (second, first)):
            self.do(here, wait_begun, there)

    def close(self) -> None:
        for name in self._alive:
            self._warm.kill(name)


@contextlib.contextmanager
def far_workers(*args: Any, **options: Any) -> Iterator[FarWorkers]:
    made = FarWorkers(*args, **options)
    try:
        yield made
    finally:
        made.close()


# Run by the workers


def join(
    namespace: str, environment: dict[str, str], rank: int, size: int | None, told: dict[str, Any]
) -> None:
    if namespace:
        enter(namespace)
    os.environ.update(environment)
    options = rpc.RpcBackendOptions(**{"rpc_timeout": 0, **told})
    rpc.init_rpc(rank=rank, world_size=size, rpc_backend_options=options)
    rpc.on_worker_lost(lambda error: _told.append((error, time.monotonic())))


def try_to_join(
    namespace: str, environment: dict[str, str], rank: int, size: int | None, told: dict[str, Any]
) -> tuple[float, Exception | None]:
    """Joins; returns how many seconds that took, and the error, if any."""
    start_s = time.monotonic()
    try:
        join(namespace, environment, rank, size, told)
    except RendezvousError as error:
        return time.monotonic() - start_s, error
    return time.monotonic() - start_s, None


def leave() -> None:
    rpc.shutdown(timeout=LIMIT_S)


def begin(key: str, to: str, function: Any, *args: Any) -> None:
    """Begins a call; ``ending`` says how it ended."""
    future = rpc.rpc_async(to, function, args=args)
    future.add_done_callback(lambda _: _ended_s.__setitem__(key, time.monotonic()))
    _futures[key] = future


def begin_doubling(key: str, to: str, size_bytes: int) -> None:
    """Begins a call with a large tensor; its value is whether the answer is right."""
    sent = torch.arange(size_bytes, dtype=torch.int32).to(torch.uint8)
    begin(key, to, double, sent)
    _futures[key] = _futures[key].then(lambda done: torch.equal(done.wait(), sent * 2))


def has_ended(key: str) -> bool:
    return key in _ended_s


def ending(key: str, limit_s: float = LIMIT_S) -> Ending:
    """Waits for a call to end; fails if it does not."""
    wait_until(lambda: key in _ended_s, lambda: f"call {key!r} has not ended", limit_s)
    try:
        return Ending(_futures[key].wait(), None, _ended_s[key])
    except Exception as error:
        return Ending(None, error, _ended_s[key])


def call(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args)


def losses(count: int) -> list[tuple[WorkerLost, float]]:
    """Waits until the program was told of ``count`` losses; returns all, with their times."""
    wait_until(lambda: len(_told) >= count, lambda: f"told of {_told}, not of {count}", LIMIT_S)
    return _told


def states() -> dict[str, str]:
    return {health.worker.name: health.state.name for health in rpc.health()}


def states_of_others() -> dict[str, str]:
    return {name: state for name, state in states().items() if state != "SELF"}


def hold(key: str) -> str:
    """Blocks until ``release``."""
    gate = _gates.setdefault(key, threading.Event())
    _begun.add(key)
    gate.wait()
    return key


def release(key: str) -> None:
    _gates.setdefault(key, threading.Event()).set()


def wait_begun(key: str) -> None:
    wait_until(lambda: key in _begun, lambda: f"{key!r} has not begun", LIMIT_S)


def keep_interpreter(key: str, seconds: int) -> str:
    """Keeps all other threads of this process from running Python."""
    _begun.add(key)
    ctypes.PyDLL(None).sleep(seconds)
    return key


def compute(key: str, seconds: float) -> str:
    _begun.add(key)
    matrix, end_s = torch.rand(1500, 1500), time.monotonic() + seconds
    while time.monotonic() < end_s:
        matrix = matrix @ matrix
    return key


def count() -> int:
    global _counter
    with _lock:
        _counter += 1
        return _counter


def counted() -> int:
    return _counter


def wait_counted(least: int) -> int:
    wait_until(lambda: _counter >= least, lambda: f"counted {_counter}, not {least}", LIMIT_S)
    return _counter


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


# A worker that calls continuously


class Caller:
    """Calls ``count`` on another worker, many calls at a time, until ``end``."""

    IN_FLIGHT = 20

    def __init__(self, to: str) -> None:
        self._to = to
        self._is_ending = False
        self._answers: list[int] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_ending:
                calls = [rpc.rpc_async(self._to, count) for _ in range(self.IN_FLIGHT)]
                self._answers += [call.wait() for call in calls]
        except Exception as error:
            self._error = error

    def end(self) -> list[int]:
        self._is_ending = True
        self._thread.join(LIMIT_S)
        if self._thread.is_alive():
            raise TimeoutError("calls do not end")
        if self._error is not None:
            raise self._error
        return self._answers


_callers: dict[str, Caller] = {}


def begin_counting(to: str) -> None:
    _callers[to] = Caller(to)


def end_counting(to: str) -> list[int]:
    return _callers.pop(to).end()


def double_all(to: str, sizes_bytes: list[int], rounds: int) -> int:
    """Doubles tensors of all sizes at once on another worker; returns how many were wrong."""
    wrong = 0
    for number in range(rounds):
        chance = torch.Generator().manual_seed(number)
        sent = [
            torch.randint(0, 100, (size,), dtype=torch.uint8, generator=chance)
            for size in sizes_bytes
        ]
        calls = [rpc.rpc_async(to, double, args=(tensor,)) for tensor in sent]
        for tensor, answer in zip(sent, calls, strict=True):
            wrong += not torch.equal(answer.wait(), tensor * 2)
    return wrong


def count_many(to: str, calls: int, at_once: int) -> int:
    """Makes small calls; returns how many different answers there were."""
    answers: set[int] = set()
    for begin_at in range(0, calls, at_once):
        made = [rpc.rpc_async(to, count) for _ in range(min(at_once, calls - begin_at))]
        answers.update(each.wait() for each in made)
    return len(answers)
