"""The state that a program has saved, a tree of dicts and lists, and the owners of its entries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torchweft.agent.current import current
from torchweft.checkpoint.parts import Owned
from torchweft.checkpoint.plain import is_plain
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.ids import WorkerInfo
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer
from torchweft.optim.local import LocalOptimizer
from torchweft.rpc import RRef, get_worker_info, get_worker_infos

SEPARATOR = "/"

Places = list[tuple[str, RRef[Any]]]
"""Things of one worker, by path: references to them."""


class Leaf(NamedTuple):
    """One entry of the state.

    Attributes:
        path: The keys that lead to it, joined by ``/``.
        value: What is there.
        container: The dict or list that it is in.
        key: Its key or its place there.
    """

    path: str
    value: Any
    container: Any
    key: Any


class Remote(NamedTuple):
    """What another worker owns of a state.

    Attributes:
        items: Its entries.
        optimizers: The local optimizers of distributed ones.
    """

    items: Places
    optimizers: Places


class Plan:
    """Tells, of a state, which worker owns what.

    Args:
        state: The state, as the user gave it.
        random_of: The workers whose random number generators are part of it: those named, all of
            the group, or none.

    Attributes:
        owned: What this worker owns.
        remote: What the others own, by their ids; those of whom only random numbers are wanted
            own nothing.
        optimizers: The distributed optimizers, by path.
        values: Where the state holds what is no reference and no optimizer, by path.
        random: Ids of the workers whose random number generators are part of it.
    """

    def __init__(self, state: object, random_of: bool | Iterable[str | int | WorkerInfo]) -> None:
        self._me = current().me.id
        self.optimizers: dict[str, DistributedOptimizer] = {}
        self.values: dict[str, Leaf] = {}
        self.remote: dict[int, Remote] = {}
        self.random = _ids(random_of)
        self._held: dict[str, Any] = {}
        self._local: dict[str, Any] = {}
        self._steppers: dict[str, LocalOptimizer] = {}
        for leaf in leaves(state):
            self._place(leaf)
        for worker in self.random - {self._me}:
            self._of(worker)
        self.owned = Owned(self._held, self._local, self._steppers)

    def _place(self, leaf: Leaf) -> None:
        value = leaf.value
        if isinstance(value, DistributedOptimizer):
            self.optimizers[leaf.path] = value
            for optimizer in value.local_optimizers():
                self._place_optimizer(leaf.path, optimizer)
            return
        reference = value.module_rref if isinstance(value, RemoteModule) else value
        if not isinstance(reference, RRef):
            self.values[leaf.path] = leaf
            self._local[leaf.path] = value
        elif reference.is_owner():
            self._held[leaf.path] = reference.local_value()
        else:
            self._of(reference.id.owner).items.append((leaf.path, reference))

    def _place_optimizer(self, path: str, reference: RRef[LocalOptimizer]) -> None:
        if reference.is_owner():
            self._steppers[path] = reference.local_value()
        else:
            self._of(reference.id.owner).optimizers.append((path, reference))

    def _of(self, worker: int) -> Remote:
        return self.remote.setdefault(worker, Remote([], []))

    @property
    def paths(self) -> set[str]:
        """The paths of all entries but optimizers."""
        remote = {path for each in self.remote.values() for path, _ in each.items}
        return remote | self._held.keys() | self._local.keys()


def _ids(random_of: bool | Iterable[str | int | WorkerInfo]) -> set[int]:
    if random_of is False:
        return set()
    infos = (
        get_worker_infos() if random_of is True else [get_worker_info(each) for each in random_of]
    )
    agent = current()
    return {agent.find(info).id for info in infos}


def leaves(state: object) -> list[Leaf]:
    """Returns the entries of a state.

    A dict or list in which there is nothing but plain values is one entry: a history that grows,
    say. The state itself never is.

    Raises:
        ArgumentTypeError: It is no dict, or has a key that is no string.
        ConfigurationError: A key is empty or has a ``/`` in it.
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
        if isinstance(value, (dict, list)) and not is_plain(value):
            yield from _inside(value, path + SEPARATOR)
        else:
            yield Leaf(path, value, container, key)


def _checked(key: object, prefix: str) -> str:
    if not isinstance(key, str):
        raise ArgumentTypeError(
            f"the state has the key {key!r} in {prefix or 'it'!r}, a {type(key).__name__}; name "
            "its entries by strings"
        )
    if not key or SEPARATOR in key:
        raise ConfigurationError(
            f"the state has the key {key!r} in {prefix or 'it'!r}; a key must not be empty, and "
            f"have no {SEPARATOR!r}"
        )
    return key
