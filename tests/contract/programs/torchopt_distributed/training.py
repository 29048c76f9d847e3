"""Rank 0 has the losses of batches computed by all workers, and alone logs and saves."""

import json
from types import SimpleNamespace

import torch
from torch import nn

import torchweft.mapreduce as todist

args = SimpleNamespace(epochs=4, log_interval=2, save_interval=3)
writer, saved = [], []
torch.manual_seed(0)
model = nn.Linear(3, 1)
dataloader = torch.randn(2, 5, 3).unbind()


@todist.rank_non_zero_only
def greet():
    print(f"Greetings from worker(rank={todist.get_rank()})!")


@todist.rank_zero_only
def save_checkpoint(model):
    saved.append(model.weight.tolist())


@todist.rank_zero_only
def log_results(writer, results):
    writer.append(results)


def loss_fn(model, batch):
    return model(batch).pow(2).mean()


@todist.rank_zero_only
def train(args):
    losses = []
    for epoch in range(args.epochs):
        for batch in dataloader:
            loss = todist.remote_sync_call(
                loss_fn,
                args=(model, batch * epoch),
                partitioner=todist.batch_partitioner,
                reducer=todist.mean_reducer,
            )
            losses.append(loss.item())
    return losses


@todist.auto_init_rpc()
def main():
    greet()
    losses = train(args)
    for epoch in range(args.epochs):
        results = epoch

        if epoch % args.log_interval == 0:
            log_results(writer, results)

        if epoch % args.save_interval == 0:
            save_checkpoint(model)
    answer = {"losses": losses, "logged": writer, "saved": len(saved)}
    print(json.dumps({"program": "training", "rank": todist.get_rank(), **answer}))


if __name__ == "__main__":
    main()
