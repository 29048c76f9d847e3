"""Questions that are known to have another answer elsewhere; whoever compares knows both."""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from probing.asynchronous import failing_future
from probing.calls import PEER, fill, identity
from probing.errors import OwnError, TwoPartError, raise_it
from probing.registry import failing, probe


def error_of(*arguments, **options):
    try:
        return rpc.rpc_sync(*arguments, **options)
    except Exception as error:
        return error


@probe
def a_tensor_after_a_call_to_oneself_that_changed_it():
    tensor = torch.zeros(2)
    rpc.rpc_sync("worker0", fill, args=(tensor, []))
    return tensor.tolist()


@probe
def gradients_of_a_call_under_no_grad():
    x, w = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    with dist_autograd.context() as context_id:
        with torch.no_grad():
            y = rpc.rpc_sync(PEER, torch.mul, args=(x, 2))
        dist_autograd.backward(context_id, [(y * w).sum()])
        gradients = dist_autograd.get_gradients(context_id)
        return [w in gradients, x in gradients]


@probe
def errors_that_are_of_their_own_kind_and_runtime_errors():
    kinds = [KeyError, IndexError, AttributeError, AssertionError, OSError, StopIteration, OwnError]
    errors = [(kind, error_of(PEER, raise_it, args=(kind, "boom"))) for kind in kinds]
    errors.append((TwoPartError, error_of(PEER, raise_it, args=(TwoPartError, 3, "parts"))))
    return {
        kind.__name__: [isinstance(error, kind), isinstance(error, RuntimeError)]
        for kind, error in errors
    }


@probe
def remote_traceback_in_the_text_of_an_error():
    text = str(error_of(PEER, raise_it, args=(ValueError, "boom")))
    return ["On WorkerInfo(id=1, name=worker1)" in text, "in raise_it" in text]


@probe
def text_of_worker_info():
    return str(rpc.get_worker_info(PEER))


@probe
def lambdas():
    result = error_of(PEER, lambda x: x + 1, args=(1,))
    return "refused" if isinstance(result, Exception) else result


@probe
def an_error_set_in_a_future_of_an_asynchronous_function():
    result = rpc.rpc_async(PEER, failing_future, args=("boom",))
    return failing(result.wait)


@probe
def operator_that_gets_what_it_cannot_take():
    return failing(lambda: rpc.rpc_sync(PEER, torch.add, args=("x", 1)))


@probe
def calling_what_cannot_be_called():
    return failing(lambda: rpc.rpc_sync(PEER, "no function"))


@probe
def device_map_of_the_agent():
    agent = rpc._get_current_rpc_agent()
    return dict(agent._get_device_map(agent.get_worker_info(PEER)))


@probe
def a_reference_is_an_rref():
    return isinstance(rpc.remote(PEER, identity, args=(1,)), rpc.RRef)
