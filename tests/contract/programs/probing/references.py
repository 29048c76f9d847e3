"""References: who owns them, what can be done with them, where they may be put."""

import pickle
import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.rpc import RRef

from probing.calls import PEER, Adder, identity
from probing.registry import failing, probe


class Counter:
    def __init__(self):
        self.count = 0
        self.lock = threading.Lock()

    def add(self, number=1, *, times=1):
        with self.lock:
            self.count += number * times
        return self.count

    def me(self):
        return RRef(self)

    @staticmethod
    def static(number):
        return -number

    @classmethod
    def of_class(cls):
        return cls.__name__

    def __len__(self):
        return self.count

    def __getitem__(self, key):
        return [self.count, key]


class Holder(nn.Module):
    """A module with references among its attributes, which travels."""

    def __init__(self, references):
        super().__init__()
        self.references = references
        self.linear = nn.Linear(2, 2)

    def forward(self):
        return [reference.rpc_sync().add() for reference in self.references]


class Lazy:
    """Makes a reference of itself the moment that it is pickled."""

    def __init__(self, value):
        self.value = value

    def __getstate__(self):
        if not isinstance(self.value, RRef):
            self.value = RRef(self.value)
        return self.__dict__


def look_at(reference):
    return [
        reference.is_owner(),
        reference.owner_name(),
        reference.owner().id,
        isinstance(reference, rpc.PyRRef),
        type(reference.local_value()).__name__ if reference.is_owner() else None,
    ]


def hold(module):
    return module()


def add_through(reference, number):
    return reference.rpc_sync().add(number)


def open_lazy(lazy):
    return lazy.value.to_here().tolist()


def annotated(reference: "RRef[Counter]") -> "RRef[torch.Tensor]":
    return RRef(torch.ones(1) * len(reference.local_value()))


@probe
def what_a_reference_says():
    remote, own = rpc.remote(PEER, Counter), RRef(Counter())
    remote.rpc_sync().add(2)
    return [
        look_at(remote),
        look_at(own),
        rpc.rpc_sync(PEER, look_at, args=(remote,)),
        rpc.rpc_sync(PEER, look_at, args=(own,)),
        remote.owner() == rpc.get_worker_info(PEER),
        [str(remote).split("(")[0], str(own).split("(")[0]],
        own.to_here() is own.local_value(),
        isinstance(remote._get_future(), torch._C.Future),
    ]


@probe
def the_three_ways_to_call_on_a_reference():
    counter = rpc.remote(PEER, Counter)
    return [
        counter.rpc_sync().add(),
        counter.rpc_async().add(2, times=3).wait(),
        counter.remote().add(times=2).to_here(),
        counter.rpc_sync(timeout=5).static(4),
        counter.rpc_async(timeout=0).of_class().wait(),
        counter.rpc_sync().__len__(),
        counter.rpc_sync().__getitem__("key"),
        counter.remote(timeout=5).me().to_here().rpc_sync().add(),
        counter.rpc_sync().me().rpc_sync().add(),
        rpc.remote(PEER, Adder, args=(2,)).rpc_sync().__call__(1, scale=3),
        rpc.remote(PEER, identity, args=(torch.ones(2),)).rpc_sync().add(1).tolist(),
        rpc.remote(PEER, identity, args=({"a": 1},)).rpc_sync().get("a"),
    ]


@probe
def references_travel():
    mine, theirs = RRef(Counter()), rpc.remote(PEER, Counter)
    module = Holder([mine, theirs])
    back = rpc.rpc_sync(PEER, identity, args=({"deep": [theirs, (mine,)]},))
    return [
        rpc.rpc_sync(PEER, hold, args=(module,)),
        rpc.rpc_sync(PEER, add_through, args=(mine, 5)),
        rpc.rpc_sync(PEER, add_through, args=(theirs, 5)),
        back["deep"][1][0].local_value() is mine.local_value(),
        back["deep"][0].is_owner(),
        rpc.remote(PEER, RRef, args=(torch.ones(2),)).to_here().to_here().tolist(),
        rpc.rpc_sync(PEER, open_lazy, args=(Lazy(torch.ones(2)),)),
        rpc.rpc_sync(PEER, annotated, args=(theirs,)).to_here().item(),
        list(module.state_dict()),
        len({mine, theirs, mine}),
        RRef[torch.Tensor] is not None,
        RRef(torch.ones(1), type_hint=None).local_value().item(),
    ]


@probe
def references_that_may_not_leave():
    reference = rpc.remote(PEER, Counter)
    return [
        failing(lambda: pickle.dumps(reference)),
        failing(lambda: rpc.rpc_sync(PEER, reference.local_value)),
        failing(lambda: RRef()),
    ]


@probe
def futures():
    seen = threading.Event()
    future = rpc.rpc_async(PEER, identity, args=(4,))
    future.add_done_callback(lambda done: seen.set())
    chained = future.then(lambda done: done.wait() + 1).then(lambda done: done.value() * 2)
    collected = torch.futures.collect_all(
        [rpc.rpc_async(PEER, identity, args=(i,)) for i in (1, 2)]
    )
    inside = future.then(lambda done: rpc.rpc_sync(PEER, identity, args=(done.wait(),)))
    return [
        isinstance(future, torch._C.Future),
        [chained.wait(), chained.done(), future.value(), seen.wait(5)],
        [done.wait() for done in collected.wait()],
        torch.futures.wait_all([future, chained]),
        inside.wait(),
    ]
