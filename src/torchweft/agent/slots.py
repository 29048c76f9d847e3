"""Objects that a worker has beside its agent, by typed keys.

Layers above the agent have objects of which each worker has one: the autograd engine, the calls,
the lock of its optimizers. Functions that programs and other workers call must find them from the
current agent, which is below those layers and cannot name their types. So the module that defines
such an object also makes its key, a ``Slot`` of its type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")


class Slot(Generic[T]):
    """The key of an object of type ``T`` that a worker has; a constant of the module of ``T``.

    Args:
        make: Makes the object where it is first asked for; None where ``rpc.node`` makes it.
    """

    def __init__(self, make: Callable[[], T] | None = None) -> None:
        self.make = make


class Slots(dict[Slot[Any], Any]):
    """The objects of one worker. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()

    if TYPE_CHECKING:
        # The lookup is that of ``dict``, as every call makes one; only its type is known here.
        def __getitem__(self, slot: Slot[T]) -> T: ...
        def __setitem__(self, slot: Slot[T], value: T) -> None: ...

    def __missing__(self, slot: Slot[T]) -> T:
        if slot.make is None:
            raise KeyError(slot)
        with self._lock:
            if slot not in self:
                self[slot] = slot.make()
            return self[slot]
