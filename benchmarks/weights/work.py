"""A trainer whose weights change as by Adam, and samplers that use them without a pause."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from typing import NamedTuple

import torch
from torch import nn

from torchweft import rpc
from torchweft.engine.worker.current import current
from torchweft.errors import WorkerLost
from torchweft.rpc import RRef
from torchweft.weights import Publisher, Subscriber

WIDTH = 1024
BATCH = 4
RATE = 1e-6
LIMIT_S = 120.0


def model_of(size_bytes: int) -> nn.Sequential:
    """Returns layers that have about so many bytes in bfloat16."""
    layers = max(1, round(size_bytes / (2 * WIDTH * WIDTH)))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.02)
    return model


class Trainer:
    """Weights in float32, and the steps of Adam on random gradients."""

    def __init__(self, size_bytes: int, deltas: int = 0) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = model_of(size_bytes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE)
        self.publisher = Publisher(self.model, dtype=torch.bfloat16, deltas=deltas)
        self.size_bytes = sum(2 * each.numel() for each in self.model.parameters())

    def reference(self) -> RRef[Publisher]:
        return RRef(self.publisher)

    def step(self) -> int:
        for weight in self.model.parameters():
            weight.grad = torch.randn_like(weight)
        self.optimizer.step()
        return self.publisher.publish()

    def sums(self) -> list[int]:
        """Returns the checksum of each tensor, as it is published."""
        return [_sum(each.detach().to(torch.bfloat16)) for each in self.model.parameters()]


def _sum(tensor: torch.Tensor) -> int:
    return int(tensor.contiguous().view(torch.int16).to(torch.int64).sum())


class Clock:
    """The time of the thread that makes it, as if no thread of the process had to wait for a core.

    So the load of the machine makes no difference. The thread is stopped while another one of its
    process has the interpreter's lock, as a fetch might. That one runs meanwhile, or waits for a
    core itself. So a stop counts as far as other threads have run, and have not waited for a core.
    """

    def __init__(self) -> None:
        self._last = _Reading.now()

    def lap_s(self) -> float:
        """Returns the seconds since the last call."""
        now, last = _Reading.now(), self._last
        self._last = now
        own_s = now.own_s - last.own_s
        others_s = now.all_s - last.all_s - own_s
        waits_s = {
            thread: (waited_ns - last.waited_ns.get(thread, 0)) / 1e9
            for thread, waited_ns in now.waited_ns.items()
        }
        own_wait_s = waits_s.pop(str(threading.get_native_id()))
        # Not their sum: a thread that waits for the lock asks for a core every few milliseconds.
        waited_s = max(own_wait_s, sum(waits_s.values()))
        stopped_s = now.wall_s - last.wall_s - own_s - waited_s
        return own_s + max(0.0, min(stopped_s, others_s))


class _Reading(NamedTuple):
    """Clocks of this thread and its process, and the waits of each thread for a core."""

    wall_s: float
    own_s: float
    all_s: float
    waited_ns: dict[str, int]

    @classmethod
    def now(cls) -> _Reading:
        waited_ns = {}
        for thread in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
                    waited_ns[thread] = int(file.read(100).split()[1])
            except OSError:
                pass  # It has ended.
        return cls(time.perf_counter(), time.thread_time(), time.process_time(), waited_ns)


class Batch(NamedTuple):
    """A batch, by the ``Clock`` of its thread.

    Attributes:
        seconds: How long it took, without the update.
        update_s: How long the update before it took, if that put a version in.
        is_fetching: Whether a version was fetched meanwhile.
    """

    seconds: float
    update_s: float
    is_fetching: bool


class Pauses(NamedTuple):
    """The batches of a sampler, by its ``Clock``.

    Attributes:
        batches: How many.
        fetching: During how many of them a version was fetched.
        batch_s: Median seconds of a batch during which none was.
        longest_alone_s: The longest of those.
        longest_fetching_s: The longest of the others.
        longest_update_s: Seconds of the longest update that put a version in.
        versions: Versions that were put in.
        deltas: Those of them that came as deltas.
    """

    batches: int
    fetching: int
    batch_s: float
    longest_alone_s: float
    longest_fetching_s: float
    longest_update_s: float
    versions: int
    deltas: int


class Sampler:
    """Runs batches in a thread, and updates its weights between two of them."""

    def __init__(self, publisher: RRef[Publisher], size_bytes: int) -> None:
        torch.set_num_threads(1)
        self.model = model_of(size_bytes).to(torch.bfloat16)
        self.subscriber = Subscriber(publisher, self.model)
        self._inputs = torch.randn(BATCH, WIDTH, dtype=torch.bfloat16)
        self._is_ending = False
        self._batches: list[Batch] = []
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def begin(self) -> int:
        version = self.subscriber.update(LIMIT_S)
        self._thread.start()
        return version

    def _run(self) -> None:
        clock = Clock()
        while not self._is_ending:
            before = self.subscriber.version
            clock.lap_s()
            after = self.subscriber.update()
            update_s = clock.lap_s() if after != before else 0.0
            is_fetching = self._is_fetching()
            clock.lap_s()
            with torch.no_grad():
                self.model(self._inputs)
            seconds = clock.lap_s()
            self._batches.append(Batch(seconds, update_s, is_fetching or self._is_fetching()))

    def _is_fetching(self) -> bool:
        fetch = self.subscriber._fetch
        return fetch is not None and fetch.is_alive()

    def await_version(self, version: int) -> None:
        """Returns when the weights are in use; batches go on."""
        end_s = time.monotonic() + LIMIT_S
        while self.subscriber.version != version:
            if time.monotonic() > end_s:
                raise TimeoutError(f"version {version} has not come")
            time.sleep(0.002)

    def end(self) -> tuple[int, list[int]]:
        """Stops the batches; returns the version, and the checksum of each tensor."""
        self._is_ending = True
        self._thread.join()
        self.subscriber.update()
        return self.subscriber.version, [_sum(each.detach()) for each in self.model.parameters()]

    def pauses(self) -> Pauses:
        batches, counts = self._batches[:], self.subscriber.statistics()
        alone = [each.seconds for each in batches if not each.is_fetching]
        fetching = [each.seconds for each in batches if each.is_fetching]
        return Pauses(
            len(batches),
            len(fetching),
            statistics.median(alone),
            max(alone),
            max(fetching, default=0.0),
            max(each.update_s for each in batches),
            counts.versions,
            counts.deltas,
        )

    def close(self) -> None:
        self.subscriber.close()


def forbid(peer: str) -> None:
    """Makes tensors for a peer travel over the connection of its messages."""
    ways = current().find(peer).ways
    # Behind the message: only there do the counters follow the bytes as they come.
    for name in ("shm", "cma", "striped"):
        ways.give_up(name, "measured as between hosts")


def fill_and_publish(trainer: RRef[Trainer]) -> None:
    """Publishes a version of which every value is its number."""
    found = trainer.local_value()
    with torch.no_grad():
        for weight in found.model.parameters():
            weight.fill_(found.publisher.version + 1)
    found.publisher.publish()


class Follower:
    """Weights of which all values are the number of their version."""

    def __init__(self, publisher: RRef[Publisher], size_bytes: int) -> None:
        self._model = model_of(size_bytes).to(torch.bfloat16)
        self._subscriber = Subscriber(publisher, self._model)

    def update(self) -> tuple[int, bool]:
        """Takes over a version, if the publisher still lives or one has arrived.

        Returns:
            The version in use, and whether all of the values are its own.
        """
        try:
            self._subscriber.update(LIMIT_S)
        except WorkerLost:
            pass
        version = self._subscriber.version
        return version, all(bool((each == version).all()) for each in self._model.parameters())

    def close(self) -> None:
        self._subscriber.close()


def kill_in_transfer(
    worker: str, others: list[str], pid: int, size_bytes: int, share: float
) -> list[tuple[int, bool]]:
    """Kills a trainer when a share of a version has arrived here, and about as much at others.

    Returns:
        For this worker and each of the others: the version in use after that, and whether all of
        its values are its own.
    """
    trainer = rpc.remote(worker, Trainer, (size_bytes,))
    publisher = trainer.rpc_sync().reference()
    own = Follower(publisher, size_bytes)
    followers = rpc.actors(others, Follower, publisher, size_bytes)
    rpc.rpc_sync(worker, fill_and_publish, (trainer,))
    assert [own.update(), *followers.rpc_sync(Follower.update)] == [(1, True)] * (1 + len(others))
    enough = rpc.traffic().bytes_received + share * size_bytes
    publishing = rpc.rpc_async(worker, fill_and_publish, (trainer,))
    end_s = time.monotonic() + LIMIT_S
    while rpc.traffic().bytes_received < enough and time.monotonic() < end_s:
        time.sleep(0)
    os.kill(pid, signal.SIGKILL)
    try:
        publishing.wait()
    except WorkerLost:
        pass
    found = [own.update(), *followers.rpc_sync(Follower.update)]
    own.close()
    followers.rpc_sync(Follower.close)
    return found
