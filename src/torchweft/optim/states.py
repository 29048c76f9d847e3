"""Saved states of optimizers: compared with an optimizer, and put back exactly.

``torch.optim.Optimizer.load_state_dict`` takes the state of any class, of any shape, and converts
floating-point tensors to the type of their parameter. So a momentum in another type is rounded, and
training does not go on as before. Here a state that does not fit is refused, and all others keep
their types.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchweft.errors import ConfigurationError
from torchweft.optim import eager

StateDict = dict[str, Any]


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


# Loading


def load(optimizer: Optimizer, state_dict: StateDict) -> None:
    """Loads a ``state_dict`` into an optimizer of this process; tensors keep their types."""
    eager.call(optimizer, "load_state_dict", state_dict)
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return  # It knows the form of its state itself.
    numbers = (number for group in state_dict["param_groups"] for number in group["params"])
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    for number, weight in zip(numbers, weights, strict=True):
        saved = state_dict["state"].get(number)
        if isinstance(saved, Mapping) and weight in optimizer.state:
            loaded = optimizer.state[weight]
            for key, value in saved.items():
                if key in loaded and key != "step":  # Fused steps need the type that torch gives.
                    loaded[key] = _in_its_type(value, loaded[key])


def _in_its_type(saved: Any, loaded: Any) -> Any:
    """Returns a loaded value as it was saved, on its present device."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        if saved.dtype == loaded.dtype or saved.shape != loaded.shape:
            return loaded
        is_converted = torch.equal(
            saved.to(loaded.device, loaded.dtype).nan_to_num(), loaded.nan_to_num()
        )
        return saved.detach().to(loaded.device, copy=True) if is_converted else loaded
    if isinstance(saved, str):  # torch takes it for a list of characters.
        return saved
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {
            key: _in_its_type(saved[key], each) if key in saved else each
            for key, each in loaded.items()
        }
    if type(saved) in (list, tuple) and type(loaded) is type(saved) and len(saved) == len(loaded):
        return type(saved)(map(_in_its_type, saved, loaded))
    return loaded


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
        key: _copied(value, None if key == "step" and stays else weight.device)
        for key, value in state.items()
    }


def _copied(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(each, device) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each, device) for each in value)
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
