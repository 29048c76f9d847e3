"""Distributed autograd, optimizers and remote modules."""

import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

from probing.calls import PEER, identity
from probing.registry import failing, probe


def make_weight(value):
    return nn.Parameter(torch.full((2,), value))


def gradients_of(context_id, reference):
    gradients = dist_autograd.get_gradients(context_id)
    return gradients[reference.local_value()].tolist()


def times(reference, x):
    return reference.local_value() * x


def there_and_back(x):
    return rpc.rpc_sync("worker0", torch.mul, args=(x, x)) + x


class Redirect(torch.autograd.Function):
    """Calls another worker on its way back."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return rpc.rpc_sync(PEER, torch.mul, args=(grad, 3))


class Doubled(optim.SGD):
    """An optimizer of the program's own."""

    def step(self, closure=None):
        super().step(closure)
        return super().step(closure)


class Scaled(nn.Module):
    def __init__(self, size, *, scale=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size) * scale)
        self.register_buffer("offset", torch.ones(size))

    def forward(self, x, *, plus=0.0):
        return x * self.weight + self.offset + plus

    def norm(self):
        return self.weight.norm().item()


@probe
def gradients_through_calls():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    weight = rpc.remote(PEER, make_weight, args=(3.0,))
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync(PEER, times, args=(weight, rpc.rpc_sync(PEER, there_and_back, args=(x,))))
        z = rpc.remote(PEER, torch.add, args=(y, x)).to_here()
        dist_autograd.backward(context_id, [z.sum(), y.sum()], retain_graph=True)
        first = [dist_autograd.get_gradients(context_id)[x].tolist()]
        first.append(rpc.rpc_sync(PEER, gradients_of, args=(context_id, weight)))
        dist_autograd.backward(context_id, [z.sum()])
        second = dist_autograd.get_gradients(context_id)[x].tolist()
        kinds = [type(context_id).__name__, y.requires_grad, y.is_leaf, x.grad is None]
    return [first, second, kinds, failing(lambda: dist_autograd.get_gradients(context_id))]


@probe
def functions_of_ones_own_and_threads():
    x = torch.ones(2, requires_grad=True)
    found = []

    def train():
        with dist_autograd.context() as context_id:
            y = Redirect.apply(rpc.rpc_sync(PEER, identity, args=(x,)))
            dist_autograd.backward(context_id, [y.sum()])
            found.append(dist_autograd.get_gradients(context_id)[x].tolist())

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def backward_of(roots, context_id=None):
    with dist_autograd.context() as fresh:
        dist_autograd.backward(fresh if context_id is None else context_id, roots)


@probe
def backward_that_is_refused():
    x = torch.ones(2, requires_grad=True)
    return [
        failing(lambda: backward_of([x.sum()], 999), "999"),
        failing(lambda: backward_of([x])),
        failing(lambda: backward_of([torch.ones(1).sum()])),
        failing(lambda: backward_of([])),
        failing(lambda: backward_of(x.sum())),
        failing(lambda: backward_of([rpc.rpc_sync(PEER, torch.add, args=(x, 1)).sum()])),
    ]


@probe
def without_a_context():
    x = torch.ones(2, requires_grad=True)
    y = rpc.rpc_sync(PEER, torch.mul, args=(x, 2))
    with torch.no_grad():
        quiet = rpc.rpc_sync(PEER, torch.mul, args=(x, 2))
    return [[t.requires_grad, t.is_leaf, t.grad_fn is None] for t in (y, quiet)]


@probe
def optimizers():
    results = {}
    for kind, options in [
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (optim.Adam, {"lr": 0.1, "amsgrad": True}),
        (optim.AdamW, {"lr": 0.1}),
        (optim.Adagrad, {"lr": 0.1}),
        (optim.RMSprop, {"lr": 0.1}),
        (optim.Adadelta, {"lr": 0.1}),
        (Doubled, {"lr": 0.1}),
    ]:
        weights = [rpc.remote(PEER, make_weight, args=(3.0,)), RRef(make_weight(2.0))]
        optimizer = DistributedOptimizer(kind, weights, **options)
        for _ in range(3):
            with dist_autograd.context() as context_id:
                loss = rpc.rpc_sync(PEER, times, args=(weights[0], weights[1].local_value() * 1))
                dist_autograd.backward(context_id, [loss.pow(2).sum()])
                optimizer.step(context_id)
        results[kind.__name__] = [weight.to_here().tolist() for weight in weights]
    return results


@probe
def optimizers_that_are_refused():
    weights = [rpc.remote(PEER, make_weight, args=(3.0,))]
    return [
        failing(lambda: DistributedOptimizer(optim.SGD, weights, no_such=1)),
        failing(lambda: DistributedOptimizer(optim.SGD, weights, lr=0.1).step(999)),
    ]


def use_remote_module(module, x):
    return [module.forward(x).tolist(), module.get_module_rref().rpc_sync().norm()]


@probe
def remote_modules():
    module = RemoteModule(f"{PEER}/cpu", Scaled, args=(2,), kwargs={"scale": 2.0})
    by_rank = RemoteModule("rank:1/cpu", Scaled, (2,))
    here = RemoteModule("worker0", Scaled, (2,))
    x = torch.ones(2)
    return [
        module.forward(x).tolist(),
        module(x, plus=1.0).tolist(),
        module.forward_async(x, plus=2.0).wait().tolist(),
        [by_rank(x).tolist(), here(x).tolist()],
        [reference.to_here().tolist() for reference in module.remote_parameters(recurse=True)],
        [module.get_module_rref().owner_name(), str(module.on), str(module.device)],
        rpc.rpc_sync(PEER, use_remote_module, args=(module, x)),
        [isinstance(module, nn.Module), type(module).__name__],
        failing(lambda: list(module.parameters())),
        failing(lambda: module.train() and None),
        failing(module.state_dict),
        failing(lambda: module.cuda()),
        failing(lambda: RemoteModule("nobody/cpu", Scaled, (2,))),
    ]
