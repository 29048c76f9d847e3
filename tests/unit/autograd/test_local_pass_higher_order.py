"""Tests that gradients of any order over several workers equal those of a single process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.higher_order_sites import Outcome, assert_equal
from tests.thorough import CHECKED, examples, lots, spread
from tests.unit.autograd import programs
from tests.unit.autograd.cluster import Cluster, SingleProcess, World
from tests.unit.autograd.cluster import Program as WorldProgram

TOLERANCE = 1e-12
RANDOM_TOLERANCE = 1e-10
"""For programs whose functions may be steep enough to amplify rounding errors."""


# Runs the programs of the first-order tests, and differentiates the gradients they leave.


def norm_of(gradients: Sequence[Tensor]) -> Tensor | None:
    """Returns the sum of squares of all differentiable gradients; None if there are none."""
    terms = [each.to_dense().pow(2).sum() for each in gradients if each.requires_grad]
    return torch.stack(terms).sum() if terms else None


def norms_on_workers(cluster: Cluster) -> Tensor | None:
    """Returns the sum of squares of all gradients, at worker 0; each worker sends its part."""
    parts = []
    for worker, context in enumerate(cluster.contexts):
        part = norm_of(list(context.get_gradients().values()))
        if part is not None:
            parts += cluster.send(worker, 0, part)
    return torch.stack(parts).sum() if parts else None


class Recorded(SingleProcess):
    """A single process whose gradients can have graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[tuple[int, str], Tensor] = {}

    def gradients(self) -> dict[tuple[int, str], Tensor]:
        return self.sums

    def backward(self, roots: Sequence[Tensor], create_graph: bool) -> None:
        found = torch.autograd.grad(
            roots, list(self.parameters.values()), create_graph=create_graph, allow_unused=True
        )
        for key, gradient in zip(self.parameters, found, strict=True):
            if gradient is not None:
                earlier = self.sums.get(key, torch.zeros((), dtype=torch.float64))
                self.sums[key] = earlier + gradient.to_dense()


def tables_after(program: WorldProgram, order: int, seed: int) -> Outcome:
    cluster = Cluster(seed=seed)
    roots: Sequence[Tensor] = list(program(cluster))
    for step in range(order):
        cluster.backward(roots, create_graph=step < order - 1)
        norm = norms_on_workers(cluster) if step < order - 1 else None
        if norm is None:
            break
        roots = [norm.log1p()]
    return [], cluster.gradients()


def expected_tables_after(program: WorldProgram, order: int) -> Outcome:
    world = Recorded()
    roots: Sequence[Tensor] = list(program(world))
    for step in range(order):
        world.backward(roots, create_graph=step < order - 1)
        norm = norm_of(list(world.sums.values()))
        if norm is None:
            break
        roots = [norm.log1p()]
    return [], world.sums


@pytest.mark.parametrize(
    ("program", "order"),
    spread(programs.ALL, [2, 3], all_from=CHECKED),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_gradients_in_contexts_are_differentiated(program: WorldProgram, order: int) -> None:
    wanted = expected_tables_after(program, order)
    for seed in range(examples(3)):
        actual = tables_after(program, order, seed)
        assert_equal(actual, wanted, 1e-11 if order == 2 else 1e-9, f"seed {seed}")


@pytest.mark.parametrize("lot", lots(100, 50), ids=str)
def test_gradients_of_random_programs_are_differentiated(lot: range) -> None:
    for seed in lot:
        program = programs.random_program(seed)
        actual = tables_after(program, 2, seed)
        assert_equal(actual, expected_tables_after(program, 2), RANDOM_TOLERANCE, f"seed {seed}")


@pytest.mark.parametrize("program", programs.ALL, ids=lambda program: program.__name__)
def test_grad_of_what_the_leader_has(program: WorldProgram) -> None:
    """Differentiates by all parameters of worker 0, then again along a random direction."""

    def leaves_of(world: World) -> list[Tensor]:
        return [leaf for (worker, _), leaf in world.parameters.items() if worker == 0]

    def direct(gradients: Sequence[Tensor | None]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [
            (each.to_dense() * torch.randn(each.shape, generator=generator, dtype=each.dtype)).sum()
            for each in gradients
            if each is not None and each.requires_grad
        ]

    world = SingleProcess()
    roots = list(program(world))
    leaves = leaves_of(world)
    if not leaves:
        return
    wanted = list(torch.autograd.grad(roots, leaves, create_graph=True, allow_unused=True))
    if directed := direct(wanted):
        wanted += torch.autograd.grad(directed, leaves, allow_unused=True)
    for seed in range(examples(3)):
        cluster = Cluster(seed=seed)
        roots = list(program(cluster))
        leaves = leaves_of(cluster)
        actual = cluster.grad(roots, leaves, create_graph=True)
        if directed := direct(actual):
            actual += cluster.grad(directed, leaves)
        assert_equal((actual, cluster.gradients()), (wanted, {}), TOLERANCE, f"seed {seed}")
