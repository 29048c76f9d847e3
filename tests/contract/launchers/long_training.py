"""Trains for some steps, of which the last life of the program does only those that remain."""

from __future__ import annotations

import logging
import sys
import time

import torch

from torchweft import checkpoint, rpc

logging.basicConfig(level=logging.WARNING, format="%(message)s")
logging.getLogger("torchweft").setLevel(logging.INFO)
steps, directory = int(sys.argv[1]), sys.argv[2]
rpc.init_rpc()
if rpc.get_worker_info().id == 0:
    torch.manual_seed(0)
    state = {"steps": [], "total": torch.zeros(3)}
    for step in checkpoint.resumable(steps, directory, state, every=10 * steps):
        time.sleep(0.05)  # A step takes time, so that the training can be interrupted.
        state["steps"].append(step)
        state["total"] += torch.rand(3)
        print("step", step, flush=True)
    torch.save(state, f"{directory}/result.pt")
rpc.shutdown()
