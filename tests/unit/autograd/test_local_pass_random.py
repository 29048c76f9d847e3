"""Tests that random programs give the same gradients or errors on workers as in one process.

``python -m tests.unit.autograd.test_local_pass_random FIRST COUNT`` tries others; ``check`` runs
one.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.thorough import lots
from tests.unit.autograd.cluster import Cluster, SingleProcess
from tests.unit.autograd.random_programs import Run
from torchweft.errors import AutogradError

TOLERANCE = 1e-10


class Outcome(NamedTuple):
    """The outcome of a program.

    Attributes:
        noted: The operations refused during the forward pass.
        roots: The roots of the backward pass.
        gradients: The parameters' gradients; None if the pass was refused.
        kept: The gradients that ``retain_grad`` kept for other tensors.
    """

    noted: list[object]
    roots: list[Tensor]
    gradients: dict[tuple[int, str], Tensor] | None
    kept: list[Tensor | None]


def steps_of(seed: int) -> int:
    return 8 + seed % 30


def passes_of(seed: int) -> int:
    return 1 + (seed % 5 == 0)


def outcome_in_one_process(seed: int) -> Outcome:
    world = SingleProcess()
    run = Run(world, seed)
    roots = run.roots(steps_of(seed))
    gradients: dict[tuple[int, str], Tensor] | None = {}
    if roots:
        try:
            for _ in range(passes_of(seed)):
                torch.autograd.backward(roots, retain_graph=passes_of(seed) > 1)
            gradients = world.gradients()
        except RuntimeError:
            gradients = None
    return Outcome(run.noted, roots, gradients, run.kept())


def outcome_on_workers(seed: int) -> Outcome:
    cluster = Cluster(seed=seed)
    run = Run(cluster, seed)
    roots = run.roots(steps_of(seed))
    gradients: dict[tuple[int, str], Tensor] | None = {}
    if roots:
        try:
            for _ in range(passes_of(seed)):
                cluster.backward(roots, retain_graph=passes_of(seed) > 1)
            gradients = cluster.gradients()
        except AutogradError as error:
            if not isinstance(error.__cause__, RuntimeError):  # only torch's own errors
                raise
            gradients = None
    return Outcome(run.noted, roots, gradients, run.kept())


def check(seed: int) -> bool:
    """Compares one program in both worlds; returns whether it has gradients."""
    wanted, actual = outcome_in_one_process(seed), outcome_on_workers(seed)
    assert actual.noted == wanted.noted, f"program {seed}"
    assert len(actual.roots) == len(wanted.roots), f"program {seed}"
    for one, other in zip(actual.roots, wanted.roots, strict=True):
        assert_close(one, other, f"program {seed}, a root")
    assert (actual.gradients is None) == (wanted.gradients is None), f"program {seed}"
    if actual.gradients is None or wanted.gradients is None:
        return False
    assert actual.gradients.keys() == wanted.gradients.keys(), f"program {seed}"
    for key, gradient in wanted.gradients.items():
        assert_close(actual.gradients[key], gradient, f"program {seed}, {key}")
    for place, (kept, gradient_kept) in enumerate(zip(actual.kept, wanted.kept, strict=True)):
        if gradient_kept is None:
            # Where a graph is cut, tensor hooks see zeros if no gradient reaches their node.
            assert kept is None or not kept.any(), f"program {seed}, kept {place}"
        else:
            assert kept is not None, f"program {seed}, kept {place}"
            assert_close(kept, gradient_kept, f"program {seed}, kept {place}")
    return bool(wanted.gradients)


def assert_close(actual: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(
        actual.detach(),
        wanted.detach(),
        rtol=TOLERANCE,
        atol=TOLERANCE,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


@pytest.mark.parametrize("lot", lots(300, 100), ids=str)
def test_programs_equal_a_single_process(lot: range) -> None:
    with_gradients = sum(check(seed) for seed in lot)
    assert with_gradients > len(lot) / 2, "too many programs are refused to compare anything"


def main() -> None:
    """Runs some programs and prints the failures."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    compared, failed = 0, 0
    for seed in range(first, first + count):
        try:
            compared += check(seed)
        except Exception as error:
            failed += 1
            print(f"{seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{count} programs, {compared} with gradients, {failed} failed")


if __name__ == "__main__":
    main()
