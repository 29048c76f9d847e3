"""The named parts of a state, and the workers that own them.

A state is a tree of dicts and lists. Each value in it is an *entry*, named by the keys that lead to
it, as in ``model/layers/0``. A worker's *part* is the kind and state of all entries that it owns,
by path. It has entries of its own for each parameter that its optimizers step, as in
``optimizer/state/model/layers/0:weight``, and for its random number generators, ``/random/ps``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchweft.arguments import kind_of
from torchweft.checkpoint import kinds
from torchweft.checkpoint.encoding import Encoder, Part, host_copy
from torchweft.checkpoint.kinds import (
    OBJECT,
    PARAMETER,
    RANDOM,
    VALUE,
    Content,
    in_base_form,
    is_plain,
)
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.extending import find_worker, present_workers, this_worker, worker_of
from torchweft.ids import WorkerInfo
from torchweft.memory import DeviceCopies
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer, LocalOptimizer, Saved, step_lock
from torchweft.optim.states import lineage
from torchweft.rpc import RRef, get_worker_info

SEPARATOR = "/"
OF_PARAMETERS = "/state/"
"""Stands between the path of an optimizer and the name of a parameter."""
Options = dict[int, dict[str, Any]]
"""Hyper-parameters of an optimizer, by the number of their group."""
Places = dict[str, RRef[Any]]
"""By path, references to values of one worker."""

# The entries of a state


class Leaf(NamedTuple):
    """One entry of the state.

    Attributes:
        path: The keys that lead to it, joined by ``/``.
        value: The value.
        container: The dict or list that contains it.
        key: Its key or index in the container.
    """

    path: str
    value: Any
    container: Any
    key: Any

    def put(self, saved: Any) -> None:
        """Replaces the content of a dict or list of the saved type, and any other value itself."""
        if isinstance(saved, (dict, list)) and isinstance(self.value, type(saved)):
            kinds.put(VALUE, self.value, saved, strict=True)
        else:
            self.container[self.key] = saved


def leaves(state: object) -> list[Leaf]:
    """Returns the entries of a state.

    A dict or list that contains only plain values and tensors, such as a growing history, is one
    entry. The state itself is never a single entry.

    Raises:
        ArgumentTypeError: The state is not a dict, or a key is not a string.
        ConfigurationError: A key is empty or contains a ``/``.
    """
    if not isinstance(state, dict):
        raise ArgumentTypeError(
            f"the state is a {type(state).__name__}; pass a dict like {{'model': model, "
            "'optimizer': optimizer}"
        )
    return list(_inside(state, ""))


def _inside(container: Any, prefix: str) -> Iterator[Leaf]:
    is_dict = isinstance(container, dict)
    for key, value in container.items() if is_dict else enumerate(container):
        path = prefix + (_checked(key, prefix) if is_dict else str(key))
        is_tree = isinstance(value, (dict, list))
        if is_tree and not is_plain(in_base_form(value), with_tensors=True):
            yield from _inside(value, path + SEPARATOR)
        else:
            yield Leaf(path, value, container, key)


def _checked(key: object, prefix: str) -> str:
    place = f" in {prefix.removesuffix(SEPARATOR)!r}" if prefix else ""
    if not isinstance(key, str):
        raise ArgumentTypeError(
            f"the state has the key {key!r}{place}, {kind_of(key)}; name its entries by strings"
        )
    if not key or SEPARATOR in key:
        raise ConfigurationError(
            f"the state has the key {key!r}{place}; a key must not be empty, and have no "
            f"{SEPARATOR!r}"
        )
    return key


class StatePlan:
    """Assigns the entries of a state to the workers that own them.

    Args:
        state: The state, as the user gave it.
        random_of: The workers whose random number generators are part of it: the named workers,
            all of the group, or none.

    Attributes:
        owned: The entries that this worker owns.
        remote: The entries of other workers, by worker id; empty for a worker of which only the
            random number generators are wanted.
        optimizers: The distributed optimizers, by path.
        values: The entries that are neither references nor optimizers, by path.
        random: Ids of the workers whose random number generators are part of the state.
    """

    def __init__(
        self, state: object, random_of: bool | Iterable[str | int | WorkerInfo] = False
    ) -> None:
        self.optimizers: dict[str, DistributedOptimizer] = {}
        self.values: dict[str, Leaf] = {}
        self.remote: dict[int, Places] = {}
        self.random = _ids(random_of)
        self.owned = OwnedState({}, {}, {})
        for leaf in leaves(state):
            self._place(leaf)
        for worker in self.random - {this_worker().id}:
            self._of(worker)

    def _place(self, leaf: Leaf) -> None:
        value = leaf.value
        if isinstance(value, DistributedOptimizer):
            self.optimizers[leaf.path] = value
            for optimizer in value.local_optimizers():
                if optimizer.is_owner():
                    self.owned.optimizers[leaf.path] = optimizer.local_value()
                else:
                    self._of(optimizer.id.owner)[leaf.path] = optimizer
            return
        reference = value.module_rref if isinstance(value, RemoteModule) else value
        if not isinstance(reference, RRef):
            self.values[leaf.path] = leaf
            self.owned.local[leaf.path] = value
        elif reference.is_owner():
            self.owned.remote[leaf.path] = reference.local_value()
        else:
            self._of(reference.id.owner)[leaf.path] = reference

    def _of(self, worker: int) -> Places:
        return self.remote.setdefault(worker, {})

    def put(self, content: Content, options: Mapping[str, Options], *, strict: bool) -> None:
        """Puts entries of this worker in place, plain values of the state included; see ``put``."""
        found = self.owned.kinds()
        for path, leaf in self.values.items():
            if path in content and found[path] == VALUE:
                leaf.put(content[path]["state"])
        put(self.owned, content, options, strict=strict)

    @property
    def classes(self) -> dict[str, list[str]]:
        """The names of each optimizer's class and of those that it derives from, by path."""
        found = {path: each.optimizer_class for path, each in self.optimizers.items()}
        for path, leaf in self.values.items():
            if isinstance(leaf.value, Optimizer):
                found[path] = type(leaf.value)
        return {path: lineage(each) for path, each in found.items()}

    @property
    def paths(self) -> set[str]:
        """The paths of all entries except optimizers."""
        remote = {path for places in self.remote.values() for path in places}
        return (remote | self.owned.values().keys()) - self.optimizers.keys()


def _ids(random_of: bool | Iterable[str | int | WorkerInfo]) -> set[int]:
    if random_of is False:
        return set()
    if random_of is True:
        return {member.id for member in present_workers() if member.lost is None}
    return {find_worker(get_worker_info(each)).id for each in random_of}


def owner_of(reference: RRef[Any]) -> WorkerInfo:
    """Returns the worker that owns a value.

    Raises:
        WorkerLost: It is lost. Another life of it may have its name and rank by now.
    """
    owner = worker_of(reference.id.owner)
    if owner.lost is not None:
        raise owner.lost_error()
    return owner.info


# The part of one worker. Nothing from here on calls other workers.


class OwnedState(NamedTuple):
    """The entries of a state that a worker owns, by path.

    Attributes:
        remote: The objects to which the state has references.
        local: The values in the state itself, if this worker saves it.
        optimizers: The local optimizers of distributed optimizers.
    """

    remote: dict[str, Any]
    local: dict[str, Any]
    optimizers: dict[str, LocalOptimizer]

    @classmethod
    def of(cls, places: Places) -> OwnedState:
        """Returns what references of another worker lead to."""
        found = {path: reference.local_value() for path, reference in places.items()}
        optimizers = {p: each for p, each in found.items() if isinstance(each, LocalOptimizer)}
        values = {p: each for p, each in found.items() if p not in optimizers}
        return cls(values, {}, optimizers)

    def values(self) -> dict[str, Any]:
        """Returns all entries except the optimizers."""
        return {**self.remote, **self.local}

    def kinds(self) -> dict[str, str]:
        """Returns the kind of each entry, by path.

        Raises:
            ArgumentTypeError: An entry cannot be restored.
        """
        found = {p: kinds.kind_of(p, v, is_remote=True) for p, v in self.remote.items()}
        return found | {p: kinds.kind_of(p, v, is_remote=False) for p, v in self.local.items()}

    def check_whole(self) -> None:
        """Refuses modules of which their ``state_dict`` has a part only; see ``kinds``.

        Raises:
            ArgumentTypeError: There is such a module.
        """
        for path, value in self.values().items():
            kinds.check_whole(path, value)

    def parameters(self) -> dict[str, dict[int, Parameter]]:
        """Returns the parameters of each optimizer by their numbers.

        Raises:
            ArgumentTypeError: A parameter has no shape yet.
        """
        values = self.values()
        return {path: _parameters(path, each, values) for path, each in self.optimizers.items()}


class Parameter(NamedTuple):
    """A parameter that an optimizer of this worker steps.

    Attributes:
        path: The path of the entry with the optimizer's state of it.
        tensor: The parameter.
        group: The number of its group.
    """

    path: str
    tensor: Tensor
    group: int


def _parameters(
    path: str, optimizer: LocalOptimizer, values: Mapping[str, Any]
) -> dict[int, Parameter]:
    tensors, groups = optimizer.parameters(), optimizer.groups()
    if any(map(is_lazy, tensors.values())):
        raise ArgumentTypeError(
            f"{path} steps a parameter of a lazy module, which has no shape yet; call the module "
            "once before the optimizer's state is saved or restored"
        )
    names = parameter_names(values, tensors)
    return {
        number: Parameter(f"{path}{OF_PARAMETERS}{names[number]}", tensor, groups[number])
        for number, tensor in tensors.items()
    }


def shown(path: str, optimizer: str) -> str:
    """Returns how messages name the entry of a parameter of an optimizer."""
    return f"{optimizer}: parameter {path.removeprefix(optimizer + OF_PARAMETERS)}"


def parameter_names(items: Mapping[str, Any], parameters: Mapping[int, Tensor]) -> dict[int, str]:
    """Returns the names of parameters by their numbers.

    A name does not depend on where the parameter lives. The optimizer's state must find its
    parameter again when the model is spread over the workers in another way, and numbers change.
    So the name comes from the saved state: ``path of the module:name in it``. A parameter that is
    in no entry of its owner's part is named by its number, ``#3``.

    Args:
        items: The entries of the state on the worker of the parameters, by path.
        parameters: The parameters by their numbers.
    """
    names: dict[Tensor, str] = {}
    for path, value in items.items():
        for name, tensor in kinds.tensors_in(path, value):
            names.setdefault(tensor, name)
        named_parameters = getattr(value, "named_parameters", None)
        if callable(named_parameters) and not hasattr(value, "module_rref"):
            for name, parameter in named_parameters():
                names.setdefault(parameter, f"{path}:{name}")
    return {number: names.get(parameter, f"#{number}") for number, parameter in parameters.items()}


def take(owned: OwnedState, *, with_random: bool) -> tuple[Part, dict[str, Options]]:
    """Returns a copy of the state that a worker owns, taken between two steps of its optimizers.

    Returns:
        The part, and the hyper-parameters by optimizer and group.

    Raises:
        ArgumentTypeError: A value cannot be saved; names it.
    """
    found, values, devices = owned.kinds(), owned.values(), DeviceCopies()
    encoder = Encoder(devices)
    options: dict[str, Options] = {}

    def add(*, objects: bool) -> None:
        for path, kind in found.items():
            if (kind == OBJECT) == objects:
                encoder.add(kind, {path: kinds.state_of(kind, values[path])})

    # No lock: an object may call other workers for its state, which may wait for our optimizers.
    add(objects=True)
    devices.wait()
    guard = step_lock()
    with guard.lock, guard.order:
        add(objects=False)
        for path, parameters in owned.parameters().items():
            saved = owned.optimizers[path].content()
            options[path] = host_copy(path, saved.options)
            shared = {key: each for key, each in saved.state.items() if key not in parameters}
            states = {
                each.path: {
                    "state": saved.state.get(number, {}),
                    "shape": list(each.tensor.shape),
                    "group": each.group,
                    "shared": shared,
                }
                for number, each in parameters.items()
            }
            encoder.add(PARAMETER, states)
        devices.wait()
    if with_random:
        # Last: the user's code that was called above may have drawn random numbers.
        encoder.add(RANDOM, {random_path(this_worker().name): kinds.take_random()})
    return encoder.finish(), options


def take_local(state: dict[str, Any]) -> Content:
    """Returns a copy of what a state has on this worker, for ``put_local`` on another one."""
    part, _ = take(StatePlan(state).owned, with_random=False)
    return part.content()


def put_local(state: dict[str, Any], content: Content) -> None:
    """Puts what ``take_local`` returned elsewhere into a state of the same names."""
    StatePlan(state).put(content, {}, strict=True)


def random_path(worker: str) -> str:
    """Returns the path of the random number generators of a worker; no key of a state is empty."""
    return f"/random/{worker}"


def put(
    owned: OwnedState, content: Content, options: Mapping[str, Options], *, strict: bool
) -> None:
    """Puts a part back, as far as the part has entries.

    Plain values of the state itself are not put back: only the holder of the state can do that.

    Args:
        owned: The entries to restore.
        content: The part.
        options: Hyper-parameters of the optimizers, by path and group.
        strict: Whether modules must have exactly the keys that the part has.
    """
    found, values = owned.kinds(), owned.values()
    for path, kind in found.items():
        if path in content and kind != VALUE:
            kinds.put(kind, values[path], content[path]["state"], strict=strict)
    for path, parameters in owned.parameters().items():
        if path in options:
            state: dict[Any, Any] = {}
            for number, parameter in parameters.items():
                saved = content.get(parameter.path, {"state": {"shared": {}, "state": {}}})["state"]
                state.update(saved["shared"])
                if saved["state"]:
                    state[number] = saved["state"]
            owned.optimizers[path].load(Saved(dict(options[path]), state))
    random = content.get(random_path(this_worker().name))
    if random is not None:
        kinds.put_random(random["state"])
