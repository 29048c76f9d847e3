"""Marks for functions that are called remotely."""

from weft.rpc.functions import async_execution

__all__ = ["async_execution"]
