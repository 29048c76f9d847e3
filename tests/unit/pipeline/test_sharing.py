"""Results that are computed into memory of a given kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchweft.pipeline.sharing import SMALLEST_BYTES, Redirection
from torchweft.pipeline.values import Packet

ROWS, WIDTH = 256, 256
assert ROWS * WIDTH * 4 >= SMALLEST_BYTES

Function = Callable[[Tensor], Tensor]


class Memory:
    """Allocates memory, and knows it again. It is taken from one tensor, so none is reused."""

    def __init__(self, count: int = 8) -> None:
        self._all = torch.empty(count, ROWS * WIDTH)
        self._taken = 0

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        if self._taken == len(self._all):
            return None
        row = self._all[self._taken]
        self._taken += 1
        buffer = torch.frombuffer(row.numpy(), dtype=torch.uint8)[: shape.numel() * dtype.itemsize]
        return buffer.view(dtype).view(shape)

    def has(self, tensor: Tensor) -> bool:
        offset = tensor.data_ptr() - self._all.data_ptr()
        return 0 <= offset < self._all.nbytes


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def given(rows: int = ROWS, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def forward(redirection: Redirection, function: Function, inputs: Tensor) -> Tensor:
    with redirection.run([inputs]):
        result = function(inputs)
    redirection.learn([result])
    return result


SHARING: dict[str, Function] = {
    "linear": linear(),
    "relu": nn.Sequential(linear(), nn.ReLU()),
    "relu in place": nn.Sequential(linear(), nn.ReLU(inplace=True)),
    "gelu": nn.Sequential(linear(), nn.GELU()),
    "sum": lambda x: x + torch.tanh(x),
    "softmax": lambda x: x.softmax(dim=1),
    "view": lambda x: (x * 2).view(WIDTH, ROWS),
    "concatenation": lambda x: torch.cat([x[:10], x[10:]]),
    "type": lambda x: x.double().mul(2).float().add(1),
}
COPYING: dict[str, Function] = {
    "normalization": nn.Sequential(linear(), nn.LayerNorm(WIDTH)),
    "part": lambda x: torch.cat([x, x])[:ROWS],
    "transposed": lambda x: (x * 2).t(),
    "input": lambda x: x.view(-1),
    "chosen": lambda x: x[x > 0].exp(),
    "long": lambda x: sum((x * number for number in range(9)), start=x),
}


@pytest.mark.parametrize("name", SHARING)
def test_the_second_run_writes_where_it_is_told(name: str) -> None:
    memory = Memory()
    redirection, function = Redirection(memory.allocate), SHARING[name]
    for seed in range(3):
        inputs = given(seed=seed).requires_grad_()
        result = forward(redirection, function, inputs)
        assert memory.has(result) == (seed > 0)
        result.square().mean().backward()
        other = given(seed=seed).requires_grad_()
        expected = function(other)
        expected.square().mean().backward()
        assert torch.equal(result, expected)
        assert torch.equal(inputs.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", COPYING)
def test_other_results_are_computed_as_usual(name: str) -> None:
    memory = Memory()
    redirection, function = Redirection(memory.allocate), COPYING[name]
    for seed in range(3):
        inputs = given(seed=seed)
        result = forward(redirection, function, inputs)
        assert not memory.has(result)
        assert torch.equal(result, function(inputs))


def test_gradients_are_written_where_they_are_told() -> None:
    memory = Memory()
    redirection = Redirection(memory.allocate)
    for seed in range(3):
        inputs = given(seed=seed).requires_grad_()
        result, gradient = inputs.exp(), given(seed=seed + 5)
        with redirection.run([gradient]):
            result.backward(gradient)
        redirection.learn([inputs.grad])
        assert inputs.grad is not None
        assert memory.has(inputs.grad) == (seed > 0)
        assert torch.equal(inputs.grad, gradient * result)


def test_a_run_that_takes_another_way_computes_as_usual() -> None:
    memory = Memory()
    redirection = Redirection(memory.allocate)
    way = 0

    def function(x: Tensor) -> Tensor:
        if way == 0:
            return x * 2
        return torch.cat([x, x]) if way == 1 else x.double() * 2

    inputs = given()
    for way in (0, 0, 1, 2, 0):  # noqa: B007
        result = forward(redirection, function, inputs)
        assert torch.equal(result, function(inputs))
    assert memory.has(result)


def test_each_shape_has_a_plan_up_to_a_limit() -> None:
    memory = Memory(40)
    redirection = Redirection(memory.allocate)
    shared = []
    for rows in [*range(ROWS, ROWS - 20, -1)] * 2:
        inputs = given(rows)
        result = forward(redirection, torch.exp, inputs)
        assert torch.equal(result, inputs.exp())
        shared.append(memory.has(result))
    assert sum(shared[:20]) == 0
    assert 0 < sum(shared[20:]) < 20


def test_without_memory_it_computes_as_usual() -> None:
    memory = Memory(1)
    redirection, inputs = Redirection(memory.allocate), given()
    results = [forward(redirection, torch.exp, inputs) for _ in range(4)]
    assert [memory.has(result) for result in results] == [False, True, False, False]
    assert all(torch.equal(result, inputs.exp()) for result in results)


def test_values_without_a_gradient_leave_the_shared_memory() -> None:
    memory = Memory()
    redirection, inputs = Redirection(memory.allocate), given()
    forward(redirection, torch.exp, inputs)
    result = forward(redirection, torch.exp, inputs)
    assert memory.has(result)
    needing, free, number = redirection.own(Packet(0b001, None, [result, result, 3])).leaves
    assert needing is result
    assert not memory.has(free)
    assert torch.equal(free, result)
    assert number == 3
