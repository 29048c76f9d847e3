"""``DistributedOptimizer``: one local optimizer on every worker that owns parameters.

The distributed optimizer is a real ``torch.optim.Optimizer``, since learning-rate schedulers
require one. But its groups hold references in place of parameters, and its own state is empty. A
scheduler changes hyper-parameters in ``param_groups``; the next step sends the changes since the
previous step, usually none or one number.

The caller holds the references behind a step while its calls run. So calls name values by address,
which is three numbers and needs no reference counting. ``RRef`` arguments would be counted anew in
every step.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torch.optim import Optimizer

from torchweft.arguments import kind_of
from torchweft.autograd.contexts import enter
from torchweft.autograd.engine import current_engine
from torchweft.engine.codec.registry import has_callable_methods
from torchweft.engine.codec.tracebacks import without_own_frames
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.engine.worker.current import current
from torchweft.errors import (
    ArgumentTypeError,
    CallTimeout,
    ConfigurationError,
    OptimizerError,
    SerializationError,
    WorkerLost,
)
from torchweft.optim import local, states
from torchweft.optim.local import Address, address_of, with_hooks
from torchweft.optim.states import Group, Options, by_owner
from torchweft.rpc import UNSET_RPC_TIMEOUT, RRef, rpc_async, rpc_sync
from torchweft.rpc.observed import info_of

Arguments = tuple[Any, ...]


class Failure(NamedTuple):
    """The error of one of the calls of ``run_on_owners``; as text, with the worker's name.

    Attributes:
        owner: The id of the worker.
        error: The error.
    """

    owner: int
    error: Exception

    @property
    def worker(self) -> str:
        """The worker's name."""
        return name_of(self.owner)

    def __str__(self) -> str:
        return f"on worker {self.worker!r}: {type(self.error).__name__}: {self.error}"


def run_on_owners(
    function: Callable[..., Any],
    arguments: Mapping[int, Arguments],
    here: Callable[[], Any] | None = None,
    timeout_s: Callable[[], float] = lambda: UNSET_RPC_TIMEOUT,
) -> tuple[dict[int, Any], list[Failure]]:
    """Runs ``function`` on several workers at the same time. Blocks until all calls have ended.

    Args:
        function: The function; on this worker it is called directly, in this thread.
        arguments: The arguments by the id of the worker, such as ``RRef.id.owner``.
        here: Called on this worker at the same time, if this worker is not among ``arguments``.
        timeout_s: Returns the timeout of each call when it begins; its error is that of the call.

    Returns:
        The results by id, and the failures by increasing id.
    """
    me = current().me.id
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    waits: dict[int, Callable[[], Any]] = {}
    if me in arguments:
        here = functools.partial(function, *arguments[me])
    if here is not None:
        waits[me] = here
    is_only_call = here is None and len(arguments) == 1
    for owner, args in arguments.items():
        if owner == me:
            continue
        try:
            to, timeout = info_of(owner), timeout_s()
            if is_only_call:
                # A caller that waits in ``rpc_sync`` is woken sooner than a waiter on a future.
                waits[owner] = functools.partial(rpc_sync, to, function, args, timeout=timeout)
            else:
                waits[owner] = rpc_async(to, function, args, timeout=timeout).wait
        except Exception as error:
            if is_of_handler(error):
                raise
            failures.append(Failure(owner, error))
    for owner in list(waits):
        try:
            # An error refers to this frame: it must not keep the answers of other owners alive.
            results[owner] = waits.pop(owner)()
        except Exception as error:
            if is_of_handler(error):
                raise
            failures.append(Failure(owner, error))
    return results, sorted(failures, key=lambda failure: failure.owner)


def raise_failures(what: str, failures: list[Failure]) -> None:
    """Raises one error for all of ``failures``, if there are any.

    If one of them is a ``WorkerLost`` or ``CallTimeout``, so is the raised error: these call for a
    recovery of the group rather than a change of the program.

    Args:
        what: The failed action, for the message.
        failures: The failures.

    Raises:
        OptimizerError: Names all the workers; its cause is the first error.
        WorkerLost: As above.
        CallTimeout: As above.
    """
    if not failures:
        return
    first = next(
        (each for each in failures if isinstance(each.error, (WorkerLost, CallTimeout))),
        failures[0],
    )
    others = [failure for failure in failures if failure is not first]
    message = f"{what} failed {'; and '.join(map(str, [first, *others]))}"
    error = first.error
    if isinstance(error, (WorkerLost, CallTimeout)):
        names = [each.name for each in dataclasses.fields(error)]
        raise type(error)(message, **{name: getattr(error, name) for name in names}) from error
    also = tuple(failure.worker for failure in others)
    raise OptimizerError(message, worker=first.worker, others=also) from error


def name_of(owner: int) -> str:
    """Returns the name of the worker with an id."""
    return current().peers[owner].name


def split_groups(
    groups: Sequence[Group], first_group: int = 0, first_number: int = 0
) -> dict[int, list[local.GroupPart]]:
    """Returns the parts of some groups, by the rank of their owner.

    Args:
        groups: The groups.
        first_group: Number of the first group.
        first_number: Number of its first parameter.
    """
    parts: dict[int, list[local.GroupPart]] = {}
    for group, (options, parameters) in enumerate(groups, start=first_group):
        for owner, members in by_owner(parameters).items():
            numbers = [first_number + position for position, _ in members]
            own = [reference for _, reference in members]
            parts.setdefault(owner, []).append(local.GroupPart(group, options, numbers, own))
        first_number += len(parameters)
    return parts


@has_callable_methods
class DistributedOptimizer(states.Unscalable, Optimizer):
    """Steps parameters of any workers with the gradients of a distributed autograd context.

    On every worker that owns some of the parameters it makes an ``optimizer_class`` over them.
    A step runs all local optimizers at the same time. The user's ``.grad`` is neither read nor
    changed. Steps for concurrent contexts never mix, and on each worker they take turns.

    ``param_groups`` holds the hyper-parameters, and may be changed at any time, also by the
    schedulers of ``torch.optim.lr_scheduler``: the next step tells the owners. Sparse gradients
    reach the local optimizer unchanged, so its support for them applies. Not thread-safe; trainers
    that share parameters each make their own optimizer. One trainer may step between the forward
    and the backward pass of another. If that backward pass needs the old weights, it raises, as in
    local training.

    Args:
        optimizer_class: Any ``torch.optim.Optimizer`` that needs no closure.
        params_rref: References to the parameters, on this and other workers: a list, or a list
            of groups like ``{"params": [rrefs], "lr": 0.1}``. Those of a lazy module may be passed
            before its first forward pass.
        args: The optimizer's further positional arguments, after the parameters.
        kwargs: Its keyword arguments.

    Raises:
        ConfigurationError: There is no parameter, one occurs twice, an entry is not a parameter,
            or the class is not a usable optimizer.
        WorkerLost: An owner is lost.
        Exception: The error of the constructor, on the first owner where it raised.

    Example::

        optimizer = DistributedOptimizer(torch.optim.Adam, module.remote_parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
        for batch, target in batches:
            with torchweft.autograd.context() as context_id:
                loss = torch.nn.functional.mse_loss(module(batch), target)
                torchweft.autograd.backward(context_id, [loss])
                optimizer.step(context_id)
        scheduler.step()
    """

    @without_own_frames
    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params_rref: Iterable[Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _check_class(optimizer_class)
        groups = states.read_groups(params_rref)
        self._recipe = (optimizer_class, args, kwargs)
        self._locals: dict[int, RRef[local.LocalOptimizer]] = {}
        self._described: dict[int, tuple[tuple[int, ...] | None, str]] = {}
        self._members: list[tuple[RRef[Any], ...]] = []  # the parameters of each group
        self._told: list[Options] = []  # the hyper-parameters that the owners have
        self._has_warned = False
        self._is_base_ready = False
        super().__init__([{"params": []}], {})
        self._is_base_ready = True
        self.state = states.elsewhere("on the parameter's owner; read it by state_dict()")
        self._add(groups)

    @without_own_frames
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, which may live on further workers. Blocks.

        Args:
            param_group: A dict with references as ``params``, and hyper-parameters.

        Raises:
            ConfigurationError: An entry is not a parameter, or is in the optimizer already.
            Exception: The error of a local optimizer; make a new optimizer then.
        """
        if not self._is_base_ready:
            return  # Ignores the empty group that the base class requires.
        group = states.read_group(param_group, len(self.param_groups))
        states.check_distinct([*self._references(), *group.parameters])
        self._add([group])

    def _add(self, groups: Sequence[Group]) -> None:
        parts = split_groups(groups, len(self.param_groups), len(self._references()))
        arguments = {
            owner: (self._locals.get(owner), *self._recipe, own) for owner, own in parts.items()
        }
        answers, failures = run_on_owners(local.place, arguments)
        if failures:
            raise failures[0].error
        options: dict[int, Options] = {}
        for owner, placed in answers.items():
            self._locals[owner] = placed.optimizer
            self._described.update(placed.parameters)
            self.defaults.update(placed.defaults)
            options.update(placed.options)
        for number, group in enumerate(groups, start=len(self.param_groups)):
            self.param_groups.append({"params": group.parameters, **options[number]})
            self._members.append(tuple(group.parameters))
            self._told.append(states.copied_options(options[number]))

    # Steps

    @with_hooks
    @without_own_frames
    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Steps every parameter that has a gradient in a context. Blocks until all are done.

        Warns once if no parameter has one.

        Args:
            context_id: The context whose backward passes have ended.

        Raises:
            ConfigurationError: ``context_id`` is not an integer.
            AutogradError: There is no such context here.
            OptimizerError: A local optimizer raised; its error is the cause. The message names
                all workers where one raised; parameters of other workers have been stepped.
            WorkerLost: An owner is lost.
        """
        states.check_context_id(context_id)
        engine = current_engine()
        engine.contexts.get(context_id)
        changes = self._changes()
        arguments = {
            owner: (address, context_id, changes) for owner, address in self._addresses().items()
        }
        # Workers that are called within the context are told of its end.
        with enter(context_id):
            had_gradients, failures = run_on_owners(local.step, arguments)
        raise_failures("the optimizer step", failures)
        self._note_told(changes)
        if not any(had_gradients.values()) and not self._has_warned:
            self._has_warned = True
            self._warn_of_no_gradient(context_id)

    def _warn_of_no_gradient(self, context_id: int) -> None:
        owners = ", ".join(repr(name_of(owner)) for owner in self._locals)
        warnings.warn(
            f"step({context_id}) changed nothing: autograd context {context_id} has no gradient "
            f"for any parameter of this optimizer, on {owners}. Did "
            "torchweft.autograd.backward(context_id, [loss]) run before, in the same context as "
            "the calls that the loss was computed from?",
            RuntimeWarning,
            stacklevel=5,  # Outside of step, without_own_frames and with_hooks.
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: every context begins with no gradients, and ``.grad`` is the user's."""

    @property
    def optimizer_class(self) -> type[Optimizer]:
        """The class of the local optimizers."""
        optimizer_class: type[Optimizer] = self._recipe[0]
        return optimizer_class

    def local_optimizers(self) -> list[RRef[local.LocalOptimizer]]:
        """Returns references to the local optimizers on the owners."""
        return list(self._locals.values())

    def _addresses(self) -> dict[int, Address]:
        return {owner: address_of(optimizer) for owner, optimizer in self._locals.items()}

    def _references(self) -> list[RRef[Any]]:
        return [reference for group in self.param_groups for reference in group["params"]]

    # Hyper-parameters

    def _changes(self) -> dict[int, Options]:
        """Returns the hyper-parameters that the owners do not have yet, by group.

        Raises:
            ConfigurationError: The program has put other parameters into the groups.
        """
        states.check_members([group["params"] for group in self.param_groups], self._members)
        changes = {}
        for number, (group, told) in enumerate(zip(self.param_groups, self._told, strict=True)):
            if changed := states.changed_options(group, told):
                changes[number] = changed
        return changes

    def tell_changes(self) -> None:
        """Sends the owners the hyper-parameters that changed since the last step. Blocks.

        A step does so by itself.

        Raises:
            OptimizerError: Not all owners could be told.
            WorkerLost: An owner is lost.
        """
        changes = self._changes()
        if changes:
            arguments = {owner: (address, changes) for owner, address in self._addresses().items()}
            _, failures = run_on_owners(local.change, arguments)
            raise_failures("changing hyper-parameters", failures)
            self._note_told(changes)

    def _note_told(self, changes: Mapping[int, Options]) -> None:
        for number, changed in changes.items():
            self._told[number].update(changed)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all local optimizers, and all hyper-parameters. Blocks.

        It equals the result of ``optimizer_class`` over all the parameters in one process, plus
        the keys ``parameters``, with owners, shapes and types, and ``classes``, the names of the
        class and those that it derives from. Each can load a state that the other saved. All
        tensors are copies. ``torch.save`` accepts it.

        Raises:
            OptimizerError: Some owners could not return their state.
            WorkerLost: An owner is lost.
        """
        return states.saved_with_hooks(self, self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        self._describe_anew()
        changes = self._changes()
        arguments = {owner: (address, changes) for owner, address in self._addresses().items()}
        answers, failures = run_on_owners(local.save, arguments)
        raise_failures("reading the optimizer's state", failures)
        self._note_told(changes)
        options: dict[int, Options] = {}
        state: dict[Any, Any] = {}
        for saved in answers.values():
            options.update(saved.options)
            state.update(saved.state)
        in_order = [options[number] for number in range(len(self.param_groups))]
        state = dict(sorted(state.items(), key=lambda item: (isinstance(item[0], str), item[0])))
        classes = states.lineage(self.optimizer_class)
        return states.as_state_dict(
            in_order, self._group_sizes(), state, self._parameters(), classes
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict`` of this class or of a local optimizer. Blocks.

        The parameters must be the same, in the same order; they may have other owners now. The
        state keeps its types, where ``torch.optim`` converts them to those of the parameters.

        Args:
            state_dict: Hyper-parameters in ``param_groups``, and tensors in ``state``, by number of
                the parameter.

        Raises:
            ConfigurationError: It is of another class of optimizers, or does not fit the
                parameters; names the difference. Nothing is changed.
            OptimizerError: Some owners could not load it.
            WorkerLost: An owner is lost.
        """
        states.loaded_with_hooks(self, state_dict, self._load_state_dict)

    def _load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._describe_anew()
        states.check_fits(state_dict, self._group_sizes(), self._parameters())
        options = states.read_options(state_dict)
        state = states.read_state(state_dict)
        self._check(state_dict, options, state)
        arguments = {
            owner: (address, local.Saved(dict(enumerate(options)), self._part_of(state, owner)))
            for owner, address in self._addresses().items()
        }
        _, failures = run_on_owners(local.load, arguments)
        raise_failures("loading the optimizer's state", failures)
        self.adopt(options)

    def _check(
        self, state_dict: Mapping[str, Any], options: Sequence[Options], state: Mapping[Any, Any]
    ) -> None:
        kind, saved = self.optimizer_class, list(state_dict.get("classes", ()))
        if not states.fits_class(saved, states.lineage(kind)):
            raise states.misfit(f"the class {saved[0]}, the optimizer {kind.__qualname__}")
        other = "" if saved else states.classes_by_options(options, self._told)
        for number, (shape, _) in self._described.items():
            if shape is None:
                continue
            name = f"parameter {number}"
            problems = states.misfits(name, shape, state.get(number, {}), kind)
            other = other or next(problems, "")
        if other:
            raise states.misfit(f"a difference: {other}")

    def adopt(self, options: Sequence[Options]) -> None:
        """Adopts the hyper-parameters of all groups, which the owners have already."""
        for group, loaded in zip(self.param_groups, options, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(states.copied_options(loaded), params=parameters)
        self._told = [states.copied_options(loaded) for loaded in options]

    def _part_of(self, state: Mapping[Any, Any], owner: int) -> dict[Any, Any]:
        """Returns the state of an owner's parameters, and entries that belong to no parameter."""
        references = enumerate(self._references())
        foreign = {number for number, reference in references if reference.id.owner != owner}
        return {key: value for key, value in state.items() if key not in foreign}

    def _describe_anew(self) -> None:
        """Asks for shapes and types: lazy modules get a shape, and modules are converted."""
        arguments: dict[int, tuple[Any, ...]] = {
            owner: (optimizer, *self._recipe, [])  # Adds no group.
            for owner, optimizer in self._locals.items()
        }
        answers, failures = run_on_owners(local.place, arguments)
        raise_failures("reading the optimizer's state", failures)
        for placed in answers.values():
            self._described.update(placed.parameters)

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.param_groups]

    def _parameters(self) -> list[states.Parameter]:
        return [
            states.Parameter(name_of(reference.id.owner), *self._described[number])
            for number, reference in enumerate(self._references())
        ]

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            "a DistributedOptimizer cannot be copied or sent; send the RRefs of the parameters "
            "and make one of them, or keep state_dict()"
        )

    def __repr__(self) -> str:
        kind = self.optimizer_class.__name__
        owners = ", ".join(repr(name_of(owner)) for owner in self._locals)
        return f"DistributedOptimizer of {kind}, {len(self._described)} parameters on {owners}"


def _check_class(optimizer_class: object) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ArgumentTypeError(
            f"optimizer_class is {kind_of(optimizer_class)}; pass a class like torch.optim.SGD, "
            "and its arguments after the parameters"
        )
    if states.needs_closure(optimizer_class):
        raise ConfigurationError(
            f"{optimizer_class.__name__} evaluates the model anew within a step, by a closure, "
            "which no context covers; use an optimizer that steps with given gradients"
        )
