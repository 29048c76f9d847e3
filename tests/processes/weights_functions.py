"""A trainer and samplers, whose weights all have the number of their version as value."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn

from tests.faults.points import send_half_of
from torchweft.engine.io.link import Link
from torchweft.engine.io.session import ResumableLink
from torchweft.rpc import RRef
from torchweft.weights import Published, Publisher, Subscriber, Taken, delta, publisher

LIMIT_S = 20.0
SIZE = 512


class Model(nn.Module):
    def __init__(self, size: int = SIZE, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(size, size, dtype=dtype)
        self.second = nn.Linear(size, 3, dtype=dtype)
        self.register_buffer("steps", torch.zeros(5, dtype=torch.int64))

    def set_to(self, value: float) -> None:
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(value)


class Trainer:
    def __init__(self, size: int = SIZE, after: int = 0, **options: Any) -> None:
        self.model = Model(size)
        self.publisher = Publisher(self.model, after=after, **options)

    def reference(self) -> RRef[Publisher]:
        return RRef(self.publisher)

    def train(self, steps: int = 1) -> int:
        for _ in range(steps):
            self.model.set_to(self.publisher.version + 1)
            self.publisher.publish()
        return self.publisher.version

    def statistics(self) -> Published:
        return self.publisher.statistics()


class Sampler:
    def __init__(
        self,
        publisher: RRef[Publisher],
        size: int = SIZE,
        dtype: torch.dtype = torch.float32,
        *,
        in_place: bool = False,
    ) -> None:
        self.model = Model(size, dtype)
        self.model.set_to(0)
        self.subscriber = Subscriber(publisher, self.model, in_place=in_place)

    def update(self, timeout: float = 0.0) -> int:
        """Updates, and checks that all weights are those of the version that is named."""
        self.subscriber.update(timeout)
        return self.check()

    def update_to(self, version: int) -> list[int]:
        """Updates until a version has come; returns the versions on the way."""
        taken = [self.check()]
        while taken[-1] != version:
            taken.append(self.update(LIMIT_S))
        return taken[1:]

    def check(self) -> int:
        for name, tensor in self.model.state_dict().items():
            assert (tensor == self.subscriber.version).all(), name
        return self.subscriber.version

    def read(self) -> float:
        return float(self.model.first.weight[0, 0])

    def damage(self) -> None:
        with torch.no_grad():
            self.model.first.weight[3, 4] += 1

    def follow(self, publisher: RRef[Publisher]) -> None:
        self.subscriber.follow(publisher)

    def lost(self) -> str:
        found = self.subscriber.lost
        return "" if found is None else found.worker

    def statistics(self) -> Taken:
        return self.subscriber.statistics()

    def close(self) -> None:
        self.subscriber.close()


# Deaths at named points: what runs there ends the process instead.


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str) -> None:
    if point == "in the middle of the copy":
        copy = torch.Tensor.copy_
        remaining = [2]

        def copy_or_die(*args: Any, **kwargs: Any) -> Any:
            remaining[0] -= 1
            return copy(*args, **kwargs) if remaining[0] else die()

        torch.Tensor.copy_ = copy_or_die  # type: ignore[method-assign, assignment]
    elif point == "before the announcement":
        Publisher._tell = die  # type: ignore[method-assign]
    elif point == "in the middle of a delta":
        encode = delta._encode_block
        delta.BLOCK_WORDS = 1 << 10
        blocks = [3]

        def encode_or_die(*args: Any) -> Any:
            blocks[0] -= 1
            return encode(*args) if blocks[0] else die()

        delta._encode_block = encode_or_die
    elif point == "in the transfer of a delta":
        _die_sending_a_delta()
    elif point == "before the answer":
        publisher.Sent = die  # type: ignore[misc, assignment]
    else:
        raise ValueError(point)


def _die_sending_a_delta() -> None:
    """Makes this worker die when half of a delta's bytes, or of what follows it, has left."""
    sent, sizes = publisher.Sent, []

    def note(offer: Any, is_shared: bool, data: torch.Tensor, *rest: Any) -> Any:
        if offer.base is not None:
            sizes.append(data.nbytes)
        return sent(offer, is_shared, data, *rest)

    publisher.Sent = note  # type: ignore[misc, assignment]
    for link_class in (Link, ResumableLink):
        for name in ("send", "hold"):
            write = getattr(link_class, name)

            def write_or_die(link: Any, states: list[Any], write: Any = write, **how: Any) -> Any:
                if sizes and sum(map(len, states)) >= sizes[-1]:
                    send_half_of(link, states)
                    die()
                return write(link, states, **how)

            setattr(link_class, name, write_or_die)


def die_when_switching() -> None:
    """Makes this worker die when a sampler puts a version into its model."""
    from torchweft.weights.layout import Switch

    Switch._run = die  # type: ignore[method-assign]
