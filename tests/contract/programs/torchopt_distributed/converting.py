"""A whole training program, converted from one for a single process."""

import argparse
import json
from types import SimpleNamespace

import torch.nn as nn
import without_gpu

import torchweft.mapreduce as todist

torch = without_gpu.TorchOnCpu()
titles = []
setproctitle = SimpleNamespace(setproctitle=titles.append)


def parse_arguments():
    parser = argparse.ArgumentParser(description="TorchOpt Distributed Training")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    return args


# Functions below need it before main has set its own.
args = parse_arguments()


def worker_init_fn():
    setproctitle.setproctitle(f"Worker{todist.get_rank()}")
    torch.manual_seed(args.seed + todist.get_rank())


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def compute_loss(model, batch):
    device = torch.device(f"cuda:{todist.get_local_rank()}")
    model = model.to(device)
    batch = batch.to(device)

    loss = model(batch[:, :2]).sub(batch[:, 2:]).pow(2).mean()
    return loss.cpu()


def build_model():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


@todist.rank_zero_only
def train(args):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    train_loader = torch.randn(3, 7, 3).unbind()
    losses = []

    for epoch in range(args.epochs):
        for batch in train_loader:
            with todist.autograd.context() as context_id:
                cloned_model = todist.module_clone(model, by="clone")
                loss = compute_loss(cloned_model, batch)

                optimizer.zero_grad()
                todist.autograd.backward(context_id, loss)

                optimizer.step()
            losses.append([epoch, loss.item()])
    return losses


@todist.auto_init_rpc(worker_init_fn)
def main():
    args = parse_arguments()
    losses = train(args)
    answer = {"program": "converting", "rank": todist.get_rank(), "losses": losses}
    todist.barrier()
    print(json.dumps({**answer, "titles": titles, "devices": sorted(set(torch.asked_for))}))


if __name__ == "__main__":
    main()
