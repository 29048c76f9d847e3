"""Workers with a GPU that die, that run out of memory, and memory that comes back."""

from __future__ import annotations

import time

import pytest

from tests.gpu import functions
from tests.gpu.device import IS_GPU, only_gpu, wait_until
from tests.gpu.members import Members
from tests.internal import overridden
from torchweft.errors import WorkerLost

MIB = 1 << 20
LARGE_BYTES = 256 * MIB
NOTICE_S = 2.0
RETURN_S = 5.0
"""How long the driver may take to free the memory of a process that was killed."""
SLACK_BYTES = 32 * MIB
"""For kernels that a process loads at their first use; far less than the tensors."""
ENDLESS_S = 15.0
COUNTS = [2, 1 << 22]


def await_free(
    members: Members,
    name: str,
    wanted: int,
    limit_s: float = RETURN_S,
    slack_bytes: int = SLACK_BYTES,
) -> None:
    """Waits until the device has as much free memory again, as a worker sees it."""
    free = [0]

    def is_back() -> bool:
        free[0] = members.do(name, functions.free_bytes_here)
        return free[0] >= wanted - slack_bytes

    wait_until(
        is_back,
        lambda: f"{(wanted - free[0]) / MIB:.0f} MiB are missing after {limit_s} s",
        limit_s,
    )


def warmed_up(members: Members, *names: str) -> None:
    """Has workers initialise CUDA, and call each other with a small tensor."""
    for name in names:
        assert members.do(name, functions.device_works) == [64, 64]
    for name in names:
        for other in names:
            if other != name:
                members.do(
                    name, functions.call_with, other, functions.bounds, functions.zeros, 4096
                )


# Killed workers


@only_gpu
@pytest.mark.parametrize("count", COUNTS)
def test_a_worker_is_killed_whose_result_is_not_written_yet(members: Members, count: int) -> None:
    members.join("caller", "callee", "third")
    warmed_up(members, "caller", "callee", "third")
    members.begin(
        "caller", functions.failure_of, "callee", functions.late_noted, 1.0, count, ENDLESS_S
    )
    assert members.do("callee", functions.await_begun)
    time.sleep(0.3)  # The answer is made, and a side waits for the stream.
    killed_s = time.monotonic()
    members.kill("callee")
    failure = members.result("caller")
    assert WorkerLost.__name__ in failure.types, failure
    assert failure.at_s - killed_s < NOTICE_S
    check_it_goes_on(members, "caller", "third")


@only_gpu
@pytest.mark.parametrize("count", COUNTS)
def test_the_sender_of_an_argument_is_killed(members: Members, count: int) -> None:
    members.join("sender", "receiver", "third")
    warmed_up(members, "sender", "receiver", "third")
    members.begin("sender", functions.call_with_late, "receiver", 1.0, count, ENDLESS_S)
    time.sleep(0.5)  # The call is made, and a side waits for the stream.
    killed_s = time.monotonic()
    members.kill("sender")
    failure = members.do("receiver", functions.failure_of, "sender", functions.device_works)
    assert WorkerLost.__name__ in failure.types, failure
    assert failure.at_s - killed_s < NOTICE_S
    check_it_goes_on(members, "receiver", "third")


def check_it_goes_on(members: Members, name: str, other: str) -> None:
    """Checks that two workers compute on the device and exchange tensors."""
    began_s = time.monotonic()
    assert members.do(name, functions.device_works) == [64, 64]
    for first, second in ((name, other), (other, name)):
        sent = (second, functions.bounds, functions.late, 3.0, 1 << 22)
        assert members.do(first, functions.call_with, *sent) == [3, 3]
    assert time.monotonic() - began_s < 10.0


@only_gpu
def test_the_memory_of_a_killed_receiver_and_of_its_sender_comes_back(members: Members) -> None:
    members.join("sender", "receiver", "third")
    warmed_up(members, "sender", "third")
    free = members.do("sender", functions.free_bytes_here)
    for _ in range(3):
        sent = ("receiver", functions.keep_more, functions.zeros, LARGE_BYTES)
        members.do("sender", functions.call_with, *sent)
    members.kill("receiver")
    failure = members.do("sender", functions.failure_of, "receiver", functions.device_works)
    assert WorkerLost.__name__ in failure.types, failure
    await_free(members, "sender", free)
    check_it_goes_on(members, "sender", "third")


@only_gpu
def test_the_memory_of_a_killed_sender_comes_back(members: Members) -> None:
    members.join("receiver", "sender", "third")
    warmed_up(members, "receiver", "third")
    free = members.do("receiver", functions.free_bytes_here)
    sent = ("receiver", functions.bounds, functions.zeros, LARGE_BYTES)
    assert members.do("sender", functions.call_with, *sent) == [0, 0]
    members.kill("sender")
    await_free(members, "receiver", free)
    check_it_goes_on(members, "receiver", "third")


def test_a_killed_worker_is_noticed(members: Members) -> None:
    """As the tests above, with nothing pending; also without a GPU."""
    members.join("caller", "callee", "third")
    warmed_up(members, "caller", "callee", "third")
    killed_s = time.monotonic()
    members.kill("callee")
    failure = members.do("caller", functions.failure_of, "callee", functions.device_works)
    assert WorkerLost.__name__ in failure.types, failure
    assert failure.at_s - killed_s < NOTICE_S
    check_it_goes_on(members, "caller", "third")


# Memory


@only_gpu
def test_a_receiver_that_is_out_of_memory(members: Members) -> None:
    """The call fails with torch's error, which names the worker; both workers go on."""
    members.join("caller", "small")
    warmed_up(members, "caller", "small")
    members.do("small", functions.limit_memory, LARGE_BYTES)
    for _ in range(2):
        sent = ("small", functions.bounds, functions.zeros, 2 * LARGE_BYTES)
        failure = members.do("caller", functions.failure_with, *sent)
        assert "OutOfMemoryError" in failure.types, failure
        assert "RuntimeError" in failure.types
        assert "small" in failure.text
        sent = ("small", functions.bounds, functions.zeros, LARGE_BYTES // 4)
        assert members.do("caller", functions.call_with, *sent) == [0, 0]
    # The answer is too large for the worker that asks.
    failure = members.do("small", functions.failure_of, "caller", functions.zeros, 2 * LARGE_BYTES)
    assert "OutOfMemoryError" in failure.types, failure
    assert "small" in failure.text
    asked = ("caller", functions.zeros, LARGE_BYTES // 4)
    assert members.do("small", functions.bounds_through, *asked) == [0, 0]


@only_gpu
def test_memory_that_was_sent_and_dropped_comes_back(members: Members) -> None:
    """Peers had it mapped; they unmap what was not used for some time."""
    members.join("sender", "receiver", environment={"": overridden(POOL_IDLE_S=2)})
    warmed_up(members, "sender", "receiver")
    members.do("receiver", functions.free_bytes_here)
    free = members.do("sender", functions.free_bytes_here)
    for _ in range(3):
        sent = ("receiver", functions.bounds, functions.zeros, LARGE_BYTES)
        assert members.do("sender", functions.call_with, *sent) == [0, 0]
    members.do("sender", functions.free_bytes_here)
    members.do("receiver", functions.free_bytes_here)
    await_free(members, "sender", free, limit_s=8.0)


CALLS, FIRST_CALLS = (10_000, 500) if IS_GPU else (1000, 500)


def test_nothing_grows_over_many_calls(members: Members) -> None:
    members.join("caller", "callee", environment={"": overridden(POOL_IDLE_S=2)})
    members.do("caller", functions.call_often, "callee", FIRST_CALLS)
    before = settled(members)
    free = {name: members.do(name, functions.free_bytes_here) for name in before}
    began_s = time.monotonic()
    members.do("caller", functions.call_often, "callee", CALLS - FIRST_CALLS)
    print(f"{(time.monotonic() - began_s) / (CALLS - FIRST_CALLS) * 1e6:.0f} us a call")
    wait_until(
        lambda: settled(members) == before,
        lambda: f"before: {before}; after {CALLS} calls: {settled(members)}",
        5.0,
    )
    for name in before:
        await_free(members, name, free[name], slack_bytes=4 * MIB)


def settled(members: Members) -> dict[str, dict[str, float]]:
    """Returns what the two workers hold."""
    return {
        "caller": members.do("caller", functions.statistics, "callee"),
        "callee": members.do("callee", functions.statistics, "caller"),
    }
