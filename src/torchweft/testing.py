"""Fixtures for pytest: groups of workers around a test, and faults on purpose.

Name this module in ``conftest.py``; it needs pytest::

    pytest_plugins = ["torchweft.testing"]

A test that takes ``weft_group`` is worker ``driver`` of a group with ``worker0`` and ``worker1``,
which it shares with the tests before and after it. The group ends when a test without it starts
another one. After the test, no reference that it made may be left on any worker::

    def test_a_table_on_a_worker(weft_group):
        table = rpc.remote("worker0", dict)
        assert table.rpc_sync().get("key") is None

A test that kills workers, or needs another group, takes ``weft_own_group``. Its group is made for
the test alone, with what the mark says: arguments of ``torchweft.cluster``::

    @pytest.mark.weft(workers=3)
    def test_a_lost_worker_is_named(weft_own_group):
        testing.kill(weft_own_group, "worker1")
        with pytest.raises(WorkerLost, match="worker1"):
            rpc.rpc_sync("worker1", torch.ones, (2,))

Workers are forked from one warm process, so a group starts in a fraction of a second. It has
imported torch, and the modules in the option ``weft_preload`` of pytest's configuration; list there
what else your workers import and takes long.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchweft.engine.worker import current
from torchweft.errors import ConfigurationError, LaunchError, NotInitialized, WorkerLost
from torchweft.launch import Cluster, Nursery, cluster, clusters
from torchweft.launch.nursery import WARM_MODULES
from torchweft.rpc import WorkerState, health, on_worker_lost, rpc_sync
from torchweft.rpc.worker import current_worker

__all__ = ["kill", "paused", "weft_group", "weft_nursery", "weft_own_group"]

LIMIT_S = 10.0
"""How long these functions wait for workers: until a loss is noticed, or references are gone."""
_CALL_LIMIT_S = 20.0
_PAUSE_S = 0.01


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``weft_preload`` to pytest's configuration."""
    parser.addini(
        "weft_preload",
        "modules that the process from which workers are forked imports first, beside torch",
        type="args",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mark known."""
    config.addinivalue_line(
        "markers", "weft(**arguments): arguments of torchweft.cluster for weft_own_group"
    )


_ENDED_EARLY = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Notes that a test has failed or was skipped; it makes no report."""
    if call.excinfo is not None:
        item.stash[_ENDED_EARLY] = True


class Groups:
    """The group that tests share; a process is in one group at a time, so others end it."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._shared: Cluster | None = None
        self.is_taken = False

    def shared(self) -> Cluster:
        """Returns the group that tests share; makes it if there is none."""
        if self._shared is None:
            self._shared = self.made(workers=2)
        return self._shared

    def made(self, **arguments: Any) -> Cluster:
        """Makes a group; ends the one that tests share."""
        self.close()
        return cluster(**{"workers": 2, **arguments}, nursery=self._nursery).start()

    def make_way(self) -> None:
        """Ends the group that tests share, unless a test has it."""
        if not self.is_taken:
            self.close()

    def drop(self) -> None:
        """Ends the shared group without waiting for it."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.abandon()

    def close(self) -> None:
        """Ends the shared group."""
        shared, self._shared = self._shared, None
        if shared is not None:
            with contextlib.suppress(LaunchError):  # A worker ended while no test had the group.
                shared.close()


@pytest.fixture(scope="session")
def weft_nursery(pytestconfig: pytest.Config) -> Iterator[Nursery]:
    """The warm process from which all workers of the session are forked."""
    with Nursery(preload=(*WARM_MODULES, *pytestconfig.getini("weft_preload"))) as nursery:
        yield nursery


@pytest.fixture(scope="session")
def weft_groups(weft_nursery: Nursery) -> Iterator[Groups]:
    """Makes the groups of the session."""
    with contextlib.closing(Groups(weft_nursery)) as groups:
        current.when_in_the_way(groups.make_way)
        clusters.when_in_the_way.append(groups.make_way)
        yield groups
        current.when_in_the_way(None)
        clusters.when_in_the_way.remove(groups.make_way)


@pytest.fixture
def weft_group(weft_groups: Groups, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The group that tests share: this process is ``driver``, the others ``worker0``, ``worker1``.

    Fails a test that has passed if references to values of workers are left for longer than
    ``LIMIT_S``. A worker that ended, or a reference that stays, does not reach the next test: it
    gets a new group.
    """
    if any(mark.name == "weft" for mark in request.node.own_markers):
        raise ConfigurationError(
            "the test takes weft_group, which always has two workers, and its pytest.mark.weft is "
            "for weft_own_group; take weft_own_group, or omit the mark"
        )
    group, before = _taken(weft_groups)
    weft_groups.is_taken = True
    ended = ""
    try:
        yield group
        if request.node.stash.get(_ENDED_EARLY, False):
            if _left(group, before):  # The traceback of the test holds its references.
                weft_groups.drop()
        else:
            if _left(group, before):  # pytest keeps values of fixtures that have ended.
                request.node.funcargs.clear()
            _wait_until(lambda: _left(group, before) == {}, lambda: _described(group, before))
    except WorkerLost as error:
        ended = f"a worker of the group that tests share has ended: {error}"
    except NotInitialized:
        ended = "the test has left the group that tests share"
    except BaseException:
        weft_groups.drop()
        raise
    finally:
        weft_groups.is_taken = False
    if ended:
        weft_groups.drop()
        if not request.node.stash.get(_ENDED_EARLY, False):
            pytest.fail(f"{ended}; a test that does so takes weft_own_group", pytrace=False)


def _taken(groups: Groups) -> tuple[Cluster, Counts]:
    """Returns the group that tests share, and its references; a new one if a worker has ended."""
    try:
        group = groups.shared()
        return group, _references(group)
    except (WorkerLost, NotInitialized):  # It ended after the last test.
        groups.drop()
    group = groups.shared()
    return group, _references(group)


@pytest.fixture
def weft_own_group(weft_groups: Groups, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A group for this test alone; ``@pytest.mark.weft`` has the arguments of its cluster."""
    if "weft_group" in request.fixturenames:
        raise ConfigurationError(
            "the test takes weft_group and weft_own_group, and a process is in one group at a "
            "time; take one of them"
        )
    mark = request.node.get_closest_marker("weft")
    if mark is not None and mark.args:
        raise ConfigurationError(
            f"pytest.mark.weft has the positional arguments {mark.args}; pass them by name: "
            "@pytest.mark.weft(workers=3)"
        )
    group = weft_groups.made(**({} if mark is None else mark.kwargs))
    try:
        yield group
    finally:
        group.abandon()


# Faults


def kill(group: Cluster, worker: str) -> None:
    """Kills a worker with ``SIGKILL``, and waits until this process knows that it is lost.

    Raises:
        ConfigurationError: The group has no such worker that runs.
        TimeoutError: The loss was not noticed within ``LIMIT_S``.
    """
    pid = _pid_of(group, worker)
    noticed = threading.Event()

    def notice(error: Any) -> None:
        if error.worker == worker:
            noticed.set()

    forget = on_worker_lost(notice)
    try:
        rpc_sync(
            worker, os.getpid, timeout=_CALL_LIMIT_S
        )  # A loss is noticed at once on a connection.
        os.kill(pid, signal.SIGKILL)
        if not noticed.wait(LIMIT_S):
            raise TimeoutError(f"the loss of {worker!r} was not noticed within {LIMIT_S:g} s")
    finally:
        forget()


@contextlib.contextmanager
def paused(group: Cluster, worker: str) -> Iterator[None]:
    """Stops a worker for a block, as a machine does that swaps or is suspended; it is not lost.

    Raises:
        ConfigurationError: The group has no such worker that runs.
        TimeoutError: The worker did not stop within ``LIMIT_S``.
    """
    pid = _pid_of(group, worker)
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while not _is_stopped(pid):  # A thread that was not told yet may still serve a call.
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{worker!r} did not stop within {LIMIT_S:g} s")
            time.sleep(_PAUSE_S)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    try:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in _threads(pid)]
    except (FileNotFoundError, ProcessLookupError):  # A thread has ended meanwhile.
        return False
    return all(state in "Tt" for state in states)


def _threads(pid: int) -> Iterator[Path]:
    return Path(f"/proc/{pid}/task").glob("*/stat")


def _pid_of(group: Cluster, worker: str) -> int:
    pid = group.pids.get(worker)
    if pid is None or any(
        each.worker.name == worker and each.state is WorkerState.LOST for each in health()
    ):
        raise ConfigurationError(f"no worker {worker!r} runs in {group!r}")
    return pid


# References

Counts = dict[str, dict[str, int]]


def count_references() -> dict[str, int]:
    """Returns how many references this worker owns and holds, without those that are garbage."""
    gc.collect()
    return current_worker().references.counts()


def _references(group: Cluster) -> Counts:
    names = (group.name, *group.names)
    return {name: rpc_sync(name, count_references, timeout=_CALL_LIMIT_S) for name in names}


def _left(group: Cluster, before: Counts) -> Counts:
    """Returns the workers that have more references than before."""
    now = _references(group)
    return {
        name: counts
        for name, counts in now.items()
        if any(count > before[name][kind] for kind, count in counts.items())
    }


def _described(group: Cluster, before: Counts) -> str:
    return (
        "references are left after the test; delete them, or leave the blocks that hold them: "
        + "; ".join(
            f"{name} has {counts}, and had {before[name]}"
            for name, counts in _left(group, before).items()
        )
    )


def _wait_until(is_so: Callable[[], bool], message: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            pytest.fail(message(), pytrace=False)
        time.sleep(_PAUSE_S)
