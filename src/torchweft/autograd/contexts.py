"""Contexts: one worker's record of a forward pass, and the gradients of its backward passes.

A context has one number in the whole group and a ``Context`` on each worker that took part. It
holds the records of the worker's messages, which backward passes follow in the opposite direction.
A message that carries tensors which require grad leaves a send record at its sender and a receive
record at its receiver, under one message id. A gate leads to each sent tensor in the sender's
graph; a placeholder stands for each received tensor in the receiver's graph.

Rules of the file: a stored gradient shares no memory that other code may write to, since
optimizers and clipping work in place. A sum is made in place only if its table made the tensor
itself.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils._python_dispatch import _disable_current_modes

from torchweft.engine.codec.tensors import PARAMETER, REQUIRES_GRAD, SHARED, separated
from torchweft.engine.protocol.numbers import Tombstones
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import keep, new_guard, new_order
from torchweft.errors import AutogradError
from torchweft.free_threading import shared_count
from torchweft.ids import WORKER_SHIFT, scoped_id, worker_of

# Gradients

_storage_use_count = getattr(torch._C, "_storage_Use_Count", None)


def _uses_of(tensor: Tensor) -> int:
    return int(_storage_use_count(tensor.untyped_storage()._cdata))  # type: ignore[misc]


# It depends on torch's version whether the storage object made for the query counts as a use.
_UNSHARED_USES = _uses_of(torch.empty(1)) if _storage_use_count else 0


UNDEFINED: Final[Literal[False]] = False
"""Stands for the missing gradient of a tensor that was used: the nodes behind it run, as in
torch's engine. None stands for that of an unused tensor: nothing behind it runs."""

Gradient = Tensor | Literal[False] | None
"""The gradient of a tensor of a message, or why there is none."""


def sum_of(first: Tensor, second: Tensor) -> Tensor:
    """Adds two gradients of one tensor into a new one; it is sparse only if both are."""
    if first.is_sparse and not second.is_sparse:
        return second + first
    return first + second


def owned(gradient: Tensor) -> Tensor:
    """Returns a gradient in memory of its own; copies what may be shared.

    Copies when in doubt: a needless copy is only slow.
    """
    if gradient.requires_grad:
        return gradient.clone()  # Its graph may have kept it.
    if gradient.layout is torch.strided:
        return gradient if _is_alone(gradient, _UNSHARED_USES) else gradient.clone()
    if gradient.layout is torch.sparse_coo:
        values = gradient._values()  # The tensor returned for a part is one more use.
        if _is_alone(values, _UNSHARED_USES + 1):
            return _with_own_indices(gradient, values)
    return gradient.clone()


def _with_own_indices(gradient: Tensor, values: Tensor) -> Tensor:
    """Copies the indices: those of an embedding's gradient are the input of the program."""
    return torch.sparse_coo_tensor(
        gradient._indices().clone(),
        values,
        gradient.shape,
        is_coalesced=gradient.is_coalesced(),
        check_invariants=False,
        device=values.device,
    )


def _is_alone(tensor: Tensor, unshared_uses: int) -> bool:
    if _storage_use_count is None or (not tensor.is_contiguous() and 0 in tensor.stride()):
        return False
    # As in ``_uses_of``: it runs for each leaf of each pass.
    uses: int = _storage_use_count(tensor.untyped_storage()._cdata)
    return uses <= unshared_uses


def _used_elsewhere(pairs: Sequence[tuple[Tensor, Tensor]], borrowed: Iterable[object]) -> set[int]:
    """Returns the ids of gradients that are borrowed, or occur more than once."""
    used = set(map(id, borrowed))
    if len(pairs) > 1:
        ids = [id(gradient) for _, gradient in pairs]
        if len(set(ids)) < len(ids):
            used |= {each for each, count in Counter(ids).items() if count > 1}
    return used


Sink = Callable[[Iterable[tuple[Tensor, Tensor]], Iterable[object]], object]
"""Adds the gradients of leaves of one engine call; other code uses those of the second argument."""


_hooks_of = attrgetter("_post_accumulate_grad_hooks")  # in C: it runs for each leaf of each pass
_NOTHING_ACCUMULATED = (
    "a leaf has hooks of register_post_accumulate_grad_hook, but a pass in an autograd context "
    "accumulates nothing in .grad, so they would never be called: remove them, or call "
    "torchweft.autograd.backward(loss) outside of contexts"
)


class Gradients:
    """Sums gradients by tensor. Thread-safe.

    Args:
        calls_hooks: Whether the caller calls the post-accumulate hooks of leaves; otherwise a leaf
            with such hooks is refused.
    """

    def __init__(self, calls_hooks: bool = True) -> None:
        self._calls_hooks = calls_hooks
        self._lock = threading.RLock()
        self._order = new_order()
        self._sums: dict[Tensor, Tensor] = {}
        self._made_here: set[Tensor] = set()

    def add_all(self, pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[object]) -> None:
        """Adds the gradients of one engine call.

        Args:
            pairs: Tensors and their gradients; a tensor may occur more than once.
            borrowed: Objects that are still used elsewhere. A borrowed gradient is copied, and so
                is a gradient that occurs for several tensors.
        """
        pairs = list(pairs)
        if not self._calls_hooks and any(map(_hooks_of, map(itemgetter(0), pairs))):
            raise AutogradError(_NOTHING_ACCUMULATED)
        used = _used_elsewhere(pairs, borrowed)
        with self._lock, self._order:
            if device_streams.HAS_CUDA:
                self._keep_for_sums(pairs)
            for tensor, gradient in pairs:
                previous = self._sums.get(tensor)
                if previous is None:
                    is_used = id(gradient) in used
                    self._sums[tensor] = gradient.clone() if is_used else owned(gradient)
                elif tensor in self._made_here and not previous.is_sparse:
                    previous += gradient
                else:
                    self._sums[tensor] = sum_of(previous, gradient)
                    self._made_here.add(tensor)

    @property
    def has_any(self) -> bool:
        """Whether there is a gradient."""
        return bool(self._sums)

    def has(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has a gradient."""
        return tensor in self._sums

    def snapshot(self) -> dict[Tensor, Tensor]:
        """Returns the sums so far; later additions do not change the returned tensors."""
        with self._lock, self._order:
            self._made_here.clear()
            if device_streams.HAS_CUDA:
                keep(self._sums)
            return dict(self._sums)

    def _keep_for_sums(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Keeps the memory of all parts of sums until this thread has added them."""
        for tensor, gradient in pairs:
            keep(gradient, self._sums.get(tensor))

    def keep(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Adds gradients without copying; other code may read but must not write them."""
        with self._lock, self._order:
            if device_streams.HAS_CUDA:
                self._keep_for_sums(gradients.items())
            for tensor, gradient in gradients.items():
                previous = self._sums.get(tensor)
                self._sums[tensor] = gradient if previous is None else sum_of(previous, gradient)
            self._made_here.difference_update(gradients)

    def put(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Replaces the sums of some tensors by gradients that no other code writes to."""
        with self._lock, self._order:
            self._sums.update(gradients)
            self._made_here.difference_update(gradients)

    def clear(self) -> None:
        """Removes all sums."""
        with self._lock, self._order:
            self._sums.clear()
            self._made_here.clear()


_accumulating = new_guard()
"""Held while adding to ``.grad``: concurrent passes may add to the same tensors."""


def add_to_grad(
    pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[object], create_graph: bool = False
) -> None:
    """Adds gradients to ``.grad`` of leaves, and calls their post-accumulate hooks.

    Args:
        pairs: Leaves and their gradients; a leaf may occur more than once.
        borrowed: Objects that are still used elsewhere; see ``Gradients.add_all``.
        create_graph: Whether the gradients have a graph that ``.grad`` must keep.
    """
    pairs = list(pairs)
    used = _used_elsewhere(pairs, borrowed)
    with torch.set_grad_enabled(create_graph):
        with _accumulating.lock, _accumulating.order:
            if device_streams.HAS_CUDA:
                keep(pairs, [tensor.grad for tensor, _ in pairs])
            for tensor, gradient in pairs:
                previous = tensor.grad
                if previous is None:
                    is_used = id(gradient) in used
                    tensor.grad = gradient.clone() if is_used else owned(gradient)
                elif create_graph or previous.is_sparse:
                    tensor.grad = sum_of(previous, gradient)
                else:
                    previous += gradient
        for tensor in dict.fromkeys([tensor for tensor, _ in pairs]):
            # Only once ``.grad`` is complete: optimizers that step in backward rely on that.
            for hook in tuple((tensor._post_accumulate_grad_hooks or {}).values()):
                hook(tensor)


# Placeholders: the tensors that stand for received tensors in the receiver's graph. They must not
# be leaves, since programs modify received tensors in place. And a walk must see where the graph
# continues on another worker. Both follow from making each placeholder the output of a node. torch
# has a suitable node that raises when it is run.
#
# Each tensor has a node of its own. The engine calls the hooks of all outputs of a node that it
# runs, with None for missing gradients, so the tensors of a message must not share a node.

RAN_INTO = (
    "backward reached a tensor that came from another worker; inside the autograd context call "
    "torchweft.autograd.backward(context_id, [loss]), which goes on there, instead of "
    "loss.backward()"
)

OF_ANOTHER_CONTEXT = (
    "backward reached a tensor that another worker computed in another autograd context, such as a "
    "state kept from an earlier step; gradients do not go from context to context: detach() such "
    "tensors, or make all calls that a loss depends on in one context"
)

_EMPTY = torch.empty(0)


_delayed_error: Any = torch._C._functions.DelayedError
_placeholder_of = _delayed_error(RAN_INTO, 1)

PLACEHOLDER = type(_placeholder_of(torch.empty(0, requires_grad=True)).grad_fn)
"""The type of placeholder nodes."""


def make_placeholders(tensors: Sequence[Tensor]) -> tuple[list[Node], list[Tensor]]:
    """Makes tensors with the memory of ``tensors``, each the output of a new node.

    Args:
        tensors: Fresh leaves of a differentiable type; their memory moves to the placeholders,
            and the caller must drop them.

    Returns:
        The nodes and the placeholders, in the order of ``tensors``.
    """
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return make_placeholders(tensors)
    nodes: list[Any] = []
    placeholders: list[Tensor] = []
    for tensor in tensors:
        placeholder: Any = _placeholder_of(tensor.requires_grad_(True))
        node = placeholder.grad_fn
        # As torch does for the first hook of a tensor. A run of the engine in another thread may
        # look at the node's tables of hooks, so none may be added once the graph can be run.
        hooks = placeholder._backward_hooks = OrderedDict()
        node._register_hook_dict(placeholder)
        node.metadata[_HOOKS] = hooks
        nodes.append(node)
        placeholders.append(placeholder)
        # The node keeps its leaf as long as the graph lives; the memory can be freed now.
        if tensor.layout is _STRIDED:
            tensor.data = _EMPTY if tensor.is_cpu else tensor.new_empty(0)
    return nodes, placeholders


_HOOKS = "torchweft hooks"
"""Key in the metadata of a placeholder."""


def hooks_at(placeholder: Any) -> dict[Any, Callable[[Tensor | None], object]]:
    """Returns the table of the hooks of a placeholder's tensor, in the order of their calls."""
    table: dict[Any, Callable[[Tensor | None], object]] = placeholder.metadata[_HOOKS]
    return table


def is_without_memory(leaf: object) -> bool:
    """Returns whether a leaf may be a placeholder's, of any context; few other leaves match."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.numel()


# Gates: the nodes of aliases of the sent tensors. A run of torch's engine can wait in a gate; see
# ``component``.


class _Alias(torch.autograd.Function):
    """Makes a gate for a tensor of any type and layout."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        take: Callable[[], Tensor | None] | None = getattr(gradient, TAKE, None)
        return gradient if take is None else take()


TAKE = "_weft_take"
"""Name of an attribute of the zeros at a gate of a function."""


_count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
_view_of = torch.ops.aten.alias.default


def gates_of(tensors: Iterable[Tensor]) -> tuple[Node, ...]:
    """Returns a gate for each of ``tensors``, which require grad; it keeps the graph alive."""
    if not _is_grad_enabled() or _count_modes():
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            return gates_of(tensors)
    gates: list[Any] = []
    for tensor in tensors:  # Without a function for a list: it runs for each recorded message.
        if type(tensor) in _PLAIN and tensor.layout is _STRIDED:
            # Not ``tensor[...]``: it keeps the interpreter lock while it waits for a lock of the
            # tensor, and a thread in another operation may hold that one and wait for the former.
            gates.append(_view_of(tensor).grad_fn)
        else:
            gates.append(_alias_of(tensor).grad_fn)
    return tuple(gates)


_alias_of: Callable[[Tensor], Tensor] = _Alias.apply


_new_edge: Any = partial(tuple.__new__, GradientEdge)
_REST = tuple(GradientEdge._field_defaults.values())
_FIRST_OUTPUT = [itertools.repeat(each) for each in (0, *_REST)]


def edges_behind(gates: Iterable[Node]) -> tuple[GradientEdge, ...]:
    """Returns the edges of the tensors that gates were made for."""
    edges: list[Any] = []
    for gate in gates:
        edges.append(_new_edge((*gate.next_functions[0], *_REST)))
    return tuple(edges)


def edges_at(nodes: Iterable[Node]) -> list[GradientEdge]:
    """Returns the edges to the first output of each node."""
    # Without a step of Python for each: a module may have a thousand leaves.
    return list(map(_new_edge, zip(nodes, *_FIRST_OUTPUT, strict=False)))


# Records


@dataclass(slots=True)
class TensorMeta:
    """The shape, type and device that the gradient of a tensor must have."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class SendRecord:
    """A sent message: its tensors that require grad, in their order.

    Attributes:
        message_id: Number of the message in the group.
        to_worker: The receiver, which will send the gradients.
        metas: Shape, type and device of each gradient.
        gates: For each tensor a node that leads to its edge; see ``gates``. They keep the graph
            alive, which an edge to a Python node does not.
        is_back: Whether its tensors were placed as those of an answer; see ``worker.peers``.
        retained: The tensors with ``retain_grad``. torch's engine may crash if it comes to such a
            tensor in the moment in which another thread drops it, as one that has served a call
            does: it asks whether the tensor lives, and then uses it.
        edges: Where in the graph the gradients go; made by the first pass that looks at it.
    """

    message_id: int
    to_worker: int
    metas: tuple[TensorMeta, ...]
    gates: tuple[Node, ...]
    is_back: bool = False
    retained: Sequence[Tensor] = ()
    edges: tuple[GradientEdge, ...] = ()


@dataclass(slots=True)
class ReceiveRecord:
    """A received message: its tensors that required grad, in their order.

    Attributes:
        message_id: Number of the message in the group.
        from_worker: The sender, which waits for the gradients.
        nodes: The placeholders, one for each tensor.
        sends_before: How many messages this worker had sent in the context before. No message
            sent later can lead to this one.
        is_answer: Whether it is the result of a call that this worker made.
        is_back: Whether its tensors were placed as those of an answer: those of an answer, and
            recorded gradients of the arguments of a call.
        is_outside: Whether it belongs to no context.
    """

    message_id: int
    from_worker: int
    nodes: list[Node]
    sends_before: int = 0
    is_answer: bool = False
    is_back: bool = False
    is_outside: bool = False


def metas_of(tensors: Iterable[Tensor]) -> tuple[TensorMeta, ...]:
    """Returns the shape, type and device of each of ``tensors``."""
    metas: list[TensorMeta] = []
    for tensor in tensors:  # Without a function for a list: it runs for each recorded message.
        metas.append(TensorMeta(tensor.shape, tensor.dtype, tensor.device))
    return tuple(metas)


# Contexts


def first_of(worker: int) -> Iterator[int]:
    """Returns a counter of numbers that no other worker of the group gives. Thread-safe."""
    return shared_count(scoped_id(worker, 1))


class SentMessages:
    """The records of messages that one worker sent. Thread-safe.

    Args:
        worker: This worker.
        counter: Makes the numbers of messages; shared by all objects of the worker.
    """

    def __init__(self, worker: int, counter: Iterator[int] | None = None) -> None:
        self.worker = worker
        self._counter = first_of(worker) if counter is None else counter
        self._lock = threading.RLock()
        self._sends: dict[int, SendRecord] = {}
        self.send: Callable[[int], SendRecord | None] = self._sends.get
        """Returns the record of a message that this worker sent."""

    def record_send(self, tensors: Sequence[Tensor], to_worker: int, is_back: bool = False) -> int:
        """Records a message that is about to be sent; returns its number.

        Args:
            tensors: The tensors of the message that require grad.
            to_worker: The receiver.
            is_back: Whether they are placed as those of an answer; see ``worker.peers``.
        """
        # Before the lock: no two threads get the same number.
        message_id = next(self._counter)
        metas, gates = metas_of(tensors), gates_of(tensors)
        retained = [tensor for tensor in tensors if tensor.retains_grad]
        record = SendRecord(message_id, to_worker, metas, gates, is_back, retained)
        with self._lock:
            self._sends[message_id] = record
        return message_id

    def sends(self) -> list[SendRecord]:
        """Returns the records of all messages that may still be used, with their edges."""
        if not self._sends:
            return []
        with self._lock:
            sends = list(self._sends.values())
        for send in sends:
            if not send.edges:
                send.edges = edges_behind(send.gates)
        return sends


class Context(SentMessages):
    """One worker's part of a context. Thread-safe.

    Args:
        context_id: Number of the context in the group.
        worker: This worker.
        counter: Makes the numbers of messages; shared by all contexts of the worker.
    """

    def __init__(self, context_id: int, worker: int, counter: Iterator[int] | None = None) -> None:
        super().__init__(worker, counter)
        self.id = context_id
        self.gradients = Gradients(calls_hooks=False)
        self.receive_of: dict[Node, ReceiveRecord] = {}
        """Receives by placeholder nodes; graph walks end at these."""
        self.recomputable: list[Any] = []
        """Tensors that can be computed again if other workers are lost; see ``replay``."""
        self.is_differentiated_twice = False
        """Whether a pass through this context was itself recorded (``create_graph``)."""
        self._receives: dict[int, ReceiveRecord] = {}
        self._known_workers: set[int] = set()
        self._is_cleared = False

    def record_send(self, tensors: Iterable[Tensor], to_worker: int, is_back: bool = False) -> int:
        """Records a message that is about to be sent.

        Args:
            tensors: All tensors of the message; tensors that do not require grad are skipped.
            to_worker: The receiver.
            is_back: Whether they are placed as those of an answer.

        Returns:
            The number of the message, or 0 if none of its tensors requires grad.
        """
        differentiable: list[Tensor] = []
        for tensor in tensors:  # Without a function for a list: it runs for each recorded message.
            if tensor.requires_grad:
                differentiable.append(tensor)
        self.add_known_worker(to_worker)
        if not differentiable:
            return 0
        return super().record_send(differentiable, to_worker, is_back)

    def record_receive(
        self,
        message_id: int,
        from_worker: int,
        tensors: Sequence[Tensor],
        flags: Sequence[int],
        is_answer: bool = False,
        is_back: bool = False,
    ) -> list[Tensor]:
        """Records a received message, and replaces its tensors by placeholders.

        Args:
            message_id: The number that ``record_send`` returned at the sender.
            from_worker: The sender.
            tensors: All tensors of the message, as received. Tensors with ``REQUIRES_GRAD`` are
                consumed: only the returned tensors may be used afterwards.
            flags: ``REQUIRES_GRAD``, ``PARAMETER`` and ``SHARED`` of each tensor at the sender.
            is_answer: Whether the message is the result of a call.
            is_back: Whether its tensors were placed as those of an answer.

        Returns:
            The tensors for the program.
        """
        self.add_known_worker(from_worker)
        result = list(tensors)
        places = [place for place, flag in enumerate(flags) if flag & REQUIRES_GRAD]
        if message_id and places:
            for place in places:
                # Each placeholder has its own graph, so it needs its own memory: an in-place
                # change of one tensor would not appear in the graph of the other.
                if flags[place] & SHARED:
                    result[place] = separated(result[place])
            received = [result[place] for place in places]
            before = len(self._sends)
            nodes, placeholders = make_placeholders(received)
            record = ReceiveRecord(
                message_id, from_worker, nodes, before, is_answer, is_answer or is_back
            )
            with self._lock:
                self._receives[message_id] = record
                for node in nodes:
                    self.receive_of[node] = record
            for place, placeholder in zip(places, placeholders, strict=True):
                result[place] = placeholder
        for tensor, flag in zip(result, flags, strict=True):
            if flag & PARAMETER:
                # isinstance(tensor, torch.nn.Parameter) checks this attribute.
                tensor._is_param = True
        return result

    def add_known_worker(self, worker: int) -> None:
        """Notes a worker that takes part in the context.

        Raises:
            AutogradError: If the context has been released, and the worker was not known before.
        """
        # An unlocked test is safe: one add to a set is atomic. Adds and copies take the lock.
        if worker != self.worker and worker not in self._known_workers:
            with self._lock:
                if self._is_cleared:  # The release was sent already and would miss this worker.
                    raise _released_error(self.id)
                self._known_workers.add(worker)

    @property
    def known_workers(self) -> frozenset[int]:
        """The other workers with which this worker exchanged messages of the context."""
        with self._lock:
            return frozenset(self._known_workers)

    def receive(self, message_id: int) -> ReceiveRecord | None:
        """Returns the record of a message that this worker received."""
        return self._receives.get(message_id)

    def receives(self) -> list[ReceiveRecord]:
        """Returns the records of all messages that this worker received."""
        with self._lock:
            return list(self._receives.values())

    def get_gradients(self) -> dict[Tensor, Tensor]:
        """Returns the gradients that backward passes of this context left on this worker."""
        return self.gradients.snapshot()

    def clear(self) -> None:
        """Releases all graphs and gradients."""
        with self._lock:
            self._is_cleared = True
            self._sends.clear()
            self._receives.clear()
            self.receive_of = {}
            self.recomputable = []
        self.gradients.clear()


class Contexts:
    """The contexts in which one worker takes part. Thread-safe.

    Args:
        worker: This worker.
        remembered: How many released contexts are remembered, so that their late messages do
            not recreate them.
        is_lost: Whether a worker, given by id, is lost: nobody would release its contexts.
    """

    def __init__(
        self,
        worker: int,
        remembered: int = 4096,
        is_lost: Callable[[int], bool] = lambda worker: False,
    ) -> None:
        self.worker = worker
        self._is_lost = is_lost
        # Reentrant: a signal handler that calls may interrupt the main thread within it.
        self._lock = threading.RLock()
        self._contexts: dict[int, Context] = {}
        self.find: Callable[[int], Context | None] = self._contexts.get
        """Returns a context, or None if it is not alive here."""
        self._releasing: dict[int, Context] = {}
        """Contexts that are released here while not all other workers may have been told."""
        self._released = Tombstones(remembered)
        self.message_counter = first_of(worker)
        """Makes the numbers of messages."""

    def new_id(self) -> int:
        """Returns the number of a context that is yet to be made; it is new in the group.

        All but the worker is random: a member that takes no part in the context cannot name it.
        """
        return scoped_id(self.worker, secrets.randbits(WORKER_SHIFT))

    def get_or_create(self, context_id: int, named_by: int | None = None) -> Context:
        """Returns a context that this or another worker opened; creates it here if missing.

        Args:
            context_id: Its number.
            named_by: The worker whose message names it, if this worker has not heard of it before.

        Raises:
            AutogradError: If it has been released here, or ``named_by`` has released it; or it is
                a context of this worker, which ``named_by`` has made up; or the worker that opened
                it is lost.
        """
        # Every call comes here, so read without the lock: a dict read is safe beside writers.
        context = self._contexts.get(context_id)
        if context is not None:
            return context
        with self._lock:
            is_made_up = named_by is not None and worker_of(context_id) == self.worker
            is_released = context_id in self._released or (context_id, named_by) in self._released
            if is_made_up or is_released or self._is_lost(worker_of(context_id)):
                raise _released_error(context_id)
            return self._contexts.setdefault(
                context_id, Context(context_id, self.worker, self.message_counter)
            )

    def get(self, context_id: int) -> Context:
        """Returns a context that must exist here.

        Raises:
            AutogradError: If it was never used here, or has been released.
        """
        context = self._contexts.get(context_id)
        if context is None:
            raise _released_error(context_id)
        return context

    def release(self, context_id: int, told_by: int | None = None) -> frozenset[int]:
        """Releases a context permanently, unless the worker that says so has no say in it.

        The opener of a context releases it. A worker that it told tells those with which it has
        exchanged messages of the context; of these, those that know the opener wait for the opener.

        Args:
            context_id: The context.
            told_by: The worker that said so; None for this worker.

        Returns:
            The workers to notify, again until ``notified`` is called; none if that was called, or
            the context was never known here.
        """
        opener = worker_of(context_id)
        with self._lock:
            if told_by is not None and told_by != opener:
                known = self._contexts.get(context_id)
                if known is None:
                    # Perhaps a message of the context is not read yet. It must not open it again.
                    self._released.add((context_id, told_by))
                    return frozenset()
                workers = known.known_workers
                waits = opener == self.worker or (opener in workers and not self._is_lost(opener))
                if waits or told_by not in workers:
                    return frozenset()
            context = self._contexts.get(context_id) or self._releasing.get(context_id)
            if context is not None:
                self._releasing[context_id] = context
            self._contexts.pop(context_id, None)
            self._released.add(context_id)
        if context is None:
            return frozenset()
        context.clear()
        return context.known_workers

    def all(self) -> list[Context]:
        """Returns all contexts that are alive here."""
        with self._lock:
            return list(self._contexts.values())

    def notified(self, context_id: int) -> None:
        """Forgets a released context: the other workers have been told."""
        self._releasing.pop(context_id, None)

    def ids(self) -> list[int]:
        """Returns the numbers of all contexts that are alive here."""
        return [context.id for context in self.all()]


def _released_error(context_id: int) -> AutogradError:
    return AutogradError(
        f"Could not find autograd context with id: {context_id}; it is not alive here, use its "
        "number only inside the `with torchweft.autograd.context()` block that opened it"
    )


# A context variable, so that tasks that share a thread stay apart. Code that runs in a copy of the
# Python context records into the same autograd context.
_current: ContextVar[int] = ContextVar("torchweft autograd context", default=0)

current_id: Callable[[], int] = _current.get
"""Returns the context that this thread or task records into, or 0."""


set_current_id: Callable[[int], object] = _current.set
"""Makes this thread or task record into a context from now on; 0 for none."""


class enter:
    """Makes this thread or task record into a context within a ``with`` block.

    The block does not end the context: its opener does.

    Args:
        context_id: The number of an open context; 0 for none.
    """

    def __init__(self, context_id: int) -> None:
        self._context_id = context_id

    def __enter__(self) -> None:
        self._before = _current.set(self._context_id)

    def __exit__(self, *failure: object) -> None:
        _current.reset(self._before)
