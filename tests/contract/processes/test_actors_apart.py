"""Actors and streams in groups of their own: lost workers, and strict ones."""

from __future__ import annotations

import os
import signal
from itertools import islice
from pathlib import Path

import pytest

import torchweft
from tests.contract.processes import generator_functions as functions
from tests.contract.processes.functions import options, wait_until
from tests.contract.processes.generator_functions import Counter
from torchweft import checkpoint, rpc
from torchweft.errors import NotAllowed, WorkerLost
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors")


def test_a_lost_actor_is_replaced_with_its_state(nursery: Nursery, tmp_path: Path) -> None:
    with torchweft.cluster(
        workers=2, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        counters = rpc.actors(["worker0", "worker1"], Counter, 0)
        counters[0].rpc_sync().add(3)
        counters[1].rpc_sync().add(5)
        checkpoint.save(tmp_path, {"counters": counters.named()}, step=1)
        assert counters.rpc_sync(Counter.add) == [4, 6]
        numbers = rpc.stream("worker1", functions.count_to, (10**9,))
        one_by_one = rpc.stream("worker1", functions.count_to, (10**9,), ahead=1)
        assert next(numbers) == next(one_by_one) == 0
        os.kill(group.pids["worker1"], signal.SIGKILL)
        for stream in (numbers, one_by_one):
            with pytest.raises(WorkerLost, match="worker1"):
                for _ in stream:
                    pass
        with pytest.raises(WorkerLost, match="worker1"):
            counters.rpc_sync(Counter.add)
        counters.replace(1, "worker0")
        checkpoint.restore(
            tmp_path, {"counters": {"1": counters[1]}}, strict=False, random_states=False
        )
        assert counters[1].rpc_sync().add() == 6
        assert counters.rpc_sync(Counter.where) == ["worker0", "worker0"]


def test_the_loss_of_a_stream_is_told_apart_and_the_others_go_on(nursery: Nursery) -> None:
    with torchweft.cluster(
        workers=2, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        streams = [rpc.stream(name, functions.count_on, (10**9,)) for name in group.names]
        lost: list[tuple[str, Exception]] = []
        with rpc.merged(
            streams, failed=lambda stream, error: lost.append((stream.worker_name, error))
        ) as found:
            seen: set[str] = set()

            def see() -> bool:
                seen.add(next(found)[0].worker_name)
                return seen == set(group.names)

            wait_until(see, lambda: f"only {seen} came")
            os.kill(group.pids["worker1"], signal.SIGKILL)
            wait_until(lambda: bool(next(found)) and bool(lost), lambda: "nothing is lost")
            ((name, error),) = lost
            assert (name, type(error)) == ("worker1", WorkerLost)
            assert found.streams == streams[:1]
            numbers = [value for _, value in islice(found, 5)]
            assert numbers == list(range(numbers[0], numbers[0] + 5))
            again = rpc.stream("worker0", functions.count_on, (3,))
            found.add(again)
            wait_until(lambda: next(found)[0] is again, lambda: "it is not among them")


def test_a_generator_ends_with_its_consumer(nursery: Nursery) -> None:
    with torchweft.cluster(
        workers=2, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        rpc.rpc_async("worker1", functions.take_one_and_wait, ("worker0",), timeout=0)
        wait_until(lambda: 2 in rpc.rpc_sync("worker0", functions.seen), lambda: "no stream")
        os.kill(group.pids["worker1"], signal.SIGKILL)
        wait_until(
            lambda: "closed" in rpc.rpc_sync("worker0", functions.seen), lambda: "not closed"
        )
        assert rpc.rpc_sync("worker0", functions.seen) == [0, 1, 2, "closed"]
        rpc.rpc_sync("worker0", functions.go_on)


def test_a_group_ends_with_open_streams_and_strict_workers_have_them(nursery: Nursery) -> None:
    strict = options(strict=True, callables=(Counter, functions.seen))  # type: ignore[arg-type]
    with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=strict):
        counter = rpc.remote("worker0", Counter, (1,))
        assert list(rpc.stream(counter, Counter.values, (2,))) == [2, 3]
        with pytest.raises(NotAllowed):
            rpc.stream("worker0", functions.count_on, (3,))
        numbers = rpc.stream("worker0", functions.count_to, (10**9,))
        assert next(numbers) == 0
    with pytest.raises(Exception, match=r"worker0|shut|left"):
        for _ in numbers:
            pass
