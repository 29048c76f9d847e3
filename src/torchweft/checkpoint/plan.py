"""The state that a program saves, a tree of dicts and lists, and the owners of its entries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.optim import Optimizer

from torchweft.arguments import kind_of
from torchweft.checkpoint.kinds import in_base_form, is_plain, refill
from torchweft.checkpoint.parts import Owned
from torchweft.engine.worker.current import current
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.ids import WorkerInfo
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer
from torchweft.optim.local import LocalOptimizer
from torchweft.optim.states import lineage
from torchweft.rpc import RRef, get_worker_info, get_worker_infos

SEPARATOR = "/"

Places = list[tuple[str, RRef[Any]]]
"""Pairs of a path and a reference to a value of one worker."""


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
            refill(self.value, saved)
        else:
            self.container[self.key] = saved


class Remote(NamedTuple):
    """The entries of a state that another worker owns.

    Attributes:
        items: Its entries except optimizers.
        optimizers: The local optimizers of distributed optimizers.
    """

    items: Places
    optimizers: Places


class Plan:
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
        lists: The paths of the lists that contain entries.
        random: Ids of the workers whose random number generators are part of the state.
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
        self.lists = list(_lists(state, ""))
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
        remote = {path for each in self.remote.values() for path, _ in each.items}
        return remote | self._held.keys() | self._local.keys()


def _ids(random_of: bool | Iterable[str | int | WorkerInfo]) -> set[int]:
    if random_of is False:
        return set()
    agent = current()
    if random_of is True:
        peers = [agent.find(info) for info in get_worker_infos()]
        return {peer.id for peer in peers if peer.lost is None}
    return {agent.find(get_worker_info(each)).id for each in random_of}


def leaves(state: object) -> list[Leaf]:
    """Returns the entries of a state.

    A dict or list that contains only plain values, such as a growing history, is one entry. The
    state itself is never a single entry.

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
        if isinstance(value, (dict, list)) and not is_plain(in_base_form(value)):
            yield from _inside(value, path + SEPARATOR)
        else:
            yield Leaf(path, value, container, key)


def _lists(container: Any, prefix: str) -> Iterator[str]:
    """Yields the paths of the lists whose entries are apart, as ``_inside`` takes them."""
    is_dict = isinstance(container, dict)
    if not is_dict:
        yield prefix.removesuffix(SEPARATOR)
    for key, value in container.items() if is_dict else enumerate(container):
        if isinstance(value, (dict, list)) and not is_plain(in_base_form(value)):
            yield from _lists(value, f"{prefix}{key}{SEPARATOR}")


def _checked(key: object, prefix: str) -> str:
    if not isinstance(key, str):
        raise ArgumentTypeError(
            f"the state has the key {key!r}{_place(prefix)}, {kind_of(key)}; name its entries by "
            "strings"
        )
    if not key or SEPARATOR in key:
        raise ConfigurationError(
            f"the state has the key {key!r}{_place(prefix)}; a key must not be empty, and have no "
            f"{SEPARATOR!r}"
        )
    return key


def _place(prefix: str) -> str:
    return f" in {prefix.removesuffix(SEPARATOR)!r}" if prefix else ""


def group_numbers(optimizer: DistributedOptimizer) -> list[int]:
    """Returns the number of the group of each parameter."""
    groups = enumerate(optimizer.param_groups)
    return [number for number, group in groups for _ in group["params"]]
