"""Decorators for functions that are called remotely."""

from torchweft.rpc.functions import async_execution

__all__ = ["async_execution"]
