"""Back-end FAULTY_TENSORPIPE."""

from __future__ import annotations

from typing import Any

from weft.compat.rpc import backend_registry, options


class FaultyTensorPipeRpcBackendOptions(options.TensorPipeRpcBackendOptions):
    def __init__(
        self,
        num_worker_threads: int,
        rpc_timeout: float,
        init_method: str,
        messages_to_fail: Any,
        messages_to_delay: Any,
        num_fail_sends: int,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method
        )
        self.messages_to_fail = messages_to_fail
        self.messages_to_delay = messages_to_delay
        self.num_fail_sends = num_fail_sends


def _options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = 16,
    messages_to_fail: Any = (),
    messages_to_delay: Any = (),
    num_fail_sends: int = 0,
    **_: Any,
) -> Any:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads,
        rpc_timeout,
        init_method,
        messages_to_fail,
        messages_to_delay,
        num_fail_sends,
    )


backend_registry.register_backend("FAULTY_TENSORPIPE", _options, backend_registry._tensorpipe_init)
