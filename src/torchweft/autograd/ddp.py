"""Modules under ``DistributedDataParallel``: which there are, and how one averages gradients.

The problem: DDP's reducer averages what is accumulated into ``.grad``, by a hook on the node that
accumulates. A pass in a context asks for gradients instead of accumulating them, so that contexts
stay apart; no hook runs, and nothing would be averaged. The obvious way, to accumulate in the
whole pass, runs into placeholders, runs a weight's node once for each component, and holds
gradients for other workers back until all ranks have met.

The idea: a pass takes the gradients of such parameters as it does all others, and sums them up.
Then they are accumulated by themselves, as if the parameters were the roots of a graph. That
runs DDP's hooks and nothing else, and what is then in ``.grad`` is the average.

Rule of the file: the context's gradients take the place of ``.grad``, which is put back.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torchweft import knobs
from torchweft.autograd.ddp_ending import keep_group_of, release_groups
from torchweft.autograd.gradients import Gradients, is_private, sum_of
from torchweft.autograd.local_engine import accumulate
from torchweft.errors import AutogradError

AVERAGING = "averaging by DistributedDataParallel"
"""The operation in which a worker failed whose gradients could not be averaged."""

_lock = threading.Lock()
_watching: RemovableHandle | None = None
# In order of construction, which is the same on all ranks since construction is collective.
_lock_of: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()


def watch() -> None:
    """Takes note of modules under DDP from now on, and of those that there are."""
    global _watching
    if not distributed.is_available():
        return
    with _lock:
        if _watching is not None:
            return
        _watching = register_module_module_registration_hook(_on_registration)
    if distributed.is_initialized():  # Without, there can be none.
        for found in gc.get_objects():
            if issubclass(type(found), DistributedDataParallel):
                _note(found)


def known_modules() -> list[tuple[Any, threading.Lock]]:
    """Returns all modules under DDP with their locks, in order of construction."""
    release_groups()
    if not _lock_of:
        return []
    with _lock:
        return list(_lock_of.items())


def _on_registration(module: Module, _: str, __: object) -> None:
    # DDP makes the module that it wraps one of its own.
    if isinstance(module, DistributedDataParallel):
        _note(module)


def _note(module: DistributedDataParallel) -> None:
    release_groups()
    with _lock:
        if module not in _lock_of:
            _lock_of[module] = threading.Lock()
            keep_group_of(module)


class Replica:
    """A module under DDP, in one backward pass.

    Args:
        module: The ``DistributedDataParallel``.
        lock: Of the module: who holds it uses its reducer and its ``.grad``.

    Attributes:
        parameters: All that DDP may average.
    """

    def __init__(self, module: Any, lock: threading.Lock) -> None:
        self._module = module
        self._lock = lock
        self._is_first_of_static_graph = False
        self.parameters: frozenset[Tensor] = frozenset(module._module_parameters)

    def check_use(self) -> None:
        """Checks that DDP does nothing with the module that is not supported.

        Raises:
            AutogradError: It does.
        """
        if reason := _unsupported_use(self._module):
            raise AutogradError(f"DistributedDataParallel in an autograd context: {reason}")

    def prepare(self) -> None:
        """Makes the module ready for nodes of its graph to run."""
        module = self._module
        if module.static_graph and not module._static_graph_delay_allreduce_enqueued:
            # Or its graph would have all be reduced at the end of the first engine call.
            module._static_graph_delay_allreduce_enqueued = True
            self._is_first_of_static_graph = True

    def give_up(self) -> None:
        """Undoes ``prepare``."""
        if self._is_first_of_static_graph:
            self._module._static_graph_delay_allreduce_enqueued = False

    def average(self, new: Gradients, gradients: Gradients) -> None:
        """Adds the average of what is ``new`` to ``gradients``; blocks until all ranks do so.

        Raises:
            AutogradError: Gradients are missing.
            RuntimeError: The collective failed.
        """
        fresh = new.snapshot()
        if self.parameters.isdisjoint(fresh):
            return
        # A second pass over the module on another thread waits here.
        if not self._lock.acquire(timeout=knobs.BACKWARD_TIMEOUT_S.get()):
            raise AutogradError("another pass has been averaging for WEFT_BACKWARD_TIMEOUT_S")
        try:
            totals = self._totals(fresh, gradients.snapshot())
            gradients.put(self._averages(totals) if _is_synchronized(self._module) else totals)
        finally:
            self._lock.release()

    def _totals(
        self, fresh: Mapping[Tensor, Tensor], earlier: Mapping[Tensor, Tensor]
    ) -> dict[Tensor, Tensor]:
        """Returns new gradients with earlier ones, which may be of passes under ``no_sync``."""
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
            averages = {
                parameter: parameter.grad
                for parameter in module._module_parameters
                if parameter.grad is not None
            }
        return {
            parameter: average if is_private(average) else average.clone()
            for parameter, average in averages.items()
        }

    def _graph_of(self, totals: Iterable[Tensor]) -> list[Tensor]:
        """Returns outputs in whose graph DDP finds what has gradients, if it looks for that."""
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
    """Tells whether DDP is to average, or the program is under ``no_sync``.

    What counts for DDP is the forward pass with grad; one without it for evaluation, or the end
    of ``no_sync`` since, changes one of the flags. What is averaged too early does not differ
    after the pass that is not under ``no_sync``.
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
    # Views into DDP's buckets are written to meanwhile.
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
    """Keeps the users' hooks from being called a second time, for the same gradients.

    They stay where they are for gradients of passes on other threads.
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
