"""Workers on separate hosts whose network fails: only lost workers are detected, and in time.

``WEFT_TEST_LOSS_BYTES`` sets the largest tensor on a bad network: 16 MiB take about half a minute.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import far_workers as far
from tests.certificates import Authority
from tests.contract.processes.cable import Impairment
from tests.contract.processes.functions import wait_until
from tests.contract.processes.hosts import Host, network
from tests.far_workers import FarWorkers, far_workers
from tests.open_workers import OpenWorkers, WarmProcess
from torchweft.errors import ConfigurationError, ShutdownError, WorkerLost

pytestmark = pytest.mark.timeout(90)

DETECTION_S = 2.0
AT_ONCE_S = 0.1
MTU_BYTES = 32_000
LARGEST_BYTES = int(os.environ.get("WEFT_TEST_LOSS_BYTES", str(4 << 20)))


@pytest.fixture(scope="module")
def warm(warm_process: WarmProcess) -> Iterator[OpenWorkers]:
    with contextlib.closing(OpenWorkers(warm_process, far.__name__)) as started:
        yield started


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with network() as made:
        yield made


def pull(first: Host, second: Host) -> None:
    second.pull()


def take_down(first: Host, second: Host) -> None:
    first.down()


def take_address(first: Host, second: Host) -> None:
    second.lose_address()


def assert_lost(workers: FarWorkers, here: str, there: str, since_s: float) -> float:
    """Returns how long after ``since_s`` a worker noticed the loss of another worker."""
    ended = workers.do(here, far.ending, "held")
    error = ended.error
    assert isinstance(error, WorkerLost)
    assert error.worker == there
    assert there in str(error)
    assert error.cause in str(error)
    assert abs((time.time() - error.since) - (time.monotonic() - ended.at_s)) < 0.5
    [(told, at_s)] = workers.do(here, far.losses, 1)
    assert (told.worker, told.cause, told.since) == (there, error.cause, error.since)
    assert workers.do(here, far.states)[there] == "LOST"
    elapsed_s: float = max(at_s, ended.at_s) - since_s
    print(f"{here}: after {elapsed_s:.3f} s: {error}")
    return elapsed_s


def assert_lost_both(workers: FarWorkers, since_s: float) -> list[float]:
    first, second = workers.names
    return [
        assert_lost(workers, here, there, since_s)
        for here, there in ((first, second), (second, first))
    ]


@pytest.mark.parametrize("fail", [pull, take_down, take_address])
def test_a_silent_network_is_noticed_on_both_sides(
    warm: OpenWorkers, hosts: list[Host], tmp_path: Path, fail: Callable[[Host, Host], None]
) -> None:
    with far_workers(warm, hosts, tmp_path, detection_time=DETECTION_S) as workers:
        workers.call_each_other()
        since_s = time.monotonic()
        fail(*hosts)
        for elapsed_s in assert_lost_both(workers, since_s):
            assert DETECTION_S / 4 < elapsed_s < 1.1 * DETECTION_S


@pytest.mark.parametrize("mute", [0, 1])
def test_a_network_that_is_silent_in_one_direction_is_noticed_on_both_sides(
    warm: OpenWorkers, hosts: list[Host], tmp_path: Path, mute: int
) -> None:
    with far_workers(warm, hosts, tmp_path, detection_time=DETECTION_S) as workers:
        workers.call_each_other()
        since_s = time.monotonic()
        hosts[mute].mute(hosts[1 - mute])
        elapsed_s = assert_lost_both(workers, since_s)
        assert elapsed_s[1 - mute] < 1.1 * DETECTION_S
        # The mute host still hears the other. It must send something, which it does within a
        # second, and retransmit it, before it knows that it is not heard.
        assert elapsed_s[mute] < 1.1 * DETECTION_S + 1.5


@pytest.mark.parametrize(
    ("fail", "mend"), [(Host.pull, Host.plug), (Host.lose_address, Host.regain_address)]
)
def test_a_network_that_comes_back_too_late_brings_nobody_back(
    warm: OpenWorkers,
    hosts: list[Host],
    tmp_path: Path,
    fail: Callable[[Host], None],
    mend: Callable[[Host], None],
) -> None:
    with far_workers(warm, hosts, tmp_path, detection_time=1) as workers:
        workers.call_each_other()
        since_s = time.monotonic()
        fail(hosts[1])
        assert_lost_both(workers, since_s)
        mend(hosts[1])
        for here, there in (workers.names, reversed(workers.names)):
            with pytest.raises(WorkerLost):
                workers.do(here, far.call, there, far.counted)
        for here, there in (workers.names, reversed(workers.names)):
            workers.do(here, far.release, there)
            with pytest.raises(ShutdownError, match=f"without every worker.*'{there}'.*is lost"):
                workers.do(here, far.leave)


@pytest.mark.parametrize(
    ("fail", "mend", "is_secure"),
    [
        (Host.pull, Host.plug, False),
        (Host.pull, Host.plug, True),
        (Host.down, Host.up, False),
        (Host.lose_address, Host.regain_address, False),
    ],
)
def test_nothing_is_lost_when_the_network_comes_back(
    warm: OpenWorkers,
    hosts: list[Host],
    tmp_path: Path,
    fail: Callable[[Host], None],
    mend: Callable[[Host], None],
    is_secure: bool,
) -> None:
    options = {"tls": Authority(tmp_path).options()} if is_secure else {}
    with far_workers(warm, hosts, tmp_path, detection_time=4, **options) as workers:
        first, second = workers.names
        for here, there in ((first, second), (second, first)):
            workers.do(here, far.begin_counting, there)
        for name in workers.names:
            workers.do(name, far.wait_counted, 100)
        fail(hosts[1])
        counts = [workers.do(name, far.counted) for name in workers.names]
        time.sleep(1.0)  # how long the network fails
        late = [workers.do(name, far.counted) for name in workers.names]
        mend(hosts[1])
        for name, standing in zip(workers.names, late, strict=True):
            workers.do(name, far.wait_counted, standing + 100)
        for here, there in ((first, second), (second, first)):
            answers = workers.do(here, far.end_counting, there)
            assert sorted(answers) == list(range(1, len(answers) + 1))
            assert workers.do(there, far.counted) == len(answers)
        # Only calls in flight when the network failed may have arrived.
        assert all(b - a <= far.Caller.IN_FLIGHT for a, b in zip(counts, late, strict=True))
        assert workers.do(first, far.states)[second] == "CONNECTED"


def test_a_killed_worker_of_another_host_is_noticed_at_once(
    warm: OpenWorkers, hosts: list[Host], tmp_path: Path
) -> None:
    with far_workers(warm, hosts, tmp_path) as workers:
        workers.call_each_other()
        workers.kill("worker1")
        # The process is gone from here on; before, its kernel was still freeing its memory.
        since_s = time.monotonic()
        assert assert_lost(workers, "worker0", "worker1", since_s) < AT_ONCE_S


def test_a_host_that_has_rebooted_is_noticed_when_it_answers(
    warm: OpenWorkers, hosts: list[Host], tmp_path: Path
) -> None:
    with far_workers(warm, hosts, tmp_path, detection_time=10) as workers:
        workers.call_each_other()
        hosts[1].vanish()
        workers.kill("worker1")
        since_s = time.monotonic()
        hosts[1].boot()
        # A keepalive probe goes out every two seconds; the rebooted kernel resets the connection.
        assert assert_lost(workers, "worker0", "worker1", since_s) < 2 + 2 * AT_ONCE_S


@pytest.mark.parametrize("how", ["interpreter", "kernel"])
def test_a_busy_worker_is_not_lost(
    warm: OpenWorkers, hosts: list[Host], tmp_path: Path, how: str
) -> None:
    busy = far.keep_interpreter if how == "interpreter" else far.compute
    keep_busy(warm, hosts, tmp_path, busy, detection_s=1, seconds=5)


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_worker_that_keeps_the_interpreter_for_half_a_minute_is_not_lost(
    warm: OpenWorkers, hosts: list[Host], tmp_path: Path
) -> None:
    keep_busy(warm, hosts, tmp_path, far.keep_interpreter, detection_s=2, seconds=30)


def keep_busy(
    warm: OpenWorkers,
    hosts: list[Host],
    folder: Path,
    busy: Callable[[str, int], str],
    detection_s: float,
    seconds: int,
) -> None:
    """Keeps one of two workers busy, while the other waits for it and calls it."""
    with far_workers(warm, hosts, folder, detection_time=detection_s) as workers:
        caller, callee = workers.names
        start_s = time.monotonic()
        workers.do(caller, far.begin, "busy", callee, busy, "key", seconds)
        workers.do(caller, far.begin_doubling, "behind", callee, 4 << 20)
        await_ending(workers, caller, "busy", seconds)
        assert time.monotonic() - start_s >= seconds
        assert workers.do(caller, far.ending, "busy").error is None
        assert workers.do(caller, far.ending, "behind").value is True
        assert workers.do(callee, far.call, caller, far.count) == 1
        end_well(workers)


def await_ending(workers: FarWorkers, caller: str, key: str, about_s: float) -> None:
    wait_until(
        lambda: workers.do(caller, far.has_ended, key),
        lambda: f"call {key!r} has not ended: {workers.do(caller, far.states)}",
        about_s + far.LIMIT_S,
    )


def end_well(workers: FarWorkers) -> None:
    for name in workers.names:
        assert workers.do(name, far.losses, 0) == []
        workers.begin(name, far.leave)
    for name in workers.names:
        workers.result(name)


SIZES = [1, 1000, 100_000, 1 << 20, LARGEST_BYTES]


@pytest.mark.parametrize("by", ["this program", "the kernel"])
def test_loss_and_delay_change_nothing(warm: OpenWorkers, tmp_path: Path, by: str) -> None:
    how = Impairment(loss=0.2, delay_s=0.03, jitter_s=0.01)
    # Long packets: with one in five lost, TCP hardly moves more than two at a time.
    made_by = {"impairment": how} if by == "this program" else {}
    with network(mtu_bytes=MTU_BYTES, **made_by) as hosts:
        if not made_by:
            for host in hosts:
                host.impair(how)
        with far_workers(warm, hosts, tmp_path, detection_time=10) as workers:
            first, second = workers.names
            start_s = time.monotonic()
            workers.begin(second, far.count_many, first, 2000, 500)
            workers.begin(first, far.double_all, second, SIZES, 1)
            assert workers.result(second) == 2000
            small_s = time.monotonic() - start_s
            assert workers.result(first) == 0
            print(f"calls took {small_s:.1f} s, tensors {time.monotonic() - start_s:.1f} s")
            end_well(workers)


def test_a_worker_that_others_reach_needs_a_secret(
    warm: OpenWorkers, hosts: list[Host], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as workers:
        workers.callback(warm.kill, "alone")
        warm.do("alone", far.enter, hosts[0].namespace)
        told = {"listen": hosts[0].address, "init_method": f"file://{tmp_path}/store"}
        with pytest.raises(ConfigurationError, match=r"no secret.*torchweft secret new FILE"):
            warm.do("alone", far.join, "", {}, 0, 1, told)
