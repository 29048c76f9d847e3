"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes.test_other_versions import NAMES, OTHER, join
from tests.open_workers import OpenWorkers
from torchweft.engine.worker.current import is_set
from torchweft.errors import ConfigurationError

pytestmark = pytest.mark.timeout(60)


def is_member() -> bool:
    return is_set()


@pytest.fixture
def workers(warm: OpenWorkers) -> Iterator[OpenWorkers]:
    yield warm
    for name in NAMES:
        warm.kill(name)


def test_another_version_of_torch_ends_the_joining_of_all(
    workers: OpenWorkers, tmp_path: Path
) -> None:
    for name, version in zip(NAMES, ("", OTHER), strict=True):
        workers.begin(name, join, name, 2, str(tmp_path / "store"), version)
    for name in NAMES:
        with pytest.raises(
            ConfigurationError, match=r"torch 1\.13\.1 on worker 'b' \(rank 1, host .*pip install"
        ):
            workers.result(name)
        assert not workers.do(name, is_member)


def test_a_newcomer_with_another_version_is_refused(workers: OpenWorkers, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    workers.do("a", join, "a", None, path)
    with pytest.raises(ConfigurationError, match=r"torch 1\.13\.1 on worker 'b'"):
        workers.do("b", join, "b", None, path, OTHER, "warn")
    assert not workers.do("b", is_member)
