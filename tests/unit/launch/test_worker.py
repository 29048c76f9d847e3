from __future__ import annotations

import os

import pytest

from tests.tables import cases
from torchweft.errors import ConfigurationError
from torchweft.launch.worker import (
    compute_environment,
    threads_per_worker,
    worker_names,
)


@cases(
    ("count", "names", "message"),
    [
        (0, None, "number of workers is 0; it must be at least 1"),
        (-2, None, "number of workers is -2"),
        (10**11, None, "number of workers is 100000000000; it must be at most 65536"),
        (2, ["a", ""], "a worker name is empty"),
        (2, ["a", " "], "a worker name is empty"),
        (2, ["a", "a"], "'a' is given twice"),
        (2, ["a", "b", "c"], "3 names for 2 workers"),
        (3, ["a", "b"], "2 names for 3 workers"),
        (2, ["a", "b c"], "'b c' is no name for a worker"),
        (2, ["a", "b/c"], "'b/c' is no name for a worker"),
        (1, ["a" * 128], "is no name for a worker.*shorter than 128"),
    ],
)
def test_names_that_cannot_work_are_refused(
    count: int, names: list[str] | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        worker_names(count, names)


def test_the_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert [threads_per_worker(count) for count in (1, 3, 8, 20)] == [8, 2, 1, 1]
    assert compute_environment({}, 4)["OMP_NUM_THREADS"] == "2"
