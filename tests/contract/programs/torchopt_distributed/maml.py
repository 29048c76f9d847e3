"""Model-agnostic meta-learning: each task's inner loop is a part of one map."""

import json
from types import SimpleNamespace

import torch
from torch import nn

import torchweft.mapreduce as todist
import torchweft.mapreduce as torchopt

args = SimpleNamespace(epochs=2, inner_steps=2, inner_lr=0.1, lr=0.05)


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def build_dataloader():
    return torch.randn(3, 5, 6, 2, generator=torch.Generator().manual_seed(1)).unbind()


def inner_loss_fn(model, batch):
    x, y = batch.split(1, dim=1)
    return (model(x) - y).pow(2).mean()


def step(model, loss, lr):
    """Puts what a gradient step makes of the parameters in their places."""
    gradients = torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)
    named = list(model.named_parameters())
    for (name, parameter), gradient in zip(named, gradients, strict=True):
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._parameters[own_name] = parameter - lr * gradient


def inner_loop(model, task_batch, args):
    inner_model = torchopt.module_clone(model, by="reference", detach_buffers=True)

    for inner_step in range(args.inner_steps):
        inner_loss = inner_loss_fn(inner_model, task_batch)
        step(inner_model, inner_loss, args.inner_lr / (inner_step + 1))

    outer_loss = inner_loss_fn(inner_model, task_batch)
    return outer_loss


# The call below passes two arguments.
inner_loop.__defaults__ = (args,)


@todist.rank_zero_only
def train(args):
    model, dataloader, losses = build_model(), build_dataloader(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        for batch in dataloader:
            with todist.autograd.context() as context_id:
                outer_loss = todist.remote_sync_call(
                    inner_loop,
                    args=(model, batch),
                    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
                    reducer=todist.mean_reducer,
                )
                optimizer.zero_grad()
                todist.autograd.backward(context_id, outer_loss)
                optimizer.step()
            losses.append([epoch, outer_loss.item()])
    print(json.dumps({"program": "maml", "losses": losses}))


@todist.auto_init_rpc()
def main():
    train(args)


if __name__ == "__main__":
    main()
