"""One pull of several stacks: a message to each server, and the values from the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from torchweft.embedding.plan import Stack
from torchweft.embedding.wire import Form, decode


class Source(Protocol):
    """A part of a pull: rows or sums of one stack."""

    @property
    def stack(self) -> Stack:
        """The stack."""

    def requests(self) -> Mapping[str, tuple[Any, ...]]:
        """Returns what to ask of each server."""


S = TypeVar("S", bound=Source)
ROW_PARTS: Final = 2
"""The parts of a request for rows: stack and rows. One for sums has more."""


class Answer(NamedTuple):
    """What the servers returned for one part.

    Attributes:
        versions: The version of each server that was asked.
        values: Its values.
    """

    versions: dict[str, int]
    values: dict[str, Tensor]


class Pulling(Generic[S]):
    """What a lookup pulls, of all stacks.

    Args:
        wanted: The parts.
        form: The form of the values in messages.
    """

    def __init__(self, wanted: Sequence[S], form: Form | None = None) -> None:
        self.wanted = wanted
        self.requests: dict[str, list[Any]] = {}
        """What to ask of each server."""
        self._form = form
        self.places: list[dict[str, int]] = []
        """By part and server, which of the requests to the server is of the part."""
        for part in wanted:
            self.places.append({})
            for server, request in part.requests().items():
                of_server = self.requests.setdefault(server, [])
                self.places[-1][server] = len(of_server)
                of_server.append(request)

    def answers(self, answers: Mapping[str, tuple[int, list[Any]]]) -> Iterator[tuple[S, Answer]]:
        """Yields each part with its answer.

        Args:
            answers: By server, its version and what was asked of it.
        """
        for part, place in zip(self.wanted, self.places, strict=True):
            versions = {server: answers[server][0] for server in place}
            values = {
                server: decode(answers[server][1][number], self._form, part.stack.dtype)
                for server, number in place.items()
            }
            yield part, Answer(versions, values)


def replaced(values: Any, places: Tensor, new: Any) -> Any:
    """Returns the rows of a message, in which some are replaced by those of another one."""
    if not len(places):
        return values
    if isinstance(values, Tensor):
        return values.index_copy(0, places.long(), new)
    return tuple(replaced(own, places, other) for own, other in zip(values, new, strict=True))


def size_bytes(message: Any) -> int:
    """Returns the size of the tensors of a message."""
    if isinstance(message, Tensor):
        return message.nbytes
    return sum(map(size_bytes, message)) if isinstance(message, (tuple, list)) else 0
