"""Open groups: workers join, leave, die and return while others work."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.processes.functions import wait_until
from tests.open_workers import OpenWorkers
from torchweft import rpc
from torchweft.errors import (
    DuplicateName,
    OwnerLost,
    RendezvousError,
    ShutdownError,
    UnknownWorker,
    WorkerLost,
)
from torchweft.observe.metrics import read

pytestmark = pytest.mark.timeout(60)
kept: dict[str, Any] = {}


class Group:
    """An open group for one test; ``close`` kills its workers."""

    def __init__(self, warm: OpenWorkers, path: Path) -> None:
        self._warm = warm
        self._method = f"file://{path}"
        self.names: list[str] = []

    def join(self, name: str, rank: int, world_size: int | None = None) -> None:
        self.begin_join(name, rank, world_size)
        self._warm.result(name)

    def begin_join(self, name: str, rank: int, world_size: int | None = None) -> None:
        self.names.append(name)
        self._warm.begin(name, join, name, rank, world_size, self._method)

    def __getattr__(self, action: str) -> Any:
        return getattr(self._warm, action)

    def close(self) -> None:
        for name in set(self.names):
            self._warm.kill(name)


@pytest.fixture
def group(warm: OpenWorkers, tmp_path: Path) -> Iterator[Group]:
    made = Group(warm, tmp_path / "store")
    yield made
    made.close()


# What the workers run


def join(name: str, rank: int, world_size: int | None, method: str) -> None:
    options = rpc.RpcBackendOptions(init_method=method, init_timeout=10.0, rpc_timeout=10.0)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def names() -> list[tuple[str, int]]:
    return [(info.name, info.id) for info in rpc.get_worker_infos()]


def call(to: str) -> float:
    return float(rpc.rpc_sync(to, torch.add, (torch.ones(2), 1)).sum())


def call_through(first: str, second: str) -> float:
    return rpc.rpc_sync(first, call, (second,))


def leave(timeout: float = 10.0) -> float:
    start_s = time.monotonic()
    rpc.shutdown(timeout=timeout)
    return time.monotonic() - start_s


def keep_remote(to: str, value: int) -> None:
    kept["reference"] = rpc.remote(to, Owned, (value,))
    kept["reference"].rpc_sync().get()


def ask_kept() -> int:
    value: int = kept["reference"].rpc_sync().get()
    return value


def hand_kept_to(to: str) -> None:
    rpc.rpc_sync(to, take, (kept["reference"],))


def take(reference: rpc.RRef[Any]) -> None:
    kept["reference"] = reference


class Owned:
    alive = 0

    def __init__(self, value: int) -> None:
        self._value = value
        Owned.alive += 1

    def get(self) -> int:
        return self._value

    def __del__(self) -> None:
        Owned.alive -= 1


def count_owned() -> int:
    return Owned.alive


def wait_until_none_is_owned() -> None:
    wait_until(lambda: Owned.alive == 0, lambda: f"{Owned.alive} are left")


def begin_slow_call(to: str, seconds: float, name: str = "sleep_and_say") -> None:
    kept["future"] = rpc.rpc_async(to, globals()[name], (seconds,))


def sleep_and_say(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


async def await_and_say(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


@rpc.functions.async_execution
def say_in_future(seconds: float) -> torch.futures.Future[int]:
    future = torch.futures.Future[int]()
    threading.Timer(seconds, lambda: future.set_result(os.getpid())).start()
    return future


def slow_result() -> int:
    pid: int = kept["future"].wait()
    return pid


def note_caller(name: str) -> None:
    kept[name] = "calls"


def wait_for_callers(*callers: str) -> None:
    wait_until(lambda: set(callers) <= kept.keys(), lambda: f"have called: {kept}")


def call_all_the_time(to: str) -> int:
    """Calls until the callee is gone, from two threads; returns the number of answers."""
    rpc.rpc_sync(to, note_caller, (rpc.get_worker_info().name,))
    answers, wrong = [1, 0], []

    def run(place: int) -> None:
        try:
            while True:
                assert call(to) == 4.0
                answers[place] += 1
        except (WorkerLost, UnknownWorker):
            pass
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong, wrong
    return sum(answers)


def peers_in_metrics() -> set[str]:
    """Returns the workers with which this worker has exchanged bytes, by its metrics."""
    points = [point.attributes for each in read() for point in each.points]
    return {each["weft.peer"] for each in points if "weft.peer" in each}


# The tests


def test_those_that_come_and_those_that_are_there_know_each_other(group: Group) -> None:
    group.join("a", 0)
    assert group.do("a", names) == [("a", 0)]
    missing = "could not find destination 'b'.*'a' \\(0\\).*others may still join"
    with pytest.raises(UnknownWorker, match=missing):
        group.do("a", call, "b")
    group.join("c", 7)
    group.join("b", 1)
    for name in "abc":
        assert group.do(name, names) == [("a", 0), ("b", 1), ("c", 7)]
    assert group.do("a", call, "b") == 4.0
    assert group.do("b", call, "a") == 4.0
    assert group.do("c", call_through, "a", "b") == 4.0


def test_many_join_at_once(group: Group) -> None:
    everybody = [f"w{rank}" for rank in range(6)]
    for rank, name in enumerate(everybody):
        group.begin_join(name, rank)
    for name in everybody:
        group.result(name)
    for name in everybody:
        assert group.do(name, names) == [(each, rank) for rank, each in enumerate(everybody)]
        for other in everybody:
            assert group.do(name, call, other) == 4.0


def test_all_leave_at_once(group: Group) -> None:
    for rank, name in enumerate("abcd"):
        group.join(name, rank)
    for name in "abcd":
        group.begin(name, leave)
    assert max(group.result(name) for name in "abcd") < 5.0


def test_the_first_leaves_and_the_others_work_on(group: Group) -> None:
    for rank, name in enumerate("abc"):
        group.join(name, rank)
    group.do("b", call, "a")
    group.do("a", leave)
    for name in "bc":
        assert group.do(name, names) == [("b", 1), ("c", 2)]
        with pytest.raises(UnknownWorker, match="could not find destination 'a'"):
            group.do(name, call, "a")
    assert group.do("b", call, "c") == 4.0
    group.join("d", 3)
    assert group.do("d", names) == [("b", 1), ("c", 2), ("d", 3)]
    assert group.do("c", call, "d") == 4.0


def test_what_a_leaver_held_is_dropped_and_what_it_owned_is_lost(group: Group) -> None:
    group.join("a", 0)
    group.join("b", 1)
    group.do("b", keep_remote, "a", 5)
    group.do("a", keep_remote, "b", 6)
    assert group.do("a", count_owned) == 1
    group.do("b", leave)
    group.do("a", wait_until_none_is_owned)
    with pytest.raises(OwnerLost, match="'b' \\(rank 1\\) has left the group"):
        group.do("a", ask_kept)


def test_a_reference_to_a_value_of_one_that_left_before_its_receiver_came(group: Group) -> None:
    group.join("a", 0)
    group.join("b", 1)
    group.do("a", keep_remote, "b", 5)
    group.do("b", leave)
    group.join("c", 2)
    group.do("a", hand_kept_to, "c")
    with pytest.raises(OwnerLost, match="has left the group"):
        group.do("c", ask_kept)
    assert group.do("c", call, "a") == 4.0
    group.do("c", leave)


@pytest.mark.parametrize("function", ["sleep_and_say", "await_and_say", "say_in_future"])
def test_calls_that_reached_a_leaver_are_answered(group: Group, function: str) -> None:
    group.join("a", 0)
    group.join("b", 1)
    group.do("a", begin_slow_call, "b", 0.5, function)
    assert group.do("b", leave) > 0.3
    assert isinstance(group.do("a", slow_result), int)


def test_a_leaver_waits_for_its_own_calls(group: Group) -> None:
    group.join("a", 0)
    group.join("b", 1)
    group.do("b", begin_slow_call, "a", 0.5)
    assert group.do("b", leave) > 0.3
    assert isinstance(group.do("b", slow_result), int)


def test_one_that_joins_meanwhile_is_told_of_the_leaver(group: Group) -> None:
    """The joiner finds the leaver in the store, and must not take it for a lost worker."""
    group.join("a", 0)
    group.join("b", 1)
    group.do("b", begin_slow_call, "a", 2.0)
    group.begin("a", leave)
    wait_until(lambda: group.do("b", names) == [("b", 1)], lambda: "nobody has left")
    group.join("c", 2)
    wait_until(lambda: group.do("c", names) == [("b", 1), ("c", 2)], lambda: "c knows of a")
    with pytest.raises(UnknownWorker):
        group.do("c", call, "a")
    assert isinstance(group.do("b", slow_result), int)
    group.result("a")


def test_a_leaver_under_fire_gets_away(group: Group) -> None:
    for rank, name in enumerate("abc"):
        group.join(name, rank)
    for name in "bc":
        group.begin(name, call_all_the_time, "a")
    group.do("a", wait_for_callers, "b", "c")
    assert group.do("a", leave) < 5.0
    assert sum(group.result(name) for name in "bc") > 0
    assert group.do("b", call, "c") == 4.0


def test_time_is_up_for_a_leaver(group: Group) -> None:
    group.join("a", 0)
    group.join("b", 1)
    group.do("a", begin_slow_call, "b", 1.0)
    with pytest.raises(
        ShutdownError, match=r"shutdown of worker 'b' took longer than 0\.3 s; it had calls"
    ):
        group.do("b", leave, 0.3)


def test_one_that_left_comes_back(group: Group) -> None:
    group.join("a", 0)
    group.join("b", 1)
    group.do("a", keep_remote, "b", 1)
    for _ in range(3):
        group.do("b", leave)
        group.join("b", 1)
        for name in "ab":
            assert group.do(name, names) == [("a", 0), ("b", 1)]
        assert group.do("a", call, "b") == 4.0
        assert group.do("b", call, "a") == 4.0
        with pytest.raises(OwnerLost):
            group.do("a", ask_kept)
        group.do("a", keep_remote, "b", 2)
        assert group.do("a", ask_kept) == 2


def test_metrics_have_no_bytes_of_a_worker_that_has_left(group: Group) -> None:
    group.join("a", 0)
    for rank, end in ((1, "leave"), (2, "die")):
        name = f"b{rank}"
        group.join(name, rank)
        assert group.do(name, call, "a") == 4.0
        assert group.do("a", peers_in_metrics) == {name}
        if end == "leave":
            group.do(name, leave)
        else:
            group.kill(name)
            with pytest.raises(WorkerLost):
                group.do("a", call, name)
        assert group.do("a", peers_in_metrics) == set()


def test_one_that_died_comes_back(group: Group) -> None:
    for rank, name in enumerate("abc"):
        group.join(name, rank)
    group.do("a", keep_remote, "b", 1)
    group.do("b", keep_remote, "a", 1)
    group.kill("b")
    with pytest.raises(WorkerLost, match="'b'"):
        group.do("a", call, "b")
    group.do("a", wait_until_none_is_owned)
    group.join("b", 1)
    for name in "abc":
        assert group.do(name, names) == [("a", 0), ("b", 1), ("c", 2)]
    assert group.do("a", call, "b") == 4.0
    assert group.do("c", call, "b") == 4.0
    assert group.do("b", call, "c") == 4.0
    with pytest.raises(OwnerLost):
        group.do("a", ask_kept)


def test_a_death_that_nobody_saw_is_found_by_who_comes_next(group: Group) -> None:
    group.join("a", 0)
    group.join("b", 1)
    group.kill("a")
    group.join("c", 2)
    assert group.do("c", names) == [("b", 1), ("c", 2)]
    assert group.do("c", call, "b") == 4.0


@pytest.mark.parametrize(("name", "rank"), [("a", 5), ("d", 0)])
def test_a_name_or_rank_that_is_taken(group: Group, name: str, rank: int) -> None:
    group.join("a", 0)
    group.join("b", 1)
    group.names.append("other")
    with pytest.raises(DuplicateName, match=r"not unique.*'a' \(rank 0\) is there already"):
        group.do("other", join, name, rank, None, group._method)
    assert group.do("b", call, "a") == 4.0
    group.join("e", 6)
    for each in "abe":
        assert group.do(each, names) == [("a", 0), ("b", 1), ("e", 6)]


def test_a_closed_group_takes_nobody_in(group: Group) -> None:
    group.begin_join("a", 0, 2)
    group.begin_join("b", 1, 2)
    group.result("a")
    group.result("b")
    with pytest.raises(RendezvousError, match="mixes statically and dynamically"):
        group.join("c", 2)
    assert group.do("a", names) == [("a", 0), ("b", 1)]


@pytest.mark.parametrize("is_late", [False, True])
def test_an_open_group_cannot_be_closed(group: Group, is_late: bool) -> None:
    group.join("a", 0)
    group.begin_join("b", 0, 2)
    if not is_late:
        group.begin_join("c", 1, 2)
    for name in "bc":
        with pytest.raises(RendezvousError, match="mixes statically and dynamically"):
            group.result(name)
        if is_late and name == "b":
            group.begin_join("c", 1, 2)
