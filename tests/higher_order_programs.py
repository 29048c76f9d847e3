"""Programs that compute higher-order gradients, each in one way.

Tests compare their results, and the gradients that they leave, between workers and a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.gradient_functions import Sine
from tests.higher_order_sites import Site

Results = list[Tensor | None]

# Functions that are called


def layer(site: Site, value: Tensor, name: str = "w") -> Tensor:
    return torch.tanh(value * site.parameter(name))


def layer_through(site: Site, value: Tensor, other: int) -> Tensor:
    """Runs a layer of another worker between two layers of this one."""
    inner: Tensor = site.call(other, layer, layer(site, value))
    return layer(site, inner)


def linear(site: Site, value: Tensor) -> Tensor:
    return value * site.parameter("w")


def critic(site: Site, points: Tensor) -> Tensor:
    """Scores points; (batch, 3) to (batch,)."""
    hidden = torch.tanh(points @ site.parameter("first", 3, 4))
    return hidden @ site.parameter("second", 4)


def error(site: Site, weights: Tensor) -> Tensor:
    """Returns the loss of weights on this worker's data, against this worker's goal."""
    generator = torch.Generator().manual_seed(site.worker)
    data = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    return ((data @ weights).sin() - site.parameter("goal", 5)).pow(2).mean()


def step_decoder(site: Site, token: Tensor) -> Tensor:
    """Keeps a hidden state; callers usually feed its results back to it."""
    hidden = site.state.get("hidden", site.parameter("hidden"))
    site.state["hidden"] = torch.tanh(hidden * site.parameter("cell") + token)
    return site.state["hidden"] * site.parameter("out")


def step_hooked_decoder(site: Site, token: Tensor) -> Tensor:
    result = step_decoder(site, token)
    # Not linear, so it must see the whole gradient. Its parameter gets a gradient, too.
    gain = site.parameter("gain")
    site.state["hidden"].register_hook(lambda gradient: (gradient * gain).sin())
    return result


def look_up(site: Site, indices: Tensor) -> Tensor:
    return torch.nn.functional.embedding(indices, site.parameter("table", 5, 3), sparse=True)


def look_up_in(site: Site, table: Tensor, indices: Tensor) -> Tensor:
    return torch.nn.functional.embedding(indices, table, sparse=True)


def norm_of_gradients(site: Site) -> Tensor:
    """Returns this worker's part of the squared norm of all gradients."""
    found = site.gradients().values()
    terms = [gradient.to_dense().pow(2).sum() for gradient in found if gradient.requires_grad]
    return torch.stack(terms).sum() if terms else site.parameter("w").new_zeros(())


def norms_everywhere(site: Site) -> Tensor:
    return torch.stack([site.call(worker, norm_of_gradients) for worker in range(3)]).sum()


def adapt(site: Site, weights: Tensor, other: int, steps: int, create_graph: bool = True) -> Tensor:
    """Takes steps of gradient descent on a loss that another worker computes."""
    for _ in range(steps):
        loss = site.call(other, error, weights)
        (gradient,) = site.grad(loss, weights, create_graph=create_graph)
        weights = weights - 0.1 * site.parameter("rate").exp() * gradient
    return weights


def adapt_and_measure(site: Site, weights: Tensor, other: int, steps: int) -> Tensor:
    adapted = adapt(site, weights, other, steps)
    measured: Tensor = site.call(other, error, adapted * 1)
    return measured


def error_of_adapted(site: Site, weights: Tensor, other: int) -> Tensor:
    """Returns the loss of weights after gradient descent on another worker's loss."""
    return error(site, adapt(site, weights, other, 2))


def curvature(site: Site, gradient: Tensor) -> list[Tensor]:
    """Differentiates another worker's gradient with respect to a parameter of this worker."""
    first, second = site.grad(gradient.pow(2).sum(), [site.parameter("w"), gradient])
    return [first, second]


def gradients_of_received(site: Site, value: Tensor) -> list[Tensor]:
    """Computes gradients of a received value and of a local parameter, no further upstream."""
    result = layer(site, value).exp()
    first, second = site.grad(result.sum(), [value, site.parameter("w")])
    return [first, second, layer(site, value, "v")]


def batch_loss(site: Site, weight: Tensor, bias: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    scores = torch.nn.functional.layer_norm(data @ weight + bias, (3,))
    return torch.nn.functional.cross_entropy(scores, torch.tensor([0, 1, 2, 1]))


# Programs: the inputs of one pass


def first_order(site: Site) -> Results:
    """Inputs are leaves, intermediate, received, upstream of one another, and repeated."""
    start = site.parameter("x")
    sent = start * 2
    received = site.call(1, layer, sent)
    further = site.call(2, layer, received.exp())
    inputs = [received, start, further, sent, start]
    return list(site.grad([further.sum(), received], inputs, [None, received.detach()]))


def an_output_is_an_input(site: Site) -> Results:
    start = site.parameter("x")
    received = site.call(1, layer, start)
    ones = torch.ones(3, dtype=torch.float64)
    return list(site.grad([received, start], [received, start], [ones * 2, ones * 3]))


def unused_inputs(site: Site) -> Results:
    start, unused = site.parameter("x"), site.parameter("unused") * 1
    dead = site.call(1, layer, unused)
    cut = site.call(1, layer, unused).detach()
    received = site.call(2, layer, start)
    inputs = [unused, start, dead, site.parameter("unused")]
    return list(site.grad((received * cut).sum(), inputs, allow_unused=True))


def shared_behind_inputs(site: Site) -> Results:
    """A node upstream of an input is also reached past it, and has a hook that is not linear."""
    start = site.parameter("x")
    common = start.exp()
    common.register_hook(lambda gradient: gradient.pow(3))
    middle = site.call(1, layer, common)
    beside = site.call(2, layer, common)
    total = site.call(1, layer, middle) + beside
    return list(site.grad(total.sum(), [middle, start]))


def shared_elsewhere_behind_inputs(site: Site) -> Results:
    """As above, with the common node on another worker."""
    start = site.parameter("x")
    first = site.call(1, step_hooked_decoder, start)
    second = site.call(1, step_hooked_decoder, start.sin())
    fed = site.call(2, layer, first)
    return list(site.grad((fed * second).sum(), [first, start, second]))


def tokens_of_a_decoder(site: Site) -> Results:
    """Each input is upstream of the next one, in one loop between two workers."""
    tokens = [site.parameter("start") * 1]
    for _ in range(5):
        tokens.append(site.call(1, step_decoder, tokens[-1]) * site.parameter("feed"))
    total = torch.stack(tokens).prod(0).sum()
    first = site.grad(total, [*tokens, site.parameter("feed")], create_graph=True)
    mixed = torch.stack(first).pow(2).sum()
    return [*first, *site.grad(mixed, [tokens[2], tokens[0], site.parameter("start")])]


def only_what_is_needed(site: Site) -> Results:
    """A pass within a call does not continue at the caller, and frees nothing there."""
    start = site.parameter("x")
    sent = start.exp()  # Keeps its result for the backward pass.
    first, second, result = site.call(1, gradients_of_received, sent)
    site.backward([result.sum()])
    return [first, second]


def again_and_again(site: Site) -> Results:
    start = site.parameter("x")
    total = site.call(1, layer_through, start * 2, 2).sum()
    results: Results = []
    for retain_graph in (True, True, False):
        results += site.grad(total, start, retain_graph=retain_graph)
    return results


def sent_as_it_is(site: Site) -> Results:
    """Leaves are sent directly and used locally as well; their gradients are summed."""
    start, other = site.parameter("x"), site.parameter("y")
    results = [site.call(1 + number % 2, layer, start) for number in range(4)]
    total = (torch.stack(results).prod(0) * start * site.call(1, linear, other)).sum()
    first = site.grad(total, [start, other], create_graph=True)
    second = site.grad((first[0] * first[1]).sum(), [other, start], create_graph=True)
    site.backward([(second[0] * second[1]).sum()])
    return [*first, *second]


# Programs: higher orders


def fourth_order(site: Site) -> Results:
    start = site.parameter("x")
    value = site.call(2, layer, site.call(1, layer, start)).sum()
    orders: Results = []
    for _ in range(4):
        (value,) = site.grad(value, start, create_graph=True)
        orders.append(value)
        value = value.sin().sum()
    site.backward([value])
    return orders


def hessian_vector_products(site: Site) -> Results:
    start = site.parameter("x")
    direction = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    loss = site.call(1, layer_through, start, 2).prod()
    (gradient,) = site.grad(loss, start, create_graph=True)
    (first,) = site.grad((gradient * direction).sum(), start, retain_graph=True)
    (second,) = site.grad(gradient, start, direction)
    return [gradient, first, second]


def whole_hessian(site: Site) -> Results:
    start = site.parameter("x")
    loss = site.call(1, layer_through, start, 2).prod()
    (gradient,) = site.grad(loss, start, create_graph=True)
    return [site.grad(each, start, retain_graph=True)[0] for each in gradient]


def forward_by_two_backwards(site: Site) -> Results:
    """The gradient at an output is itself an input of the next pass."""
    start = site.parameter("x")
    result = site.call(1, layer_through, start, 2)
    dummy = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (pulled,) = site.grad(result, start, dummy, create_graph=True)
    direction = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (pushed,) = site.grad(pulled, dummy, direction, create_graph=True)
    (third,) = site.grad(pushed.pow(2).sum(), start)
    return [pushed, third]


def linear_has_no_second_order(site: Site) -> Results:
    start = site.parameter("x")
    (gradient,) = site.grad(site.call(1, linear, start).sum(), start, create_graph=True)
    return [gradient, *site.grad(gradient.sum(), start, allow_unused=True)]


def gradient_penalty(site: Site) -> Results:
    points = site.parameter("points", 4, 3) * 1.5
    scores = site.call(1, critic, points)
    (slopes,) = site.grad(scores.sum(), points, create_graph=True)
    penalty = (slopes.norm(dim=1) - 1).pow(2).mean()
    site.backward([scores.mean() + 10 * penalty])
    return [penalty]


def norms_of_all_gradients(site: Site) -> Results:
    """Gradients that have a graph, in each worker's context, are differentiated again."""
    loss = site.call(1, layer_through, site.parameter("x"), 2).sum()
    site.backward([loss], create_graph=True)
    site.backward([norms_everywhere(site)], create_graph=True)
    third = norms_everywhere(site)
    site.backward([third])
    return [third]


def gradients_given(site: Site) -> Results:
    start = site.parameter("x")
    first, second = site.call(1, layer, start), site.call(2, layer, start.exp())
    weights = site.parameter("weights").exp()
    roots = [first, second.sum(), second]
    site.backward(roots, [weights, None, first], create_graph=True)
    site.backward([norms_everywhere(site)])
    return []


def further_gradients_by_others(site: Site) -> Results:
    """One worker computes a gradient; another worker differentiates it in a pass of its own."""
    start = site.parameter("x")
    result = site.call(1, layer_through, start * 2, 2)
    (gradient,) = site.grad(result.sum(), start, create_graph=True)
    return [result, *site.call(1, curvature, gradient.exp())]


# Programs: gradient descent within gradient descent


def maml(site: Site) -> Results:
    weights = site.parameter("weights")
    adapted = adapt(site, weights, 1, 3)
    loss = site.call(2, error, adapted)
    site.backward([loss])
    return [adapted, loss]


def maml_of_first_order(site: Site) -> Results:
    weights = site.parameter("weights")
    adapted = adapt(site, weights, 1, 3, False)
    site.backward([site.call(2, error, adapted)])
    return [adapted]


def maml_within_a_call(site: Site) -> Results:
    """Worker 1 descends by itself on a loss of worker 2; the caller differentiates through it."""
    weights = site.parameter("weights")
    loss = site.call(1, adapt_and_measure, weights.sin(), 2, 3)
    (gradient,) = site.grad(loss, weights, create_graph=True)
    site.backward([gradient.pow(2).sum() + loss])
    return [loss, gradient]


def maml_of_first_order_within_a_call(site: Site) -> Results:
    """The passes of the callee free the graph that they traversed, and nothing else."""
    weights = site.parameter("weights")
    adapted = site.call(1, adapt, weights.exp(), 2, 3, False)
    site.backward([adapted.pow(2).sum()])
    return [adapted]


def tasks_side_by_side(site: Site) -> Results:
    """Inner loops run concurrently, each on a loss that another worker computes."""
    weights = site.parameter("weights") * 1
    waits = [
        site.start(worker, adapt_and_measure, weights, other, 2)
        for worker, other in [(1, 2), (2, 1), (1, 0), (2, 0), (2, 1), (1, 2)]
    ]
    losses = torch.stack([wait() for wait in waits])
    (gradient,) = site.grad(losses.sum(), site.parameter("weights"), create_graph=True)
    site.backward([(gradient * losses[:3]).sum()])
    return [losses, gradient]


def descent_within_descent(site: Site) -> Results:
    """The inner loss itself comes from an inner loop; the last of these calls the first worker."""
    weights = site.parameter("weights")
    for _ in range(2):
        loss = site.call(1, error_of_adapted, weights, 2)
        (gradient,) = site.grad(loss, weights, create_graph=True)
        weights = weights - 0.2 * gradient
    site.backward([site.call(2, error_of_adapted, weights, 0)])
    return [weights]


def classification(site: Site) -> Results:
    weight, bias = site.parameter("weight", 3, 3), site.parameter("bias")
    for _ in range(2):
        loss = site.call(1, batch_loss, weight, bias)
        first, second = site.grad(loss, [weight, bias], create_graph=True)
        weight, bias = weight - first, bias - second
    site.backward([site.call(2, batch_loss, weight, bias)])
    return [weight, bias]


# Programs: hooks, layouts, user-defined functions


def hooked_circle(site: Site, order: int = 2) -> Results:
    token, total = site.parameter("start") * 1, torch.zeros((), dtype=torch.float64)
    for _ in range(3):
        token = site.call(1, step_hooked_decoder, token) * site.parameter("feed")
        total = total + token.sum()
    site.backward([total], create_graph=True)
    for _ in range(order - 2):
        site.backward([norms_everywhere(site)], create_graph=True)
    site.backward([norms_everywhere(site)])
    return [total]


def hooked_circle_of_third_order(site: Site) -> Results:
    return hooked_circle(site, 3)


def hooked_inputs(site: Site) -> Results:
    start, seen = site.parameter("x"), [torch.zeros(3, dtype=torch.float64)]
    received = site.call(1, layer, start.exp())
    made = received * 1
    made.register_hook(lambda gradient: gradient.pow(2))
    received.register_hook(lambda gradient: gradient.sin())
    start.register_hook(lambda gradient: gradient * start)

    def note(gradient: Tensor) -> None:
        seen[0] = seen[0] + gradient.detach()

    made.register_hook(note)
    total = (made * site.call(2, layer, made) * site.call(1, layer, received)).sum()
    first = site.grad(total, [made, start], create_graph=True)
    second = site.grad((first[0] * first[1]).sum(), [start, made], create_graph=True)
    (third,) = site.grad((second[0] * second[1]).sum(), received)
    return [*first, *second, third, *seen]


def sparse_gradients(site: Site) -> Results:
    rows = [site.call(1, look_up, torch.tensor(at)) for at in ([0, 2, 2], [4, 0])]
    site.backward([torch.cat(rows).pow(3).sum()], create_graph=True)
    site.backward([norms_everywhere(site)])
    return []


def sparse_gradients_on_the_way(site: Site) -> Results:
    table = site.parameter("table", 5, 3)
    rows = site.call(1, look_up_in, table, torch.tensor([0, 2, 2]))
    (gradient,) = site.grad(rows.pow(3).sum(), table, create_graph=True)
    return [gradient, *site.grad(gradient.to_dense().pow(2).sum(), table)]


def shapes(site: Site) -> Results:
    """Gradients that are expanded, transposed, broadcast, and of no elements."""
    matrix = site.parameter("matrix", 3, 3)
    turned = site.call(1, linear, matrix.t())
    spread = site.call(2, linear, site.parameter("scalar", 1).expand(3, 3))
    (empty,) = site.call(1, empty_one, site.parameter("nothing", 0, 3))
    total = (turned @ spread.t()).sin().sum() + empty.sum()
    inputs = [matrix, site.parameter("scalar", 1), site.parameter("nothing", 0, 3)]
    first = site.grad(total, inputs, create_graph=True)
    site.backward([(first[0] * first[1]).sum()])
    return list(first)


def empty_one(site: Site, value: Tensor) -> list[Tensor]:
    return [value.exp() * site.parameter("w")]


def complex_numbers(site: Site) -> Results:
    start = torch.complex(site.parameter("real"), site.parameter("imaginary"))
    received = site.call(1, squared, start)
    (first,) = site.grad(received.abs().sum(), start, create_graph=True)
    site.backward([first.abs().pow(3).sum()])
    return [torch.view_as_real(first)]


def squared(site: Site, value: Tensor) -> Tensor:
    return (value * value * site.parameter("w")).exp()


def functions_of_the_user(site: Site) -> Results:
    start = site.parameter("x")
    received = site.call(1, sine, start, start * 2)
    first = site.grad(received.prod(), start, create_graph=True)
    (second,) = site.grad(first[0].prod(), start, create_graph=True)
    site.backward([second.prod()])
    return [*first, second]


def sine(site: Site, first: Tensor, second: Tensor) -> Tensor:
    made: Tensor = Sine.apply(first * site.parameter("w"), 2.0, second)  # type: ignore[no-untyped-call]
    return made


def partly_used(site: Site) -> Results:
    """Some tensors of a message have gradients, others only in the second order."""
    parts = site.call(1, three, *[site.parameter(name) * 2 for name in "abc"])
    (first,) = site.grad(parts[1].sum(), site.parameter("b"), create_graph=True)
    mixed = (first * parts[0]).sum()
    inputs = [site.parameter(name) for name in "abc"]
    return [first, *site.grad(mixed, inputs, allow_unused=True)]


def three(site: Site, *values: Tensor) -> list[Tensor]:
    return [value.sin() * site.parameter("w") for value in values]


def no_grad_around(site: Site) -> Results:
    """As in one process, the pass decides whether graphs are made, not its caller's grad mode."""
    start = site.parameter("x")
    loss = site.call(1, layer_through, start, 2).prod()
    with torch.no_grad():
        (first,) = site.grad(loss, start, create_graph=True)
        site.backward([loss], create_graph=True)
    site.backward([first.pow(2).sum() + norms_everywhere(site)])
    return [first]


def in_place(site: Site) -> Results:
    start = site.parameter("x")
    value = start * 2
    received = site.call(1, layer, value)
    before = received
    received.mul_(start)
    again = site.call(1, layer, received)
    first = site.grad(again.sum(), [before, start], create_graph=True)
    site.backward([(first[0] * first[1]).sum()])
    return list(first)


def several_outputs_of_a_node(site: Site) -> Results:
    start = site.parameter("x")
    left, middle, right = (start * 2).unbind()
    received = site.call(1, layer, middle.expand(3))
    total = (received * left).sum() * right
    first = site.grad(total, [right, middle, start, left], create_graph=True)
    return [*first, *site.grad(torch.stack([*first[:2], first[3]]).prod(), [left, middle])]


ALL: list[Any] = [
    first_order, an_output_is_an_input, unused_inputs, shared_behind_inputs,
    shared_elsewhere_behind_inputs, tokens_of_a_decoder, only_what_is_needed, again_and_again,
    sent_as_it_is, fourth_order, hessian_vector_products, whole_hessian, forward_by_two_backwards,
    linear_has_no_second_order, gradient_penalty, norms_of_all_gradients, gradients_given,
    further_gradients_by_others, maml, maml_of_first_order, maml_within_a_call,
    maml_of_first_order_within_a_call, tasks_side_by_side, descent_within_descent, classification,
    hooked_circle, hooked_circle_of_third_order, hooked_inputs, sparse_gradients,
    sparse_gradients_on_the_way, shapes, complex_numbers, functions_of_the_user, partly_used,
    no_grad_around, in_place, several_outputs_of_a_node,
]  # fmt: skip
