"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torchweft
from tests import remains
from tests.contract.processes import attacks, functions, rl_functions
from tests.contract.processes.functions import options
from tests.contract.processes.rl_functions import make_walk, small_walk_policy
from torchweft import rl, rpc, weights
from torchweft.errors import NotAllowed, RemoteError
from torchweft.launch import Cluster, Nursery
from torchweft.rl import (
    Observer,
    ReplayBuffer,
)

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")


@pytest.fixture(scope="module")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    own = (attacks.is_imported, remains.count_references, make_walk, small_walk_policy)
    own = (*own, rl_functions.mean_size_of_batches)
    strict = options(
        strict=True,
        callables=(*rl.CALLABLES, *weights.CALLABLES, *own),  # type: ignore[arg-type]
    )
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=strict) as group:
        yield group


def test_other_functions_methods_and_values(group: Cluster) -> None:
    with pytest.raises(NotAllowed):
        rpc.rpc_sync("worker0", functions.identity, (1,))
    with pytest.raises(NotAllowed):
        rpc.rpc_sync("worker0", rl_functions.change_program)
    buffer = rpc.remote("worker0", ReplayBuffer, (10,))
    with pytest.raises(NotAllowed, match="declares no such method"):
        buffer.rpc_sync().load_state_dict({})
    with pytest.raises(NotAllowed, match="declares no such method"):
        buffer.rpc_sync()._serials(torch.arange(2).numpy())
    with pytest.raises((TypeError, RemoteError), match="environments of a call"):
        rpc.rpc_sync("worker0", Observer, (0, {"make": "CartPole-v1"}, None))
