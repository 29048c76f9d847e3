"""Random programs leave the same gradients on real workers as in a single process.

The message of a failure names the program's seed; ``check`` runs that program alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.contract.processes.autograd_programs import (
    Program,
    random_program,
    run_in_one_process,
    run_on_workers,
)
from tests.thorough import lots
from torchweft.launch import Nursery, cluster

LOT = 50
TOLERANCE = 1e-10
pytestmark = pytest.mark.keeps("threads", "descriptors")
run_numbers = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=2, nursery=nursery):
        yield


def check(seed: int, mode: str) -> None:
    program = random_program(seed)
    actual = run_on_workers(program, mode, next(run_numbers))
    expected = run_in_one_process(program)
    assert actual.keys() == expected.keys(), described(program, mode)
    for key, gradient in expected.items():
        torch.testing.assert_close(
            actual[key],
            gradient,
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=lambda text, key=key: f"{key}: {text}\n{described(program, mode)}",
        )


def described(program: Program, mode: str) -> str:
    steps = "\n  ".join(map(str, program.body.steps))
    return f"in program {program.seed}, {mode}:\n  {steps}\n  {program._replace(body=None)}"


@pytest.mark.parametrize("lot", lots(500, LOT), ids=str)
def test_programs_equal_a_single_process(lot: range) -> None:
    for seed in lot:
        check(seed, "smart")


@pytest.mark.parametrize("lot", lots(100, LOT), ids=str)
def test_programs_equal_a_single_process_without_discovery(lot: range) -> None:
    for seed in lot:
        check(seed, "fast")
