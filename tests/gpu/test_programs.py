"""Random programs on a GPU leave the same gradients on real workers as in one process.

The message of a failure names the program's seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import higher_order_random, higher_order_sites
from tests.contract.processes import autograd_programs, higher_order_functions
from tests.gpu.device import DEVICE
from torchweft import rpc
from torchweft.launch import Cluster

PROGRAMS, OF_HIGHER_ORDER = 64, 36
TOLERANCE = 1e-5
WORKERS = ("driver", "worker0", "worker1")
run_numbers = itertools.count(1)


def use(device: Any, dtype: torch.dtype) -> None:
    autograd_programs.use(device, dtype)
    higher_order_sites.use(device, dtype)


@pytest.fixture(autouse=True)
def _on_the_device(group: Cluster) -> Iterator[None]:
    for worker in WORKERS:
        rpc.rpc_sync(worker, use, (DEVICE, torch.float32))
    yield
    for worker in WORKERS:
        rpc.rpc_sync(worker, use, ("cpu", torch.float64))


def assert_close(actual: Mapping[Any, Tensor], wanted: Mapping[Any, Tensor], what: object) -> None:
    """Checks that gradients are close, relative to the greatest number of each."""
    assert actual.keys() == wanted.keys(), what
    for key, gradient in wanted.items():
        found = actual[key].detach().to_dense()
        expected = gradient.detach().to_dense()
        assert (found.device, found.dtype) == (expected.device, expected.dtype), f"{key}, {what}"
        allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(
            found,
            expected,
            rtol=0,
            atol=allowed,
            msg=lambda text, key=key: f"{key}, {what}: {text}",
        )


def next_program(seeds: Iterator[int], refused: list[int]) -> tuple[int, Any]:
    """Returns the next program that one process can run on this device, and its outcome.

    A few programs differentiate a graph twice of which a part is freed. Whether that is an error
    depends on the device: kernels differ in what they save.
    """
    for seed in seeds:
        try:
            return seed, higher_order_sites.expected(higher_order_random.random_program(seed))
        except RuntimeError as error:
            if "a second time" not in str(error):
                raise
            refused.append(seed)
            assert len(refused) <= OF_HIGHER_ORDER // 4, refused
    raise AssertionError


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_programs_equal_a_single_process(group: Cluster, mode: str) -> None:
    for seed in range(PROGRAMS)[mode == "fast" :: 2]:
        program = autograd_programs.random_program(seed)
        actual = autograd_programs.run_on_workers(program, mode, next(run_numbers))
        wanted = autograd_programs.run_in_one_process(program)
        assert_close(actual, wanted, f"program {seed}, {mode}")


def test_programs_of_higher_order_equal_a_single_process(group: Cluster) -> None:
    refused: list[int] = []
    seeds = itertools.count()
    for _ in range(OF_HIGHER_ORDER):
        seed, (wanted_results, wanted_tables) = next_program(seeds, refused)
        program = higher_order_random.random_program(seed)
        results, tables = higher_order_functions.run_on_workers(program)
        assert_close(tables, wanted_tables, f"program {seed} of higher order")
        pairs = zip(results, wanted_results, strict=True)
        for place, (actual, wanted) in enumerate(pairs):
            assert actual is not None
            assert wanted is not None
            assert_close({place: actual}, {place: wanted}, f"results of program {seed}")
