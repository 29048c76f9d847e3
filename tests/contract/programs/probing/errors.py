"""Errors of calls, and what is refused."""

import torch
import torch.distributed.rpc as rpc

from probing.calls import PEER, Adder, identity
from probing.registry import failing, probe


class TwoPartError(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code


class OwnError(ValueError):
    pass


def raise_it(kind, *args):
    raise kind(*args)


def raise_from():
    try:
        raise KeyError("first")
    except KeyError as error:
        raise OwnError("second") from error


def count_up():
    yield 1


@probe
def errors_keep_their_kind():
    kinds = [ValueError, TypeError, RuntimeError, NotImplementedError, torch.OutOfMemoryError]
    raised = [
        failing(lambda kind=kind: rpc.rpc_sync(PEER, raise_it, args=(kind, "boom")), "boom")
        for kind in kinds
    ]
    return [
        raised,
        failing(lambda: rpc.rpc_sync(PEER, raise_it, args=(ValueError, "a", 2)), "a"),
        failing(lambda: rpc.rpc_sync(PEER, raise_from), "second"),
        failing(lambda: rpc.rpc_sync("worker0", raise_it, args=(OwnError, "mine")), "mine"),
    ]


@probe
def errors_of_futures_and_references():
    failed = rpc.remote(PEER, raise_it, args=(ValueError, "boom"))
    future = rpc.rpc_async(PEER, raise_it, args=(ValueError, "boom"))
    both = [rpc.rpc_async(PEER, identity, args=(1,)), future]
    return [
        failing(failed.to_here, "boom"),
        failing(failed.rpc_sync().anything),
        failing(lambda: rpc.rpc_sync(PEER, identity, args=(failed,)).to_here(), "boom"),
        failing(future.wait, "boom"),
        failing(future.value, "boom"),
        failing(lambda: torch.futures.wait_all(both), "boom"),
        failing(lambda: torch.futures.collect_all(both).wait()[1].wait(), "boom"),
        failing(lambda: future.then(lambda done: done.wait()).wait(), "boom"),
        failing(lambda: both[0].then(lambda done: raise_it(OwnError, "late")).wait(), "late"),
        rpc.rpc_sync(PEER, identity, args=("still there",)),
    ]


@probe
def refused_results_and_arguments():
    reference = rpc.remote(PEER, Adder, args=(1,))
    return [
        failing(lambda: rpc.rpc_sync(PEER, count_up)),
        failing(lambda: rpc.rpc_sync(PEER, identity, args=(count_up(),))),
        failing(lambda: reference.rpc_sync().missing(), "missing"),
        failing(reference.local_value),
        rpc.rpc_sync(PEER, identity, args=("still there",)),
    ]


@probe
def options_that_are_refused():
    return [
        failing(lambda: rpc.TensorPipeRpcBackendOptions(16)),
    ]
