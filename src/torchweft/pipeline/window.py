"""Which minibatches of an asynchronous pipeline are under way, and whose result is next."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Window(Generic[T]):
    """Lets minibatches enter as long as few are under way; puts their results in order.

    Args:
        bound: The most minibatches that have entered and whose results were not taken.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.n_entered = 0
        self.n_taken = 0
        self._results: dict[int, T] = {}

    @property
    def has_room(self) -> bool:
        """Whether one more minibatch may enter."""
        return self.n_entered - self.n_taken < self.bound

    @property
    def is_empty(self) -> bool:
        """Whether the results of all minibatches were taken."""
        return self.n_entered == self.n_taken

    @property
    def has_next(self) -> bool:
        """Whether the result that is to be taken next is there."""
        return self.n_taken in self._results

    def enter(self) -> int:
        """Notes that a minibatch enters; returns its number, counted from 0."""
        number = self.n_entered
        self.n_entered += 1
        return number

    def put(self, minibatch: int, result: T) -> None:
        """Keeps the result of a minibatch until it is its turn."""
        self._results[minibatch] = result

    def take(self) -> T:
        """Returns the next result."""
        result = self._results.pop(self.n_taken)
        self.n_taken += 1
        return result
