"""Parameter groups and states of optimizers: read, compared, copied, and those that are elsewhere.

``torch.optim.Optimizer.load_state_dict`` takes the state of any class, of any shape, and converts
floating-point tensors to the type of their parameter. So a momentum in another type is rounded, and
training does not go on as before. Here a state that does not fit is refused;
``load_exactly`` has all others keep their types.

A model that was handed to a pipeline, or whose tables went to servers, still has its parameters
here. An optimizer of them would step what nobody trains: no gradient ever comes to them, and
``clip_grad_norm_`` would measure nothing. So steps and functions that clip look for them
(``Moved``).
"""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchweft.arguments import kind_of, wrong_type
from torchweft.autograd.graph import check_context_id as check_number
from torchweft.autograd.refusals import add_check
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.rpc import RRef

__all__ = [
    "Moved",
    "Options",
    "StateDict",
    "Unscalable",
    "changed_options",
    "check_context_id",
    "check_members",
    "classes_by_options",
    "copied_options",
    "differences",
    "elsewhere",
    "fits_class",
    "lineage",
    "load_exactly",
    "loaded_with_hooks",
    "misfits",
    "needs_closure",
    "placed",
    "saved_with_hooks",
]

StateDict = dict[str, Any]
Reference = RRef[Any]
Options = dict[str, Any]
"""The hyper-parameters of one group: all its entries except ``params``."""


def changed_options(group: Mapping[str, Any], told: Options) -> Options:
    """Returns copies of a group's hyper-parameters that differ from those told before."""
    return copied_options(
        {
            key: value
            for key, value in group.items()
            if key != "params"
            and (key not in told or (value is not told[key] and not _is_same(value, told[key])))
        }
    )


def check_members(present: Sequence[Sequence[Any]], known: Sequence[Sequence[Any]]) -> None:
    """Raises if the program has put other parameters into the groups than their owners have.

    Args:
        present: The parameters of each group now.
        known: Those that the owners have.

    Raises:
        ConfigurationError: They are not the same objects, in the same order.
    """
    pairs = zip(present, known, strict=False)
    is_same = len(present) == len(known) and all(
        len(mine) == len(theirs) and all(map(operator.is_, mine, theirs)) for mine, theirs in pairs
    )
    if not is_same:
        raise ConfigurationError(
            "param_groups has other parameters or groups than the optimizers on the workers, which "
            "step all that they were made with: add parameters by add_param_group where the class "
            "has it, call requires_grad_(False) of those that are to stay where they live, or make "
            "a new optimizer"
        )


def copied_options(options: Mapping[str, Any]) -> Options:
    """Returns a deep copy: later changes within a tensor or list do not affect it."""
    return {key: copy.deepcopy(value) for key, value in options.items()}


def _is_same(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


class Group(NamedTuple):
    """A parameter group: hyper-parameters, and references to its parameters."""

    options: Options
    parameters: list[Reference]


def read_groups(given: Iterable[Any]) -> list[Group]:
    """Converts a list of references, or of dicts with ``params``, to groups.

    Raises:
        ConfigurationError: There is no parameter, or one is not a reference or occurs twice.
    """
    if isinstance(given, (Tensor, RRef, Mapping, str)) or not isinstance(given, Iterable):
        fix = 'pass a list of RRefs, or a list of dicts like {"params": [rrefs], "lr": 0.1}'
        raise wrong_type("params_rref", given, fix)
    items = list(given)
    if not items:
        raise ConfigurationError("params_rref is empty; pass at least one RRef to a parameter")
    if not any(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
    groups = [read_group(item, number) for number, item in enumerate(items)]
    check_distinct([reference for group in groups for reference in group.parameters])
    return groups


def read_group(given: Any, number: int) -> Group:
    """Converts a dict with ``params`` to a group.

    Args:
        given: The dict.
        number: Number of the group, for messages.

    Raises:
        ConfigurationError: It is not such a dict, has no parameters, or has a parameter that is
            not a reference.
    """
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            f"params_rref mixes dicts with a {type(given).__name__} at {number}; pass either "
            "RRefs or parameter groups"
        )
    if "params" not in given:
        raise ConfigurationError(
            f'parameter group {number} has no "params"; add "params": [rrefs] to it'
        )
    options = {key: value for key, value in given.items() if key != "params"}
    references = _listed_references(given["params"], f" of group {number}")
    if not references:
        raise ConfigurationError(f"parameter group {number} is empty; leave it out")
    return Group(options, references)


def read_references(given: Iterable[Any]) -> list[Reference]:
    """Returns references to parameters as a list.

    Raises:
        ConfigurationError: A parameter is not a reference, or occurs twice.
    """
    references = _listed_references(given)
    check_distinct(references)
    return references


def check_distinct(references: Sequence[Reference]) -> None:
    """Raises ConfigurationError if a reference occurs twice."""
    seen: dict[object, int] = {}
    for position, reference in enumerate(references):
        first = seen.setdefault(reference.id, position)
        if first != position:
            raise ConfigurationError(
                f"parameters {first} and {position} are the same, {reference!r}; leave one out"
            )


def _listed_references(given: Iterable[Any] | RRef[Any], of: str = "") -> list[Reference]:
    references = [given] if isinstance(given, RRef) else list(given)
    for position, reference in enumerate(references):
        if not isinstance(reference, RRef):
            fix = "pass RRefs, for instance those of RemoteModule.remote_parameters()"
            if isinstance(reference, Tensor):
                fix = "pass torchweft.RRef(parameter)"
            text = f"parameter {position}{of} is {kind_of(reference)}, not an RRef; {fix}"
            raise ArgumentTypeError(text)
    return references


def by_owner(references: Iterable[Reference]) -> dict[int, list[tuple[int, Reference]]]:
    """Returns references with their positions, by the rank of the worker that owns them."""
    found: dict[int, list[tuple[int, Reference]]] = {}
    for position, reference in enumerate(references):
        found.setdefault(reference.id.owner, []).append((position, reference))
    return found


# The ``state_dict``. It equals that of a local optimizer over the same parameters in the same
# order, plus one key::
#
#     {
#         "state": {0: {"exp_avg": ..., ...}, 1: ...},          # by number of the parameter
#         "param_groups": [{"lr": 0.1, ..., "params": [0, 1]}, ...],
#         "parameters": [{"owner": "ps0", "shape": (3, 4), "dtype": "float32"}, ...],  # by number
#         "classes": ["Adam"],                                  # these two are Weft's own
#     }
#
# So training can move to a single process, or from one, or to other owners of the parameters.

_NOT_OPTIONS = ("params", "param_names")


class Parameter(NamedTuple):
    """The name of a parameter's owner, its shape, and the name of its type.

    A lazy module's parameter has no shape before the first forward pass.
    """

    owner: str
    shape: tuple[int, ...] | None
    dtype: str


def as_state_dict(
    options: Sequence[Options],
    group_sizes: Sequence[int],
    state: dict[Any, Any],
    parameters: Sequence[Parameter],
    classes: Sequence[str],
) -> dict[str, Any]:
    """Returns a ``state_dict``; groups and parameters are in order."""
    first = 0
    groups = []
    for group_options, size in zip(options, group_sizes, strict=True):
        groups.append({**group_options, "params": list(range(first, first + size))})
        first += size
    return {
        "state": state,
        "param_groups": groups,
        "parameters": [each._asdict() for each in parameters],
        "classes": list(classes),
    }


def read_options(state_dict: Mapping[str, Any]) -> list[Options]:
    """Returns the hyper-parameters of each group of a ``state_dict``."""
    return [
        {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        for group in state_dict["param_groups"]
    ]


def read_state(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns the state of each parameter by position; the groups may number them arbitrarily."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    position = {number: place for place, number in enumerate(numbers)}
    return {position.get(key, key): value for key, value in state_dict["state"].items()}


def check_fits(
    state_dict: Any, group_sizes: Sequence[int], parameters: Sequence[Parameter]
) -> None:
    """Raises ConfigurationError, naming the difference, if a ``state_dict`` does not fit.

    Args:
        state_dict: The ``state_dict`` to load.
        group_sizes: How many parameters each group of the optimizer has.
        parameters: All parameters, in order.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ConfigurationError(
            'this is no state_dict of an optimizer: it has no "state" and "param_groups"'
        )
    if not all("params" in group for group in state_dict["param_groups"]):
        raise ConfigurationError(
            'this is no state_dict of an optimizer: a parameter group has no "params"'
        )
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if len(sizes) != len(group_sizes):
        raise misfit(f"{len(sizes)} parameter groups, the optimizer {len(group_sizes)}")
    for group, (saved, mine) in enumerate(zip(sizes, group_sizes, strict=True)):
        if saved != mine:
            raise misfit(f"{saved} parameters in group {group}, the optimizer {mine}")
    for number, parameter in enumerate(state_dict.get("parameters", ())):
        shape, present = parameter["shape"], parameters[number]
        if None not in (shape, present.shape) and tuple(shape) != present.shape:
            raise misfit(
                f"shape {tuple(shape)} for parameter {number}, the optimizer {present.shape}"
            )
        dtype = parameter.get("dtype", present.dtype)
        if dtype != present.dtype:
            raise misfit(f"type {dtype} for parameter {number}, the optimizer {present.dtype}")


def misfit(difference: str) -> ConfigurationError:
    """Returns the error for a ``state_dict`` that does not fit."""
    return ConfigurationError(
        f"the state_dict has {difference}; make the optimizer with the same parameters in the "
        "same order as the one that was saved"
    )


# Classes


def lineage(optimizer_class: type[Optimizer]) -> list[str]:
    """Returns the names of a class of optimizers and of those that it derives from."""
    own = [each for each in optimizer_class.__mro__ if issubclass(each, Optimizer)]
    return [each.__qualname__ for each in own[:-1]]  # The last one is Optimizer itself.


def fits_class(saved: Sequence[str], present: Sequence[str]) -> bool:
    """Whether the state of one class fits another, by their lineages: one derives from the other.

    An empty lineage is that of an unknown class.
    """
    return not saved or not present or saved[0] in present or present[0] in saved


def needs_closure(optimizer_class: type[Optimizer]) -> bool:
    """Whether a class evaluates the model anew within a step."""
    parameters = inspect.signature(optimizer_class.step).parameters.values()
    return any(each.name == "closure" and each.default is each.empty for each in parameters)


def classes_by_options(
    saved: Iterable[Mapping[str, Any]], present: Iterable[Mapping[str, Any]]
) -> str:
    """Returns how the hyper-parameters of a state show that it is of another class; or nothing.

    Versions of torch add hyper-parameters, and schedulers add names of their own. So a state is of
    another class if it lacks some, and has others that no scheduler adds.
    """
    for number, (theirs, mine) in enumerate(zip(saved, present, strict=False)):
        missing = sorted(mine.keys() - theirs.keys() - _OF_SCHEDULERS)
        others = sorted(theirs.keys() - mine.keys() - _OF_SCHEDULERS)
        if missing and others:
            return (
                f"group {number} has {', '.join(others)} there, and {', '.join(missing)} here, so "
                "it is of another class of optimizers"
            )
    return ""


_OF_SCHEDULERS = {
    "params",
    "param_names",
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
}


# Shapes


def misfits(
    name: str,
    shape: Sequence[int],
    state: object,
    optimizer_class: type[Optimizer],
    present: Mapping[Any, Any] | None = None,
) -> Iterator[str]:
    """Yields the differences because of which a state cannot be that of a parameter.

    A tensor has the shape of the one that the optimizer has now, if it has one. Otherwise the
    optimizers of torch keep numbers, and tensors of the parameter's shape; of other classes nothing
    is known.

    Args:
        name: The parameter's name, for messages.
        shape: The parameter's shape.
        state: Its saved state.
        optimizer_class: The class of the optimizer that is to have it.
        present: The state that this optimizer has now.
    """
    if not isinstance(state, Mapping):
        yield f"{name} has {state!r} as state, where a dict is needed"
        return
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        known = (present or {}).get(key)
        if isinstance(known, Tensor):
            if known.shape != value.shape:
                yield _shapes(name, key, value.shape, known.shape)
        elif _keeps_shapes(optimizer_class) and value.numel() != 1 and value.shape != tuple(shape):
            yield _shapes(name, key, value.shape, shape)


def _keeps_shapes(optimizer_class: type[Optimizer]) -> bool:
    own = optimizer_class.__module__.startswith("torch.optim.")
    return own and optimizer_class.__name__ != "Adafactor"  # It keeps rows and columns.


def _shapes(name: str, key: object, saved: Sequence[int], present: Sequence[int]) -> str:
    return f"{key!r} of {name} has shape {list(saved)} there and {list(present)} here"


def differences(
    optimizer: Optimizer, classes: Sequence[str], state: Any, saved_classes: Sequence[str] = ()
) -> list[str]:
    """Returns why an optimizer of this process cannot have a saved state.

    Optimizers with a ``load_state_dict`` of their own may take other states.

    Args:
        optimizer: The optimizer.
        classes: The lineage of its class.
        state: The ``state_dict``.
        saved_classes: The lineage of the saved optimizer's class, as far as it is known.
    """
    if not fits_class(saved_classes, classes):
        return [f"it is of the class {saved_classes[0]} there and {classes[0]} here"]
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return []
    saved = [len(group["params"]) for group in state["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        return [f"groups of {_listed(saved)} parameters there and of {_listed(present)} here"]
    pairs = enumerate(zip(state["param_groups"], optimizer.param_groups, strict=True))
    renamed = [
        f"group {number} has parameters of the names {theirs} there and {mine} here"
        for number, (saved_group, group) in pairs
        if (theirs := saved_group.get("param_names")) and (mine := group.get("param_names"))
        if list(theirs) != list(mine)
    ]
    numbers = (number for group in state["param_groups"] for number in group["params"])
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return renamed + [
        text
        for number, weight in zip(numbers, weights, strict=True)
        if number in state["state"]
        for text in misfits(
            f"parameter {number}", weight.shape, state["state"][number], type(optimizer)
        )
    ]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def placed(optimizer: Optimizer, weight: Tensor, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns a copy of a weight's state on the device where its optimizer needs it."""
    group = next(
        (
            group
            for group in optimizer.param_groups
            if any(each is weight for each in group["params"])
        ),
        {},
    )
    stays = not (group.get("fused") or group.get("capturable"))
    return {
        key: copied_to(value, None if key == "step" and stays else weight.device)
        for key, value in state.items()
    }


def copied_to(value: Any, device: torch.device | None) -> Any:
    """Returns a copy of a value of a state, its tensors on ``device``; None: where they are."""
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {key: copied_to(each, device) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied_to(each, device) for each in value)
    return value


class Unscalable:
    """Refuses ``torch.amp.GradScaler``, which looks for gradients in ``.grad`` of this process."""

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:  # The scaler reads it before a step.
        raise ConfigurationError(
            f"a GradScaler cannot unscale the gradients of a {type(self).__name__}, which are on "
            "other workers: compute in torch.bfloat16, which needs no scaler"
        )


def elsewhere(where: str) -> defaultdict[Any, Any]:
    """Returns the ``state`` of an optimizer that has none here: it raises, and says where it is.

    Args:
        where: Where it is, and how it is read.
    """

    def refuse() -> NoReturn:
        raise ConfigurationError(f"the state of this parameter is {where}")

    return defaultdict(refuse)


# Parameters of this process whose values are trained elsewhere


class Moved:
    """Some parameters that are trained elsewhere, until it is closed or dropped.

    Args:
        instead: What to call instead of optimizers and functions of this process, for the message.
    """

    def __init__(self, instead: str) -> None:
        self.instead = instead
        self._elsewhere = WeakIdKeyDictionary()
        self._beside = WeakIdKeyDictionary()
        _moved.add(self)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Adds parameters."""
        own = dict.fromkeys(parameters)
        if own:
            self._elsewhere.update(own)
            add_check(_check)

    def add_beside(self, parameters: Iterable[Tensor]) -> None:
        """Adds parameters that are trained here, but clipped together with those elsewhere."""
        self._beside = WeakIdKeyDictionary(dict.fromkeys(parameters))

    def warn_of_rest(self, name: str, parameters: Iterable[Tensor]) -> None:
        """Warns once if parameters beside those elsewhere are clipped alone."""
        if any(each in self._beside for each in parameters):
            self._beside = WeakIdKeyDictionary()
            warnings.warn(
                f"{name} leaves out gradients that are elsewhere; {self.instead}",
                RuntimeWarning,
                stacklevel=5,  # Outside of clip_grad_norm_.
            )

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._elsewhere

    def close(self) -> None:
        """Lets optimizers step the parameters again."""
        _moved.discard(self)
        self._elsewhere = WeakIdKeyDictionary()


_moved: weakref.WeakSet[Moved] = weakref.WeakSet()


def _check(name: str, parameters: Sequence[Tensor]) -> None:
    """Raises if gradients of parameters that are trained elsewhere are read."""
    for moved in list(_moved):  # Mostly there are none.
        there = [each for each in parameters if each in moved]
        if there and all(each.grad is None for each in there):
            raise ConfigurationError(
                f"{name} was given {len(there)} parameters of this process that are trained "
                f"elsewhere, where it does not reach them; {moved.instead}"
            )
        if name.startswith("clip_"):
            moved.warn_of_rest(name, parameters)


# Hooks of ``state_dict`` and ``load_state_dict``


def saved_with_hooks(optimizer: Optimizer, save: Callable[[], StateDict]) -> StateDict:
    """Runs the hooks that ``Optimizer.state_dict`` runs, around ``save``; returns the state."""
    hooked: Any = optimizer
    for before in list(hooked._optimizer_state_dict_pre_hooks.values()):
        before(optimizer)
    state = save()
    for after in list(hooked._optimizer_state_dict_post_hooks.values()):
        changed = after(optimizer, state)
        state = state if changed is None else changed
    return state


def loaded_with_hooks(
    optimizer: Optimizer, state_dict: StateDict, load: Callable[[StateDict], None]
) -> None:
    """Runs the hooks that ``Optimizer.load_state_dict`` runs, around ``load``."""
    hooked: Any = optimizer
    state = state_dict.copy() if isinstance(state_dict, dict) else state_dict
    for before in list(hooked._optimizer_load_state_dict_pre_hooks.values()):
        changed = before(optimizer, state)
        state = state if changed is None else changed
    load(state)
    for after in list(hooked._optimizer_load_state_dict_post_hooks.values()):
        after(optimizer)


def load_exactly(optimizer: Optimizer, state_dict: StateDict) -> None:
    """Loads a ``state_dict`` into an optimizer of this process; tensors keep their types."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        optimizer.load_state_dict(state_dict)  # It knows the form of its state itself.
        return
    given: list[StateDict] = []

    def keep_types(_: Optimizer) -> None:
        (state,) = given
        numbers = (number for group in state["param_groups"] for number in group["params"])
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        for number, weight in zip(numbers, weights, strict=True):
            saved = state["state"].get(number)
            if isinstance(saved, Mapping):
                kept = {key: copied_to(each, weight.device) for key, each in saved.items()}
                kept.pop("step", None)  # Fused steps need the type that torch gives.
                optimizer.state[weight].update(kept)

    # Between the hooks of the program that change what is loaded, and those that see the result.
    first = optimizer.register_load_state_dict_pre_hook(lambda _, state: given.append(state))
    last = optimizer.register_load_state_dict_post_hook(keep_types, prepend=True)
    try:
        optimizer.load_state_dict(state_dict)
    finally:
        first.remove()
        last.remove()


def check_context_id(context_id: Any) -> None:
    """Raises ConfigurationError unless it is a number, as that of a context."""
    if callable(context_id):
        raise ConfigurationError(
            "step() takes no closure; compute the loss and its gradients in an autograd context, "
            "then call step(context_id)"
        )
    check_number(context_id)
