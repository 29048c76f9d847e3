"""A recurrent model on two workers: embedding and decoder on ``ps``, the LSTM at the trainer."""

import json
import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

BATCH, BPTT, TOKENS, INPUTS, HIDDEN, LAYERS = 4, 6, 20, 8, 12, 2


def _call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method, rref, *args, **kwargs):
    arguments = [method, rref, *args]
    return rpc.rpc_sync(rref.owner(), _call_method, args=arguments, kwargs=kwargs)


def _parameter_rrefs(module):
    return [RRef(parameter) for parameter in module.parameters()]


def fill(module, seed):
    """Gives the parameters values that do not depend on what else draws random numbers."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)


class EmbeddingTable(nn.Module):
    def __init__(self, tokens, inputs, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(tokens, inputs)
        fill(self, 1)

    def forward(self, tokens):
        return self.drop(self.encoder(tokens))


class Decoder(nn.Module):
    def __init__(self, tokens, hidden, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(hidden, tokens)
        fill(self, 2)

    def forward(self, output):
        return self.decoder(self.drop(output))


class RNNModel(nn.Module):
    def __init__(self, ps, tokens, inputs, hidden, layers, dropout=0.2):
        super().__init__()
        self.emb_table_rref = rpc.remote(ps, EmbeddingTable, args=(tokens, inputs, dropout))
        self.rnn = nn.LSTM(inputs, hidden, layers, dropout=dropout)
        fill(self.rnn, 3)
        self.decoder_rref = rpc.remote(ps, Decoder, args=(tokens, hidden, dropout))

    def forward(self, tokens, hidden):
        embedded = _remote_method(EmbeddingTable.forward, self.emb_table_rref, tokens)
        output, hidden = self.rnn(embedded, hidden)
        return _remote_method(Decoder.forward, self.decoder_rref, output), hidden

    def parameter_rrefs(self):
        remote_params = []
        remote_params.extend(_remote_method(_parameter_rrefs, self.emb_table_rref))
        remote_params.extend(_parameter_rrefs(self.rnn))
        remote_params.extend(_remote_method(_parameter_rrefs, self.decoder_rref))
        return remote_params


def seed_dropout(seed):
    torch.manual_seed(seed)


def get_batches():
    """Yields counting sequences, so that there is something to learn."""
    for start in range(3):
        tokens = torch.arange(BPTT + 1).unsqueeze(1) + torch.arange(BATCH) * 5 + start
        tokens %= TOKENS
        yield tokens[:-1], tokens[1:]


def _run_trainer():
    hidden = (torch.zeros(LAYERS, BATCH, HIDDEN), torch.zeros(LAYERS, BATCH, HIDDEN))
    model = RNNModel("ps", TOKENS, INPUTS, HIDDEN, LAYERS)
    opt = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.5, momentum=0.5)
    criterion = nn.CrossEntropyLoss()
    seed_dropout(5)
    rpc.rpc_sync("ps", seed_dropout, args=(6,))
    losses = []
    for _ in range(4):
        for data, target in get_batches():
            with dist_autograd.context() as context_id:
                hidden[0].detach_()
                hidden[1].detach_()
                output, hidden = model(data, hidden)
                loss = criterion(output.view(-1, TOKENS), target.reshape(-1))
                dist_autograd.backward(context_id, [loss])
                opt.step(context_id)
                losses.append(loss.item())
    sums = [rref.to_here().detach().double().sum().item() for rref in model.parameter_rrefs()]
    print(json.dumps({"losses": losses, "parameters": sums}))


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "29500")
    if rank == 1:
        rpc.init_rpc("trainer", rank=rank, world_size=world_size)
        _run_trainer()
    else:
        rpc.init_rpc("ps", rank=rank, world_size=world_size)
        # The parameter server answers calls.
    rpc.shutdown()


if __name__ == "__main__":
    world_size = 2
    mp.spawn(run_worker, args=(world_size,), nprocs=world_size, join=True)
