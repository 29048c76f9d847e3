"""Weights as copies and deltas between strict workers that share no memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torchweft
from tests.contract.processes.functions import options, wait_until
from tests.contract.processes.rl_functions import LIMIT_S, make_walk, small_walk_policy
from torchweft import knobs, rl, rpc, weights
from torchweft.errors import ArgumentTypeError, NotAllowed
from torchweft.launch import Nursery
from torchweft.rl import Environments, FollowingPolicy, Observers
from torchweft.weights import Publisher, publisher
from torchweft.weights.versions import Version

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
OWN = (make_walk, small_walk_policy)


@pytest.fixture(scope="module", autouse=True)
def apart(nursery: Nursery) -> Iterator[None]:
    strict = options(
        strict=True,
        callables=(*rl.CALLABLES, *weights.CALLABLES, *OWN),  # type: ignore[arg-type]
    )
    with (
        knobs.SHM_LIMIT_BYTES.override(0),
        knobs.CMA_FROM_BYTES.override(1 << 60),
        torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=strict),
    ):
        yield


def test_a_copy_and_then_deltas() -> None:
    policy = small_walk_policy()
    published = Publisher(policy.network, deltas=1)
    published.publish()
    following = FollowingPolicy(small_walk_policy, published, timeout_s=LIMIT_S)
    with Observers(
        ["worker0"], Environments(make_walk, 2), following, steps=2, time_limit_s=LIMIT_S
    ) as observers:
        assert int(observers.round()[0].versions.min()) == 1
        with torch.no_grad():
            policy.network[0].bias[0] += 1  # type: ignore[index, union-attr, operator]
        published.publish()
        found = [0]

        def has_come() -> bool:
            found[0] = int(observers.round()[0].versions.min())
            return found[0] == 2

        wait_until(has_come, lambda: str(found))
    counts = published.statistics()
    assert (counts.shared, counts.wholes, counts.deltas) == (0, 1, 1)


def test_what_a_publisher_and_a_subscriber_are_sent_is_checked() -> None:
    with pytest.raises(ArgumentTypeError, match="inbox of a call"):
        rpc.rpc_sync("worker0", publisher.announce, (1, Version(1, 2)))
    observer = rpc.remote("worker0", rl.ReplayBuffer, (2,))
    for version, message in (((1, 2), "version of a call"), (Version(1, 2), "a ReplayBuffer")):
        with pytest.raises(ArgumentTypeError, match=message):
            rpc.rpc_sync("worker0", publisher.announce, (observer, version))
    with pytest.raises(NotAllowed):
        rpc.rpc_sync("worker0", Publisher, (nn.Linear,))
