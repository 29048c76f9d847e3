"""``barrier`` and ``all_gather``: of all workers, of some, repeated, and with missing workers.

The driver has rank 0, so it leads the gatherings that it takes part in; ``worker0`` leads those of
the workers alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.contract.processes.functions import (
    collect,
    give,
    identity,
    keep,
    open_gate,
    pass_gate,
    raised_by,
    wait_until,
)
from tests.remains import count_gatherings
from torchweft import rpc
from torchweft.errors import (
    ArgumentTypeError,
    CallError,
    CallTimeout,
    ConfigurationError,
    SerializationError,
    UnknownWorker,
)

pytestmark = pytest.mark.keeps("threads", "descriptors")
EVERYBODY = ["driver", "worker0", "worker1"]
WORKERS = EVERYBODY[1:]
SHORT_S = 0.1


def gather_often(value: Any, workers: list[str], times: int) -> list[dict[str, Any]]:
    return [rpc.all_gather((value, number), workers) for number in range(times)]


def gather_in_threads(workers: list[str] | None, threads: int, times: int) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(times):
                rpc.barrier(workers)
                values = rpc.all_gather(rpc.get_worker_info().id, workers)
                assert values == {name: rpc.get_worker_info(name).id for name in values}
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


def gather_lock(workers: list[str] | None) -> None:
    """Gathers a value that cannot be sent."""
    rpc.all_gather(threading.Lock(), workers)


@pytest.fixture(autouse=True)
def nothing_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "group" in request.fixturenames:
        for name in EVERYBODY:
            wait_until(
                lambda name=name: rpc.rpc_sync(name, count_gatherings) == 0,  # type: ignore[misc]
                lambda name=name: f"{name} still knows a gathering",  # type: ignore[misc]
            )


@pytest.mark.usefixtures("group")
def test_everybody_gets_the_values_of_all() -> None:
    theirs = [rpc.rpc_async(name, rpc.all_gather, args=({"from": name},)) for name in WORKERS]
    mine = rpc.all_gather(torch.ones(3))
    expected = {name: {"from": name} for name in WORKERS}
    for values in (mine, *(call.wait() for call in theirs)):
        assert torch.equal(values.pop("driver"), torch.ones(3))
        assert values == expected


@pytest.mark.usefixtures("group")
def test_references_are_handed_on() -> None:
    theirs = [rpc.rpc_async(name, rpc.all_gather, args=(name,)) for name in WORKERS]
    mine = rpc.all_gather(rpc.RRef(5))
    assert mine["driver"].local_value() == 5
    assert [call.wait()["driver"].owner_name() for call in theirs] == ["driver"] * 2


@pytest.mark.usefixtures("group")
def test_nobody_passes_before_all_have_come() -> None:
    passing = [rpc.rpc_async(name, rpc.barrier) for name in WORKERS]
    wait_until(lambda: count_gatherings() == 1, lambda: "nobody has come")
    time.sleep(SHORT_S)
    assert not any(call.done() for call in passing)
    rpc.barrier()
    assert [call.wait() for call in passing] == [None, None]


@pytest.mark.usefixtures("group")
def test_some_gather_while_others_do_something_else() -> None:
    some = ["driver", "worker1"]
    theirs = [rpc.rpc_async(name, gather_often, args=(name, WORKERS, 20)) for name in WORKERS]
    with_mine = rpc.rpc_async("worker1", gather_often, args=("worker1", some, 20))
    # Any order, any way to name a worker.
    mine = [rpc.all_gather(("driver", number), [2, rpc.get_worker_info()]) for number in range(20)]
    assert mine == [{name: (name, number) for name in some} for number in range(20)]
    assert with_mine.wait() == mine
    expected = [{name: (name, number) for name in WORKERS} for number in range(20)]
    assert [call.wait() for call in theirs] == [expected, expected]
    assert rpc.all_gather(1, ["driver"]) == {"driver": 1}


@pytest.mark.usefixtures("group")
def test_several_threads_gather_at_the_same_time() -> None:
    # More waits than a worker runs calls at a time: a waiting call holds no place.
    calls = [rpc.rpc_async(name, gather_in_threads, args=(None, 4, 10)) for name in WORKERS]
    gather_in_threads(None, 4, 10)
    for call in calls:
        call.wait()
    waiting = [rpc.rpc_async("worker0", rpc.barrier, args=(WORKERS,)) for _ in range(6)]
    wait_until(lambda: rpc.rpc_sync("worker0", count_gatherings) == 6, lambda: "they did not come")
    others = [rpc.rpc_async("worker1", rpc.barrier, args=(WORKERS,)) for _ in range(6)]
    for call in [*waiting, *others]:
        call.wait()


@pytest.mark.parametrize("waiting", ["driver", "worker0"])
@pytest.mark.usefixtures("group")
def test_who_waits_too_long_gives_up(waiting: str) -> None:
    missing = "worker1"
    some = [waiting, missing]
    error = raised_by(
        lambda: rpc.rpc_sync(waiting, rpc.all_gather, args=(1, some), kwargs={"timeout": SHORT_S})
    )
    assert isinstance(error, CallTimeout)
    assert "timed out in all_gather after 0.10 seconds" in str(error)
    assert "'worker1'" in str(error)
    # The leader has ended this gathering for the other worker too; the next is a new one.
    late = raised_by(lambda: rpc.rpc_sync(missing, rpc.all_gather, args=(2, some)))
    assert isinstance(late, CallTimeout)
    again = [rpc.rpc_async(name, rpc.all_gather, args=(name, some)) for name in some]
    assert [call.wait() for call in again] == [{name: name for name in some}] * 2


@pytest.mark.usefixtures("group")
def test_who_has_come_counts_though_he_gave_up() -> None:
    error = raised_by(lambda: rpc.rpc_sync("worker1", rpc.barrier, args=(WORKERS, SHORT_S)))
    assert isinstance(error, CallTimeout)
    assert "worker 'worker0', which leads it" in str(error)
    rpc.rpc_sync("worker0", rpc.barrier, args=(WORKERS,))


@pytest.mark.parametrize("culprit", WORKERS)
@pytest.mark.usefixtures("group")
def test_a_value_that_cannot_travel_fails_everybody(culprit: str) -> None:
    (other,) = set(WORKERS) - {culprit}
    waiting = rpc.rpc_async(other, rpc.all_gather, args=(1, WORKERS))
    wait_until(lambda: rpc.rpc_sync("worker0", count_gatherings) == 1, lambda: "it has not come")
    assert isinstance(
        raised_by(lambda: rpc.rpc_sync(culprit, gather_lock, args=(WORKERS,))), SerializationError
    )
    error = raised_by(waiting.wait)
    assert isinstance(error, CallError)
    assert f"worker '{culprit}' failed in all_gather: SerializationError" in str(error)


@pytest.mark.usefixtures("group")
def test_only_those_who_take_part_may_call() -> None:
    with pytest.raises(ConfigurationError, match="'driver' called barrier for 'worker0', 'worker"):
        rpc.barrier(WORKERS)
    with pytest.raises(UnknownWorker, match="nobody"):
        rpc.barrier(["driver", "nobody"])


# One call to several workers


def name_and(value: Any) -> tuple[str, Any]:
    return rpc.get_worker_info().name, value


def fail_on(name: str) -> str:
    """Fails on worker ``name`` once ``worker0`` runs this; elsewhere waits to be cancelled."""
    if rpc.get_worker_info().name == name:
        # A call that is cancelled before it has begun would never run.
        wait_until(
            lambda: rpc.rpc_sync("worker0", has_begun, args=(name,)),
            lambda: "the other call has not begun",
        )
        raise KeyError(name)
    _begun.append(name)
    wait_until(rpc.is_cancelled, lambda: "the call was not cancelled")
    _cancelled.append(name)
    return "cancelled"


_begun: list[str] = []
_cancelled: list[str] = []


def has_begun(name: str) -> bool:
    return name in _begun


def was_cancelled(name: str) -> bool:
    return name in _cancelled


def call_all_here(names: list[str], value: Any) -> list[Any]:
    return rpc.rpc_all(names, name_and, args=(value,))


@pytest.mark.usefixtures("group")
def test_results_of_several_workers_come_in_their_order() -> None:
    results = rpc.rpc_all(["worker1", 0, rpc.get_worker_info("worker0")], name_and, args=(3,))
    assert results == [("worker1", 3), ("driver", 3), ("worker0", 3)]
    assert rpc.rpc_all([], name_and, args=(3,)) == []
    assert rpc.rpc_all(iter(WORKERS), collect, (1,), {"two": 2}) == [((1,), {"two": 2})] * 2
    # It can be called remotely; a call that waits there holds no place.
    nested = [rpc.rpc_async("worker0", call_all_here, args=(EVERYBODY, n)) for n in range(20)]
    for number, call in enumerate(nested):
        assert call.wait() == [(name, number) for name in EVERYBODY]


@pytest.mark.usefixtures("group")
def test_the_first_failure_ends_the_calls_to_all() -> None:
    with pytest.raises(KeyError, match="worker1"):
        rpc.rpc_all(WORKERS, fail_on, args=("worker1",), timeout=20)
    wait_until(
        lambda: rpc.rpc_sync("worker0", was_cancelled, args=("worker1",)),
        lambda: "the other call goes on",
    )


@pytest.mark.usefixtures("group")
def test_failures_are_returned_where_that_is_wanted() -> None:
    found = rpc.rpc_all(["worker1", "driver"], fail_on_worker1, return_exceptions=True)
    assert isinstance(found[0], KeyError)
    assert found[1] == "driver"
    first, second = rpc.rpc_all(
        WORKERS, fail_on, ("nobody",), timeout=SHORT_S, return_exceptions=True
    )
    assert isinstance(first, CallTimeout)
    assert isinstance(second, CallTimeout)


def fail_on_worker1() -> str:
    name = rpc.get_worker_info().name
    if name == "worker1":
        raise KeyError(name)
    return name


@pytest.mark.usefixtures("group")
def test_nobody_is_called_where_the_call_cannot_be_made() -> None:
    for workers, error in (
        (["worker0", "worker7"], UnknownWorker),
        ("worker0", ArgumentTypeError),
        (3, ArgumentTypeError),
    ):
        with pytest.raises(error):
            rpc.rpc_all(workers, keep, args=("called", True))  # type: ignore[call-overload]
    with pytest.raises(SerializationError):
        rpc.rpc_all(WORKERS, identity, args=(threading.Lock(),))
    with pytest.raises(KeyError):
        rpc.rpc_sync("worker0", give, args=("called",))


@pytest.mark.usefixtures("group")
def test_futures_come_as_their_calls_end() -> None:
    gates = [f"gate{number}" for number in range(3)]
    opened = dict.fromkeys(gates)
    futures = {rpc.rpc_async("worker0", pass_gate, args=(gate, gate)): gate for gate in gates}
    failing = rpc.rpc_async("worker1", fail_on_worker1)
    done = rpc.as_completed([*futures, failing, failing], timeout=20)
    assert next(done) is failing
    for gate in reversed(list(opened)):
        rpc.rpc_sync("worker0", open_gate, args=(gate,))
        future = next(done)
        assert future.done()
        assert future.wait() == gate == futures[future]
    with pytest.raises(StopIteration):
        next(done)
    with pytest.raises(KeyError):
        failing.wait()


@pytest.mark.usefixtures("group")
def test_the_wait_for_futures_is_bounded() -> None:
    held = [rpc.rpc_async(name, pass_gate, args=("held", 1)) for name in ("worker0", "worker1")]
    quick = rpc.rpc_async("worker0", identity, args=(5,))
    quick.wait()
    done = rpc.as_completed([*held, quick], SHORT_S)
    assert next(done).wait() == 5
    with pytest.raises(CallTimeout, match=r"2 calls have not .* 'worker0', 'worker1'") as late:
        next(done)
    assert late.value.elapsed_s == SHORT_S
    for name in WORKERS:
        rpc.rpc_sync(name, open_gate, args=("held",))
    assert [future.wait() for future in held] == [1, 1]
