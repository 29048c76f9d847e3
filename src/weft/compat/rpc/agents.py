"""The agent as programs see it."""

from __future__ import annotations

from typing import Any

import weft.rpc
from weft.agent import current as current_agent


class RpcAgent:
    """The worker that this process is."""

    def get_worker_info(self, worker_name: Any = None) -> Any:
        return weft.rpc.get_worker_info(worker_name)

    def get_worker_infos(self) -> list[Any]:
        return weft.rpc.get_worker_infos()

    def get_debug_info(self) -> dict[str, str]:
        return {"agent.thread_pool_size": "16"}

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        pass

    def sync(self) -> None:
        pass

    def shutdown(self) -> None:
        current_agent.current()


class TensorPipeAgent(RpcAgent):
    is_static_group = True
