"""What can be called, with what arguments, and what comes back."""

import builtins
import collections
import dataclasses
import enum
import functools
import operator
import threading
import time

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch import nn

from probing.registry import failing, probe

PEER = "worker1"


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    name: str
    values: torch.Tensor
    nested: dict = dataclasses.field(default_factory=dict)


class Adder:
    step = 10

    def __init__(self, base):
        self.base = base

    def __call__(self, x, *, scale=1):
        return (self.base + x) * scale

    def add(self, x):
        return self.base + x

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def of_class(cls, x):
        return cls.step + x


def echo(*args, **kwargs):
    return args, kwargs


def keywords_only(*, a, b=2):
    return a * b


def doubled(function):
    @functools.wraps(function)
    def twice(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return twice


@doubled
def wrapped(x):
    return x + 1


def identity(x):
    return x


def describe(tensor):
    return [
        type(tensor).__name__,
        list(tensor.shape),
        list(tensor.stride()) if tensor.layout is torch.strided else str(tensor.layout),
        str(tensor.dtype),
        tensor.requires_grad,
        tensor.is_leaf,
        (tensor.to_dense() if tensor.is_sparse else tensor)
        .detach()
        .to(torch.complex128)
        .sum()
        .real.item(),
    ]


@probe
def callables():
    return [
        rpc.rpc_sync(PEER, torch.add, args=(torch.ones(2), 1)).tolist(),
        rpc.rpc_sync(PEER, torch.add, args=(torch.ones(2), 1), kwargs={"alpha": 3}).tolist(),
        rpc.rpc_sync(PEER, torch.nn.functional.relu, args=(torch.tensor([-1.0, 2.0]),)).tolist(),
        rpc.rpc_sync(PEER, torch.Tensor.sum, args=(torch.ones(3),)).item(),
        rpc.rpc_sync(PEER, operator.mul, args=(6, 7)),
        rpc.rpc_sync(PEER, len, args=([1, 2],)),
        rpc.rpc_sync(PEER, sorted, args=([3, 1],), kwargs={"reverse": True}),
        rpc.rpc_sync(PEER, "abc".upper),
        rpc.rpc_sync(PEER, builtins.getattr, args=(Adder(1), "base")),
        rpc.rpc_sync(PEER, functools.partial(operator.sub, 10), args=(3,)),
        rpc.rpc_sync(PEER, Adder(5), args=(1,), kwargs={"scale": 2}),
        rpc.rpc_sync(PEER, Adder(5).add, args=(1,)),
        rpc.rpc_sync(PEER, Adder.static, args=(1,)),
        rpc.rpc_sync(PEER, Adder.of_class, args=(1,)),
        rpc.rpc_sync(PEER, Adder, args=(3,)).base,
        rpc.rpc_sync(PEER, wrapped, args=(3,)),
        rpc.rpc_sync(to=PEER, func=keywords_only, kwargs={"a": 4}),
        list(rpc.rpc_sync(PEER, nn.Linear, args=(2, 3)).weight.shape),
    ]


@probe
def forms_of_arguments():
    return [
        rpc.rpc_sync(PEER, echo),
        rpc.rpc_sync(PEER, echo, args=None, kwargs=None),
        rpc.rpc_sync(PEER, echo, args=[1, [2]], kwargs={}),
        rpc.rpc_sync(PEER, echo, (1,), {"k": None}),
        rpc.rpc_async(PEER, echo, (1,), {"k": None}, 5).wait(),
        rpc.remote(PEER, echo, (1,), {"k": None}, 5).to_here(),
        failing(lambda: rpc.rpc_sync(PEER, keywords_only, args=(1,)), "keywords_only"),
    ]


@probe
def names_of_workers():
    info = rpc.get_worker_info(PEER)
    return [
        rpc.rpc_sync(info, operator.add, args=(1, 1)),
        rpc.rpc_sync(1, operator.add, args=(1, 1)),
        rpc.remote(1, operator.add, args=(1, 1)).owner().name,
        [info.name, info.id, rpc.get_worker_info().name, rpc.get_worker_info().id],
        info == rpc.rpc_sync(PEER, rpc.get_worker_info),
        rpc.rpc_sync(PEER, identity, args=(info,)) == info,
        rpc.rpc_sync(PEER, identity, args=([info],))[0].name,
        info in {rpc.get_worker_info(PEER): 1},
        isinstance(info, rpc.WorkerInfo),
        failing(lambda: rpc.get_worker_info("nobody"), "nobody"),
        failing(lambda: rpc.rpc_sync("nobody", echo), "nobody"),
        failing(lambda: rpc.rpc_sync(7, echo)),
        failing(lambda: rpc.rpc_sync(None, echo)),
        failing(lambda: rpc.remote("nobody", echo), "nobody"),
    ]


@probe
def objects_keep_their_kind():
    values = [None, True, 2**80, 1.5, float("inf"), 1j, "ü", b"\0", (1,), [2], {3}, {4: (5,)}]
    values += [frozenset([1]), slice(1, 2), range(3), Color.RED, Point(1, 2), Ellipsis, int]
    values += [collections.OrderedDict(a=1), torch.float16, torch.device("cpu"), torch.Size([2])]
    back = rpc.rpc_sync(PEER, identity, args=(values,))
    record = rpc.rpc_sync(
        PEER, identity, args=(Record("r", torch.ones(2), {"a": [torch.ones(1)]}),)
    )
    array = rpc.rpc_sync(PEER, identity, args=(np.arange(6).reshape(2, 3)[:, ::2],))
    counts = rpc.rpc_sync(PEER, identity, args=(collections.defaultdict(list, a=[1]),))
    return [
        [type(value).__name__ for value in back],
        back == values,
        [type(record).__name__, record.values.tolist(), record.nested["a"][0].item()],
        [array.tolist(), str(array.dtype)],
        [counts["a"], counts["b"]],
        type(rpc.rpc_sync(PEER, identity, args=(nn.Sequential(nn.Linear(1, 1)),))).__name__,
    ]


@probe
def tensors_keep_their_form():
    tensors = [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[3:7],
        torch.ones(2, 0),
        torch.tensor(3),
        torch.tensor([True]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(1).expand(3),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(1, 2, 3, 3).contiguous(memory_format=torch.channels_last),
        torch.eye(3).to_sparse(),
    ]
    return [
        [describe(rpc.rpc_sync(PEER, identity, args=(tensor,))) for tensor in tensors],
        rpc.rpc_sync(PEER, describe, args=(nn.Parameter(torch.ones(2)),)),
        rpc.rpc_sync(PEER, describe, args=(torch.ones(2, requires_grad=True) * 2,)),
        describe(rpc.rpc_sync(PEER, torch.mul, args=(torch.ones(2, requires_grad=True), 2))),
    ]


def compare_identity(a, b, views):
    views[0].fill_(7)
    return [a is b, bool((views[1] == 7).all()), a.data_ptr() == b.data_ptr()]


@probe
def the_same_tensor_twice():
    whole = torch.zeros(4)
    same = rpc.rpc_sync(PEER, compare_identity, args=(whole, whole, [whole, whole.view(2, 2)]))
    shared = {}
    pair = rpc.rpc_sync(PEER, identity, args=([shared, shared],))
    return [same, whole.tolist(), pair[0] is pair[1]]


def fill(tensor, values):
    tensor.fill_(3)
    values.append(1)
    return tensor


@probe
def arguments_are_copies():
    tensor, values = torch.zeros(2), []
    remotely = rpc.rpc_sync(PEER, fill, args=(tensor, values)).tolist()
    mine = rpc.rpc_sync("worker0", fill, args=(tensor.clone(), values)).tolist()
    return [remotely, mine, tensor.tolist(), values]


@probe
def large_tensors():
    large = torch.arange(8 << 20, dtype=torch.float32)
    back = rpc.rpc_sync(PEER, torch.mul, args=(large, 2))
    many = rpc.rpc_sync(PEER, identity, args=([torch.full((10,), float(i)) for i in range(300)],))
    text = rpc.rpc_sync(PEER, identity, args=("x" * (5 << 20),))
    return [torch.equal(back, large * 2), sum(t.sum().item() for t in many), len(text)]


def slow(seconds):
    time.sleep(seconds)
    return seconds


@probe
def timeouts():
    text = "RPC ran for more than"
    return [
        failing(lambda: rpc.rpc_sync(PEER, slow, args=(0.6,), timeout=0.15), text),
        failing(lambda: rpc.rpc_async(PEER, slow, args=(0.6,), timeout=0.15).wait(), text),
        failing(lambda: rpc.remote(PEER, slow, args=(0.6,)).to_here(timeout=0.1)),
        rpc.rpc_sync(PEER, slow, args=(0.01,), timeout=0),
        rpc.get_rpc_timeout(),
    ]


def call_back(depth):
    name = rpc.get_worker_info().name
    other = "worker0" if name == "worker1" else "worker1"
    return [name, *rpc.rpc_sync(other, call_back, args=(depth - 1,))] if depth else [name]


@probe
def nested_calls_and_threads():
    sums = [0] * 8

    def work(number):
        for step in range(5):
            sums[number] += rpc.rpc_sync(PEER, operator.add, args=(number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rpc.rpc_sync(PEER, call_back, args=(5,)), sums]
