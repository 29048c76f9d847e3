from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from torchweft.embedding import RowStream
from torchweft.errors import ConfigurationError


class Lookup:
    """A lookup that was sent, and what became of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = "sent"

    def outputs(self) -> dict[str, Tensor]:
        if self.number < 0:
            raise OSError("no rows")
        self.state = "used"
        return {"words": torch.tensor(self.number)}

    def cancel(self) -> None:
        self.state = "cancelled"


class Sender:
    """Sends lookups of batches, which are numbers."""

    def __init__(self) -> None:
        self.sent: list[Lookup] = []

    def __call__(self, inputs: Mapping[str, Any], waiting: int) -> Lookup:
        assert waiting == self.states().count("sent")
        self.sent.append(Lookup(inputs["words"]))
        return self.sent[-1]

    def states(self) -> list[str]:
        return [each.state for each in self.sent]


def stream_of(batches: Any, ahead: int, sender: Sender) -> RowStream[int]:
    return RowStream(batches, ahead, lambda batch: {"words": batch}, sender)


def test_an_error_of_a_lookup_cancels_it_and_the_later_ones() -> None:
    sender = Sender()
    stream = stream_of([0, -1, 2, 3], 1, sender)
    next(stream)
    with pytest.raises(OSError, match="no rows"):
        next(stream)
    assert sender.states() == ["used", "cancelled", "cancelled"]
    assert list(stream) == []


def test_an_error_of_the_batches_cancels_what_was_sent() -> None:
    def batches() -> Iterator[int]:
        yield 0
        raise OSError("no file")

    sender = Sender()
    with pytest.raises(OSError, match="no file"):
        next(stream_of(batches(), 3, sender))
    assert sender.states() == ["cancelled"]


@pytest.mark.parametrize("ahead", [-1, 1.5, True])
def test_a_look_ahead_that_is_no_number_is_refused(ahead: Any) -> None:
    with pytest.raises(ConfigurationError, match="ahead is"):
        stream_of([], ahead, Sender())
