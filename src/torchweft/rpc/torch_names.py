"""What private names of ``torch.distributed.rpc`` need of a worker; for ``torchweft.compat`` only.

PyTorch's own tests, and some programs, use names such as ``rpc._get_debug_info`` or the pickler of
calls, for which there is no public API. ``torchweft.compat`` has them, and reaches the engine
through this module alone. All functions but ``open_store`` and ``join`` need a worker.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import _create_store_from_options, rendezvous

from torchweft import knobs
from torchweft.arguments import UNSET_RPC_TIMEOUT
from torchweft.autograd.contexts import Context as Context
from torchweft.autograd.contexts import current_id as current_id
from torchweft.autograd.contexts import set_current_id
from torchweft.autograd.engine import current_engine
from torchweft.autograd.local_pass import enable_zeros
from torchweft.engine.codec.exceptions import as_runtime_error, chain
from torchweft.engine.codec.objects import pack as pack
from torchweft.engine.codec.objects import unpack as unpack
from torchweft.engine.codec.reducers import register_reducer as register_reducer
from torchweft.engine.codec.registry import rebuilds_pickled as rebuilds_pickled
from torchweft.engine.codec.registry import (
    remotely_callable_unless_strict as remotely_callable_unless_strict,
)
from torchweft.engine.codec.tracebacks import places_of, shorten
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.rendezvous import check_answers, why_not_open
from torchweft.engine.worker.rendezvous import open_store as open_own_store
from torchweft.errors import CallError
from torchweft.ids import ReferenceId
from torchweft.rpc.api import RRef
from torchweft.rpc.calls import Future
from torchweft.rpc.calls import RPCExecMode as RPCExecMode
from torchweft.rpc.calls import build_key as build_key
from torchweft.rpc.calls import wait_unseen as wait_unseen
from torchweft.rpc.collective import Limits, current_gatherings, members
from torchweft.rpc.collective import tell as tell
from torchweft.rpc.joining import join_group
from torchweft.rpc.node import current_node
from torchweft.rpc.options import (
    DEFAULT_SHUTDOWN_TIMEOUT,
    TensorPipeRpcBackendOptions,
    from_tensorpipe,
    warn_of_ignored,
)
from torchweft.rpc.options import BackendOptions as BackendOptions
from torchweft.rpc.proxies import Proxy as Proxy
from torchweft.rpc.worker import current_worker

_log = logging.getLogger("torchweft")

# A worker of a program for ``torch.distributed.rpc``

_last_rendezvous: Any = None
"""Keeps the store of the last group alive."""


def open_store(options: BackendOptions, rank: int, world_size: int | None) -> Store:
    """Opens the store of the init method.

    Blocks for other workers as long as PyTorch does, but not for a host that does not answer.

    Raises:
        RendezvousError: The store cannot be reached, or cannot be hosted here.
    """
    global _last_rendezvous
    method, limit_s = options.init_method, knobs.INIT_TIMEOUT_S.get()
    check_answers(method, rank, limit_s)
    began_s = time.monotonic()
    store: Any
    try:
        if world_size:
            _last_rendezvous = rendezvous(method, rank=rank, world_size=world_size)
            store, _, _ = next(_last_rendezvous)
        elif rank >= 0 and urlsplit(method).scheme == "file":
            store = open_own_store(method, rank, None, limit_s)
        else:
            store = _create_store_from_options(options, rank)  # type: ignore[no-untyped-call]
    except DistError as error:
        raise why_not_open(error, method, rank, time.monotonic() - began_s) from error
    return store  # type: ignore[no-any-return]


def join(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    given: TensorPipeRpcBackendOptions,
    reference_type: type[RRef[Any]],
) -> None:
    """Makes this process a worker that treats tensors and errors as PyTorch does. Blocks.

    Args:
        store: Where the workers meet.
        name: Name of this worker.
        rank: Its number.
        world_size: Number of workers; None for a group that workers may join and leave.
        given: PyTorch's options.
        reference_type: The class of the worker's references.
    """
    warn_of_ignored(given, stacklevel=6)  # By init_rpc, the registry and the back-end.
    options = from_tensorpipe(
        given,
        store=store,
        reference_type=reference_type,
        copy_to_self=True,
        lost_gradients="warn",
        unmapped_devices="refuse",
        other_versions="warn",
    )
    enable_zeros()
    try:
        # Whatever size the environment names.
        join_group(name, rank, world_size or None, options)
    except BaseException:
        enable_zeros(False)
        raise
    worker = current_worker()
    worker.on_failure = log_failure
    worker.decoder.as_raised_here = as_runtime_error
    current_node().on_end[enable_zeros] = partial(enable_zeros, False)


def log_failure(caller: Peer, error: BaseException) -> None:
    """Logs the error of a call that ``caller`` made, unless another worker has done so.

    Programs expect the error in the callee's log. Weft itself leaves logging to the caller, which
    gets the error with the callee's traceback.
    """
    if not any(map(places_of, chain(error))):
        shorten(error)
        _log.warning("a call of worker %r failed here", caller.name, exc_info=error)


def leave(timeout: float, *, notes_held: bool) -> list[str]:
    """Blocks until this worker may leave; it goes on as a worker until ``rpc.shutdown``.

    Args:
        timeout: Seconds to wait at most; 0 for no limit.
        notes_held: Whether to describe the references that the program still holds.

    Returns:
        A line for each such reference.

    Raises:
        ShutdownError: Not every worker has taken part; the message says which and why.
    """
    leaving = current_node().leaving
    problem = leaving.wait(timeout, notes_held=notes_held)
    if problem is not None:
        raise problem
    return leaving.held


def set_default_timeout(timeout_s: float) -> None:
    """Sets the default timeout of calls; 0 for no limit."""
    current().default_timeout_s = float(timeout_s) or math.inf


# Information


class DebugInfo(NamedTuple):
    """Numbers of this worker under PyTorch's names, as text.

    Attributes:
        references: References that involve this worker, without values that only it refers to.
        agent: Threads, and calls that are open.
        autograd: Running backward passes, and contexts.
    """

    references: dict[str, str]
    agent: dict[str, str]
    autograd: dict[str, str]


def debug_info() -> DebugInfo:
    """Returns how many references, calls and contexts this worker has now."""
    agent, engine = current(), current_engine()
    reactor, census = agent.reactor, current_worker().references.census()
    references = {
        "num_owner_rrefs": census.shared,
        "num_forks": census.users,
        "num_pending_users": census.unconfirmed,
        "num_pending_children": census.handovers,
        "num_pending_futures": census.unanswered,
    }
    activity = {
        "agent.thread_pool_size": reactor.limit,
        "agent.num_idle_threads": max(reactor.limit - reactor.running, 0),
        "agent.client_active_calls": len(agent.calls),
        "agent.server_active_calls": max(reactor.busy, 0),
    }
    autograd = {
        "num_current_backward_passes": engine.count_passes(),
        "num_autograd_contexts": len(engine.contexts.ids()),
    }
    return DebugInfo(*map(_as_text, (references, activity, autograd)))


def _as_text(numbers: dict[str, int]) -> dict[str, str]:
    return {name: str(number) for name, number in numbers.items()}


def open_callees() -> list[str]:
    """Returns the names of the workers that have not answered calls of this worker."""
    return sorted({call.worker_name for call in current().calls.all()})


# Values behind references, and autograd contexts


def when_made(number: tuple[int, int, int]) -> torch.futures.Future[None]:
    """Returns a future that is done when a value of this worker has been made, or cannot be."""
    made: torch.futures.Future[None] = torch.futures.Future()
    owned = current_worker().references.value_of(ReferenceId(*number), is_use=False)
    owned.when_ready(lambda _: made.set_result(None))
    return made


def find_context(context_id: int) -> Context:
    """Returns an autograd context that is alive here.

    Raises:
        AutogradError: The context is not alive here.
    """
    return current_engine().contexts.get(context_id)


def release_context(context_id: int) -> None:
    """Ends an autograd context that is alive here, on all workers that know it.

    Raises:
        AutogradError: The context is not alive here.
    """
    find_context(context_id)
    current_engine().release(context_id)
    if current_id() == context_id:
        set_current_id(0)


# Gathering, with steps that a program may replace


def gather(
    name: str,
    value: Any,
    workers: Iterable[str] | None,
    timeout: float,
    tell_all: Callable[[Any, dict[str, Any]], None],
) -> dict[str, Any]:
    """Exchanges a value with other workers as ``rpc.all_gather`` does. Blocks.

    Args:
        name: The name of the operation in messages.
        value: The value of this worker.
        workers: The workers that take part; all if there are none.
        timeout: Seconds for each call and for waiting for the others; 0 for no limit. By default
            the worker's limit for each call, and none for waiting.
        tell_all: The function that the leader calls on the others; it calls ``tell``.

    Raises:
        CallError: The values could not be sent to some workers; the message says which.
    """
    agent = current()
    limits = _limits(timeout, agent.default_timeout_s)
    peers = members(agent, workers or None)
    outcome = current_gatherings().gather(value, peers, name, limits, tell_all)
    failed = {}
    for follower, call in outcome.calls.items():
        error = _error_of(call)
        if error is not None:
            failed[follower] = error
    if failed:
        first = next(iter(failed.values()))
        within = "" if name == "_all_gather" else f", in {name}"
        raise CallError(
            f"Followers {list(failed)} failed or timed out in _all_gather after "
            f"{limits.call_s:.2f} seconds{within}; the first error is "
            f"{type(first).__name__}: {first}",
            worker=next(iter(failed)),
            call=name,
        ) from first
    return outcome.values


def _limits(timeout: float, default_s: float) -> Limits:
    if timeout == UNSET_RPC_TIMEOUT:
        return Limits(0.0 if math.isinf(default_s) else default_s, math.inf)
    if timeout == DEFAULT_SHUTDOWN_TIMEOUT:
        return Limits(0.0, math.inf)
    return Limits(timeout, timeout)


def _error_of(call: Future[None]) -> Exception | None:
    """Waits for a call; returns its error, if any."""
    try:
        call.wait()
    except Exception as error:
        return error
    return None
