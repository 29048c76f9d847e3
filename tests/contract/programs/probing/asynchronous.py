"""Functions that answer with a future."""

import torch
import torch.distributed.rpc as rpc

from probing.calls import PEER, identity
from probing.registry import failing, probe


@rpc.functions.async_execution
def add_over(to, x, y):
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda done: done.wait() + 10)


@rpc.functions.async_execution
def gather_over(names, x):
    futures = [rpc.rpc_async(name, torch.mul, args=(x, 2)) for name in names]
    total = torch.futures.Future()
    torch.futures.collect_all(futures).then(
        lambda done: total.set_result(sum(each.wait() for each in done.wait()))
    )
    return total


@rpc.functions.async_execution
def no_future(x):
    return x


@rpc.functions.async_execution
def raising(x):
    raise ValueError(x)


@rpc.functions.async_execution
def failing_future(x):
    future = torch.futures.Future()
    future.set_exception(ValueError(x))
    return future


@rpc.functions.async_execution
def failing_callback(to, text):
    def fail(done):
        raise KeyError(text)

    return rpc.rpc_async(to, identity, args=(1,)).then(fail)


class Service:
    @staticmethod
    @rpc.functions.async_execution
    def static(to, x):
        return rpc.rpc_async(to, torch.add, args=(x, 1))

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, to, x):
        return rpc.rpc_async(to, torch.add, args=(x, 2))

    @rpc.functions.async_execution
    def bound(self, to, x):
        return rpc.rpc_async(to, torch.add, args=(x, 3))


@probe
def async_execution_in_all_modes():
    one = torch.ones(1)
    service = rpc.remote(PEER, Service)
    return [
        rpc.rpc_sync(PEER, add_over, args=("worker0", one, 1)).item(),
        rpc.rpc_async(PEER, add_over, args=("worker1", one, 1)).wait().item(),
        rpc.remote(PEER, add_over, args=("worker0", one, 1)).to_here().item(),
        rpc.rpc_sync("worker0", add_over, args=(PEER, one, 1)).item(),
        rpc.rpc_sync(PEER, gather_over, args=(["worker0", "worker1"], one)).item(),
        rpc.rpc_sync(PEER, Service.static, args=("worker0", one)).item(),
        rpc.rpc_sync(PEER, Service.of_class, args=("worker0", one)).item(),
        service.rpc_sync().static("worker0", one).item(),
        service.rpc_async().of_class("worker0", one).wait().item(),
        service.remote().bound("worker0", one).to_here().item(),
        service.rpc_sync().bound("worker1", one).item(),
        isinstance(no_future(1), int),
    ]


@probe
def async_execution_that_fails():
    return [
        failing(lambda: rpc.rpc_sync(PEER, no_future, args=(1,)), "torch.futures.Future object"),
        failing(lambda: rpc.rpc_sync(PEER, raising, args=("boom",)), "boom"),
        failing(lambda: rpc.rpc_sync(PEER, failing_callback, args=("worker0", "boom")), "boom"),
    ]
