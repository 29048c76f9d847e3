"""Errors in recorded passes, and in passes for certain tensors, are reported accurately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests import remains
from tests.contract.processes import autograd_functions
from tests.contract.processes import higher_order_functions as functions
from torchweft import rpc
from torchweft.errors import ArgumentTypeError, AutogradError
from torchweft.launch import Nursery, cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")

LIMIT_S = 20.0
DRIVER, FIRST, SECOND = EVERYBODY = ("driver", "worker0", "worker1")


@pytest.fixture(scope="module")
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=2, nursery=nursery):
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing(_workers: None) -> Iterator[None]:
    """Checks that no context and no pass is left on any worker."""
    yield
    remains.await_no_autograd()


def test_inputs_that_are_none() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x")
        result = rpc.rpc_sync(FIRST, functions.layer, (value,)).sum()
        plain = torch.ones(3)
        cases: list[tuple[Any, type[Exception], str]] = [
            ([], AutogradError, "inputs"),
            ([value, plain], AutogradError, r"inputs\[1\]"),
            (plain, AutogradError, "does not require grad"),
            ([value, 3.0], ArgumentTypeError, r"inputs\[1\] is a float"),
            (None, ArgumentTypeError, "inputs"),
            (3.0, ArgumentTypeError, "inputs"),
            ([functions.parameter("other")], AutogradError, "not have been used"),
            ([value, functions.parameter("other")], AutogradError, r"inputs\[1\]"),
        ]
        for inputs, kind, complaint in cases:
            with pytest.raises(kind, match=complaint):
                torchweft.autograd.grad(context_id, result, inputs, retain_graph=True)
        # None of the errors has changed the graph.
        unused = functions.parameter("other")
        found = torchweft.autograd.grad(context_id, result, [unused, value], allow_unused=True)
        assert found[0] is None
        assert found[1] is not None


def test_outputs_that_are_none() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x")
        vector = rpc.rpc_sync(FIRST, functions.layer, (value,))
        ones = torch.ones(3, dtype=torch.float64)
        cases: list[tuple[Any, Any, type[Exception]]] = [
            ([], None, AutogradError),
            (vector, None, AutogradError),
            ([vector, vector], [ones, None], AutogradError),
            ([vector.sum(), torch.ones(())], None, AutogradError),
            ([vector, vector], [ones], AutogradError),
            (vector, [ones, ones], AutogradError),
            (vector, torch.ones(4, dtype=torch.float64), AutogradError),
            (vector, torch.ones(3, 1, dtype=torch.float64), AutogradError),
            (vector, torch.ones(3, dtype=torch.complex128), AutogradError),
            (vector, 3.0, ArgumentTypeError),
            (vector, [3.0], ArgumentTypeError),
            (3.0, None, ArgumentTypeError),
            ([3.0], None, ArgumentTypeError),
            (None, None, ArgumentTypeError),
        ]
        for outputs, weights, kind in cases:
            with pytest.raises(kind):
                torchweft.autograd.grad(context_id, outputs, value, weights)
            roots = [outputs] if isinstance(outputs, Tensor) else outputs
            given = [weights] if isinstance(weights, Tensor) else weights
            with pytest.raises(kind):
                torchweft.autograd.backward(context_id, roots, grad_tensors=given)
        (gradient,) = torchweft.autograd.grad(context_id, vector, value, ones)
        assert gradient.shape == (3,)
        assert torchweft.autograd.get_gradients(context_id) == {}


def test_errors_are_those_of_torch_for_programs_that_catch_them() -> None:
    """A program that catches torch's errors for these cases catches ours as well."""
    value = functions.parameter("x")
    with torchweft.autograd.context() as context_id:
        result = rpc.rpc_sync(FIRST, functions.layer, (value,))
        with pytest.raises(RuntimeError):
            torchweft.autograd.grad(context_id, result, value)
        with pytest.raises(RuntimeError):
            torchweft.autograd.grad(context_id, result.sum(), functions.parameter("other"))
        with pytest.raises(RuntimeError):
            torchweft.autograd.grad(context_id, result.sum(), [])


def test_contexts_that_are_not_alive() -> None:
    value = functions.parameter("x")
    with torchweft.autograd.context() as context_id:
        loss = rpc.rpc_sync(FIRST, functions.layer, (value,)).sum()
        (slope,) = torchweft.autograd.grad(context_id, loss, value, create_graph=True)
    for number in (context_id, context_id + 1, -1, 0, 1 << 62):
        for ask in (
            lambda number=number: torchweft.autograd.grad(number, loss, value),
            lambda number=number: torchweft.autograd.grad(number, slope.sum(), value),
            lambda number=number: torchweft.autograd.backward(number, [loss], create_graph=True),
        ):
            with pytest.raises(AutogradError, match="not alive here"):
                ask()
    for number in (None, "3", 1.5):
        with pytest.raises(ArgumentTypeError):
            torchweft.autograd.grad(number, loss, value)  # type: ignore[arg-type]


def test_tensors_of_another_context() -> None:
    value = functions.parameter("x")
    with torchweft.autograd.context() as outer:
        first = rpc.rpc_sync(FIRST, functions.layer, (value,)).prod()
        (slope,) = torchweft.autograd.grad(outer, first, value, create_graph=True)
        with torchweft.autograd.context() as inner:
            second = rpc.rpc_sync(SECOND, functions.layer, (value,)).prod()
            for outputs in (first, slope.sum()):
                with pytest.raises(AutogradError):
                    torchweft.autograd.grad(inner, outputs, value, create_graph=True)
            # The pass must not silently omit a part.
            with pytest.raises(AutogradError):
                torchweft.autograd.grad(inner, first * second, value, create_graph=True)
        # The errors have not broken the outer context.
        assert torchweft.autograd.grad(outer, slope.sum(), value)[0].shape == (3,)


@pytest.mark.parametrize("path", [(FIRST,), (FIRST, SECOND), (SECOND, DRIVER)])
def test_a_function_that_can_only_be_differentiated_once(path: tuple[str, ...]) -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 1
        total = called_along(path, functions.once_only, value).pow(2).sum()
        (slope,) = torchweft.autograd.grad(context_id, total, value, create_graph=True)
        with pytest.raises(AutogradError, match="once_differentiable") as caught:
            torchweft.autograd.backward(context_id, [slope.sum()])
    assert caught.value.worker == path[-1]
    assert caught.value.operation


def called_along(path: tuple[str, ...], function: Callable[[Tensor], Tensor], value: Tensor) -> Any:
    if len(path) == 1:
        return rpc.rpc_sync(path[0], function, (value,))
    return rpc.rpc_sync(path[0], autograd_functions.pass_to, (path[1], function, value))


@pytest.mark.parametrize("path", [(FIRST,), (FIRST, SECOND), (SECOND, DRIVER)])
def test_an_error_in_the_second_pass_names_worker_and_operation(path: tuple[str, ...]) -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 1
        result = called_along(path, functions.broken_at_second, value)
        other = rpc.rpc_sync(SECOND, functions.layer, (value,))
        total = (result * other).sum()
        (slope,) = torchweft.autograd.grad(context_id, total, value, create_graph=True)
        for end in (
            lambda: torchweft.autograd.grad(context_id, slope.prod(), value, retain_graph=True),
            lambda: torchweft.autograd.backward(context_id, [slope.prod()], retain_graph=True),
        ):
            with pytest.raises(AutogradError, match="no slope here") as caught:
                end()
            assert (caught.value.worker, caught.value.operation) == (path[-1], "Broken.backward")
            assert isinstance(caught.value.__cause__, ArithmeticError)
        # The context stays usable.
        good = rpc.rpc_sync(FIRST, functions.layer, (value,)).sum()
        assert torchweft.autograd.grad(context_id, good, value)[0].shape == (3,)


def test_an_error_within_the_pass_of_a_callee_comes_to_the_caller() -> None:
    with torchweft.autograd.context():
        value = functions.parameter("x") * 1
        arguments = (SECOND, autograd_functions.broken, value)
        with pytest.raises(AutogradError, match="no slope here") as caught:
            rpc.rpc_sync(FIRST, functions.gradient_through, arguments)
    assert (caught.value.worker, caught.value.operation) == (SECOND, "Broken.backward")


def test_a_plain_pass_into_a_gradient_says_what_to_call() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 1
        result = rpc.rpc_sync(FIRST, functions.layer, (value,))
        (slope,) = torchweft.autograd.grad(context_id, result.prod(), value, create_graph=True)
        with pytest.raises(RuntimeError, match=r"torchweft\.autograd"):
            slope.sum().backward()
        assert torchweft.autograd.grad(context_id, slope.sum(), value)[0].shape == (3,)
