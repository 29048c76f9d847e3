"""Functions of the tests of graphs that wait for themselves, for their workers and for a model.

``remote(caller, callee, function, *values)`` stands for a call; in the model it calls at once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchweft import autograd, rpc

noted: Counter[str] = Counter()
"""What has happened here."""
local = threading.local()
PROMPT_S = 10.0
_stop = threading.Event()


def take_noted() -> dict[str, int]:
    """Returns what has happened here, and forgets it."""
    found = dict(noted)
    noted.clear()
    return found


Call = Callable[..., Any]


def at_once(_: str, function: Callable[..., Any], *values: Any) -> Any:
    """Stands for a call in the model."""
    results = function(*[each.clone() if isinstance(each, Tensor) else each for each in values])
    return results.clone() if isinstance(results, Tensor) else results


def called(worker: str, function: Callable[..., Any], *values: Any) -> Any:
    """Calls a function on a worker."""
    return rpc.rpc_sync(worker, function, args=values)


def sine(value: Tensor) -> Tensor:
    return value.sin()


def two(value: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two results, of which the second leads to ``other`` alone."""
    return value.sin(), Noting.apply(other.cos(), "unused")


# Blocks between calls. Each returns a tensor that is sent, and used here as well.


class Noting(torch.autograd.Function):
    """Notes its runs backwards; sees zeros where there is no gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        noted[ctx.name] += 1
        return gradient, None


class Queueing(torch.autograd.Function):
    """Queues a callback for the end of the run, as FSDP does."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: noted.update(["callback"]))
        noted["node"] += 1
        return gradient


def queueing(value: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = Queueing.apply(torch.tanh(value * weight))
    return result


def several_tensors_hooked(value: Tensor, weight: Tensor) -> Tensor:
    first, second = value * weight, value.sin()

    def note(gradients: Any) -> None:
        noted["all" if all(each is not None for each in gradients) else "some"] += 1

    register_multi_grad_hook((first, second), note)
    register_multi_grad_hook((first, second), lambda _: noted.update(["any"]), mode="any")
    return torch.tanh(first * second) + first.sin()


def hooked_everywhere(value: Tensor, weight: Tensor) -> Tensor:
    made = torch.tanh(value * weight)
    made.register_hook(lambda gradient: noted.update(["tensor"]) or gradient.clamp(-0.3, 0.3))
    node = made.grad_fn
    assert node is not None
    node.register_prehook(lambda gradients: noted.update(["before"]) or (gradients[0] * 2,))
    node.register_hook(lambda inner, outer: noted.update(["after"]) or (inner[0] * 0.5,))
    made.retain_grad()
    return made


def _deep(value: Tensor, weight: Tensor) -> Tensor:
    noted["forward"] += 1
    for _ in range(4):
        value = torch.tanh(value * weight)
    return value


def checkpointed(value: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = checkpoint(_deep, value, weight, use_reentrant=False)
    return result


def _policy(ctx: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_kept = operation == torch.ops.aten.mul.Tensor
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def selectively_checkpointed(value: Tensor, weight: Tensor) -> Tensor:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_policy)

    result: Tensor = checkpoint(_deep, value, weight, use_reentrant=False, context_fn=contexts)
    return result


def with_saved_tensors_packed(value: Tensor, weight: Tensor) -> Tensor:
    def pack(tensor: Tensor) -> Tensor:
        noted["pack"] += 1
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        noted["unpack"] += 1
        return tensor

    with saved_tensors_hooks(pack, unpack):
        return torch.tanh(value * weight).exp()


def noting_the_thread(value: Tensor, weight: Tensor) -> Tensor:
    """Its hook sees what belongs to the thread that calls backward."""
    made = value * weight
    made.register_hook(lambda _: noted.update([f"in {getattr(local, 'name', 'another')}"]))
    return made


def _compilable(value: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh((value * weight).relu() + (value * weight).sigmoid()) * value


compiled = torch.compile(_compilable, backend="aot_eager")
compiled_to_code = torch.compile(_compilable, backend="inductor")


BLOCKS = {
    each.__name__: each
    for each in (
        queueing,
        several_tensors_hooked,
        hooked_everywhere,
        checkpointed,
        selectively_checkpointed,
        with_saved_tensors_packed,
        noting_the_thread,
    )
}


def residual(
    call: Call, block: Callable[..., Tensor], weight: Tensor, value: Tensor, other: str, steps: int
) -> Tensor:
    """Returns the end of a chain of residual calls."""
    for _ in range(steps):
        sent = block(value, weight)
        value = call(other, sine, sent) + sent
    return value


# A block at the callee, which keeps a state

_states: dict[str, Tensor] = {}


def leaf(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()


def begin_state() -> None:
    """Begins a state of this worker."""
    weight = leaf(1)
    _states.update(weight=weight, state=weight * 0.5)
    noted.clear()


def advance(block: str, fed: Tensor) -> Tensor:
    """Computes the next state of this worker, and returns it."""
    function = compiled if block == "compiled" else BLOCKS[block]
    state = function(_states["state"] + fed, _states["weight"])
    _states["state"] = state + fed.sin()
    return state


def state_gradient(context_id: int) -> Tensor | None:
    """Returns the gradient of the parameter of ``advance``; in the model, for context 0."""
    weight = _states["weight"]
    return autograd.get_gradients(context_id)[weight] if context_id else weight.grad


def decoded(call: Call, block: str, fed: Tensor, other: str, steps: int) -> Tensor:
    """Feeds a worker with a state its own output."""
    total = fed.sum() * 0
    for _ in range(steps):
        fed = call(other, advance, block, fed)
        total = total + fed.sum()
    return total


# Failing and waiting


class Failing(torch.autograd.Function):
    """Raises at its second run backwards."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        noted["failing"] += 1
        if noted["failing"] == 2:
            raise ArithmeticError("no slope here")
        return gradient


def failing(value: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = Failing.apply(torch.tanh(value * weight))
    return result


def failing_sine(value: Tensor) -> Tensor:
    result: Tensor = Failing.apply(value.sin())
    return result


class Halting(torch.autograd.Function):
    """Waits in its run backwards."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        noted["halting"] += 1
        _stop.wait(20)
        return gradient


def halting_sine(value: Tensor) -> Tensor:
    result: Tensor = Halting.apply(value.sin())
    return result


def halts() -> int:
    return noted["halting"]


def go_on() -> None:
    _stop.set()
    _stop.clear()


# The program of a test


def backward_noting(context_id: int, loss: Tensor, failures: list[BaseException]) -> None:
    try:
        autograd.backward(context_id, [loss])
    except BaseException as error:
        failures.append(error)


def await_halt(worker: str, count: int) -> None:
    deadline_s = time.monotonic() + PROMPT_S
    while rpc.rpc_sync(worker, halts) < count:
        assert time.monotonic() < deadline_s, "the pass has not come so far"
        time.sleep(0.01)
