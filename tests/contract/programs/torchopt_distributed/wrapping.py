"""Functions that run on all workers whenever they are called, by decorators."""

import json
from types import SimpleNamespace

import torch
from maml import build_dataloader, build_model, inner_loss_fn, step

import torchweft.mapreduce as todist
import torchweft.mapreduce as torchopt


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def distributed_data_parallelism(model, batch, args):
    loss = args.weight * inner_loss_fn(model, batch)
    return loss


@todist.parallelize(
    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
    reducer=todist.mean_reducer,
)
def inner_loop(model, batch, args):
    task_batch = batch
    inner_model = torchopt.module_clone(model, by="reference", detach_buffers=True)

    step(inner_model, inner_loss_fn(inner_model, batch), args.inner_lr)

    outer_loss = inner_loss_fn(inner_model, task_batch)
    return outer_loss


@todist.rank_zero_only
def train(args):
    model, dataloader, losses = build_model(), build_dataloader(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        for batch in dataloader:
            with todist.autograd.context() as context_id:
                outer_loss = inner_loop(model, batch, args)
                loss = outer_loss + distributed_data_parallelism(model, batch[0], args)
                optimizer.zero_grad()
                todist.autograd.backward(context_id, loss)
                optimizer.step()
            losses.append([epoch, outer_loss.item(), loss.item()])
    print(json.dumps({"program": "wrapping", "losses": losses}))


args = SimpleNamespace(epochs=2, inner_lr=0.1, lr=0.05, weight=0.5)


@todist.auto_init_rpc()
def main():
    train(args)


if __name__ == "__main__":
    main()
