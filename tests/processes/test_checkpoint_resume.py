"""Training that is killed and goes on from its last snapshot equals uninterrupted training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.processes.functions import wait_until
from tests.open_workers import OpenWorkers, WarmProcess
from tests.processes import checkpoint_training as training
from tests.processes.checkpoint_model_internals import count_held, have_held
from torchweft import checkpoint
from torchweft.errors import WorkerLost

pytestmark = pytest.mark.timeout(60)
WORKERS = ("driver", "first", "second")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def warm(warm_process: WarmProcess) -> Iterator[OpenWorkers]:
    # Making the first optimizer imports dynamo, which takes a second.
    started = OpenWorkers(warm_process, "torch._dynamo", training.__name__)
    yield started
    started.close()


class Job:
    """A group of three processes that trains."""

    def __init__(self, warm: OpenWorkers, path: Path) -> None:
        self._warm = warm
        method = f"file://{path}/store{next(_numbers)}"
        for rank, name in enumerate(WORKERS):
            warm.begin(name, training.join, name, rank, len(WORKERS), method)
        for name in WORKERS:
            warm.result(name)

    def do(self, worker: str, function: Any, *args: Any) -> Any:
        return self._warm.do(worker, function, *args)

    def begin_training(self, directory: Path, **how: Any) -> None:
        arguments = (str(directory), "first", "second", how)
        self._warm.begin("driver", training.train_keyworded, *arguments)

    def trained(self) -> tuple[int, dict[str, Any]]:
        begun, digest = self._warm.result("driver")
        return begun, digest

    def kill(self, *names: str) -> None:
        """Kills processes of the group, by default all."""
        for name in names or WORKERS:
            self._warm.kill(name)


@pytest.fixture
def jobs(warm: OpenWorkers, tmp_path: Path) -> Iterator[Any]:
    started: list[Job] = []

    def start() -> Job:
        for job in started:
            job.kill()
        started[:] = [Job(warm, tmp_path)]
        return started[0]

    yield start
    for job in started:
        job.kill()


@pytest.fixture(scope="module")
def uninterrupted(warm: OpenWorkers, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The digest of a training that is not killed."""
    path = tmp_path_factory.mktemp("uninterrupted")
    job = Job(warm, path)
    job.begin_training(path / "snapshots")
    begun, digest = job.trained()
    job.kill()
    assert begun == 0
    return digest


@pytest.mark.parametrize(
    ("worker", "point", "resumed_from"),
    [
        ("driver", "while copying", 2),
        ("second", "while writing", 2),
        ("first", "before naming", 2),
        ("first", "after naming", 2),
        ("driver", "before the manifest", 2),
        ("driver", "after the manifest", 4),
        ("driver", "while removing", 6),
    ],
)
def test_killed_while_saving_goes_on_from_the_last_whole_snapshot(
    jobs: Any, tmp_path: Path, uninterrupted: Any, worker: str, point: str, resumed_from: int
) -> None:
    directory = tmp_path / "snapshots"
    job = jobs()
    # Two snapshots are kept: when the third is complete, the first is removed.
    job.do(worker, training.die_at, point, 2 if point == "while removing" else 4)
    job.begin_training(directory)
    with pytest.raises((WorkerLost, ConnectionError)):
        job.trained()
    latest = checkpoint.latest(directory)
    assert latest is not None
    assert latest.step == resumed_from
    job = jobs()
    job.begin_training(directory)
    begun, digest = job.trained()
    assert begun == resumed_from
    assert digest == uninterrupted
    # The remains of the killed training are gone.
    kept = [snapshot.name for snapshot in checkpoint.list_snapshots(directory)]
    assert sorted(path.name for path in directory.iterdir()) == kept
    assert [int(name.split("-step")[1].split("-")[0]) for name in kept] == [6, training.STEPS]


@pytest.mark.parametrize("in_background", [False, True])
def test_killed_in_the_middle_of_a_step_goes_on_bit_by_bit(
    jobs: Any, tmp_path: Path, uninterrupted: Any, in_background: bool
) -> None:
    directory = tmp_path / "snapshots"
    job = jobs()
    job.begin_training(directory, in_background=in_background, die_at=5)
    with pytest.raises(ConnectionError):
        job.trained()
    job = jobs()
    job.begin_training(directory, in_background=in_background)
    begun, digest = job.trained()
    assert begun in ((2, 4) if in_background else (4,))
    assert digest == uninterrupted


def test_all_killed_from_outside_at_some_moment_goes_on_bit_by_bit(
    jobs: Any, tmp_path: Path, uninterrupted: Any
) -> None:
    directory = tmp_path / "snapshots"
    job = jobs()
    job.begin_training(directory)
    wait_until(lambda: checkpoint.latest(directory) is not None, lambda: "no snapshot came")
    job = jobs()
    job.begin_training(directory)
    begun, digest = job.trained()
    assert begun >= 2
    assert digest == uninterrupted


def test_an_owner_drops_what_it_holds_for_a_lost_driver(jobs: Any) -> None:
    job = jobs()
    job.do("driver", have_held, "first")
    assert job.do("first", count_held) == 1
    job.kill("driver")
    wait_until(lambda: job.do("first", count_held) == 0, lambda: "the part is still held")
