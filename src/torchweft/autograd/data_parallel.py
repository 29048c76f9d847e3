"""Averages gradients of modules under ``DistributedDataParallel``, and refuses those under FSDP.

DDP's problem with contexts: its reducer averages what is accumulated into ``.grad``, by a hook on
the node that accumulates. A pass in a context asks for gradients instead of accumulating them, to
keep contexts apart. So no hook runs, and nothing would be averaged. The obvious way is to
accumulate in the whole pass. That runs into placeholders, runs a weight's node once for each
component, and delays gradients for other workers until all ranks have met.

The idea: a pass takes the gradients of such parameters like all others, and sums them. Then it
accumulates the sums alone, as if the parameters were the roots of a graph. That runs DDP's hooks
and nothing else, and leaves the average in ``.grad``. ``Averaging`` decides when: once no component
can add to a module's gradients any more. Until all modules have been averaged, no message counts
as executed, so the pass does not end.

Rules of the file:

- The context's gradients replace ``.grad`` meanwhile; ``.grad`` is restored.
- Modules take turns in the same order on all ranks; otherwise their collectives would not match.
- Work that another worker waits for never waits for an average, or two ranks might wait for each
  other: gradients for other workers are sent first.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torchweft import knobs
from torchweft.autograd.component import accumulate
from torchweft.autograd.contexts import Gradients, Sink, owned, sum_of
from torchweft.autograd.graph import Reached
from torchweft.engine.protocol.backward import Progress
from torchweft.engine.threads.device_streams import Guard, new_guard
from torchweft.engine.threads.interrupts import acquire
from torchweft.errors import AutogradError, BackwardTimeout

AVERAGING = "averaging by DistributedDataParallel"
"""The operation named in errors of averaging."""


# The modules under DDP

_lock = threading.Lock()
_watching: RemovableHandle | None = None
# In order of construction, which is the same on all ranks since construction is collective.
_guard_of: weakref.WeakKeyDictionary[Any, Guard] = weakref.WeakKeyDictionary()
has_known = False
"""Whether there has been a module under DDP."""


def watch() -> None:
    """Registers modules under DDP: existing ones now, and later ones on construction."""
    global _watching
    if not distributed.is_available():
        return
    with _lock:
        if _watching is not None:
            return
        _watching = register_module_module_registration_hook(_on_registration)
    if distributed.is_initialized():  # A DDP module needs a process group.
        for found in gc.get_objects():
            if issubclass(type(found), DistributedDataParallel):
                _note(found)


def known_modules() -> list[tuple[Any, Guard]]:
    """Returns all modules under DDP with their locks, in order of construction."""
    release_groups()
    if not _guard_of:
        return []
    with _lock:
        return list(_guard_of.items())


def _on_registration(module: Module, _: str, __: object) -> None:
    # DDP registers the module that it wraps as its submodule.
    if isinstance(module, DistributedDataParallel):
        _note(module)


def _note(module: DistributedDataParallel) -> None:
    global has_known
    has_known = True
    release_groups()
    with _lock:
        if module not in _guard_of:
            _guard_of[module] = new_guard()
            ending = weakref.finalize(module, _former.append, module.process_group)
            ending.atexit = False


# After ``destroy_process_group()``, DDP's reducer may be the last owner of the process group. It
# frees the group while it holds the interpreter lock, and freeing waits for the group's threads.
# One of those threads may be waiting for the lock, to free a tensor that was just reduced. The
# other threads of a worker make this rare deadlock likely. The group's Python object releases the
# lock while it waits. So it must be freed last.

_former: list[object] = []
"""The process groups of freed modules."""


def release_groups() -> None:
    """Releases the process groups of freed modules."""
    _former.clear()


atexit.register(release_groups)


# One module


class Replica:
    """A module under DDP, in one backward pass.

    Args:
        module: The ``DistributedDataParallel``.
        guard: The module's lock: held while using its reducer and its ``.grad``.
        components: The components of this worker's sends.

    Attributes:
        parameters: All parameters that DDP may average.
        open: For each component that may still yield gradients of these, its messages.
    """

    def __init__(self, module: Any, guard: Guard, components: Iterable[Reached]) -> None:
        self._module = module
        self._guard = guard
        self._is_first_of_static_graph = False
        self.parameters: frozenset[Tensor] = frozenset(module._module_parameters)
        self.open = [
            frozenset([send.message_id for send in reached.sends])
            for reached in components
            if not self.parameters.isdisjoint(reached.leaves.values())
        ]

    def close_components(self, executed: set[int], is_settled: bool, live: Collection[int]) -> None:
        """Closes components that have run, and once settled, those without a live message."""
        self.open = [
            message_ids
            for message_ids in self.open
            if message_ids.isdisjoint(executed)
            and not (is_settled and message_ids.isdisjoint(live))
        ]

    def check_use(self) -> None:
        """Raises AutogradError if the module uses a feature of DDP that is not supported."""
        if reason := _unsupported_use(self._module):
            raise AutogradError(f"DistributedDataParallel in an autograd context: {reason}")

    def prepare(self) -> None:
        """Prepares the module for its graph to run."""
        module = self._module
        if module.static_graph and not module._static_graph_delay_allreduce_enqueued:
            # Otherwise its graph would reduce everything at the end of the first engine call.
            module._static_graph_delay_allreduce_enqueued = True
            self._is_first_of_static_graph = True

    def give_up(self) -> None:
        """Undoes ``prepare``."""
        if self._is_first_of_static_graph:
            self._module._static_graph_delay_allreduce_enqueued = False

    def average(self, new: Gradients, gradients: Gradients) -> None:
        """Adds the average of ``new`` gradients to ``gradients``; blocks until all ranks do so.

        Raises:
            AutogradError: Gradients are missing.
            RuntimeError: The collective failed.
        """
        fresh = new.snapshot()
        if self.parameters.isdisjoint(fresh):
            return
        # A second pass over the module on another thread waits here.
        is_mine: list[bool] = []
        try:
            limit_s = knobs.BACKWARD_TIMEOUT_S.get()
            if not acquire(self._guard.lock, is_mine, timeout_s=limit_s):
                raise BackwardTimeout(
                    "another pass of this worker has averaged the gradients of the same "
                    f"DistributedDataParallel for {limit_s:g} s (WEFT_BACKWARD_TIMEOUT_S); it "
                    "waits for the other ranks of the module's process group",
                    operation=AVERAGING,
                )
            with self._guard.order:
                totals = self._totals(fresh, gradients.snapshot())
                gradients.put(self._averages(totals) if _is_synchronized(self._module) else totals)
        finally:
            if any(is_mine):
                self._guard.lock.release()

    def _totals(
        self, fresh: Mapping[Tensor, Tensor], earlier: Mapping[Tensor, Tensor]
    ) -> dict[Tensor, Tensor]:
        """Returns the sums of new and earlier gradients, which passes under ``no_sync`` leave."""
        totals: dict[Tensor, Tensor] = {}
        for parameter in self._module._module_parameters:
            if parameter not in earlier:
                if parameter in fresh:
                    totals[parameter] = fresh[parameter]
            elif parameter in fresh:
                totals[parameter] = sum_of(earlier[parameter], fresh[parameter])
            else:
                totals[parameter] = earlier[parameter].clone()
        return totals

    def _averages(self, totals: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        module = self._module
        self._check_complete(totals)
        with _grad_set_aside(module), _hooks_passed_by(totals):
            # The last forward pass did this, but a pass may have come in between.
            module.reducer.prepare_for_backward(self._graph_of(totals))
            accumulate(tuple(totals), tuple(totals.values()))
            if self._is_first_of_static_graph:
                module.reducer._delay_all_reduce()
            module.reducer._check_reducer_finalized()
            averages = [(parameter, parameter.grad) for parameter in module._module_parameters]
        return {key: owned(average) for key, average in averages if average is not None}

    def _graph_of(self, totals: Iterable[Tensor]) -> list[Tensor]:
        """Returns outputs in whose graph DDP finds parameters with gradients, if it looks."""
        if not self._module.find_unused_parameters or self._module.static_graph:
            return []
        with torch.enable_grad():
            return [parameter.view_as(parameter) for parameter in totals]

    def _check_complete(self, totals: Mapping[Tensor, Tensor]) -> None:
        module = self._module
        if module.find_unused_parameters or module.static_graph:
            return
        missing = [
            name
            for name, parameter in module.module.named_parameters()
            if parameter in self.parameters and parameter.requires_grad and parameter not in totals
        ]
        if missing:
            raise AutogradError(
                f"no gradient came for {', '.join(missing)}, and DistributedDataParallel averages "
                "all or none; construct it with find_unused_parameters=True, or use all its "
                "outputs in the loss"
            )


def _is_synchronized(module: Any) -> bool:
    """Returns whether DDP must average, that is, whether the program is not under ``no_sync``.

    DDP decides by the last forward pass with grad. An evaluation pass without grad, or leaving
    ``no_sync`` afterwards, changes one of the flags. Averaging too early is harmless: after the
    pass outside of ``no_sync`` the result is the same.
    """
    return bool(module.require_forward_param_sync or module.require_backward_grad_sync)


def _unsupported_use(module: Any) -> str:
    if module.mixed_precision is not None:
        return "mixed_precision is not supported; use torch.autocast"
    if module._delay_all_reduce_params:
        return "delay_all_reduce_named_params is not supported"
    if getattr(module, "_use_python_reducer", False):
        return "the Python reducer of torch.compile is not supported; set optimize_ddp to another"
    if any(
        hasattr(parameter, "_in_backward_optimizers") for parameter in module._module_parameters
    ):
        return "optimizers that run in backward are not supported; use DistributedOptimizer"
    return ""


@contextlib.contextmanager
def _grad_set_aside(module: Any) -> Iterator[None]:
    """Makes ``.grad`` of all parameters None within a ``with`` block."""
    kept = [(parameter, parameter.grad) for parameter in module._module_parameters]
    # DDP writes to its buckets meanwhile, and ``.grad`` may be a view into one.
    copies = [
        (grad, grad.clone())
        for _, grad in kept
        if grad is not None and module.gradient_as_bucket_view
    ]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for grad, copy in copies:
            grad.copy_(copy)
        for parameter, grad in kept:
            parameter.grad = grad


Hook = Callable[[Tensor], "Tensor | None"]


@contextlib.contextmanager
def _hooks_passed_by(totals: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Keeps the users' hooks from being called a second time for the same gradients.

    The hooks still run for gradients of passes on other threads.
    """
    hooked: list[tuple[dict[int, Hook], dict[int, Hook]]] = []
    for parameter, total in totals.items():
        if hooks := parameter._backward_hooks:
            hooked.append((hooks, dict(hooks)))
            for number, hook in hooks.items():
                hooks[number] = functools.partial(_call_unless, total, hook)
    try:
        yield
    finally:
        for hooks, originals in hooked:
            for number in hooks.keys() & originals.keys():
                hooks[number] = originals[number]


def _call_unless(total: Tensor, hook: Hook, gradient: Tensor) -> Tensor | None:
    return None if gradient is total else hook(gradient)


# All modules of a pass


def find_averaging(
    components: Iterable[Reached], gradients: Gradients, sink: Sink | None = None
) -> Averaging | None:
    """Returns the averaging that a pass needs on this worker; None if it needs none.

    Args:
        components: An item for each message sent from here, live or not, and for the roots: its
            component, the same object for messages of one component.
        gradients: Receives the averages.
        sink: Receives the gradients of all other leaves; by default ``gradients`` does.

    Raises:
        AutogradError: DDP is used in a way that is not supported.
    """
    known = known_modules()
    if not known:
        return None
    components = list({id(reached): reached for reached in components}.values())
    # The module that was constructed last usually has all its gradients first.
    turns = [Replica(module, guard, components) for module, guard in reversed(known)]
    turns = [turn for turn in turns if turn.open]
    return Averaging(gradients, sink or gradients.add_all, turns) if turns else None


class Averaging:
    """The modules under DDP that a backward pass reaches. One thread at a time may use it.

    Args:
        gradients: Receives the averages.
        sink: Receives the gradients of leaves that are not averaged.
        turns: The modules, in order.

    Raises:
        AutogradError: DDP is used in a way that is not supported.
    """

    def __init__(self, gradients: Gradients, sink: Sink, turns: Sequence[Replica]) -> None:
        self._gradients = gradients
        self._sink = sink
        self._turns = turns
        self._replicated = _all_parameters(turns)
        self._sums = Gradients()
        self._held: list[int] = []
        for turn in turns:
            turn.check_use()
        for turn in turns:
            turn.prepare()

    def add_all(self, pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[object]) -> None:
        """Receives the gradients of leaves in place of the context; keeps those to average."""
        pairs, borrowed = list(pairs), list(borrowed)
        kept = [pair for pair in pairs if pair[0] in self._replicated]
        others = [pair for pair in pairs if pair[0] not in self._replicated]
        self._sums.add_all(kept, borrowed)
        self._sink(others, [*borrowed, *[gradient for _, gradient in kept]])

    def hold_back(self, progress: Progress, is_settled: bool, live: Collection[int]) -> None:
        """Removes executed messages from ``progress`` while there are modules to average.

        Args:
            progress: This worker's progress since the last call.
            is_settled: Whether all live messages are known.
            live: The live messages that are known.
        """
        executed = set(progress.executed)
        for turn in self._turns:
            turn.close_components(executed, is_settled, live)
        self._held += progress.executed
        progress.executed = self._take_released()

    def _take_released(self) -> list[int]:
        if self._turns:
            return []
        released, self._held = self._held, []
        return released

    @property
    def is_due(self) -> bool:
        """Whether the module whose turn is next has all its gradients."""
        return bool(self._turns) and not self._turns[0].open

    def run(self) -> Progress:
        """Averages the modules that are due. Blocks until all their ranks do the same.

        Returns:
            The messages that count as executed now.

        Raises:
            AutogradError: DDP cannot average these gradients.
            RuntimeError: The collective failed.
        """
        while self.is_due:
            self._turns[0].average(self._sums, self._gradients)
            self._turns = self._turns[1:]
        if not self._turns:
            self._sums.clear()
        return Progress(executed=self._take_released())

    def close(self) -> None:
        """Gives up modules that have not been averaged."""
        for turn in self._turns:
            turn.give_up()
        self._turns = ()


def _all_parameters(replicas: Sequence[Replica]) -> frozenset[Tensor]:
    parameters = frozenset[Tensor]().union(*[replica.parameters for replica in replicas])
    if len(parameters) < sum(len(replica.parameters) for replica in replicas):
        raise AutogradError(
            "two DistributedDataParallel modules have a parameter in common; wrap it once"
        )
    return parameters


# Fully sharded data parallelism (FSDP) gathers a parameter for the forward pass. Its hooks reduce
# what a backward pass has accumulated into ``.grad`` of the gathered parameter, and free it. A pass
# of Weft accumulates nothing, so FSDP would find nothing to reduce, and the gradients would be lost
# silently. PyTorch tells nobody which parameters are gathered ones, so the check reads FSDP's own
# records. Where another version of PyTorch has other records, nothing is found.


def check_unsharded(reached_of: Mapping[int, Reached]) -> None:
    """Raises AutogradError if a send leads to a parameter under FSDP.

    Args:
        reached_of: The component of each send of this worker, by the number of the send.

    Raises:
        AutogradError: Names the module, and the way to train it beside Weft.
    """
    gathered = {id(parameter): module for module, parameter in _gathered()}
    for reached in reached_of.values():
        for leaf in reached.leaves.values():
            if not isinstance(leaf, Tensor):
                continue
            module = gathered.get(id(leaf))
            if module is not None or getattr(leaf, "_is_flat_param", False):
                name = "a module" if module is None else f"the {type(module).__name__}"
                raise AutogradError(
                    f"this pass leads to {name} under FullyShardedDataParallel, whose gradients "
                    "only loss.backward() reduces. Let it begin at a leaf: "
                    "h = inputs.detach().requires_grad_(), call the module with h, run "
                    "loss.backward(), and go on with torchweft.autograd.backward(context_id, "
                    "[inputs], grad_tensors=[h.grad])"
                )


def _gathered() -> Iterator[tuple[nn.Module, Any]]:
    """Yields the gathered parameters of ``fully_shard``, with the modules that hold them."""
    states: Any = sys.modules.get("torch.distributed._composable_state")
    for module in list(getattr(states, "_module_state_mapping", ())):
        state = states._get_module_state(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # Earlier versions have one at most.
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                yield module, getattr(parameter, "_unsharded_param", None)
