"""Joins as its launcher says, calls its neighbour, and prints what it found."""

from __future__ import annotations

import logging

import torch

from torchweft import rpc

logging.basicConfig(level=logging.WARNING, format="%(message)s")
logging.getLogger("torchweft").setLevel(logging.INFO)
rpc.init_rpc()
me, workers = rpc.get_worker_info(), rpc.get_worker_infos()
total = rpc.rpc_sync((me.id + 1) % len(workers), torch.add, args=(torch.ones(2), me.id))
# In one write: the workers may share a pipe, and one that is ended may be ended between two.
print(f"joined {me.name} of {len(workers)} {total.tolist()}\n", end="", flush=True)
rpc.shutdown()
