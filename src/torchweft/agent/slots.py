"""Per-worker objects of the layers above the agent, by typed keys.

Each worker has one autograd engine, one object for its calls, one lock for its optimizers.
Functions that programs and other workers call must find these objects from the current agent. The
agent is below those layers and cannot name their types. So the module that defines such an object
also makes its key, a ``Slot`` of its type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")


class Slot(Generic[T]):
    """The key of a worker's object of type ``T``; a constant of the module of ``T``.

    Args:
        make: Makes the object on first access; None if ``rpc.node`` makes it.
    """

    def __init__(self, make: Callable[[], T] | None = None) -> None:
        self.make = make


class Slots(dict[Slot[Any], Any]):
    """The objects of one worker. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()

    if TYPE_CHECKING:
        # Every call makes a lookup, so it stays that of ``dict``; only its type is declared here.
        def __getitem__(self, slot: Slot[T]) -> T: ...
        def __setitem__(self, slot: Slot[T], value: T) -> None: ...

    def __missing__(self, slot: Slot[T]) -> T:
        if slot.make is None:
            raise KeyError(slot)
        with self._lock:
            if slot not in self:
                self[slot] = slot.make()
            return self[slot]
