"""Random programs that also differentiate in the middle, drawn as plain data, run on any site.

A program is a body of steps. A body computes with a list of values and prefers recent ones. It may
have other workers run bodies of their own, and may differentiate its values by each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.higher_order_programs import norms_everywhere
from tests.higher_order_sites import WORKERS, Program, Site
from tests.random_steps import NAMES, OPERATIONS, Compute, Remember, Use, at, computed

# The parts of a program, beside those of ``random_steps``.


class Differentiate(NamedTuple):
    """Adds the gradients of one value by others, where there are any."""

    output: int
    inputs: tuple[int, ...]
    weight: int | None
    create_graph: bool


class Call(NamedTuple):
    """Makes a worker run a body, and adds its results."""

    to: int
    body: Body
    arguments: tuple[int, ...]


class FanOut(NamedTuple):
    """Makes calls side by side, and adds the results of all."""

    calls: tuple[Call, ...]


Step = Compute | Use | Remember | Differentiate | Call | FanOut


class Body(NamedTuple):
    """Steps, and how many of the last values are the results."""

    steps: tuple[Step, ...]
    results: int


class Generator:
    """Draws bodies."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def body(self, worker: int, depth: int, steps: int, may_remember: bool) -> Body:
        """Returns a body for a worker, with calls nested up to ``depth``."""
        drawn = tuple(self._step(worker, depth, may_remember) for _ in range(steps))
        return Body(drawn, self.chance.choice([1, 1, 2]))

    def _step(self, worker: int, depth: int, may_remember: bool) -> Step:
        chance = self.chance
        kind = chance.random()
        if depth and kind < 0.4:
            if kind < 0.32:
                return self._call(worker, depth, may_remember)
            # The calls run in any order, so they do not touch states.
            return FanOut(tuple(self._call(worker, depth, False) for _ in range(2)))
        if kind < 0.6:
            inputs = tuple(self._late() for _ in range(chance.choice([1, 1, 2, 3])))
            weight = chance.choice([None, self._late()])
            return Differentiate(self._late(), inputs, weight, chance.random() < 0.8)
        if may_remember and kind < 0.7:
            return Remember(self._late())
        if kind < 0.77:
            return Use(chance.choice(NAMES))
        return Compute(chance.choice((*OPERATIONS, "in place")), self._late(), self._late() + 1)

    def _call(self, worker: int, depth: int, may_remember: bool) -> Call:
        chance = self.chance
        to = chance.choice([other for other in range(WORKERS) if other != worker])
        body = self.body(to, depth - 1, chance.choice([0, 1, 2, 2, 3]), may_remember)
        return Call(to, body, tuple(self._late() for _ in range(chance.choice([1, 2, 3]))))

    def _late(self) -> int:
        return int(self.chance.random() ** 2 * 6)


def random_program(seed: int) -> Program:
    """Returns the program of a seed, always the same."""
    generator = Generator(seed)
    body = generator.body(0, 2, generator.chance.randint(5, 9), True)
    is_of_second_order = generator.chance.random() < 0.6

    def program(site: Site) -> list[Tensor]:
        results = run(site, body, site.parameter("x") * 2)
        roots = [result.sum() for result in results if result.requires_grad]
        if roots:
            site.backward(roots, retain_graph=True, create_graph=is_of_second_order)
        if roots and is_of_second_order:
            norm = norms_everywhere(site)
            if norm.requires_grad:
                site.backward([norm.sin()])
        return results

    program.__doc__ = "\n".join(map(str, body.steps))
    return program


def run(site: Site, body: Body, *arguments: Tensor) -> list[Tensor]:
    """Runs a body; its first value is made of a parameter of this worker."""
    values = [site.parameter("w") * 2, *arguments]
    for step in body.steps:
        values += _RUNNERS[type(step)](site, step, values)
    return values[-body.results :]


def _use(site: Site, step: Use, _: list[Tensor]) -> list[Tensor]:
    return [site.parameter(step.name)]


def _remember(site: Site, step: Remember, values: list[Tensor]) -> list[Tensor]:
    state = site.state.get("state", site.parameter("state"))
    site.state["state"] = torch.tanh(state * site.parameter("v") + at(values, step.value))
    return [site.state["state"]]


def _differentiate(site: Site, step: Differentiate, values: list[Tensor]) -> list[Tensor]:
    output = at(values, step.output)
    inputs = [value for age in step.inputs if (value := at(values, age)).requires_grad]
    if not output.requires_grad or not inputs:
        return []
    weight = torch.ones_like(output) if step.weight is None else at(values, step.weight)
    if not step.create_graph:
        weight = weight.detach()  # torch may return the weight itself, with its graph.
    found = site.grad(
        output,
        inputs,
        weight,
        retain_graph=True,
        create_graph=step.create_graph,
        allow_unused=True,
    )
    # Bounded, so that rounding differences do not grow from order to order.
    return [torch.sin(gradient) for gradient in found if gradient is not None]


def _call(site: Site, step: Call, values: list[Tensor]) -> list[Tensor]:
    return _fan_out(site, FanOut((step,)), values)


def _fan_out(site: Site, step: FanOut, values: list[Tensor]) -> list[Tensor]:
    waits = [
        site.start(call.to, run, call.body, *[at(values, age) for age in call.arguments])
        for call in step.calls
    ]
    return [result for wait in waits for result in wait()]


def _compute(site: Site, step: Compute, values: list[Tensor]) -> list[Tensor]:
    first, second = at(values, step.first), at(values, step.second)
    result = computed(step.operation, first, second, site.parameter("w"))
    if step.operation == "in place":
        changed = (result * 2).add_(second)
        changed[1:].tanh_()
        return [changed]
    if step.operation == "hooked":
        # Not linear, so it must see the whole gradient.
        result.register_hook(lambda gradient: torch.sin(3 * gradient))
    return [result]


_RUNNERS: dict[type, Callable[[Site, Any, list[Tensor]], list[Tensor]]] = {
    Use: _use,
    Remember: _remember,
    Differentiate: _differentiate,
    Call: _call,
    FanOut: _fan_out,
    Compute: _compute,
}
