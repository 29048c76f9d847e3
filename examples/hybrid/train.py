"""Trains an embedding on a parameter server, and a layer that two trainers replicate by DDP.

    python examples/hybrid/train.py --epochs 30

Four processes, as in PyTorch's tutorial on combining DDP with RPC: two trainers, a master and a
parameter server. The master makes the embedding on the server, and has both trainers train.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from torchweft import autograd, rpc
from torchweft.hybrid import init_process_group
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer

N_EMBEDDINGS, DIMENSION, N_CLASSES = 100, 16, 8
TRAINERS, MASTER, SERVER = ["trainer0", "trainer1"], "master", "ps"
BATCHES = 10


class HybridModel(nn.Module):
    """The embedding on the server, and a layer under DDP.

    Args:
        embedding: The remote module with the embedding.
        device: Where the layer is.
    """

    def __init__(self, embedding: RemoteModule, device: torch.device) -> None:
        super().__init__()
        self.embedding = embedding
        self.device = device
        self.layer = DistributedDataParallel(nn.Linear(DIMENSION, N_CLASSES).to(device))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """Looks up bags on the server, and classifies them here."""
        found = self.embedding.forward(indices, offsets)
        logits: Tensor = self.layer(found.to(self.device))
        return logits


def batches(numbers: random.Random) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields bags of 1 to 10 indices; those of a bag are of one class, which is to be learned."""
    for _ in range(BATCHES):
        indices: list[int] = []
        offsets, classes = [], []
        for _ in range(8):
            offsets.append(len(indices))
            classes.append(numbers.randrange(N_CLASSES))
            of_class = range(classes[-1], N_EMBEDDINGS, N_CLASSES)
            indices += numbers.choices(of_class, k=numbers.randint(1, 10))
        yield torch.tensor(indices), torch.tensor(offsets), torch.tensor(classes)


def run_trainer(embedding: RemoteModule, rank: int, epochs: int) -> tuple[str, list[float]]:
    """Trains on a trainer; the master calls it. Returns the back end and the loss of each epoch."""
    choice = init_process_group(TRAINERS)
    torch.manual_seed(rank)
    device = torch.device("cuda" if choice.backend == "nccl" else "cpu")
    model = HybridModel(embedding, device)
    # The parameters of the remote module are on the server: references lead to all of them.
    references = [
        *embedding.remote_parameters(),
        *(rpc.RRef(parameter) for parameter in model.layer.parameters()),
    ]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
    criterion = nn.CrossEntropyLoss()
    numbers = random.Random(rank)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for indices, offsets, target in batches(numbers):
            with autograd.context() as context_id:
                loss = criterion(model(indices, offsets), target.to(device))
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
                # Each context has gradients of its own, so there are none to set to zero.
            total += loss.item()
        losses.append(total / BATCHES)
    del model
    distributed.destroy_process_group()
    return str(choice), losses


def run_master(epochs: int, folder: Path | None) -> None:
    """Makes the embedding, has the trainers train, and shows what came out."""
    embedding = RemoteModule(
        SERVER, nn.EmbeddingBag, args=(N_EMBEDDINGS, DIMENSION), kwargs={"mode": "sum"}
    )
    start_s = time.perf_counter()
    calls = [
        rpc.rpc_async(name, run_trainer, args=(embedding, rank, epochs), timeout=0)
        for rank, name in enumerate(TRAINERS)
    ]
    (choice, first), (_, second) = [call.wait() for call in calls]
    elapsed_s = time.perf_counter() - start_s
    losses = [sum(pair) / 2 for pair in zip(first, second, strict=True)]
    print(f"process group: {choice}")
    for epoch in sorted({0, epochs // 4, epochs // 2, epochs - 1}):
        print(f"epoch {epoch + 1}: loss {losses[epoch]:.3f}")
    steps = epochs * BATCHES
    print(f"{steps} steps of {len(TRAINERS)} trainers in {elapsed_s:.1f} s")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        figures: dict[str, Any] = {"losses": losses, "steps": steps, "elapsed_s": elapsed_s}
        (folder / "figures.json").write_text(json.dumps({**figures, "process_group": choice}))


def run_worker(rank: int, epochs: int, port: int, folder: Path | None) -> None:
    """Runs one of the four processes."""
    name = [*TRAINERS, MASTER, SERVER][rank]
    options = rpc.RpcBackendOptions(init_method=f"tcp://localhost:{port}")
    torch.manual_seed(0)
    rpc.init_rpc(name, rank=rank, world_size=4, rpc_backend_options=options)
    if name == MASTER:
        run_master(epochs, folder)
    # The trainers wait for the master's calls here, and the server for those of all.
    rpc.shutdown()


def main() -> None:
    """Reads the command line, and starts the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="epochs of 10 batches")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write figures.json there")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs is {options.epochs}; it is at least 1")
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    multiprocessing.spawn(run_worker, args=(options.epochs, port, options.out), nprocs=4)


if __name__ == "__main__":
    main()
