"""The kinds of values that a state may have, and how each kind is copied and put back.

An object of another class takes part by ``state_dict`` and ``load_state_dict``. It may also have

- ``weft_differences(path, state)``, which returns why it cannot have a saved state, as texts that
  begin with its path; it is asked before anything is restored, and
- ``weft_saved_by``, for a module whose ``state_dict`` has a part only: what that lacks, and how it
  is saved; empty while it is saved so.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchweft.errors import ArgumentTypeError
from torchweft.nn import local_modules
from torchweft.optim import states

SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
SEQUENCES = (list, tuple, set)
MAPPINGS = (dict, OrderedDict, Counter)

MODULE, TENSOR, GENERATOR, OBJECT = "module", "tensor", "generator", "object"
DATA = "data"
"""A dict or list behind a reference: its content is replaced, and it stays the same object."""
VALUE = "value"
"""Plain values and tensors of the driver's state. The content of a dict or list is replaced, but
for the tensors in it, which get the saved values; any other value is itself replaced."""
OPTIMIZER, PARAMETER = "distributed optimizer", "parameter's state"
"""The hyper-parameters of a distributed optimizer, by group, and its state of one parameter::

    {"state": {...}, "shape": (2, 3), "group": 0, "shared": {...}}
"""
RANDOM = "random state"
"""The random number generators of a worker."""
FOREIGN = "group of values"
"""Values by name that another program saved: they get the kind of the entry that they restore."""


def is_plain(value: object, *, with_tensors: bool = False) -> bool:
    """Whether a value consists of plain values only.

    Args:
        value: Any value.
        with_tensors: Whether tensors count as plain values.
    """
    kind = type(value)
    if kind in SCALARS or isinstance(value, np.generic):
        return True
    if isinstance(value, Tensor):
        return with_tensors
    if kind in SEQUENCES:
        items = list(value)  # type: ignore[call-overload]
    elif kind in MAPPINGS:
        items = [each for pair in value.items() for each in pair]  # type: ignore[attr-defined]
    else:
        return False
    return all(is_plain(item, with_tensors=with_tensors) for item in items)


def in_base_form(value: Any) -> Any:
    """Returns a dict or list with the entries of a value of a subclass, such as a defaultdict.

    Its entries are saved, and put back into the value of the subclass, which stays what it is.
    """
    if isinstance(value, dict) and type(value) not in MAPPINGS:
        return dict(value)
    if isinstance(value, list) and type(value) is not list:
        return list(value)
    return value


Content = dict[str, dict[str, Any]]
"""A part: the ``kind`` and the ``state`` of each entry, by its path."""


class Differences(NamedTuple):
    """How a snapshot, or an entry of it, differs from the state; each difference with its path."""

    missing: list[str]
    unexpected: list[str]
    differing: list[str]

    def add(self, others: Differences) -> None:
        """Adds the differences of another entry."""
        for mine, theirs in zip(self, others, strict=True):
            mine += theirs


def kind_of(path: str, value: Any, *, is_remote: bool) -> str:
    """Returns the kind of a value.

    Args:
        path: Its path in the state, for messages.
        value: A value of this worker.
        is_remote: Whether the state has a reference to it, rather than the value itself.

    Raises:
        ArgumentTypeError: Such a value cannot be restored.
    """
    if isinstance(value, nn.Module):
        return MODULE
    if isinstance(value, Tensor):
        return TENSOR
    if isinstance(value, torch.Generator):
        return GENERATOR
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return OBJECT
    if not is_remote:
        return VALUE
    if isinstance(value, (dict, list)):
        return DATA
    raise ArgumentTypeError(
        f"{path} is a reference to a {type(value).__name__}, which cannot be changed in place when "
        "it is restored; refer to a module, a tensor, a dict, a list, a torch.Generator or "
        "something with state_dict and load_state_dict"
    )


def check_whole(path: str, value: Any) -> None:
    """Refuses a module of which its ``state_dict`` has a part only, by ``weft_saved_by``.

    Raises:
        ArgumentTypeError: It is such a module.
    """
    for each in local_modules(value) if isinstance(value, nn.Module) else ():
        lacks = getattr(each, "weft_saved_by", "")
        if lacks:
            raise ArgumentTypeError(
                f"{path} is a {type(value).__qualname__}, whose state_dict lacks {lacks}"
            )


def state_of(kind: str, value: Any) -> Any:
    """Returns the state of a value of a kind; nothing is copied."""
    if kind == MODULE:
        with torch.no_grad():
            state = value.state_dict()
        return {"state": dict(state), "metadata": dict(getattr(state, "_metadata", {}))}
    if kind == GENERATOR:
        return value.get_state()
    return value.state_dict() if kind == OBJECT else in_base_form(value)


def put(kind: str, value: Any, state: Any, *, strict: bool) -> None:
    """Puts a saved state into a value.

    Args:
        kind: The kind of the value.
        value: The value; it stays the same object.
        state: The state of such a value; see ``state_of``.
        strict: Whether a module must have exactly the keys that the state has.
    """
    with torch.no_grad():
        if kind == MODULE:
            loaded: Any = OrderedDict(state["state"])
            loaded._metadata = OrderedDict(state["metadata"])  # versions, which some modules check
            value.load_state_dict(loaded, strict=strict)
        elif kind == TENSOR:
            value.copy_(state)
        elif kind == GENERATOR:
            value.set_state(state)
        elif kind == OBJECT and isinstance(value, Optimizer):
            states.load_exactly(value, state)
        elif kind == OBJECT:
            value.load_state_dict(state)
        else:
            refill(value, state, in_place=kind == VALUE)


def refill(value: Any, state: Any, *, in_place: bool = False) -> None:
    """Replaces the content of a dict or list, which stays the same object.

    A tensor goes to the device of the tensor whose place it takes, and to the CPU if there is none.

    Args:
        value: The dict or list.
        state: Its new content.
        in_place: Whether tensors stay the same objects, too.
    """
    state = _placed(value, state, in_place)
    if isinstance(value, dict):
        value.clear()
        value.update(state)
    else:
        value[:] = state


def _placed(present: Any, saved: Any, in_place: bool) -> Any:
    if isinstance(saved, Tensor) and isinstance(present, Tensor):
        if in_place and saved.shape == present.shape and saved.dtype == present.dtype:
            return present.copy_(saved)
        return saved.to(present.device)
    if isinstance(saved, dict) and isinstance(present, dict):
        placed = type(saved)()
        for key, item in saved.items():
            placed[key] = _placed(present.get(key), item, in_place)
        return placed
    if type(saved) in (list, tuple) and isinstance(present, (list, tuple)):
        pairs = itertools.zip_longest(present[: len(saved)], saved)
        return type(saved)(_placed(*pair, in_place) for pair in pairs)
    return saved


# Differences between a saved state and a value


def differences(path: str, kind: str, value: Any, item: dict[str, Any]) -> Differences:
    """Returns the differences that prevent putting a saved entry into a value.

    An optimizer has to have as many parameters in each group as the saved one. An object may have
    ``weft_differences``; others check their state themselves, when they load it.

    Args:
        path: The path of the value.
        kind: Its kind.
        value: The value.
        item: The kind and state of the saved entry; a foreign one becomes one of this kind.
    """
    if item["kind"] == FOREIGN:
        _adopt(kind, value, item)
    found, saved, state = Differences([], [], []), item["kind"], item["state"]
    if kind == VALUE and saved in (VALUE, TENSOR):
        _compare_values(path, value, state, found)
    elif kind == TENSOR and saved == VALUE and (names := [*tensors_in(path, state)]):
        found.unexpected.extend(name for name, _ in names)
    elif kind != saved:
        found.differing.append(f"{path} is a {saved} in the snapshot and a {kind} here")
    elif kind == TENSOR:
        found.differing.extend(_of_tensors(path, state, value))
    elif kind == PARAMETER:
        found.differing.extend(_of_parameters(path, state, value))
    elif kind == OPTIMIZER and len(state) != len(value.param_groups):
        found.differing.append(
            f"{path} has {len(state)} parameter groups in the snapshot and "
            f"{len(value.param_groups)} here"
        )
    elif kind == MODULE:
        _compare_modules(path, value, state["state"], found)
    elif kind == OBJECT and (own := getattr(value, "weft_differences", None)):
        found.differing.extend(own(path, state))
    elif kind == OBJECT and isinstance(value, Optimizer):
        texts = states.differences(value, states.lineage(type(value)), state)
        found.differing.extend(f"{path}: {text}" for text in texts)
    return found


def _adopt(kind: str, value: Any, item: dict[str, Any]) -> None:
    """Gives a foreign entry the form of a kind; its tensors are by their names within it."""
    states: dict[str, Any] = item["state"]
    if kind == MODULE:
        with torch.no_grad():
            metadata = dict(getattr(value.state_dict(), "_metadata", {}))
        item.update(kind=kind, state={"state": states, "metadata": metadata})
    elif states.keys() == {""}:
        item.update(kind=kind, state=states[""])


def _of_parameters(path: str, saved: dict[str, Any], present: Any) -> Iterator[str]:
    shape, group = tuple(present.tensor.shape), present.group
    if tuple(saved["shape"]) != shape:
        yield f"{path} has shape {tuple(saved['shape'])} in the snapshot and {shape} here"
    elif saved["group"] != group:
        yield f"{path} is in group {saved['group']} in the snapshot and in group {group} here"


def _compare_modules(path: str, module: Any, saved: dict[str, Any], found: Differences) -> None:
    with torch.no_grad():
        present = module.state_dict()
    found.missing.extend(f"{path}:{key}" for key in present if key not in saved)
    found.unexpected.extend(f"{path}:{key}" for key in saved if key not in present)
    for key in present:
        if key in saved:
            found.differing.extend(_of_tensors(f"{path}:{key}", saved[key], present[key]))


def _compare_values(path: str, present: Any, saved: Any, found: Differences) -> None:
    """Compares tensors in plain values: a dict has to have all of those that it has here."""
    if isinstance(present, dict) and isinstance(saved, dict):
        for key, value in present.items():
            if key in saved:
                _compare_values(f"{path}/{key}", value, saved[key], found)
            else:
                found.missing.extend(name for name, _ in tensors_in(f"{path}/{key}", value))
    elif isinstance(present, (list, tuple)) and isinstance(saved, (list, tuple)):
        for place, pair in enumerate(zip(present, saved, strict=False)):
            _compare_values(f"{path}/{place}", *pair, found)
    else:
        found.differing.extend(_of_tensors(path, saved, present))


def tensors_in(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in a value of dicts, lists and tuples, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(f"{path}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from tensors_in(f"{path}/{place}", item)


def _of_tensors(path: str, saved: Any, present: Any) -> list[str]:
    """Returns how a saved tensor differs from the tensor that is to have its values."""
    if not isinstance(saved, Tensor) or not isinstance(present, Tensor):
        return []
    if nn.parameter.is_lazy(present):  # It has no shape before it is used or loaded.
        return []
    found = []
    if saved.shape != present.shape:
        shapes = tuple(saved.shape), tuple(present.shape)
        found.append(f"{path} has shape {shapes[0]} in the snapshot and {shapes[1]} here")
    if saved.dtype != present.dtype:  # torch would convert the values, and round or cut them.
        found.append(f"{path} has type {saved.dtype} in the snapshot and {present.dtype} here")
    return found


# The random number generators of a worker: of Python, NumPy and PyTorch


def take_random() -> dict[str, Any]:
    """Returns the states of this process's generators."""
    numpy_state: Any = np.random.get_state(legacy=False)
    states = {
        "python": random.getstate(),
        "numpy": _with_key(numpy_state, numpy_state["state"]["key"].tolist()),
        "torch": torch.get_rng_state(),
    }
    # If CUDA is not initialized, asking would make the process use a device that it does not use.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [
            torch.cuda.get_rng_state(device).cpu() if _is_in_use(device) else None
            for device in range(torch.cuda.device_count())
        ]
    return states


def _is_in_use(device: int) -> bool:
    """Whether this process has used a GPU; where torch does not tell, whether it may have."""
    has_context: Callable[[int], bool] | None = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return has_context is None or has_context(device)


def put_random(states: dict[str, Any]) -> None:
    """Sets the generators of this process to saved states.

    States of GPUs that this process does not have are left out.
    """
    random.setstate(states["python"])
    key = np.asarray(states["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(_with_key(states["numpy"], key))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            if state is not None:
                torch.cuda.set_rng_state(state, device)


def _with_key(numpy_state: dict[str, Any], key: Any) -> dict[str, Any]:
    return {**numpy_state, "state": {**numpy_state["state"], "key": key}}
