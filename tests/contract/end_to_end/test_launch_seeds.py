"""A launcher's seed makes random numbers reproducible, and different for each worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes.weft_run import Start, finish, running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from running(tmp_path)


def test_a_seed_makes_different_numbers_of_warm_workers_reproducible(start: Start) -> None:
    body = """
    import random
    import numpy, torch
    print(random.random(), float(numpy.random.random()), float(torch.rand(())))
    """
    status, first, _ = finish(start(body, "--warm", "--seed", "5", count=2))
    assert status == 0
    assert len({number for line in first for number in line.split()[1:]}) == 6
    assert sorted(finish(start(body, "--warm", "--seed", "5", count=2))[1]) == sorted(first)
