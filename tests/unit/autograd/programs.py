"""Programs over three workers, each for one way in which graphs can be connected."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tests.gradient_functions import Sine
from tests.unit.autograd.cluster import Program, World


def call(world: World, caller: int, callee: int, name: str, *arguments: Tensor) -> Tensor:
    """Calls a small layer on another worker and returns its result."""
    received = world.send(caller, callee, *arguments)
    weight = world.parameter(callee, name, 3, 3)
    made = torch.tanh(torch.stack(received).sum(0) @ weight)
    return world.send(callee, caller, made)[0]


def chain(world: World) -> list[Tensor]:
    value = world.parameter(0, "x", 3) * 2
    for step in range(4):
        value = call(world, 0, 1 + step % 2, f"w{step}", value)
    return [value.sum()]


def fan_out(world: World) -> list[Tensor]:
    value = world.parameter(0, "x", 3).exp()
    return [(call(world, 0, 1, "w", value) * call(world, 0, 2, "w", value)).sum()]


def dead_branches(world: World) -> list[Tensor]:
    value = world.parameter(0, "x", 3) * 2
    call(world, 0, 1, "unused", value)
    used = call(world, 0, 2, "w", value)
    used.sum()
    kept = world.send(0, 1, used)[0]
    world.send(1, 2, kept * world.parameter(1, "unused too", 3))
    return [used.sum()]


def nested(world: World) -> list[Tensor]:
    def inner(value: Tensor) -> Tensor:
        received = world.send(0, 1, value)[0]
        further = call(world, 1, 2, "inner", received * world.parameter(1, "w", 3))
        back = call(world, 1, 0, "callback", further, received)
        return world.send(1, 0, back)[0]

    return [inner(inner(world.parameter(0, "x", 3) * 1)).sum()]


def reuse(world: World) -> list[Tensor]:
    value = world.parameter(0, "x", 3) * 3
    first = call(world, 0, 1, "w", value)
    second = call(world, 0, 1, "w", first, value, first)
    return [(first * second * value).sum()]


def diamond(world: World) -> list[Tensor]:
    value = world.send(0, 1, world.parameter(0, "x", 3) * 2)[0]
    left = world.send(1, 2, value * world.parameter(1, "left", 3))[0]
    right = world.send(1, 0, value.exp())[0]
    joined = world.send(0, 2, right * 2)[0]
    return [world.send(2, 0, (left * joined) @ world.parameter(2, "w", 3, 3))[0].sum()]


def decoder(world: World, steps: int = 5, hooked: bool = False) -> list[Tensor]:
    """A remote decoder keeps its hidden state and gets its own output as input."""
    token = world.parameter(0, "start", 3) * 1
    hidden = world.parameter(1, "hidden", 3) * 1
    loss = torch.zeros((), dtype=torch.float64)
    for _ in range(steps):
        received = world.send(0, 1, token)[0]
        hidden = torch.tanh(hidden @ world.parameter(1, "cell", 3, 3) + received)
        if hooked:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05) * 3)
        output = world.send(1, 0, hidden @ world.parameter(1, "out", 3, 3))[0]
        token = output * world.parameter(0, "feed", 3)
        loss = loss + output.sum()
    return [loss]


def hooked_decoder(world: World) -> list[Tensor]:
    return decoder(world, hooked=True)


def hooked_leaf(world: World) -> list[Tensor]:
    """A non-linear hook must see the sum over a cycle, not its terms."""
    world.parameter(1, "cell", 3, 3).register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return decoder(world)


def hooked_received(world: World) -> list[Tensor]:
    received = world.send(0, 1, world.parameter(0, "x", 3) * 2)[0]
    received.register_hook(lambda gradient: gradient**2)
    first = world.send(1, 0, received * 2)[0]
    second = world.send(1, 0, received + world.send(0, 1, first)[0])[0]
    return [(first * second).sum()]


def two_decoders(world: World) -> list[Tensor]:
    """Two workers keep states, and each gets the other's output as input."""
    states = {1: world.parameter(1, "s", 3) * 1, 2: world.parameter(2, "s", 3) * 1}
    value = world.send(0, 1, world.parameter(0, "x", 3) * 1)[0]
    for _ in range(4):
        for worker, other in ((1, 2), (2, 1)):
            states[worker] = torch.tanh(states[worker] * world.parameter(worker, "w", 3) + value)
            value = world.send(worker, other, states[worker] * 2)[0]
    return [world.send(1, 0, value)[0].sum() + world.send(2, 0, states[2])[0].prod()]


def parameter_as_argument(world: World) -> list[Tensor]:
    weight = world.parameter(0, "w", 3)
    received = world.send(0, 1, weight, weight * 2)
    result = world.send(1, 0, received[0] * received[1] * world.parameter(1, "v", 3))[0]
    return [(result * weight).sum()]


def parameter_in_a_cycle(world: World) -> list[Tensor]:
    """The leaf itself is sent, beside a value that makes its component run in parts."""
    weight, state = world.parameter(1, "w", 3), world.parameter(1, "s", 3) * 1
    total = torch.zeros((), dtype=torch.float64)
    fed = world.parameter(0, "x", 3) * 1
    for _ in range(3):
        state = state * weight + world.send(0, 1, fed)[0]
        output, sent_weight = world.send(1, 0, state, weight)
        fed = output * sent_weight
        total = total + fed.sum()
    return [total]


def broadcast_and_bare_leaf_in_a_cycle(world: World) -> list[Tensor]:
    """At the cut a broadcast gradient must be summed; another leaf is sent but not used locally."""
    gain, state = world.parameter(1, "gain").exp(), world.parameter(1, "s", 3) * 1
    total = torch.zeros((), dtype=torch.float64)
    fed = world.parameter(0, "x", 3) * 1
    for _ in range(3):
        state = state + world.send(0, 1, fed)[0] + gain + gain.sin()
        output, bare = world.send(1, 0, state, world.parameter(1, "bare", 3))
        fed = output * bare
        total = total + fed.sum()
    return [total]


def pass_through(world: World) -> list[Tensor]:
    received = world.send(0, 1, world.parameter(0, "x", 3) * 2)[0]
    forwarded = world.send(1, 2, received)[0]
    again = world.send(2, 1, forwarded, forwarded * 2)
    back = world.send(1, 0, again[0], again[1], received)
    return [(back[0] * back[1] * back[2]).sum()]


def same_tensor_twice(world: World) -> list[Tensor]:
    value = world.parameter(0, "x", 3) * 2
    first, second, third = world.send(0, 1, value, value, value)
    return [world.send(1, 0, first * second.exp() + third)[0].sum()]


def partly_used(world: World) -> list[Tensor]:
    parts = world.send(0, 1, *[world.parameter(0, name, 3) * 2 for name in "abc"])
    return [world.send(1, 0, parts[1] * 2)[0].sum()]


def several_roots(world: World) -> list[Tensor]:
    value = world.parameter(0, "x", 3) * 2
    first = call(world, 0, 1, "w", value).sum()
    return [first, value.prod(), first, call(world, 0, 2, "w", value).sum()]


def to_itself(world: World) -> list[Tensor]:
    return [call(world, 0, 0, "w", world.parameter(0, "x", 3) * 2).sum()]


def in_place(world: World) -> list[Tensor]:
    received = world.send(0, 1, world.parameter(0, "x", 3) * 2)[0]
    received.mul_(3)
    return [world.send(1, 0, received.exp())[0].sum()]


def embedding(world: World) -> list[Tensor]:
    table = world.parameter(1, "table", 5, 3)
    total = torch.zeros((), dtype=torch.float64)
    for indices in ([0, 2, 2], [4, 0]):
        rows = torch.nn.functional.embedding(torch.tensor(indices), table, sparse=True)
        total = total + world.send(1, 0, rows)[0].pow(2).sum()
    return [total]


def sparse_and_dense(world: World) -> list[Tensor]:
    table = world.parameter(1, "table", 5, 3)
    rows = torch.nn.functional.embedding(torch.tensor([1, 3]), table, sparse=True)
    sent = world.send(1, 0, rows)[0].exp().sum()
    return [sent + world.send(1, 0, table * 2)[0].pow(2).sum()]


def leaf_is_root(world: World) -> list[Tensor]:
    weight = world.parameter(0, "w")
    return [weight, call(world, 0, 1, "v", weight.expand(3)).sum()]


def random_program(seed: int, steps: int = 14) -> Program:
    """Returns a program that computes with, and sends, randomly chosen values of its workers.

    Values are reused, so graphs share nodes, form cycles between workers, and have dead ends.
    """

    def program(world: World) -> list[Tensor]:
        chance = random.Random(seed)
        values = [[world.parameter(worker, "x", 3) * 2] for worker in range(3)]
        for _ in range(steps):
            worker, other = chance.choice([0, 1, 2]), chance.choice([0, 1, 2])
            # Prefer recent values, for deep graphs.
            chosen = [
                pool[-1 - int(len(pool) * chance.random() ** 2)] for pool in [values[worker]] * 2
            ]
            if chance.random() < 0.5:
                values[other] += world.send(worker, other, *chosen[: chance.choice([1, 1, 2])])
            else:
                values[worker].append(_combined(world, worker, chosen, chance))
        # A root may be the sum of a received value itself, or may depend on no message.
        return [value.sum() for value in chance.sample(values[0], min(3, len(values[0])))]

    return program


def _combined(world: World, worker: int, chosen: list[Tensor], chance: random.Random) -> Tensor:
    first, second = chosen
    kind = chance.randrange(6)
    if kind == 0:
        return Sine.apply(first, 2.0, second)
    if kind == 1:
        return torch.stack(chosen).unbind()[1] * 0.5
    if kind == 2:
        return torch.tanh(first * second.sum())
    weight = world.parameter(worker, chance.choice("vw"), 3)
    made = torch.tanh(first * weight + second)
    if kind == 3:
        made.register_hook(lambda gradient: gradient.clamp(-0.3, 0.3))
    return made


ALL = [
    chain, fan_out, dead_branches, nested, reuse, diamond, decoder, hooked_decoder, hooked_leaf,
    hooked_received, two_decoders, parameter_as_argument, parameter_in_a_cycle,
    broadcast_and_bare_leaf_in_a_cycle, pass_through,
    same_tensor_twice, partly_used, several_roots, to_itself, in_place, embedding,
    sparse_and_dense, leaf_is_root,
]  # fmt: skip
