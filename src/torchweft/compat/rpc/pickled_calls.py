"""Makes calls whose function and arguments are pickled by a program's own pickler.

The pickler's bytes and tensors travel as the arguments of a function of this module, which
unpickles and runs the call on the other side. Results travel as usual, as they do in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CoroutineType
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from torchweft.autograd.contexts import current_id
from torchweft.compat.rpc.internal import PythonUDF, deserialize, references_beside
from torchweft.errors import CallCancelled, NotAllowed
from torchweft.rpc.functions import async_execution, is_async_execution
from torchweft.rpc.worker import current_worker


def pickled_call(
    pickler: Any, function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], None]:
    """Returns a function and arguments that replace those of a call.

    Args:
        pickler: Has a ``serialize`` whose bytes ``internal.deserialize`` can read.
        function: The function to run on the other worker.
        args: Its positional arguments, or None.
        kwargs: Its keyword arguments, or None.
    """
    references: list[Any] = []
    with references_beside(references):
        binary, tensors = pickler.serialize(PythonUDF(function, tuple(args or ()), kwargs or {}))
    return run_pickled, (binary, list(tensors), references), None


@async_execution
def run_pickled(binary: bytes, tensors: Sequence[Tensor], references: list[Any]) -> Future[Any]:
    """Runs the call that ``pickled_call`` wrapped; returns a future of its result."""
    worker = current_worker()
    if worker.reader.is_restricted:
        name = worker.agent.info.name
        raise NotAllowed(
            f"worker {name!r} restricts what it reads, and the pickles of a program's own pickler "
            "cannot be checked; use the default one",
            worker=name,
            refused="a pickle of a program's own pickler",
        )
    with references_beside(references):
        call = deserialize(binary, tensors)
    result = call.func(*call.args, **call.kwargs)
    if is_async_execution(call.func):
        return result  # type: ignore[no-any-return]
    done: Future[Any] = torch.futures.Future()
    if not isinstance(result, CoroutineType):
        done.set_result(result)
        return done

    def finish(value: Any, error: BaseException | None) -> None:
        if error is None:
            done.set_result(value)
        elif isinstance(error, Exception):
            done.set_exception(error)
        else:  # A future takes no other kind: the coroutine was cancelled.
            done.set_exception(CallCancelled(f"the coroutine ended with {error!r}"))

    worker.coroutines.run(result, current_id(), finish)
    return done
