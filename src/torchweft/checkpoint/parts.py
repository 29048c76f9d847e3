"""The part of a state that one worker owns: copies it, holds it, and puts it back.

Nothing here calls other workers. A part is a dict of tensors and plain values::

    {
        "items": {path: {"kind": ..., "state": ...}},
        "optimizers": {path: {"state": {name of parameter: {...}}, "shared": {...}}},
        "random": {...} or None,
        "options": {path: [...]},                # of the driver's part: hyper-parameters by group
    }
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import is_lazy

from torchweft.checkpoint import kinds
from torchweft.checkpoint.device_copies import DeviceCopies
from torchweft.checkpoint.kinds import DATA, GENERATOR, MODULE, OBJECT, TENSOR, VALUE, HostCopier
from torchweft.engine.worker.agent import Agent, Slot
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.errors import ArgumentTypeError, CheckpointError
from torchweft.optim.local import LocalOptimizer, Saved, step_lock

Content = dict[str, Any]
Options = dict[int, dict[str, Any]]
Described = dict[str, dict[int, tuple[str, tuple[int, ...]]]]
"""Names and shapes of the parameters of each optimizer, by their numbers."""


class Owned(NamedTuple):
    """The entries of a state that a worker owns, by path.

    Attributes:
        remote: The objects to which the state has references.
        local: The values in the state itself, if this worker saves it.
        optimizers: The local optimizers of distributed optimizers.
    """

    remote: Mapping[str, Any]
    local: Mapping[str, Any]
    optimizers: Mapping[str, LocalOptimizer]

    def values(self) -> dict[str, Any]:
        """Returns all entries except the optimizers."""
        return {**self.remote, **self.local}

    def kinds(self) -> dict[str, str]:
        """Returns the kind of each entry, by path.

        Raises:
            ArgumentTypeError: An entry cannot be restored.
        """
        for path, value in self.values().items():
            kinds.check_whole(path, value)
        found = {p: kinds.kind_of(p, v, is_remote=True) for p, v in self.remote.items()}
        found |= {p: kinds.kind_of(p, v, is_remote=False) for p, v in self.local.items()}
        return found


class Taken(NamedTuple):
    """A part, and its description for the driver.

    Attributes:
        content: The part.
        kinds: The kind of each entry.
        described: The parameters of the optimizers.
        options: The hyper-parameters, by optimizer and group.
    """

    content: Content
    kinds: dict[str, str]
    described: Described
    options: dict[str, Options]


def take(owned: Owned, *, with_random: bool) -> Taken:
    """Returns a copy of the state that a worker owns, taken between two steps of its optimizers.

    Raises:
        ArgumentTypeError: A value cannot be saved; names it.
    """
    found = owned.kinds()
    values = owned.values()
    devices = DeviceCopies()

    def taken(*which: str) -> Content:
        return {
            path: {"kind": kind, "state": kinds.take(path, kind, values[path], devices)}
            for path, kind in found.items()
            if kind in which
        }

    # No lock: an object may call other workers for its state, which may wait for our optimizers.
    items = taken(OBJECT)
    devices.wait()
    guard = step_lock()
    with guard.lock, guard.order:
        items |= taken(MODULE, TENSOR)
        described = describe(owned)
        saved = {path: optimizer.content() for path, optimizer in owned.optimizers.items()}
        optimizers = {
            path: _named(path, each.state, described[path], devices) for path, each in saved.items()
        }
        devices.wait()
    items |= taken(GENERATOR, DATA, VALUE)
    # Last: the user's code that was called above may have drawn random numbers.
    random = kinds.take_random() if with_random else None
    content = {"items": items, "optimizers": optimizers, "random": random}
    options = {path: HostCopier(path, devices).copy(each.options) for path, each in saved.items()}
    devices.wait()
    return Taken(content, found, described, options)


def describe(owned: Owned) -> Described:
    """Returns names and shapes of the parameters that the optimizers of a worker step."""
    values = owned.values()
    described: Described = {}
    for path, optimizer in owned.optimizers.items():
        parameters = optimizer.parameters()
        if any(map(is_lazy, parameters.values())):
            raise ArgumentTypeError(
                f"{path} steps a parameter of a lazy module, which has no shape yet; call the "
                "module once before the optimizer's state is saved or restored"
            )
        names = parameter_names(values, parameters)
        described[path] = {
            number: (names[number], tuple(parameter.shape))
            for number, parameter in parameters.items()
        }
    return described


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
        if isinstance(value, Tensor):
            names.setdefault(value, path)
            continue
        named_parameters = getattr(value, "named_parameters", None)
        if callable(named_parameters) and not hasattr(value, "module_rref"):
            for name, parameter in named_parameters():
                names.setdefault(parameter, f"{path}:{name}")
    return {number: names.get(parameter, f"#{number}") for number, parameter in parameters.items()}


def _named(
    path: str,
    state: dict[Any, Any],
    described: dict[int, tuple[str, tuple[int, ...]]],
    devices: DeviceCopies,
) -> Content:
    copier = HostCopier(path, devices)
    return {
        "state": {
            described[key][0]: copier.copy(value)
            for key, value in state.items()
            if key in described
        },
        "shared": {key: copier.copy(value) for key, value in state.items() if key not in described},
    }


def put(
    owned: Owned,
    content: Content,
    options: Mapping[str, Options],
    *,
    strict: bool,
) -> None:
    """Puts a part back, as far as the part has entries.

    Plain values of the state itself are not put back: only the holder of the state can do that.

    Args:
        owned: The entries to restore.
        content: The part; the state of optimizers is by the parameters' present numbers.
        options: Hyper-parameters of the optimizers, by path and group.
        strict: Whether modules must have exactly the keys that the part has.
    """
    found = owned.kinds()
    values = owned.values()
    for path, item in content["items"].items():
        if found.get(path, VALUE) != VALUE:
            kinds.put(found[path], values[path], item["state"], strict=strict)
    for path, optimizer in owned.optimizers.items():
        if path in options:
            state = content["optimizers"].get(path, {})
            optimizer.load(Saved(dict(options[path]), state))
    if content["random"] is not None:
        kinds.put_random(content["random"])


# Parts that a worker holds between two calls of a driver: copied or read parts


_MOST_GIVEN_UP = 1000
"""How many parts may be given up while they are being made."""


class StagedParts:
    """The parts that a worker holds for drivers, by the driver's id and its ticket. Thread-safe.

    A ticket alone would be no proof: all owners of one snapshot are told it. The parts of a lost
    driver are dropped: no other worker would ask for them. A driver may give a part up while it is
    still being copied or read; such a part is not held when it is complete.
    """

    def __init__(self, agent: Agent) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, str], Any] = {}
        self._given_up: deque[tuple[int, str]] = deque(maxlen=_MOST_GIVEN_UP)
        self._agent = agent
        agent.on_lost(self._drop_of)

    def __len__(self) -> int:
        return len(self._parts)

    def keep(self, ticket: str, driver: Peer, part: Any) -> None:
        """Holds a part for a driver until the part is taken out or dropped."""
        key = driver.id, ticket
        with self._lock:
            if key not in self._given_up and driver.lost is None:
                self._parts[key] = part

    def take_out(self, ticket: str, driver: Peer) -> Any:
        """Returns a part of a driver, and stops holding it.

        Raises:
            CheckpointError: No part is held: the driver gave up, or was considered lost.
        """
        with self._lock:
            found = self._parts.pop((driver.id, ticket), None)
        if found is None:
            raise CheckpointError(
                f"worker {current().info.name!r} holds nothing of this snapshot for worker "
                f"{driver.name!r} any more; that driver has given it up, or was lost for a moment: "
                "begin again"
            )
        return found

    def drop(self, ticket: str, driver: Peer) -> None:
        """Drops a part of a driver if it is held, and else when it is complete."""
        key = driver.id, ticket
        with self._lock:
            if self._parts.pop(key, None) is None:
                self._given_up.append(key)

    def _drop_of(self, driver: Peer) -> None:
        with self._lock:
            for key in [key for key in self._parts if key[0] == driver.id]:
                del self._parts[key]


def staged_parts() -> StagedParts:
    """Returns the parts that this worker holds."""
    return current().slots[_HELD]


_HELD = Slot(lambda: StagedParts(current()))
