"""Proxies of references that behave like PyTorch's."""

from __future__ import annotations

from typing import Any

import torch

from torchweft.compat.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.compat.waiting import note_future
from torchweft.errors import SerializationError
from torchweft.rpc.rref import Proxy

__all__ = ["RRefProxy"]

_WAYS = {"rpc_sync": "sync", "rpc_async": "async", "remote": "remote"}
_SCRIPTED = (torch.jit.ScriptModule, torch._C.ScriptModule)


class RRefProxy(Proxy):
    """Calls the methods of a referenced value on the worker that owns it.

    PyTorch first asks the owner for the type of the value, and so knows the methods. Here a call
    for a result is sent at once, and fails if the method does not exist. A ``remote`` has no
    result that could report this, so here too the owner is asked first. That costs the first
    ``remote`` of each reference one more round trip, and the time until the value is made.

    Args:
        rref: The reference.
        rpc_api: Selects what a method returns: the function ``rpc_sync``, ``rpc_async`` or
            ``remote``, or Weft's name for it.
        timeout: Seconds for each call; negative for the default, 0 for no limit.
    """

    def __init__(self, rref: Any, rpc_api: Any, timeout: float = UNSET_RPC_TIMEOUT) -> None:
        super().__init__(rref, _WAYS.get(getattr(rpc_api, "__name__", ""), rpc_api), timeout)
        self._rref = rref

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if self._way == "remote":
            self._check_has(name)
        result = super()._call(name, *args, **kwargs)
        if self._way == "async":
            note_future(result)
        elif self._way == "remote" and self._timeout > 0:
            result._watch_creation(self._timeout)
        return result

    def _check_has(self, name: str) -> None:
        try:
            value_type = self._rref._get_type(self._timeout)
        except SerializationError:
            return  # The class cannot be sent; using the result raises the error.
        if not issubclass(value_type, _SCRIPTED):
            getattr(value_type, name)
