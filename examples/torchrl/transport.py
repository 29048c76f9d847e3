"""A transport of torchrl's inference server: collectors on other workers ask by remote calls."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.modules.inference_server import InferenceClient, ThreadingTransport

from torchweft import rpc
from torchweft.rpc.functions import async_execution


class Answering:
    """Lets other workers submit requests to a transport of this worker."""

    @async_execution
    def ask(self, request: TensorDictBase, **options: Any) -> torch.futures.Future[TensorDictBase]:
        """Answers a call of another worker when the server has; no thread waits for it."""
        answer: torch.futures.Future[TensorDictBase] = torch.futures.Future()
        transport: Any = self
        submitted = transport.submit(request, **options)
        submitted.add_done_callback(lambda done: settle(answer, done))
        return answer


class WeftTransport(Answering, ThreadingTransport):
    """Requests of this and of other workers, which the server answers in batches.

    It is made on the server's worker, which must be in a group. A client may be passed to any
    worker as an argument of a call.
    """

    def client(self) -> InferenceClient:
        return InferenceClient(Asking(rpc.RRef(self)))


class Asking:
    """A client's side of the transport: a reference, so it may travel."""

    supports_metadata = True

    def __init__(self, transport: rpc.RRef[Any]) -> None:
        self._transport = transport

    def submit(self, request: TensorDictBase, **options: Any) -> Future[TensorDictBase]:
        answer: Future[TensorDictBase] = Future()
        call = self._transport.rpc_async().ask(request, **options)
        call.add_done_callback(lambda done: settle(answer, done))
        return answer


def settle(answer: Any, done: Any) -> None:
    """Passes on a result or an error between futures of PyTorch and of Python."""
    try:
        result = done.result() if isinstance(done, Future) else done.value()
    except Exception as error:
        answer.set_exception(error)
    else:
        answer.set_result(result)
