"""One pull of several stacks: a message to each server, and the values from the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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
        self._places: list[dict[str, int]] = []
        for part in wanted:
            self._places.append({})
            for server, request in part.requests().items():
                of_server = self.requests.setdefault(server, [])
                self._places[-1][server] = len(of_server)
                of_server.append(request)

    def answers(self, answers: Mapping[str, tuple[int, list[Any]]]) -> Iterator[tuple[S, Answer]]:
        """Yields each part with its answer.

        Args:
            answers: By server, its version and what was asked of it.
        """
        for part, place in zip(self.wanted, self._places, strict=True):
            versions = {server: answers[server][0] for server in place}
            values = {
                server: decode(answers[server][1][number], self._form, part.stack.dtype)
                for server, number in place.items()
            }
            yield part, Answer(versions, values)
