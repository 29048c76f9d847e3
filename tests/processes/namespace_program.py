"""One of two workers in network namespaces of their own; prints what rank 0 found out, as JSON."""

from __future__ import annotations

import json
import sys

import torch

from torchweft import rpc
from torchweft.agent.current import current
from torchweft.agent.data_connections import DataConnections
from torchweft.channel.table import STRIPED
from torchweft.rpc.worker import Worker

SIZES = [1, 1 << 16, (1 << 19) + 1, 5 << 20, (64 << 20) + 3]


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def call_all() -> dict[str, object]:
    peer = current().peers[1]
    rpc.rpc_sync(1, double, args=(torch.ones(1),))
    # Large tensors follow their messages until the other side has said what it can receive.
    while peer.channels.channel_for(SIZES[-1]) != STRIPED:
        rpc.rpc_sync(1, double, args=(torch.ones(1),))
    wrong = []
    for size_bytes in SIZES:
        sent = (torch.arange(size_bytes, dtype=torch.int32) % 100).to(torch.uint8)
        if not torch.equal(rpc.rpc_sync(1, double, args=(sent,)), sent * 2):
            wrong.append(size_bytes)
    source = current().part(Worker).parcels.sources[STRIPED]
    assert isinstance(source, DataConnections)
    assert peer.link is not None
    data = source._of(peer)
    assert data.sending is not None
    return {
        "wrong": wrong,
        "way": peer.channels.channel_for(SIZES[-1]).name,
        "family": peer.link._socket.family.name,
        "data families": [sending._socket.family.name for sending in data.sending.connections],
        "received": data.arrivals.bytes_received,
    }


def main() -> None:
    rank, store, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    options = rpc.RpcBackendOptions(
        init_method=f"file://{store}", listen=address, rpc_timeout=30, init_timeout=30
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    found = call_all() if rank == 0 else {}
    rpc.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
