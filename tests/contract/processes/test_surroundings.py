"""What surrounds a function: context variables and modes that calls and callbacks see, or leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchweft import rpc
from torchweft.autograd import backward, context, get_gradients
from torchweft.errors import SerializationError

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

FIRST, SECOND = "worker0", "worker1"
REQUEST = ContextVar("request", default="none")
X = torch.tensor([1.0, 2.0, 3.0])


def values_with_a_variable() -> Any:
    REQUEST.set("the stream's")
    for _ in range(3):
        yield REQUEST.get()


@pytest.mark.usefixtures("group")
def test_a_generator_keeps_its_variables_from_one_value_to_the_next() -> None:
    assert list(rpc.stream(FIRST, values_with_a_variable)) == ["the stream's"] * 3


# Modes of the caller


class _Dispatched(TorchDispatchMode):
    """Makes zeros of what all operations return."""

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return zeroed(function(*args, **(kwargs or {})))


class _Called(TorchFunctionMode):
    """Makes zeros of what all functions of torch return."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return zeroed(function(*args, **(kwargs or {})))


def zeroed(value: Any) -> Any:
    return value * 0 if isinstance(value, Tensor) and value.is_floating_point() else value


MODES: dict[str, Callable[[], Any]] = {
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "only fake tensors": FakeTensorMode,
    "dispatch": _Dispatched,
    "functions": _Called,
    "default device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.float16),
}


def arguments(count: int) -> list[Any]:
    row = torch.arange(float(count))
    computed = row.clone().requires_grad_() * 1
    return [
        row,
        row[::2],
        row.bfloat16(),
        nn.Parameter(row),
        computed,
        row.to_sparse(),
        [row, row[:1]],
    ]


def doubled(x: Any) -> Any:
    return [each * 2 for each in x] if isinstance(x, list) else x * 2


def doubled_in_a_stream(x: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield x


def plain(value: Any) -> list[Tensor]:
    return [each.detach().to_dense() for each in (value if isinstance(value, list) else [value])]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("group")
def test_modes_of_the_caller_do_not_change_what_a_call_sends_and_returns(mode: str) -> None:
    for count in (2, 1000, 100_000):
        for argument in arguments(count):
            wanted = plain(doubled(argument))
            with MODES[mode]():
                future = rpc.rpc_async(FIRST, doubled, (argument,))
                found = [rpc.rpc_sync(FIRST, doubled, (argument,)), future.wait()]
                found.append(rpc.remote(FIRST, doubled, (argument,)).to_here())
            for each in found:
                torch.testing.assert_close(plain(each), wanted)


@pytest.mark.usefixtures("group")
def test_a_stream_sends_its_tensors_whole_from_within_a_mode() -> None:
    row = torch.arange(1000.0)
    (found,) = rpc.stream(FIRST, doubled_in_a_stream, (row,))
    torch.testing.assert_close(found, row)


class _Asking(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return rpc.rpc_sync(FIRST, doubled, (x,))


def ask(x: Tensor) -> Any:
    return rpc.rpc_sync(FIRST, doubled, (x,))


def ask_for_sum(x: Tensor) -> Any:
    return ask(x).sum()


TRANSFORMS: dict[str, Callable[[Tensor], object]] = {
    "grad": torch.func.grad(ask_for_sum),
    "vmap": torch.func.vmap(ask),
    "vjp": lambda x: torch.func.vjp(ask, x),
    "jvp": lambda x: torch.func.jvp(ask, (x,), (x,)),
    "jacrev": torch.func.jacrev(ask),
    "jacfwd": torch.func.jacfwd(ask),
    "hessian": torch.func.hessian(ask_for_sum),
    "linearize": lambda x: torch.func.linearize(ask, x),
    "functionalize": torch.func.functionalize(ask),
    "make_fx": lambda x: make_fx(ask)(x),
    "make_fx of fake tensors": lambda x: make_fx(ask, tracing_mode="fake")(x),
    "symbolic_trace": lambda _: torch.fx.symbolic_trace(_Asking()),
    "export": lambda x: torch.export.export(_Asking(), (x,), strict=False),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("group")
def test_a_call_within_a_transform_or_a_trace_is_refused(transform: str) -> None:
    with pytest.raises(
        SerializationError, match=r"within torch\.func|traces the code|symbolic_trace"
    ):
        TRANSFORMS[transform](torch.ones(3, 2))


@pytest.mark.usefixtures("group")
def test_tensors_that_a_transform_has_not_made_can_be_sent_within_it() -> None:
    x, constant = torch.ones(3, 2), torch.full((2,), 3.0)
    for transform in (torch.func.vmap, torch.func.functionalize):
        made = transform(lambda row: row * ask(constant))
        torch.testing.assert_close(made(x), x * 6)
    gradient = torch.func.grad(lambda it: (it * ask(constant)).sum())(x)
    torch.testing.assert_close(gradient, torch.full((3, 2), 6.0))


# Callbacks of futures


def multiply(x: Tensor, factor: Any) -> Tensor:
    return x * factor


def chain_of_then(x: Tensor, w: Tensor) -> Tensor:
    first = rpc.rpc_async(FIRST, multiply, (x, 3.0))
    return first.then(lambda done: rpc.rpc_sync(SECOND, multiply, (done.value(), w))).wait()


def chain_of_two(x: Tensor, w: Tensor) -> Tensor:
    first = rpc.rpc_async(FIRST, multiply, (x, 3.0))
    second = first.then(lambda done: done.value() * 1)
    return second.then(lambda done: rpc.rpc_sync(SECOND, multiply, (done.value(), w))).wait()


def chain_of_all(x: Tensor, w: Tensor) -> Tensor:
    all_of_them: Any = torch.futures.collect_all([rpc.rpc_async(FIRST, multiply, (x, 3.0))])
    second = all_of_them.then(lambda done: done.value()[0].value() * 1)
    return second.then(lambda done: rpc.rpc_sync(SECOND, multiply, (done.value(), w))).wait()


def chain_of_done(x: Tensor, w: Tensor) -> Tensor:
    found: torch.futures.Future[Tensor] = torch.futures.Future()

    def go_on(done: Any) -> None:
        found.set_result(rpc.rpc_sync(SECOND, multiply, (done.value(), w)))

    rpc.rpc_async(FIRST, multiply, (x, 3.0)).add_done_callback(go_on)
    return found.wait()


def chain_of_a_coroutine(x: Tensor, w: Tensor) -> Tensor:
    async def run() -> Tensor:
        return await rpc.rpc_async(
            SECOND, multiply, (await rpc.rpc_async(FIRST, multiply, (x, 3.0)), w)
        )

    return asyncio.run(run())


@pytest.mark.parametrize(
    "chain", [chain_of_then, chain_of_two, chain_of_all, chain_of_done, chain_of_a_coroutine]
)
@pytest.mark.usefixtures("group")
def test_calls_of_callbacks_belong_to_the_context(
    chain: Callable[[Tensor, Tensor], Tensor],
) -> None:
    x, w = X.clone().requires_grad_(), torch.full((3,), 2.0, requires_grad=True)
    with context() as context_id:
        backward(context_id, [chain(x, w).sum()])
        found = get_gradients(context_id)
    torch.testing.assert_close(found, {x: torch.full((3,), 6.0), w: 3 * X})


@pytest.mark.usefixtures("group")
def test_a_callback_is_a_function() -> None:
    future: Any = rpc.rpc_async(FIRST, multiply, (X, 2.0))
    for add in (future.then, future.add_done_callback):
        with pytest.raises(TypeError, match=r"incompatible function arguments: .* is None"):
            add(None)
    future.wait()
