"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import pytest
import torch

from tests.contract.processes import functions, rl_functions
from torchweft import rpc
from torchweft.errors import NotAllowed, RemoteError
from torchweft.launch import Cluster
from torchweft.rl import (
    Observer,
    ReplayBuffer,
)

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")


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
