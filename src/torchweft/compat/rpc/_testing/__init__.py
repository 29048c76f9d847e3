"""Fault injection: importing this registers back-end ``FAULTY_TENSORPIPE``."""

from __future__ import annotations

from torchweft.compat.rpc._testing import faulty_agent_backend_registry
from torchweft.compat.rpc._testing.faulty_agent_backend_registry import (
    FaultyTensorPipeAgent,
    FaultyTensorPipeRpcBackendOptions,
)

__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]


def is_available() -> bool:
    """Whether faults can be injected: always."""
    return True
