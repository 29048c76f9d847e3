"""Proxies: the methods of a remote value, called as if it were here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchweft.rpc.calls import call_method
from torchweft.rpc.handles import RRef
from torchweft.rpc.typed_values import check_method, known_type, methods_of
from torchweft.serialize.tracebacks import shorten


class Proxy:
    """Calls the methods of a referenced value on the worker that owns it.

    Args:
        reference: The reference to the value.
        way: ``sync``, ``async`` or ``remote``: what a method returns.
        timeout: Seconds for each call; 0 for no limit, -1 for that of the worker.
    """

    def __init__(self, reference: RRef[Any], way: str, timeout: float) -> None:
        self._reference = reference
        self._way = way
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        value_type = getattr(self._reference, "value_type", None)
        if value_type is not None and not hasattr(value_type, name):
            try:
                check_method(self._reference, name)
            except AttributeError as error:
                shorten(error)
                raise
        return functools.partial(self._call, name)

    def __dir__(self) -> list[str]:
        value_type = known_type(self._reference)
        return [] if value_type is None else methods_of(value_type)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value itself."""
        return self._call("__call__", *args, **kwargs)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return call_method(self._reference, self._way, name, args, kwargs, self._timeout)
        except Exception as error:
            shorten(error)
            raise

    def __repr__(self) -> str:
        return f"{self._reference!r}.rpc_{self._way}()"


if TYPE_CHECKING:
    from torchweft.rpc.futures import Future

    class AsyncProxy(Proxy):
        """What a type checker sees of a proxy whose methods return futures."""

        def __getattr__(self, name: str) -> Callable[..., Future[Any]]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Future[Any]: ...  # noqa: D102

    class RemoteProxy(Proxy):
        """What a type checker sees of a proxy whose methods return references."""

        def __getattr__(self, name: str) -> Callable[..., RRef[Any]]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> RRef[Any]: ...  # noqa: D102
