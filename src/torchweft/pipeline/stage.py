"""One stage on its worker: forward and backward, a micro-batch at a time.

A backward is whole, or in two parts: to the stage's inputs first, to its weights later. The first
part captures the gradients at the nodes where paths to weights alone branch off. The second part
runs each of these nodes once more, for its branches only, and goes on to the weights. So each
node's work is done once (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call
from torch.utils import _pytree

from torchweft.autograd import accumulate
from torchweft.errors import ConfigurationError
from torchweft.extending import device_mark
from torchweft.pipeline.wiring import BATCH, Packet, Wiring, describe, make_packet, pick

Loss = Callable[[Any, Any], Tensor]
Leaves = Mapping[str, Tensor]
"""Leaves of a graph that a module uses in place of its own weights, by name."""


class Objective(NamedTuple):
    """What the last stage does with its output.

    Attributes:
        loss: Returns the loss of an output and a target, a tensor with one element.
        divisor: The backward of each loss begins with the gradient ``1 / divisor``.
    """

    loss: Loss
    divisor: int


class _Rerun(NamedTuple):
    """A forward that the backward runs again: what it took and the state of the random numbers."""

    arguments: Sequence[Any]
    weights: Leaves | None
    target: Any
    random_state: Tensor


class _Activations:
    """All that a stage holds of one micro-batch between its forward and its backward.

    Attributes:
        inputs: By source, the leaves that need a gradient.
        sent: By consumer, the tensors that need a gradient, with their graph.
        loss: The loss, with its graph, in the last stage.
        rerun: How to make the graph; None if it exists.
        rest: The second part of a backward that was split.
    """

    __slots__ = ("inputs", "loss", "rerun", "rest", "sent")

    def __init__(self) -> None:
        self.inputs: dict[int, list[Tensor]] = {}
        self.sent: dict[int, list[Tensor]] = {}
        self.loss: Tensor | None = None
        self.rerun: _Rerun | None = None
        self.rest: WeightPart | None = None


class _Enter(torch.autograd.Function):
    """Leads from an input that requires grad to a tensor of its memory, which is no leaf.

    So a stage may begin with an operation in place, as layers in the middle of a model may.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Returns the tensor."""
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Returns the gradient."""
        return gradient


def _entered(value: Any) -> Any:
    enter: Any = _Enter.apply  # It has a type in some versions of torch, and none in others.
    return enter(value) if isinstance(value, Tensor) and value.requires_grad else value


def _versions_of(arguments: Sequence[Any]) -> list[int]:
    """Returns how often each tensor was changed in place; 0 where torch does not count it."""
    leaves = _pytree.tree_leaves(arguments)
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    return [0 if each.is_inference() else each._version for each in tensors]


class StageRun:
    """Runs one stage. One thread uses it.

    Args:
        stage: Its number.
        module: Its module.
        wiring: The values that it takes, and the stages that take its output.
        objective: For the last stage, its loss; None elsewhere.
        checkpoints: Whether to drop the activations of a micro-batch after its forward, and to run
            the forward again before its backward.
    """

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        wiring: Wiring,
        objective: Objective | None,
        checkpoints: Callable[[int], bool],
    ) -> None:
        self.stage = stage
        self.module = module
        self.sources = wiring.sources(stage)
        self.consumers = wiring.consumers(stage)
        self._takes = wiring.takes[stage]
        self._taken = {source: wiring.taken(stage, source) for source in (BATCH, *self.sources)}
        self._given = {each: wiring.taken(each, stage) for each in self.consumers}
        self._is_spread = wiring.spreads and len(self._takes) == 1 and self._takes[0].key is None
        self._objective = objective
        self._checkpoints = checkpoints
        self._held: dict[int, _Activations] = {}
        # A change of a value that other stages take, too, would be one that they do not see.
        self._may_change = all(wiring.consumers(each) == (stage,) for each in self.sources)
        self._changes_inputs: bool | None = None
        """Whether its forward changes its inputs in place; None until it is known."""

    @property
    def held(self) -> int:
        """The number of micro-batches whose activations it holds."""
        return len(self._held)

    def reset(self) -> None:
        """Drops all that is held."""
        self._held.clear()

    def parameters(self) -> list[Tensor]:
        """Returns the weights that require grad."""
        return [each for each in self.module.parameters() if each.requires_grad]

    # Forward

    def infer(self, packets: Mapping[int, Packet]) -> tuple[Any, dict[int, Packet]]:
        """Runs a forward without gradients; returns the output, and the packets by consumer."""
        with torch.no_grad():
            output = self._call(self._arguments(packets))
        return output, {each: self._packet(output, each, False)[0] for each in self.consumers}

    def forward(
        self,
        microbatch: int,
        packets: Mapping[int, Packet],
        target: Any = None,
        weights: Leaves | None = None,
    ) -> tuple[dict[int, Packet], Tensor | None]:
        """Runs a forward, and holds its graph.

        Args:
            microbatch: Which micro-batch.
            packets: The values of each source.
            target: What the loss compares the output with.
            weights: Used in place of the module's own; for its backward as well.

        Returns:
            The packets by consumer; and the loss, detached, in the last stage.
        """
        held = self._held[microbatch] = _Activations()
        held.inputs = {source: packet.require_grad() for source, packet in packets.items()}
        arguments = self._arguments(packets)
        rerun = None
        if self._checkpoints(microbatch):
            rerun = held.rerun = _Rerun(arguments, weights, target, torch.get_rng_state())
        if rerun is None:
            given = self._taken_in(arguments)
            before = None if given is arguments else _versions_of(arguments)
            output, held.loss = self._run(given, weights, target)
            if before is not None and self._changes_inputs is None and self.module.training:
                self._changes_inputs = _versions_of(arguments) != before
        else:
            with torch.no_grad():
                output, held.loss = self._run_first(rerun)
        outgoing = {}
        needs_grad = bool(rerun) and (any(held.inputs.values()) or bool(self.parameters()))
        for consumer in self.consumers:
            outgoing[consumer], held.sent[consumer] = self._packet(output, consumer, needs_grad)
        return outgoing, None if held.loss is None else held.loss.detach()

    def _taken_in(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Returns arguments that the module may change in place, where that is its own affair."""
        if not self._may_change or not self.sources or self._changes_inputs is False:
            return arguments
        found: Sequence[Any] = _pytree.tree_map(_entered, arguments)
        return found

    def _run_first(self, rerun: _Rerun) -> tuple[Any, Tensor | None]:
        """Runs a forward that will be run again, from inputs as they are now.

        The first one ever, and each one of a module that changes its inputs, has copies of them.
        """
        arguments = rerun.arguments
        if self._changes_inputs is False:
            before = _versions_of(arguments)
            output = self._run(arguments, rerun.weights, rerun.target)
            if _versions_of(arguments) != before:
                raise RuntimeError(
                    f"it changed one of {describe(tuple(arguments))} in place, and has not done so "
                    "before; its forward cannot be run again, so make the pipeline with "
                    "checkpoint='never', or use an operation that makes a new tensor"
                )
            return output
        copies = _pytree.tree_map_only(Tensor, torch.clone, arguments)
        before = _versions_of(copies)
        output = self._run(copies, rerun.weights, rerun.target)
        self._changes_inputs = _versions_of(copies) != before
        return output

    def _run(
        self, arguments: Sequence[Any], weights: Leaves | None, target: Any
    ) -> tuple[Any, Tensor | None]:
        """Returns the output of the module; and its loss, in the last stage."""
        output = self._call(arguments, weights)
        if self._objective is None:
            return output, None
        loss = self._objective.loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigurationError(
                f"the loss function returned {describe(loss)}; a tensor with one element is needed"
            )
        return output, loss

    def _arguments(self, packets: Mapping[int, Packet]) -> Sequence[Any]:
        if len(packets) == 1:
            (packet,) = packets.values()
            alone: Sequence[Any] = packet.values()
            return alone
        values = {source: iter(packet.values()) for source, packet in packets.items()}
        return [next(values[take.source]) for take in self._takes]

    def _call(self, arguments: Sequence[Any], weights: Leaves | None = None) -> Any:
        positional, named = self._spread(arguments)
        if weights is None:
            return self.module(*positional, **named)
        return functional_call(self.module, dict(weights), positional, named)

    def _spread(self, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and the keyword arguments of the module."""
        if self._is_spread:
            (value,) = arguments
            if isinstance(value, tuple):
                return value, {}
            return ((), value) if isinstance(value, dict) else ((value,), {})
        pairs = list(zip(self._takes, arguments, strict=True))
        positional = tuple(value for take, value in pairs if not take.name)
        return positional, {take.name: value for take, value in pairs if take.name}

    def _packet(
        self, output: Any, consumer: int, may_need_grad: bool
    ) -> tuple[Packet, list[Tensor]]:
        picked = [pick(output, take, consumer) for take in self._given[consumer]]
        return make_packet(picked, may_need_grad=may_need_grad)

    # Backward

    def expects(self, microbatch: int) -> list[int]:
        """Returns the consumers that send gradients for a micro-batch."""
        return _consumers_of(self._held[microbatch])

    def backward(
        self, microbatch: int, gradients: Mapping[int, Sequence[Tensor | None]]
    ) -> dict[int, list[Tensor | None]]:
        """Runs a whole backward; returns the gradients for each source.

        Args:
            microbatch: Which micro-batch; it is no longer held afterwards.
            gradients: By consumer, those of the tensors that it was sent, in order.
        """
        held = self._held[microbatch]
        roots, arrived = self._roots(held, gradients)
        if roots:
            accumulate(tuple(roots), tuple(arrived))
        del self._held[microbatch]
        return {
            source: [leaf.grad for leaf in leaves]
            for source, leaves in held.inputs.items()
            if leaves
        }

    def backward_input(
        self, microbatch: int, gradients: Mapping[int, Sequence[Tensor | None]]
    ) -> dict[int, list[Tensor | None]]:
        """Runs the first part of a backward; ``backward_weight`` follows."""
        held = self._held[microbatch]
        roots, arrived = self._roots(held, gradients)
        leaves = [leaf for each in held.inputs.values() for leaf in each]
        found, held.rest = input_part(roots, arrived, leaves, self.parameters())
        results = iter(found)
        outgoing = {
            source: [next(results) for _ in each] for source, each in held.inputs.items() if each
        }
        held.inputs, held.sent, held.loss = {}, {}, None
        return outgoing

    def backward_weight(self, microbatch: int) -> None:
        """Runs the second part of a backward; the micro-batch is no longer held afterwards."""
        held = self._held.pop(microbatch)
        assert held.rest is not None
        held.rest.run()

    def check_weights(self, microbatch: int = -1) -> None:
        """Checks the gradients of its weights, if it is a ``CheckedStage``.

        Args:
            microbatch: The last micro-batch that they belong to; -1 for all of a step.

        Raises:
            NotFinite: One is NaN or infinite.
        """

    def _roots(
        self, held: _Activations, gradients: Mapping[int, Sequence[Tensor | None]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the tensors at which a backward begins, and their gradients."""
        if held.rerun is not None:
            self._run_again(held, held.rerun)
        roots: list[Tensor] = []
        arrived: list[Tensor] = []
        if held.loss is not None and held.loss.requires_grad:
            assert self._objective is not None
            roots.append(held.loss)
            arrived.append(torch.full_like(held.loss, 1 / self._objective.divisor))
        for consumer, tensors in held.sent.items():
            if not tensors:
                continue
            for tensor, gradient in zip(tensors, gradients[consumer], strict=True):
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    arrived.append(gradient)
        return roots, arrived

    def _run_again(self, held: _Activations, rerun: _Rerun) -> None:
        """Makes the graph of a forward that was run without."""
        held.rerun = None
        now = torch.get_rng_state()
        torch.set_rng_state(rerun.random_state)
        # Statistics of a batch normalization count each micro-batch once.
        buffers = [(each, each.clone()) for each in self.module.buffers()]
        try:
            with torch.enable_grad():
                given = self._taken_in(rerun.arguments)
                output, held.loss = self._run(given, rerun.weights, rerun.target)
        finally:
            torch.set_rng_state(now)
            for buffer, before in buffers:
                buffer.data.copy_(before)  # ``data``: no graph takes this for a change.
        for consumer in _consumers_of(held):
            picked = [pick(output, take, consumer) for take in self._given[consumer]]
            held.sent[consumer] = make_packet(picked, may_need_grad=True)[1]


def _consumers_of(held: _Activations) -> list[int]:
    """Returns the consumers that were sent tensors which need a gradient."""
    return [consumer for consumer, sent in held.sent.items() if sent]


# A backward in two parts


class _Fork(NamedTuple):
    """A node on the way to an input, from which branches lead to weights alone."""

    outputs: tuple[GradientEdge, ...]
    branches: tuple[GradientEdge, ...]


class WeightPart:
    """The second part of one backward; holds the graph until ``run``.

    Args:
        parameters: The weights whose gradients it computes.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._whole: tuple[list[Tensor], list[Tensor]] | None = None
        self._forks: list[tuple[_Fork, tuple[Tensor | None, ...]]] = []

    def keep_all(self, roots: list[Tensor], gradients: list[Tensor]) -> None:
        """Leaves the whole graph to the second part."""
        self._whole = roots, gradients

    def keep(self, fork: _Fork, gradients: tuple[Tensor | None, ...]) -> None:
        """Leaves the branches of one node to the second part."""
        self._forks.append((fork, gradients))

    def run(self) -> None:
        """Adds the gradients to ``grad`` of the weights, and releases the graph.

        The engine itself adds them: it runs the hooks of the weights, and gives each weight a
        gradient of its own, also where one tensor is the gradient of several.
        """
        whole, self._whole = self._whole, None
        forks, self._forks = self._forks, []
        if whole is not None:
            roots, gradients = whole
            accumulate(tuple(roots), tuple(gradients), self._parameters)
        edges: list[Any] = []
        arrived: list[Tensor] = []
        for fork, captured in forks:
            pairs = zip(fork.outputs, captured, strict=True)
            given = {edge: gradient for edge, gradient in pairs if gradient is not None}
            if not given:
                continue
            for edge, gradient in _run(fork, given):
                edges.append(edge)
                arrived.append(gradient)
        if edges:
            accumulate(tuple(edges), tuple(arrived), self._parameters)


class _HasRun(BaseException):
    """Ends a run after its first node."""


def _run(
    fork: _Fork, gradients: dict[GradientEdge, Tensor]
) -> Iterator[tuple[GradientEdge, Tensor]]:
    """Runs the node of a fork once; yields the gradients of its branches.

    The run ends before the branches: the engine would run the hooks at their beginning, which run
    when the branches do.
    """
    node = fork.outputs[0].node
    found: list[tuple[Tensor | None, ...]] = []
    marks: list[Callable[..., None]] = []

    def take(after: tuple[Tensor | None, ...], _: Any) -> None:
        marks.append(device_mark())
        found.append(after)
        raise _HasRun

    handle = node.register_hook(take)
    try:
        torch.autograd.grad(
            tuple(gradients),
            fork.branches,
            tuple(gradients.values()),
            retain_graph=True,
            allow_unused=True,
        )
    except _HasRun:
        for mark in marks:
            mark(found)
    finally:
        handle.remove()
    for after in found:
        for (child, number), gradient in zip(node.next_functions, after, strict=True):
            if child is not None and gradient is not None:
                edge = GradientEdge(child, number)
                if edge in fork.branches:
                    yield edge, gradient


def input_part(
    roots: list[Tensor],
    gradients: list[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[list[Tensor | None], WeightPart]:
    """Runs the first part of a backward.

    Args:
        roots: Outputs of a stage.
        gradients: The gradient of each.
        inputs: The stage's inputs, leaves that require grad.
        parameters: The stage's weights that require grad.

    Returns:
        The gradient of each input, None where it has none; and the second part.
    """
    rest = WeightPart(parameters)
    if not roots:
        return [None] * len(inputs), rest
    if not inputs:
        rest.keep_all(roots, gradients)
        return [], rest
    forks = _forks(roots, inputs) if parameters else []
    if forks is None:
        rest.keep_all(roots, gradients)
        forks = []
    ends: list[Any] = [*inputs, *(edge for fork in forks for edge in fork.outputs)]
    results = torch.autograd.grad(
        roots, ends, gradients, retain_graph=bool(parameters), allow_unused=True
    )
    position = len(inputs)
    for fork in forks:
        end = position + len(fork.outputs)
        rest.keep(fork, results[position:end])
        position = end
    return list(results[: len(inputs)]), rest


def _forks(roots: Sequence[Tensor], inputs: Iterable[Tensor]) -> list[_Fork] | None:
    """Returns the nodes at which the backward is cut; None if it cannot be cut.

    It cannot where two nodes have a branch in common, in whole or in part of it: the earlier one
    would run into the branch by way of the later one.
    """
    edges = [get_gradient_edge(root) for root in roots]
    ends = {get_gradient_edge(each).node for each in inputs}
    order = _post_order([edge.node for edge in edges])
    leads: set[Node] = set()
    arriving: dict[Node, set[int]] = {}
    for edge in edges:
        arriving.setdefault(edge.node, set()).add(edge.output_nr)
    for node in order:
        for child, number in node.next_functions:
            if child is not None:
                arriving.setdefault(child, set()).add(number)
        if node in ends or any(child in leads for child, _ in node.next_functions):
            leads.add(node)
    forks: list[_Fork] = []
    begun: set[Node] = set()
    for node in order:
        if node not in leads or node in ends:
            continue
        branches = {
            GradientEdge(child, number)
            for child, number in node.next_functions
            if child is not None and child not in leads
        }
        nodes = {edge.node for edge in branches}
        if nodes & begun:
            return None
        begun |= nodes
        if branches:
            outputs = tuple(GradientEdge(node, number) for number in sorted(arriving[node]))
            forks.append(_Fork(outputs, tuple(branches)))
    if any(edge.node not in leads for edge in edges):
        return None  # A whole root leads to weights alone.
    behind = [child for node in begun for child, _ in node.next_functions if child is not None]
    return None if begun.intersection(_post_order(behind)) else forks


def _post_order(starts: Iterable[Node]) -> list[Node]:
    """Returns all nodes of a graph, each after those that its ``next_functions`` lead to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(node, False) for node in starts]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
