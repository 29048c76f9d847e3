"""Groups for tests that damage them, of processes that join as users' programs do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.gpu.device import prepare
from tests.open_workers import OpenWorkers
from torchweft import rpc


class Members:
    """The workers of one group; ``close`` kills those that are left.

    Args:
        warm: Forks their processes.
        path: Of the file by which they find each other.
    """

    def __init__(self, warm: OpenWorkers, path: Path) -> None:
        self._warm = warm
        self._method = f"file://{path}"
        self._names: list[str] = []

    def join(
        self,
        *names: str,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Starts workers that form a group.

        Args:
            names: Their names, by rank.
            options: Arguments of the options of some workers, by name; ``kind`` is their class.
            environment: Variables of some workers, by name, or of all under the empty name.
        """
        variables = environment or {}
        for rank, name in enumerate(names):
            self._names.append(name)
            told = {"init_method": self._method, **(options or {}).get(name, {})}
            own = {**variables.get("", {}), **variables.get(name, {})}
            self._warm.begin(name, join, name, rank, len(names), told, own)
        failures = [error for name in names if (error := self._joined(name))]
        if failures:
            raise failures[0]

    def _joined(self, name: str) -> Exception | None:
        try:
            self._warm.result(name)
        except Exception as error:
            return error
        return None

    def do(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function in the main thread of a worker; blocks."""
        return self._warm.do(name, function, *args)

    def begin(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Begins to run a function in the main thread of a worker; ``result`` waits for it."""
        self._warm.begin(name, function, *args)

    def result(self, name: str) -> Any:
        return self._warm.result(name)

    def kill(self, name: str) -> None:
        """Kills a worker; returns when its process is gone."""
        self._names.remove(name)
        self._warm.kill(name)

    def close(self) -> None:
        for name in self._names:
            self._warm.kill(name)


def join(
    name: str, rank: int, size: int, told: Mapping[str, Any], variables: Mapping[str, str]
) -> None:
    os.environ.update(variables)
    prepare()
    arguments = {"rpc_timeout": 15.0, **told}
    kind = arguments.pop("kind", rpc.RpcBackendOptions)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=kind(**arguments))
