"""Fault injection."""

from . import faulty_agent_backend_registry


def is_available() -> bool:
    return True
