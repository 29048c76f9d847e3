"""A user's program with torchrl's ``RemoteTensorDictReplayBuffer``, the same on both libraries."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed.rpc as rpc
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RemoteTensorDictReplayBuffer

from benchmarks.frame.api import Api
from benchmarks.frame.work import Work
from benchmarks.replay.question import BATCH, SAMPLES

CAPACITY = 10_000


def make_buffer() -> Any:
    torch.set_num_threads(1)
    return RemoteTensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=BATCH)


def make_frames() -> TensorDict:
    """Returns frames with the keys, shapes and types of a collector's for CartPole."""
    generator = torch.Generator().manual_seed(0)

    def observations() -> torch.Tensor:
        return torch.randn(BATCH, 4, generator=generator)

    flags = torch.zeros(BATCH, 1, dtype=torch.bool)
    ends = {"done": flags, "terminated": flags.clone(), "truncated": flags.clone()}
    following = {"observation": observations(), "reward": torch.ones(BATCH, 1), **ends}
    actions = torch.randint(2, (BATCH, 2), generator=generator)
    now = {key: value.clone() for key, value in ends.items()}
    return TensorDict(
        {"observation": observations(), "action": actions, **now, "next": following}, [BATCH]
    )


def works(api: Api) -> dict[str, Work]:
    """Returns the works, with a buffer on the second worker that they share."""
    (owner,) = api.peers
    frames = make_frames()

    @functools.cache
    def buffer() -> Any:
        found = rpc.remote(owner, make_buffer)
        found.rpc_sync().extend(frames)
        return found

    def extend() -> None:
        buffer().rpc_sync().extend(frames)

    def sample() -> None:
        assert len(buffer().rpc_sync().sample()) == BATCH

    def both() -> None:
        extend()
        for each in [buffer().rpc_async().sample() for _ in range(SAMPLES)]:
            assert len(each.wait()) == BATCH

    return {"extend and sample": Work(both), "extend": Work(extend), "sample": Work(sample)}
