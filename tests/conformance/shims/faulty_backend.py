"""Back-end ``FAULTY_TENSORPIPE``, Weft with injected faults; importing this registers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tests.conformance.shims.fault_plan import Plan
from tests.conformance.shims.faults import Faults
from torchweft.compat.rpc import backend_registry
from torchweft.compat.rpc.agents import TensorPipeAgent
from torchweft.rpc import constants
from torchweft.rpc.options import TensorPipeRpcBackendOptions
from torchweft.rpc.worker import current_worker

NO_DELAYS: Mapping[str, float] = MappingProxyType({})


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options of a worker with faults.

    Args:
        num_worker_threads: See ``TensorPipeRpcBackendOptions``.
        rpc_timeout: See there.
        init_method: See there.
        messages_to_fail: Kinds of messages, by PyTorch's names, whose first sends fail.
        messages_to_delay: Seconds by which to delay each kind.
        num_fail_sends: How many sends of each message fail.
    """

    def __init__(
        self,
        num_worker_threads: int,
        rpc_timeout: float,
        init_method: str,
        messages_to_fail: Sequence[str],
        messages_to_delay: Mapping[str, float],
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method
        )
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay)
        self.num_fail_sends = num_fail_sends


class FaultyTensorPipeAgent(TensorPipeAgent):
    """The agent of a worker with faults."""


def _construct(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    messages_to_fail: Sequence[str] | None = None,
    messages_to_delay: Mapping[str, float] = NO_DELAYS,
    num_fail_sends: int = 0,
    **_: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads=num_worker_threads,
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        messages_to_fail=() if messages_to_fail is None else messages_to_fail,
        messages_to_delay=messages_to_delay or NO_DELAYS,
        num_fail_sends=num_fail_sends,
    )


def _init(
    store: Any,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: FaultyTensorPipeRpcBackendOptions,
) -> FaultyTensorPipeAgent:
    given = rpc_backend_options
    plan = Plan(given.messages_to_fail, given.messages_to_delay, given.num_fail_sends)
    agent = backend_registry.BackendType.TENSORPIPE.value.init_backend_handler(
        store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=given
    )
    Faults(current_worker(), plan)
    agent.__class__ = FaultyTensorPipeAgent
    return agent  # type: ignore[no-any-return]


backend_registry.register_backend("FAULTY_TENSORPIPE", _construct, _init)
