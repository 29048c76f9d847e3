"""Proxies: the methods of a remote value, called as if it were here."""

from __future__ import annotations

import functools
from typing import Any

from weft.rpc.calls import call_method
from weft.rpc.handles import RRef


class Proxy:
    """Calls the methods of a referenced value on the worker that owns it.

    Args:
        reference: The reference to the value.
        way: ``sync``, ``async`` or ``remote``: what a method returns.
        timeout: Seconds for each call; negative for the default, 0 for no limit.
    """

    def __init__(self, reference: RRef[Any], way: str, timeout: float) -> None:
        self._reference = reference
        self._way = way
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value itself."""
        return self._call("__call__", *args, **kwargs)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return call_method(self._reference, self._way, name, args, kwargs, self._timeout)

    def __repr__(self) -> str:
        return f"{self._reference!r}.rpc_{self._way}()"
