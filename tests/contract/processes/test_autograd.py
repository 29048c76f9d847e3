"""Distributed autograd between real workers: one test for each shape of program.

The expected gradients are those of a model in one process that computes the same as the program.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests import remains
from tests.contract.processes import autograd_functions as functions
from torchweft import rpc
from torchweft.errors import ArgumentTypeError, AutogradError
from torchweft.launch import Nursery, cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")

LIMIT_S = 10.0
DRIVER, FIRST, SECOND = EVERYBODY = ("driver", "worker0", "worker1")
Leaf = Callable[..., Tensor]
"""Returns a parameter of the model, by worker, name and shape."""

every_mode = pytest.mark.parametrize("mode", ["smart", "fast"])
unique = itertools.count()


@pytest.fixture(scope="module")
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=2, nursery=nursery):
        yield


@pytest.fixture
def _leaves_nothing(_workers: None) -> Iterator[None]:
    """Checks that no context and no pass is left on any worker."""
    yield
    remains.await_no_autograd()


together = pytest.mark.usefixtures("_leaves_nothing")


def check(context_id: int, model: Callable[[Leaf], Tensor], passes: int = 1) -> None:
    """Checks that the workers' gradients in a context are those of the model."""
    leaves: dict[tuple[str, str], Tensor] = {}

    def leaf(worker: str, name: str, *shape: int) -> Tensor:
        if (worker, name) not in leaves:
            leaves[worker, name] = functions.initial(worker, name, *(shape or (3,)))
        return leaves[worker, name]

    loss = model(leaf)
    for _ in range(passes):
        loss.backward(retain_graph=True)
    actual = {
        (worker, name): gradient
        for worker in EVERYBODY
        for name, gradient in rpc.rpc_sync(worker, functions.gradients, (context_id,)).items()
    }
    expected = {key: tensor.grad for key, tensor in leaves.items() if tensor.grad is not None}
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(
            actual[key].to_dense(), gradient.to_dense(), rtol=1e-10, atol=1e-10, msg=f"{key}"
        )


def layer(value: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(value * weight)


def wait_all(futures: list[Any]) -> list[Any]:
    return [future.wait() for future in futures]


# Shapes of programs


@together
@every_mode
def test_chain(mode: Any) -> None:
    with torchweft.autograd.context() as context_id:
        value = rpc.rpc_sync(FIRST, functions.layer, (functions.parameter("x"),))
        value = rpc.rpc_sync(SECOND, functions.layer, (value,))
        torchweft.autograd.backward(context_id, [value.sum()], mode=mode)
        check(
            context_id,
            lambda leaf: layer(layer(leaf(DRIVER, "x"), leaf(FIRST, "w")), leaf(SECOND, "w")).sum(),
        )


@together
@every_mode
def test_unused_results(mode: Any) -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 2
        rpc.rpc_sync(FIRST, functions.layer, (value, "unused"))
        unused = rpc.rpc_sync(SECOND, functions.layer, (value, "unused too"))
        rpc.rpc_sync(FIRST, functions.pass_to, (SECOND, functions.layer, unused))
        used = rpc.rpc_sync(FIRST, functions.layer, (value,))
        torchweft.autograd.backward(context_id, [used.sum()], mode=mode)
        check(context_id, lambda leaf: layer(leaf(DRIVER, "x") * 2, leaf(FIRST, "w")).sum())


@together
@every_mode
def test_mutually_recursive_calls(mode: Any) -> None:
    def model(leaf: Leaf, depth: int, value: Tensor, me: str, other: str) -> Tensor:
        if depth == 0:
            return value
        return model(leaf, depth - 1, layer(value, leaf(me, "w")), other, me) + value

    with torchweft.autograd.context() as context_id:
        arguments = (6, functions.parameter("x") * 1, FIRST, SECOND)
        result = rpc.rpc_sync(FIRST, functions.recurse, arguments)
        torchweft.autograd.backward(context_id, [result.sum()], mode=mode)
        check(context_id, lambda leaf: model(leaf, 6, leaf(DRIVER, "x"), FIRST, SECOND).sum())


@together
def test_call_back_to_the_caller() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 1
        result = rpc.rpc_sync(FIRST, functions.pass_to, (DRIVER, functions.layer, value))
        torchweft.autograd.backward(context_id, [result.sum()])

        def model(leaf: Leaf) -> Tensor:
            inner = layer(layer(leaf(DRIVER, "x"), leaf(FIRST, "w")), leaf(DRIVER, "w"))
            return layer(inner, leaf(FIRST, "w")).sum()

        check(context_id, model)


@together
@every_mode
def test_fan_out(mode: Any) -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x").exp()
        futures = [
            rpc.rpc_async(worker, functions.layer, (value * factor,))
            for factor in range(1, 9)
            for worker in (FIRST, SECOND)
        ]
        torchweft.autograd.backward(context_id, [torch.stack(wait_all(futures)).sum()], mode=mode)

        def model(leaf: Leaf) -> Tensor:
            value = leaf(DRIVER, "x").exp()
            weights = [leaf(worker, "w") for worker in (FIRST, SECOND)]
            parts = [layer(value * f, weight) for f in range(1, 9) for weight in weights]
            return torch.stack(parts).sum()

        check(context_id, model)


@together
@every_mode
def test_several_roots(mode: Any) -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 2
        first = rpc.rpc_sync(FIRST, functions.layer, (value,)).sum()
        second = rpc.rpc_sync(SECOND, functions.layer, (value,)).prod()
        torchweft.autograd.backward(context_id, [first, second, value.prod(), first], mode=mode)

        def model(leaf: Leaf) -> Tensor:
            value = leaf(DRIVER, "x") * 2
            first = layer(value, leaf(FIRST, "w")).sum()
            return 2 * first + layer(value, leaf(SECOND, "w")).prod() + value.prod()

        check(context_id, model)


@together
@every_mode
def test_same_reference_used_twice(mode: Any) -> None:
    with torchweft.autograd.context() as context_id:
        reference = rpc.remote(FIRST, functions.layer, (functions.parameter("x") * 1,))
        on_both = [
            rpc.rpc_sync(worker, functions.add, (reference, reference))
            for worker in (FIRST, SECOND)
        ]
        total = reference.to_here() * reference.to_here() + sum(on_both)
        torchweft.autograd.backward(context_id, [total.sum()], mode=mode)

        def model(leaf: Leaf) -> Tensor:
            value = layer(leaf(DRIVER, "x"), leaf(FIRST, "w"))
            return (value * value + 2 * (value + value.exp())).sum()

        check(context_id, model)


@together
@every_mode
def test_same_tensor_twice_in_one_message(mode: Any) -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 2
        result = rpc.rpc_sync(FIRST, functions.add, (value, value))
        torchweft.autograd.backward(context_id, [result.sum()], mode=mode)
        check(
            context_id, lambda leaf: (leaf(DRIVER, "x") * 2 + (leaf(DRIVER, "x") * 2).exp()).sum()
        )


@together
@every_mode
def test_decoder_is_fed_its_own_output(mode: Any) -> None:
    steps = 10
    with torchweft.autograd.context() as context_id:
        decoder = rpc.remote(FIRST, functions.Decoder)
        token, outputs = functions.parameter("start") * 1, []
        for _ in range(steps):
            outputs.append(decoder.rpc_sync().step(token))
            token = outputs[-1] * functions.parameter("feed")
        torchweft.autograd.backward(context_id, [torch.stack(outputs).sum()], mode=mode)

        def model(leaf: Leaf) -> Tensor:
            token, hidden, outputs = leaf(DRIVER, "start") * 1, leaf(FIRST, "hidden") * 1, []
            for _ in range(steps):
                hidden = torch.tanh(hidden * leaf(FIRST, "cell") + token)
                outputs.append(hidden * leaf(FIRST, "out"))
                token = outputs[-1] * leaf(DRIVER, "feed")
            return torch.stack(outputs).sum()

        check(context_id, model)


@together
@every_mode
def test_two_decoders_feed_each_other(mode: Any) -> None:
    steps = 5
    with torchweft.autograd.context() as context_id:
        decoders = [rpc.remote(worker, functions.Decoder) for worker in (FIRST, SECOND)]
        token = functions.parameter("start") * 1
        for _ in range(steps):
            for decoder in decoders:
                token = decoder.rpc_async().step(token).wait()
        torchweft.autograd.backward(context_id, [token.sum()], mode=mode)

        def model(leaf: Leaf) -> Tensor:
            token = leaf(DRIVER, "start") * 1
            hidden = {worker: leaf(worker, "hidden") * 1 for worker in (FIRST, SECOND)}
            for _ in range(steps):
                for worker in (FIRST, SECOND):
                    hidden[worker] = torch.tanh(hidden[worker] * leaf(worker, "cell") + token)
                    token = hidden[worker] * leaf(worker, "out")
            return token.sum()

        check(context_id, model)


@together
def test_call_to_itself() -> None:
    with torchweft.autograd.context() as context_id:
        value = rpc.rpc_sync(DRIVER, functions.layer, (functions.parameter("x") * 1,))
        value = rpc.rpc_sync(FIRST, functions.pass_to, (FIRST, functions.layer, value))
        reference = rpc.remote(DRIVER, functions.layer, (value,))
        torchweft.autograd.backward(context_id, [reference.to_here().sum()])

        def model(leaf: Leaf) -> Tensor:
            value = layer(leaf(DRIVER, "x"), leaf(DRIVER, "w"))
            for _ in range(3):
                value = layer(value, leaf(FIRST, "w"))
            return layer(value, leaf(DRIVER, "w")).sum()

        check(context_id, model)


@together
def test_async_functions_are_recorded() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 1
        value = rpc.rpc_sync(FIRST, functions.layer_of_other, (value, SECOND))
        value = rpc.rpc_sync(SECOND, functions.layers_in_turn, (value, FIRST))
        torchweft.autograd.backward(context_id, [value.sum()])

        def model(leaf: Leaf) -> Tensor:
            value = layer(leaf(DRIVER, "x"), leaf(SECOND, "w")) * leaf(FIRST, "v")
            value = layer(value, leaf(FIRST, "w")) * leaf(SECOND, "v")
            return layer(value, leaf(FIRST, "w")).sum()

        check(context_id, model)


@together
def test_pass_led_by_the_owner_of_a_reference() -> None:
    with torchweft.autograd.context() as context_id:
        reference = rpc.remote(FIRST, functions.layer, (functions.parameter("x") * 1,))
        total = rpc.remote(FIRST, functions.add, (reference, torch.zeros(3)))
        rpc.remote(FIRST, torch.sum, (total.to_here(),)).backward(context_id)
        check(context_id, lambda leaf: (layer(leaf(DRIVER, "x"), leaf(FIRST, "w")) + 1).sum())


# Kinds of tensors


@together
def test_parameter_as_argument_stays_in_the_graph() -> None:
    with torchweft.autograd.context() as context_id:
        weight = functions.parameter("x")
        *claims, result = rpc.rpc_sync(FIRST, functions.describe_argument, (weight,))
        assert claims == [True, True, False]  # a Parameter that requires grad, and no leaf
        torchweft.autograd.backward(context_id, [(result * weight).sum()])
        check(context_id, lambda leaf: (leaf(DRIVER, "x") ** 2 * leaf(FIRST, "w")).sum())


@together
def test_changes_in_place_of_a_received_tensor() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 1
        received = rpc.rpc_sync(FIRST, functions.change_in_place, (value,))
        received.mul_(value)
        torchweft.autograd.backward(context_id, [received.sum()])

        def model(leaf: Leaf) -> Tensor:
            return ((leaf(DRIVER, "x") * 3 + leaf(FIRST, "w")).exp() * leaf(DRIVER, "x")).sum()

        check(context_id, model)


@together
def test_sparse_gradients_stay_sparse() -> None:
    with torchweft.autograd.context() as context_id:
        rows = [rpc.rpc_sync(FIRST, functions.look_up, (at,)) for at in ([0, 2, 2], [4, 0])]
        torchweft.autograd.backward(context_id, [torch.cat(rows).pow(2).sum()])
        assert rpc.rpc_sync(FIRST, functions.gradients, (context_id,))["table"].is_sparse
        indices = torch.tensor([0, 2, 2, 4, 0])
        check(context_id, lambda leaf: leaf(FIRST, "table", 5, 3)[indices].pow(2).sum())


@together
@pytest.mark.parametrize("count", [100, 20_000, 500_000])
def test_tensors_of_every_size(count: int) -> None:
    value = torch.ones(count, dtype=torch.float64, requires_grad=True)
    with torchweft.autograd.context() as context_id:
        received = rpc.rpc_sync(FIRST, torch.mul, (value, 3.0))
        torchweft.autograd.backward(context_id, [(received * received).sum()])
        gradient = torchweft.autograd.get_gradients(context_id)[value]
    torch.testing.assert_close(gradient, torch.full_like(gradient, 18.0))


# Passes


@together
@every_mode
def test_two_passes_on_a_retained_graph_add_up(mode: Any) -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 1
        loss = rpc.rpc_sync(FIRST, functions.pass_to, (SECOND, functions.layer, value)).sum()
        torchweft.autograd.backward(context_id, [loss], retain_graph=True, mode=mode)
        torchweft.autograd.backward(context_id, [loss], mode=mode)

        def model(leaf: Leaf) -> Tensor:
            inner = layer(layer(leaf(DRIVER, "x"), leaf(FIRST, "w")), leaf(SECOND, "w"))
            return layer(inner, leaf(FIRST, "w")).sum()

        check(context_id, model, passes=2)
        with pytest.raises(AutogradError, match="second time"):
            torchweft.autograd.backward(context_id, [loss], mode=mode)


@together
@pytest.mark.parametrize("reused", [False, True], ids=["known at once", "discovered"])
def test_branches_on_different_workers_run_at_once(reused: bool) -> None:
    name = f"gate {next(unique)}"
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x").exp()
        parts = [
            rpc.rpc_sync(worker, functions.meet, (value, name, other))
            for worker, other in ((FIRST, SECOND), (SECOND, FIRST))
        ]
        # A sent tensor that is also used here makes the pass discover what is live.
        extra = value if reused else torch.zeros(3)
        torchweft.autograd.backward(context_id, [(parts[0] * parts[1] + extra).sum()])

        def model(leaf: Leaf) -> Tensor:
            value = leaf(DRIVER, "x").exp()
            first, second = (layer(value, leaf(worker, "w")) for worker in (FIRST, SECOND))
            return (first * second + (value if reused else 0.0)).sum()

        check(context_id, model)


@together
def test_concurrent_contexts_on_shared_parameters() -> None:
    results: dict[tuple[int, int], bool] = {}

    def train(thread: int) -> None:
        for step in range(1, 11):
            with torchweft.autograd.context() as context_id:
                factor = float(thread * 100 + step)
                value = functions.parameter("x") * factor
                loss = rpc.rpc_sync(FIRST, torch.mul, (value, 2.0)).sum()
                loss = loss + rpc.rpc_sync(SECOND, functions.scaled, (factor,)).sum()
                torchweft.autograd.backward(context_id, [loss])
                mine = functions.gradients(context_id)["x"]
                theirs = rpc.rpc_sync(SECOND, functions.gradients, (context_id,))["w"]
                results[thread, step] = bool(
                    (mine == 2 * factor).all() and (theirs == factor).all()
                )

    threads = [threading.Thread(target=train, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 30
    assert all(results.values())


@together
def test_contexts_within_each_other_do_not_mix() -> None:
    with torchweft.autograd.context() as outer:
        value = rpc.rpc_sync(FIRST, functions.scaled, (2.0,))
        with torchweft.autograd.context() as inner:
            loss = rpc.rpc_sync(FIRST, functions.scaled, (3.0,)).sum()
            torchweft.autograd.backward(inner, [loss])
            check(inner, lambda leaf: (leaf(FIRST, "w") * 3).sum())
        value = value + rpc.rpc_sync(FIRST, functions.scaled, (5.0,))
        torchweft.autograd.backward(outer, [value.sum()])
        check(outer, lambda leaf: (leaf(FIRST, "w") * 7).sum())


# What cannot work


@together
@every_mode
@pytest.mark.parametrize("path", [(FIRST,), (FIRST, SECOND), (SECOND, DRIVER)])
def test_an_error_in_backward_names_worker_and_operation(path: tuple[str, ...], mode: Any) -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 1
        # A healthy parallel branch must end too.
        other = rpc.rpc_sync(SECOND, functions.layer, (value,))
        if len(path) == 1:
            value = rpc.rpc_sync(path[0], functions.broken, (value,))
        else:
            value = rpc.rpc_sync(path[0], functions.pass_to, (path[1], functions.broken, value))
        with pytest.raises(AutogradError, match="no slope here") as caught:
            torchweft.autograd.backward(context_id, [(value + other).sum()], mode=mode)
        assert (caught.value.worker, caught.value.operation) == (path[-1], "Broken.backward")
        assert isinstance(caught.value.__cause__, ArithmeticError)
        for worker in EVERYBODY:
            await_no_part(worker)


def await_no_part(worker: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while rpc.rpc_sync(worker, remains.of_autograd)["parts"]:
        assert time.monotonic() < deadline_s, f"the pass is not over on {worker}"
        time.sleep(0.01)


@together
def test_a_context_can_be_used_after_a_failed_pass() -> None:
    with torchweft.autograd.context() as context_id:
        value = functions.parameter("x") * 1
        bad = rpc.rpc_sync(FIRST, functions.broken, (value,))
        good = rpc.rpc_sync(SECOND, functions.layer, (value,))
        with pytest.raises(AutogradError):
            torchweft.autograd.backward(context_id, [bad.sum()])
        torchweft.autograd.backward(context_id, [good.sum()])
        check(context_id, lambda leaf: layer(leaf(DRIVER, "x"), leaf(SECOND, "w")).sum())


@together
def test_roots_that_are_none() -> None:
    with torchweft.autograd.context() as context_id:
        received = rpc.rpc_sync(FIRST, functions.layer, (functions.parameter("x"),))
        for roots, complaint in (
            ([], "at least one root"),
            ([received], r"root 0 has shape \(3,\)"),
            ([received.sum(), torch.ones(())], "root 1 does not require grad"),
        ):
            with pytest.raises(AutogradError, match=complaint):
                torchweft.autograd.backward(context_id, roots)
        with pytest.raises(ArgumentTypeError, match="root 1 is a float"):
            torchweft.autograd.backward(context_id, [received.sum(), 1.0])
        with pytest.raises(ArgumentTypeError, match="context_id is None"):
            torchweft.autograd.backward(None, [received.sum()])
        assert torchweft.autograd.get_gradients(context_id) == {}


@together
def test_contexts_that_are_not_alive() -> None:
    with torchweft.autograd.context() as context_id:
        loss = rpc.rpc_sync(FIRST, functions.layer, (functions.parameter("x"),)).sum()
    for number in (context_id, context_id + 1, -1, 0, 1 << 62):
        with pytest.raises(AutogradError, match=f"id: {number}; it is not alive here"):
            torchweft.autograd.backward(number, [loss])
        with pytest.raises(AutogradError, match=f"id: {number}; it is not alive here"):
            torchweft.autograd.get_gradients(number)


@together
def test_a_plain_backward_says_what_to_call() -> None:
    with torchweft.autograd.context():
        value = functions.parameter("x") * 1
        received = rpc.rpc_sync(FIRST, functions.layer, (value,))
        with pytest.raises(RuntimeError, match=r"torchweft\.autograd\.backward"):
            received.sum().backward()
        with pytest.raises(RuntimeError, match=r"torchweft\.autograd\.backward"):
            rpc.rpc_sync(FIRST, functions.plain_backward, (value,))


@together
def test_a_tensor_of_an_earlier_context_is_told_as_such() -> None:
    with torchweft.autograd.context():
        state = rpc.rpc_sync(FIRST, functions.layer, (functions.parameter("x"),))
    told = pytest.raises(AutogradError, match=r"in another autograd context, .* detach\(\)")
    with torchweft.autograd.context() as context_id:
        for worker in (FIRST, SECOND):  # On the way from one of them, and at the caller alone.
            loss = rpc.rpc_sync(worker, functions.layer, (state,)).sum()
            with told:
                torchweft.autograd.backward(context_id, [loss])
        with told:
            torchweft.autograd.backward(context_id, [state.sum()])
        after = rpc.rpc_sync(FIRST, functions.layer, (state.detach(),))
        torchweft.autograd.backward(context_id, [after.sum()])


@together
def test_calls_that_outlive_their_context() -> None:
    name = f"gate {next(unique)}"
    with torchweft.autograd.context():
        value = functions.parameter("x") * 1
        arguments = (value, name, SECOND)
        late = [rpc.rpc_async(FIRST, functions.layer_behind_gate, arguments) for _ in range(3)]
        reference = rpc.remote(FIRST, functions.layer_behind_gate, arguments)
    remains.await_no_autograd()
    rpc.rpc_sync(FIRST, functions.open_gate, (name,))
    for result in (*wait_all(late), reference.to_here()):
        assert result.shape == (3,)
    remains.await_no_autograd()


@together
def test_many_contexts_that_end_while_calls_are_made() -> None:
    started = []
    for _ in range(50):
        with torchweft.autograd.context():
            value = functions.parameter("x") * 1
            for worker, other in ((FIRST, SECOND), (SECOND, FIRST)):
                arguments = (other, functions.layer, value)
                started.append(rpc.rpc_async(worker, functions.pass_to, arguments))
    for result in wait_all(started):
        assert result.shape == (3,)
