"""What a worker keeps for a map of which it runs parts: shared values, and the turns of parts.

The caller packs the values that parts share once. A worker keeps them packed, and unpacks them anew
for each part, with clones of the tensors: no part sees another part's changes to its copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from torchweft import extending, rpc
from torchweft.errors import ArgumentTypeError, CallCancelled
from torchweft.extending import Packed, check_types
from torchweft.mapreduce import trees
from torchweft.mapreduce.buffers import original
from torchweft.mapreduce.schedule import Attempt
from torchweft.rpc import RRef

_LOOK_S = 0.5
"""How often a part that waits for its turn checks whether it was cancelled."""

Address = tuple[int, int, int]
"""The ``id`` of a reference, passed by a caller that keeps the reference alive meanwhile."""


@extending.rebuilds_plain
class Slot:
    """Stands for a shared value in the arguments of a part.

    Args:
        number: The index of the shared value.
    """

    __slots__ = ("number",)
    __match_args__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[type[Slot], tuple[int]]:
        return Slot, (self.number,)


class Shared:
    """A function and shared values, packed, on a worker that runs parts.

    Args:
        packed: The pair of the function and the list of values.
        concurrency: How many parts may run at a time; other parts wait for their turn.
    """

    def __init__(self, packed: Packed, concurrency: int) -> None:
        self.packed = packed
        self.concurrency = concurrency
        self._turns = Turns(concurrency)

    def call(
        self, args: Any, kwargs: Any, number: Attempt, after: Attempt | None
    ) -> tuple[Callable[..., Any], Callable[[], Any]]:
        """Prepares a call of the function, with copies of the values in place of the slots.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            number: The attempt.
            after: The attempt that must get its turn first, if any.

        Returns:
            The program's function, and what calls it in its turn.
        """
        function, values = self.packed.unpack()
        check_types(values=(values, list))
        if extending.caller().is_self:  # Its tensors went by reference.
            args, kwargs = _copy((args, kwargs))
        else:
            extending.check_called(function)
        args, kwargs = _filled((args, kwargs), values)
        if isinstance(args, Tensor):
            # One of few bytes may have any number of rows.
            raise ArgumentTypeError("the arguments of a call are a tensor, and not a tuple")

        def run() -> Any:
            with self._turn(number, after):
                return function(*args, **kwargs)

        return original(function), run

    @contextlib.contextmanager
    def _turn(self, number: Attempt, after: Attempt | None) -> Iterator[None]:
        """Holds a turn for the block; a part that was sent ahead waits for its turn first."""
        if not self._turns.take(number, after):
            with extending.waiting(list):
                has_turn = self._turns.wait(number, rpc.is_cancelled)
            if not has_turn:
                raise CallCancelled("the caller of the map does not want this part any more")
        try:
            yield
        finally:
            self._turns.give_back()


# Called by name: by the caller of a map, and by workers on one another.


@extending.remotely_callable
def make(payload: bytes, tensors: Sequence[Tensor], concurrency: int) -> Shared:
    """Returns a ``Shared`` object of the values that the caller of a map has packed."""
    return _made(payload, tensors, concurrency)


def _made(payload: Any, tensors: Any, concurrency: Any) -> Shared:
    check_types(
        payload=(payload, bytes), tensors=(tensors, (list, tuple)), concurrency=(concurrency, int)
    )
    for tensor in tensors:
        check_types(tensor=(tensor, Tensor))
    return Shared(Packed(payload, list(tensors), []), concurrency)


@extending.remotely_callable
async def pull(parent: RRef[Shared]) -> Shared:
    """Returns a copy of another worker's ``Shared`` object; no thread waits for it meanwhile."""
    check_types(parent=(parent, RRef))
    # Found by id: the name may by now belong to another worker, or to no worker.
    owner = extending.worker_of(parent.id.owner)
    return _made(*await extending.start_call(owner, content, (tuple(parent.id),), timeout=0.0))


@extending.remotely_callable
def content(address: Address) -> Any:
    """Returns the content of a ``Shared`` object of this worker."""

    def parts_of(value: Any) -> tuple[Callable[..., Any], Callable[[], Any]]:
        shared = _checked(value)
        return content, lambda: (shared.packed.payload, shared.packed.tensors, shared.concurrency)

    return extending.when_ready(address, parts_of)


@extending.remotely_callable
def run(address: Address, args: Any, kwargs: Any, number: Attempt, after: Attempt | None) -> Any:
    """Runs a part of a map with a ``Shared`` object of this worker."""
    check_types(number=(number, tuple), after=(after, (tuple, type(None))))
    return extending.when_ready(
        address, lambda value: _checked(value).call(args, kwargs, number, after)
    )


def _checked(value: Any) -> Shared:
    # Other workers pass an id, and must not reach any other kind of value with it.
    if not isinstance(value, Shared):
        raise ArgumentTypeError(f"a part of a map was sent to a {type(value).__name__}")
    return value


def _filled(arguments: tuple[Any, Any], values: Sequence[Any]) -> tuple[Any, Any]:
    if not values:
        return arguments
    flat, spec = trees.flatten(arguments)
    args, kwargs = trees.unflatten(
        [values[leaf.number] if isinstance(leaf, Slot) else leaf for leaf in flat], spec
    )
    return args, kwargs


def _copy(arguments: tuple[Any, Any]) -> tuple[Any, Any]:
    copied: tuple[Any, Any] = Packed.of(arguments, [extending.this_worker()]).unpack()
    return copied


# Turns: a few parts run at a time; the others wait, and run in the order of the caller. A semaphore
# would give a turn to any thread that asks at the right moment. And two threads may read two
# messages, so a part that was sent ahead may arrive before the part that it follows. Hence it names
# that part, and gets no turn before that part has had its turn.


class Turns:
    """Hands out turns. Thread-safe.

    Args:
        count: How many parts have a turn at a time.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._changed = threading.Condition()
        self._queue: list[tuple[Attempt, Attempt | None]] = []
        """The attempts that wait, each with the one that it follows."""
        self._seen: set[Attempt | None] = {None}
        """The attempts that have a turn, or have had it."""

    def take(self, number: Attempt, after: Attempt | None = None) -> bool:
        """Takes a turn; returns False if the part has to ``wait`` in the queue."""
        with self._changed:
            self._queue.append((number, after))
            self._hand_out()
            return number in self._seen

    def wait(self, number: Attempt, is_unwanted: Callable[[], bool]) -> bool:
        """Blocks until a part in the queue has its turn, or is not wanted any more.

        Returns:
            Whether the part has a turn; if not, it has left the queue.
        """
        with self._changed:
            while number not in self._seen and not is_unwanted():
                self._changed.wait(_LOOK_S)
            if not is_unwanted():
                return True
            if number in self._seen:
                self.give_back()
            else:
                self._queue = [each for each in self._queue if each[0] != number]
            return False

    def give_back(self) -> None:
        """Ends a turn, and passes it to the first part in the queue that may run."""
        with self._changed:
            self._free += 1
            self._hand_out()

    def _hand_out(self) -> None:
        while self._free:
            place = next((each for each in self._queue if each[1] in self._seen), None)
            if place is None:
                return
            self._queue.remove(place)
            self._seen.add(place[0])
            self._free -= 1
            self._changed.notify_all()
