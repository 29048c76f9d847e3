"""The local optimizer of one owner, which a distributed optimizer runs where parameters live.

A local optimizer reads ``.grad``, which belongs to the user. During a step, ``.grad`` holds the
context's gradient; afterwards it is restored. So all local optimizers of a worker take turns: two
that share a parameter would see each other's gradients.

``torch.optim.Optimizer`` imports ``torch._dynamo`` when its first parameter group is added, and
again in each step, only to tell the compiler what it may not trace. The import costs more than a
second of CPU, and memory, in each process that hosts an optimizer. In a process that has not
imported the compiler, there is no compiler to tell. There the methods of all optimizers, and
``step_optimizer``, call the functions that PyTorch wrapped. Otherwise, or if this module does not
know the wrapper, they call PyTorch's functions unchanged.

Each step of PyTorch also names itself to profilers and runs hooks. That takes longer than the step
of a small layer, also where there is no profiler and no hook. So it is left out then.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, optimizer

from torchweft.autograd import get_gradients
from torchweft.autograd.refusals import OWN_HOOKS, leave_out
from torchweft.engine.codec.registry import rebuilds_plain, remotely_callable
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Guard, new_guard
from torchweft.engine.worker.agent import Slot
from torchweft.engine.worker.current import current
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.optim.states import Options, Reference, load_exactly
from torchweft.rpc import RRef
from torchweft.rpc.serving import (
    check_called,
    check_types,
    reference_in,
    refuse,
    serves_another_strictly,
)
from torchweft.rpc.worker import current_worker

_COMPILER = "torch._dynamo"

P = ParamSpec("P")
T = TypeVar("T")


def _spare_compiler(method: Any) -> None:
    """Has a method of all optimizers mark itself for the compiler only once that is imported."""
    plain = getattr(method, "__wrapped__", None)
    if plain is None:
        return  # This version of PyTorch does not mark it.

    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return plain(*args, **kwargs)
        vars(plain).pop(_MARKED, None)
        return method(*args, **kwargs)

    vars(plain)[_MARKED] = call


_MARKED = "__dynamo_disable"
"""Attribute in which PyTorch keeps the marked form of a method, once it was called."""

if _COMPILER not in sys.modules:
    for _name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        _spare_compiler(getattr(Optimizer, _name))


def step_optimizer(optimizer: Optimizer) -> None:
    """Steps an optimizer once, with the gradients that its parameters have."""
    step: Any = type(optimizer).step
    marked: Any = getattr(step, "__wrapped__", None)
    is_known = _code_of(step) is _HOOKS and _code_of(marked) is _MARKED_STEP
    # Schedulers put their wrapper into the object.
    if not is_known or "step" in vars(optimizer) or _COMPILER in sys.modules:
        optimizer.step()
        return
    plain, is_recorded = marked.__wrapped__, optimizer.defaults["differentiable"]
    if _is_seen(optimizer):
        in_mode = torch.set_grad_enabled(is_recorded)(plain)
        Optimizer.profile_hook_step(in_mode)(optimizer)
    else:
        with torch.set_grad_enabled(is_recorded):
            plain(optimizer)


def with_hooks(step: Callable[P, T]) -> Callable[P, T]:
    """Does what PyTorch does to the ``step`` of each class of optimizers, if it has any effect."""
    seen: Callable[P, T] = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (seen if _is_seen(args[0]) else step)(*args, **kwargs)

    vars(call)["hooked"] = True  # PyTorch's own mark: it does not wrap this function once more.
    return call


def _is_seen(optimizer: Any) -> bool:
    return bool(
        torch._C._autograd._profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or len(_GLOBAL_HOOKS[0]) > len(OWN_HOOKS)
        or _GLOBAL_HOOKS[1]
    )


_GLOBAL_HOOKS: list[Any] = [
    getattr(optimizer, name, ())
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
]


def _code_of(function: object) -> object:
    return getattr(function, "__code__", None)


def _marked_step() -> object:
    """Returns the code around each ``step`` that only tells the compiler what not to trace.

    Otherwise returns an object that equals no code: a version of PyTorch whose wrappers do more
    keeps them.
    """
    marks: Any = getattr(optimizer, "_use_grad_for_differentiable", None)
    code = None if marks is None else marks(lambda *_: None).__code__
    names = "cast Optimizer torch torch._dynamo _dynamo graph_break is_grad_enabled"
    known = {*names.split(), "set_grad_enabled", "defaults"}
    return code if code is not None and known.issuperset(code.co_names) else object()


_HOOKS = _code_of(Optimizer.profile_hook_step(lambda _: None))
_MARKED_STEP = _marked_step()


# The optimizer

Address = tuple[int, int, int]


def address_of(reference: RRef[Any]) -> Address:
    """Returns the address of the value behind a reference on its owner."""
    creator, owner, number = reference.id
    return creator, owner, number


def value_at(address: Address) -> Any:
    """Returns a value of this worker; None while it is still being made.

    Raises:
        ReferenceGone: The value was released.
    """
    found = current_worker().references.value_of(reference_in(address))
    if found.mark is not None:
        device_streams.use(found.mark, found.value)
    return found.value


@rebuilds_plain
class GroupPart(NamedTuple):
    """The part of a parameter group that lives on one worker.

    Attributes:
        group: Number of the group in the optimizer.
        options: The hyper-parameters that the user gave for the group.
        numbers: Positions of the parameters among all parameters of the optimizer.
        parameters: References to them.
    """

    group: int
    options: Options
    numbers: list[int]
    parameters: list[Reference]


@rebuilds_plain
class Placed(NamedTuple):
    """An owner's description of its parameters.

    Attributes:
        optimizer: A reference to its local optimizer.
        defaults: The default hyper-parameters of groups.
        options: The hyper-parameters of each group, by its number.
        parameters: The shape of each parameter and the name of its type, by its number. A lazy
            module's have no shape before its first forward pass.
    """

    optimizer: RRef[LocalOptimizer]
    defaults: Options
    options: dict[int, Options]
    parameters: dict[int, tuple[tuple[int, ...] | None, str]]


@rebuilds_plain
class Saved(NamedTuple):
    """An owner's contribution to a ``state_dict``; all copies.

    Attributes:
        options: The hyper-parameters of each group, by its number.
        state: The state of each parameter by its number, and entries with other keys.
    """

    options: dict[int, Options]
    state: dict[Any, Any]


class LocalOptimizer:
    """An optimizer over those parameters of a distributed optimizer that live on this worker.

    Args:
        make: Makes the optimizer from parameter groups.
        parts: The parts of the groups that live here.
        lock: Held while ``.grad`` of any parameter of this worker is replaced.
    """

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], Optimizer],
        parts: Iterable[GroupPart],
        lock: Guard,
    ) -> None:
        self._numbers: dict[Tensor, int] = {}
        self._group_numbers: list[int] = []  # in the order of the optimizer's own groups
        self._guard = lock
        self._optimizer = make([self._take(part) for part in parts])
        leave_out(self._optimizer)

    def _take(self, part: GroupPart) -> dict[str, Any]:
        parameters = [reference.local_value() for reference in part.parameters]
        for number, parameter in zip(part.numbers, parameters, strict=True):
            self._check(number, parameter)
            self._numbers[parameter] = number
        self._group_numbers.append(part.group)
        return {**part.options, "params": parameters}

    def _check(self, number: int, parameter: object) -> None:
        if not isinstance(parameter, Tensor) or not parameter.is_leaf:
            kind = (
                "tensor that is no leaf"
                if isinstance(parameter, Tensor)
                else type(parameter).__name__
            )
            raise ConfigurationError(
                f"parameter {number}, on worker {_my_name()!r}, is a {kind}; pass RRefs to "
                "parameters, for instance those of RemoteModule.remote_parameters()"
            )
        if parameter in self._numbers:
            raise ConfigurationError(
                f"parameters {self._numbers[parameter]} and {number}, on worker {_my_name()!r}, "
                "are the same tensor behind two RRefs; leave one out"
            )

    def add(self, parts: Iterable[GroupPart]) -> None:
        """Adds groups."""
        with self._guard.lock, self._guard.order:
            for part in parts:
                self._optimizer.add_param_group(self._take(part))

    def placed(self, reference: RRef[LocalOptimizer]) -> Placed:
        """Returns the description that the distributed optimizer needs of this one."""
        parameters = {number: _described(tensor) for tensor, number in self._numbers.items()}
        return Placed(reference, dict(self._optimizer.defaults), self._options(), parameters)

    def _options(self) -> dict[int, Options]:
        groups = zip(self._group_numbers, self._optimizer.param_groups, strict=True)
        return {
            number: {key: value for key, value in group.items() if key != "params"}
            for number, group in groups
        }

    def step(self, gradients: Mapping[Tensor, Tensor], changes: Mapping[int, Options]) -> bool:
        """Steps with the gradients of a context; parameters without a gradient there stay.

        Args:
            gradients: The gradients of these, and perhaps of other parameters.
            changes: Hyper-parameters that have changed, by the number of their group.

        Returns:
            Whether any parameter had a gradient.
        """
        with self._guard.lock, self._guard.order:
            self._change(changes)
            grads = [parameter.grad for parameter in self._numbers]
            try:
                for parameter in self._numbers:
                    parameter.grad = gradients.get(parameter)
                step_optimizer(self._optimizer)
            finally:
                for parameter, grad in zip(self._numbers, grads, strict=True):
                    parameter.grad = grad
            return not gradients.keys().isdisjoint(self._numbers)

    def _change(self, changes: Mapping[int, Options]) -> None:
        if changes:
            groups = zip(self._group_numbers, self._optimizer.param_groups, strict=True)
            for number, group in groups:
                group.update(changes.get(number, {}))

    def save(self, changes: Mapping[int, Options]) -> Saved:
        """Returns a copy of the state, after ``changes`` of hyper-parameters."""
        with self._guard.lock, self._guard.order:
            self._change(changes)
            # Copied, since the answer is serialized after the lock is released.
            return copy.deepcopy(self.content())

    @property
    def is_fused(self) -> bool:
        """Whether it steps by kernels that do not check the sizes of their arguments."""
        return any(group.get("fused") for group in self._optimizer.param_groups)

    def content(self) -> Saved:
        """Returns the state without copying; the caller must hold the lock and copy it."""
        numbers = self._numbers_in_order()
        state = {
            numbers[key] if isinstance(key, int) else key: value
            for key, value in self._optimizer.state_dict()["state"].items()
        }
        return Saved(self._options(), state)

    def parameters(self) -> dict[int, Tensor]:
        """Returns the parameters by their numbers."""
        return {number: parameter for parameter, number in self._numbers.items()}

    def groups(self) -> dict[int, int]:
        """Returns the number of the group of each parameter, by the number of the parameter."""
        groups = zip(self._group_numbers, self._optimizer.param_groups, strict=True)
        return {
            self._numbers[parameter]: number
            for number, group in groups
            for parameter in group["params"]
        }

    def change(self, changes: Mapping[int, Options]) -> None:
        """Applies changed hyper-parameters, by the number of their group."""
        with self._guard.lock, self._guard.order:
            self._change(changes)

    def load(self, saved: Saved) -> None:
        """Loads the state that ``save`` returned, here or on other workers."""
        with self._guard.lock, self._guard.order:
            content = self._optimizer.state_dict()
            state = copy.deepcopy(saved.state)
            positions = {number: place for place, number in enumerate(self._numbers_in_order())}
            content["state"] = {positions.get(key, key): value for key, value in state.items()}
            content["param_groups"] = [
                {**_placed_as(saved.options[number], group), "params": group["params"]}
                for number, group in zip(self._group_numbers, content["param_groups"], strict=True)
            ]
            load_exactly(self._optimizer, content)

    def _numbers_in_order(self) -> list[int]:
        """Returns the numbers of the parameters in the order of the optimizer's ``state_dict``."""
        groups = self._optimizer.param_groups
        return [self._numbers[parameter] for group in groups for parameter in group["params"]]


def _placed_as(options: Options, group: Mapping[str, Any]) -> Options:
    """Returns options whose tensors are on the devices of a group's, as its kernels need them."""
    return {
        name: value.to(present.device)
        if isinstance(value, Tensor) and isinstance(present := group.get(name), Tensor)
        else value
        for name, value in options.items()
    }


def _described(tensor: Tensor) -> tuple[tuple[int, ...] | None, str]:
    shape = None if is_lazy(tensor) else tuple(tensor.shape)
    return shape, str(tensor.dtype).removeprefix("torch.")


# Functions that a distributed optimizer calls on owners, by name.


@remotely_callable
def place(
    optimizer: RRef[LocalOptimizer] | None,
    optimizer_class: type[Optimizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parts: list[GroupPart],
) -> Placed:
    """Gives groups to a local optimizer of this worker; makes a new optimizer if None."""
    _check_parts(parts)
    if optimizer is not None:
        check_types(optimizer=(optimizer, RRef))
        local = _checked(optimizer.local_value())
        local.add(parts)
        return local.placed(optimizer)
    if serves_another_strictly():
        check_called(optimizer_class)
        check_types(args=(args, tuple), kwargs=(kwargs, dict))
        _check_options(kwargs)
        for value in args:
            _check_option(value)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ArgumentTypeError(f"{optimizer_class!r} is no class of optimizers")
    made = LocalOptimizer(
        lambda groups: optimizer_class(groups, *args, **kwargs), parts, step_lock()
    )
    return made.placed(RRef(made))


@remotely_callable
def step(optimizer: Address, context_id: int, changes: dict[int, Options]) -> bool:
    """Steps a local optimizer of this worker; returns whether it had any gradient."""
    check_types(context_id=(context_id, int))
    _check_changes(changes)
    return _local(optimizer).step(get_gradients(context_id), changes)


@remotely_callable
def change(optimizer: Address, changes: dict[int, Options]) -> None:
    """Applies changed hyper-parameters to a local optimizer of this worker."""
    _check_changes(changes)
    _local(optimizer).change(changes)


@remotely_callable
def save(optimizer: Address, changes: dict[int, Options]) -> Saved:
    """Returns the state of a local optimizer of this worker."""
    _check_changes(changes)
    return _local(optimizer).save(changes)


@remotely_callable
def load(optimizer: Address, saved: Saved) -> None:
    """Loads a state into a local optimizer of this worker."""
    check_types(saved=(saved, Saved))
    _check_changes(saved.options)
    check_types(state=(saved.state, dict))
    local = _local(optimizer)
    if serves_another_strictly():
        if local.is_fused:
            _refuse_fused()
        _check_state(saved.state, local.parameters())
    local.load(saved)


# Checks by which a strict worker limits calls of other workers.


def _check_changes(changes: Any) -> None:
    if serves_another_strictly():
        check_types(changes=(changes, dict))
        for group, options in changes.items():
            check_types(group=(group, int), options=(options, dict))
            _check_options(options)


def _check_parts(parts: Any) -> None:
    if not serves_another_strictly():
        return
    check_types(parts=(parts, list))
    for part in parts:
        check_types(part=(part, GroupPart))
        check_types(
            group=(part.group, int),
            options=(part.options, dict),
            numbers=(part.numbers, list),
            parameters=(part.parameters, list),
        )
        _check_options(part.options)
        for reference in part.parameters:
            check_types(reference=(reference, RRef))
            value = reference.local_value()
            if not isinstance(value, nn.Parameter):
                refuse(
                    f"optimize a {type(value).__name__}",
                    "pass RRefs to parameters, as those of RemoteModule.remote_parameters()",
                )


def _check_state(state: Mapping[Any, Any], parameters: Mapping[int, Tensor]) -> None:
    """Raises if a state exceeds the possible state of this worker's parameters."""
    for number, values in state.items():
        check_types(number=(number, int), values=(values, dict))
        parameter = parameters.get(number)
        if parameter is None:
            refuse(f"load the state of parameter {number!r}", "the optimizer does not have it")
        for name, value in values.items():
            check_types(name=(name, str))
            if not isinstance(value, Tensor):
                _check_option(value)
            elif value.layout is not parameter.layout or value.numel() > max(parameter.numel(), 1):
                refuse(
                    f"load {name!r} of shape {tuple(value.shape)}",
                    f"parameter {number} has shape {tuple(parameter.shape)}",
                )


def _check_options(options: Mapping[Any, Any]) -> None:
    for name, value in options.items():
        check_types(name=(name, str))
        if name == "params":
            refuse("take parameters in hyper-parameters", "give them as RRefs")
        if name == "fused" and value:
            _refuse_fused()
        _check_option(value)


def _refuse_fused() -> NoReturn:
    # They do not check sizes, and would run past the memory of a state that others loaded.
    refuse("use fused optimizers for others", "leave 'fused' out")


def _check_option(value: Any) -> None:
    if isinstance(value, (tuple, list)):
        for part in value:
            check_types(value=(part, (bool, int, float, str)))
    elif not isinstance(value, Tensor) or value.dim():
        check_types(value=(value, (bool, int, float, str, type(None))))


def _local(optimizer: Address) -> LocalOptimizer:
    return _checked(value_at(optimizer))


def _checked(local: Any) -> LocalOptimizer:
    if not isinstance(local, LocalOptimizer):
        raise ConfigurationError(f"this is no local optimizer, but a {type(local).__name__}")
    return local


def _my_name() -> str:
    return current().info.name


_STEP_LOCK: Slot[Guard] = Slot(new_guard)


def step_lock() -> Guard:
    """Returns the lock under which optimizers of this worker take their turns."""
    return current().slots[_STEP_LOCK]
