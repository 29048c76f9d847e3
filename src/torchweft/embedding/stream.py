"""Batches together with their rows, which are pulled some batches ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from torchweft.arguments import check_type
from torchweft.closing import Closing
from torchweft.errors import ConfigurationError

B = TypeVar("B")
"""A batch of the program."""


class Ahead(Protocol):
    """A lookup that was sent."""

    def outputs(self) -> dict[str, Tensor]:
        """Waits for the rows, and returns the output of each table."""

    def cancel(self) -> None:
        """Ends the pull; its rows are not wanted."""


class _Waiting(NamedTuple, Generic[B]):
    batch: B
    lookup: Ahead


class RowStream(Closing, Generic[B]):
    """Yields batches in order, each with the outputs of its lookups; see ``Tables.stream``.

    Also a context manager, which closes it. Not thread-safe.

    Args:
        batches: The batches.
        ahead: How many batches are pulled before they are needed.
        inputs: Returns the input of the tables for a batch.
        send: Sends the pull of a lookup, given how many that were sent are used before.
    """

    def __init__(
        self,
        batches: Iterable[B],
        ahead: int,
        inputs: Callable[[B], Mapping[str, Any]],
        send: Callable[[Mapping[str, Any], int], Ahead],
    ) -> None:
        if type(ahead) is not int or ahead < 0:
            raise ConfigurationError(f"ahead is {ahead!r}; pass a number of batches, at least 0")
        check_type(batches, Iterable, "batches", "the batches of the program, such as a list")
        self._batches = iter(batches)
        self._ahead = ahead
        self._inputs = inputs
        self._send = send
        self._waiting: deque[_Waiting[B]] = deque()
        self._is_closed = False

    def __iter__(self) -> Iterator[tuple[B, dict[str, Tensor]]]:
        return self

    def __next__(self) -> tuple[B, dict[str, Tensor]]:
        if self._is_closed:
            raise StopIteration
        try:
            self._fill()
            if self._waiting:
                batch, lookup = self._waiting[0]
                outputs = lookup.outputs()
                self._waiting.popleft()
                return batch, outputs
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def _fill(self) -> None:
        while len(self._waiting) <= self._ahead:
            try:
                batch = next(self._batches)
            except StopIteration:
                return
            lookup = self._send(self._inputs(batch), len(self._waiting))
            self._waiting.append(_Waiting(batch, lookup))

    def close(self) -> None:
        """Cancels the pulls that are under way. The stream is at its end then."""
        self._is_closed = True
        while self._waiting:
            self._waiting.pop().lookup.cancel()
