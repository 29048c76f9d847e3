"""Refuses functions of PyTorch that would leave out what other workers have.

*Passes of PyTorch alone.* ``loss.backward()`` runs every node, so it runs into a placeholder, which
raises. A pass for certain inputs, as ``torch.autograd.grad(loss, w)`` and
``loss.backward(inputs=[w])``, runs only nodes that lead to an input here. It would leave out the
part of the gradient that leads over another worker, and say nothing. No hook can tell, since
nothing of that part runs. PyTorch's engine is an object with one method, which all passes of Python
call. An object of a subclass takes its place, and looks at passes for inputs before they begin. The
gradient is incomplete if the roots lead to a tensor of another worker, and if a message that this
worker had sent before leads to an input. That takes a walk through the graph, which is made only
where this worker has exchanged tensors with a graph.

*Functions that read ``.grad``.* Steps of optimizers and ``torch.nn.utils.clip_grad_norm_`` leave
out parameters without ``.grad``. But a pass in a context leaves gradients in the context, and a
model that was handed to other workers gets them there. Then these functions would do nothing, and
say nothing. Each kind of place adds a check, which raises where gradients are elsewhere. Contexts
are looked at only where no parameter has a gradient in ``.grad``: then the function can have no
effect.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import utils
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchweft.autograd import hooks
from torchweft.autograd.component import probed_by, probing
from torchweft.autograd.contexts import Contexts, SendRecord
from torchweft.autograd.graph import walk
from torchweft.autograd.outside import Ends, OutsideRecords
from torchweft.errors import AutogradError, ConfigurationError

_variable: Any = torch.autograd.Variable
_engine: Any = _variable._execution_engine


class Recorder(Protocol):
    """A worker, with what it has sent and received."""

    contexts: Contexts
    outside: OutsideRecords

    def name_of(self, worker: int) -> str:
        """Returns the name of a worker."""
        ...


_watched: weakref.WeakSet[Recorder] = weakref.WeakSet()


def watch(recorder: Recorder) -> None:
    """Looks for gradients of a worker from now on, for as long as ``recorder`` lives."""
    _watched.add(recorder)
    if type(_variable._execution_engine) is type(_engine):
        _variable._execution_engine = _Watching()
    _begin()


# Passes of PyTorch alone

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_Engine: Any = type(_engine)


class _Watching(_Engine):  # type: ignore[misc]
    """PyTorch's engine, which looks at passes for inputs before they begin."""

    def run_backward(
        self,
        roots: Sequence[Any],
        gradients: Any,
        retain_graph: Any,
        create_graph: Any,
        inputs: Sequence[Any] = (),
        *others: Any,
        **options: Any,
    ) -> Any:
        """Runs a pass, or raises AutogradError if it would leave out a part."""
        if inputs:
            _check(roots, inputs)
        begin = super().run_backward
        if not hooks.has_hooks_of_several and probing.run is None:
            return begin(roots, gradients, retain_graph, create_graph, inputs, *others, **options)
        with hooks.gathered_by(None), probed_by(None):  # It may begin in a hook of a pass of Weft.
            return begin(roots, gradients, retain_graph, create_graph, inputs, *others, **options)


def _check(roots: Sequence[Any], inputs: Sequence[Any]) -> None:
    for recorder in list(_watched):
        contexts = [each for each in recorder.contexts.all() if each.receive_of]
        if not contexts and not recorder.outside.sends():
            continue
        reached = set(walk(_nodes(roots), set()))
        wanted = set(_nodes(inputs))
        for context in contexts:
            records = [each for node, each in list(context.receive_of.items()) if node in reached]
            if records:
                latest = max(records, key=lambda record: record.sends_before)
                before = context.sends()[: latest.sends_before]
                if not wanted.isdisjoint(walk(_sent(before), set())):
                    raise _left_out(recorder.name_of(latest.from_worker))
        name = _led_outside(recorder, reached, wanted)
        if name is not None:
            raise _left_out(name)


def check_inside(recorder: Recorder, roots: Sequence[GradientEdge], inputs: Sequence[Any]) -> None:
    """Raises AutogradError if gradients may lead over calls that were made outside of contexts.

    Args:
        recorder: The worker.
        roots: Where the pass begins.
        inputs: The tensors whose gradients a pass in a context is to return.
    """
    if not recorder.outside.sends():
        return
    name = _led_outside(recorder, set(walk(_nodes(roots), set())), set(_nodes(inputs)))
    if name is not None:
        raise AutogradError(
            f"the outputs lead to a tensor that worker {name!r} computed in a call outside of "
            "autograd contexts, perhaps from the inputs: make the call within the context, or "
            "call torchweft.autograd.backward(loss)",
            worker=name,
        )


def _led_outside(recorder: Recorder, reached: set[Node], wanted: set[Node]) -> str | None:
    """Returns the worker that computed, outside of contexts, a tensor perhaps from the inputs."""
    sends = recorder.outside.sends()
    if not sends or wanted.isdisjoint(walk(_sent(sends), set())):
        return None
    ends = Ends(recorder.outside, {}, lambda _: None)
    found = [end for node in reached if (end := ends.get(node)) is not None]
    return recorder.name_of(found[0].from_worker) if found else None


def _sent(records: Iterable[SendRecord]) -> list[Node]:
    return [node for record in records for node in _nodes(record.edges)]


def _left_out(name: str) -> AutogradError:
    return AutogradError(
        "torch.autograd.grad and backward(inputs=) would leave out a part of the gradient: the "
        f"pass leads to a tensor that worker {name!r} computed, perhaps from the inputs. Call "
        "torchweft.autograd.grad(context_id, outputs, inputs) within `with "
        "torchweft.autograd.context() as context_id:`, or detach() the tensor if it is meant to "
        "be a constant",
        worker=name,
    )


def _nodes(edges: Iterable[Any]) -> list[Node]:
    """Returns the nodes of tensors and edges; of a leaf, the node that accumulates there.

    Tensors of ``torch.func`` are left out: they have graphs of their own, and cannot be sent.
    """
    nodes = []
    for edge in edges:
        if isinstance(edge, GradientEdge):
            nodes.append(edge.node)
        elif isinstance(edge, Tensor) and edge.requires_grad and not _is_wrapped(edge):
            if edge.grad_fn is not None:
                nodes.append(edge.grad_fn)
            elif edge.layout is torch.strided:  # torch finds no node of others; they end there.
                nodes.append(get_gradient_edge(edge).node)
    return nodes


# Absent gradients

Check = Callable[[str, Sequence[Tensor]], object]
"""Raises if gradients of parameters are elsewhere. It gets the name of the function that reads
them: that of a class of optimizers, or of a function of ``torch.nn.utils``."""


_checks: list[Check] = []
_fed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
OWN_HOOKS: list[Any] = []
"""The hook of all optimizers. It stays: a step must not change its hooks."""


def add_check(check: Check) -> None:
    """Calls a check from now on, before gradients are read."""
    if check not in _checks:
        _checks.append(check)
    _begin()


def leave_out(optimizer: Optimizer) -> None:
    """Does not look at the steps of an optimizer, which Weft gives the gradients that there are."""
    _fed.add(optimizer)


def _begin() -> None:
    if not OWN_HOOKS:
        OWN_HOOKS.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    # With a closure, or the number of a context, gradients come from elsewhere.
    if len(args) > 1 or options or optimizer in _fed:
        return
    groups = [group["params"] for group in optimizer.param_groups]
    _look(type(optimizer).__name__, [each for group in groups for each in group])


def _check_before(look: Callable[[str, list[Any]], None], name: str) -> None:
    """Has a function of ``torch.nn.utils`` look at its tensors before it begins."""
    function: Callable[..., Any] = getattr(utils, name)

    @functools.wraps(function)
    def call(tensors: Any, *args: Any, **options: Any) -> Any:
        found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        look(name, found)
        # torch warns of a generator that yields nothing.
        return function(found or tensors, *args, **options)

    hooks.replace(function, call, name)


def _look_for_norm(name: str, gradients: Iterable[Any]) -> None:
    if not gradients and any(_contexts_with_gradients()):
        warnings.warn(
            f"{name} was called without gradients, and there are gradients in an autograd "
            "context: torchweft.autograd.get_gradients(context_id) has them",
            RuntimeWarning,
            stacklevel=3,
        )


def _look(name: str, parameters: Iterable[Any]) -> None:
    tensors = [each for each in parameters if isinstance(each, Tensor)]
    for check in _checks:
        check(name, tensors)
    if any(each.grad is not None for each in tensors):
        return
    for context_id, has_gradient in _contexts_with_gradients():
        if any(map(has_gradient, tensors)):
            raise ConfigurationError(
                f"{name} finds no gradient: those of its parameters are in autograd context "
                f"{context_id}. {_instead(name)}, or call torchweft.autograd.backward(loss) "
                "outside of contexts, which adds to .grad"
            )


def _contexts_with_gradients() -> list[tuple[int, Callable[[Tensor], bool]]]:
    contexts = [context for recorder in list(_watched) for context in recorder.contexts.all()]
    return [(each.id, each.gradients.has) for each in contexts if each.gradients.has_any]


def _instead(name: str) -> str:
    if name == "clip_grad_norm_":
        return (
            "Call torchweft.optim.clip_grad_norm_(context_id, references, max_norm), with RRefs "
            "to the parameters"
        )
    if name.startswith("clip_"):
        return "Change the tensors of torchweft.autograd.get_gradients(context_id) in place"
    return (
        f"Use torchweft.optim.DistributedOptimizer({name}, references), with RRefs to the "
        "parameters, and its step(context_id)"
    )


for _name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
    _check_before(_look, _name)
_check_before(_look_for_norm, "get_total_norm")
