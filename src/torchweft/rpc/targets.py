"""``torchweft.rpc.on``: remote calls in Python's own call syntax, for type checkers.

``rpc_sync(to, f, (x,), {"scale": 2})`` gives a checker a tuple and a dict. Here the arguments
follow the function, and are checked as in a local call, keywords and defaults included.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from torchweft.arguments import wrong_type
from torchweft.rpc import api
from torchweft.rpc.api import Answer
from torchweft.rpc.calls import Destination, call_method
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.futures import Future
from torchweft.rpc.rref import RRef, check_method
from torchweft.serialize.tracebacks import shorten
from torchweft.worker.current import current

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")

_METHODS = (FunctionType, MethodDescriptorType, WrapperDescriptorType)


@overload
def on(to: RRef[V], timeout: float = ...) -> OnValue[V]: ...


@overload
def on(to: Destination, timeout: float = ...) -> OnWorker: ...


def on(to: Any, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Returns an object that calls functions on a worker, or methods of a referenced value.

    ``rpc.on("ps").rpc_sync(f, x, scale=2)`` is ``rpc.rpc_sync("ps", f, (x,), {"scale": 2})``, and
    ``rpc.on(model).rpc_sync(Model.loss, x)`` is ``model.rpc_sync().loss(x)``; but a type checker
    knows the parameters and the result. Does not block, and makes no call.

    Args:
        to: A worker (its name, its rank, or its ``WorkerInfo``), or a reference.
        timeout: Seconds for each call; 0 for no limit, by default the worker's ``rpc_timeout``.

    Raises:
        UnknownWorker: There is no worker ``to``.
        ReferenceGone: The reference is of a group that has been shut down.

    Example::

        model = rpc.on("ps").remote(Model, 512, bias=False)  # an RRef[Model]
        future = rpc.on(model).rpc_async(Model.loss, batch)  # a Future of what loss returns
    """
    try:
        if isinstance(to, RRef):
            to.agent()
            return OnValue(to, timeout)
        current().find(to)
        return OnWorker(to, timeout)
    except Exception as error:
        shorten(error)
        raise


class OnWorker:
    """Calls functions on a worker; made by ``on``. Thread-safe."""

    def __init__(self, to: Destination, timeout: float) -> None:
        self._to = to
        self._timeout = timeout

    @overload
    def rpc_sync(self, func: Callable[P, Answer[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def rpc_sync(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def rpc_sync(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs ``func(*args, **kwargs)`` there and returns its result; see ``rpc.rpc_sync``."""
        return api.rpc_sync(self._to, func, args, kwargs, self._timeout)

    @overload
    def rpc_async(
        self, func: Callable[P, Answer[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    @overload
    def rpc_async(
        self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    def rpc_async(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts ``func(*args, **kwargs)`` there; see ``rpc.rpc_async``."""
        return api.rpc_async(self._to, func, args, kwargs, self._timeout)

    @overload
    def remote(
        self, func: Callable[P, Answer[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RRef[T]: ...
    @overload
    def remote(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]: ...
    def remote(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Starts ``func(*args, **kwargs)`` there, where the result stays; see ``rpc.remote``."""
        return api.remote(self._to, func, args, kwargs, self._timeout)

    def __repr__(self) -> str:
        return f"on({self._to!r})"


class OnValue(Generic[V]):
    """Calls methods of the value behind a reference, on its owner; made by ``on``. Thread-safe.

    A method is passed as an attribute of its class, ``Model.loss``. The value's own method of that
    name runs, also if the value's class is a subclass that overrides it.
    """

    def __init__(self, reference: RRef[V], timeout: float) -> None:
        self._reference = reference
        self._timeout = timeout

    @overload
    def rpc_sync(
        self, method: Callable[Concatenate[V, P], Answer[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    def rpc_sync(
        self, method: Callable[Concatenate[V, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    def rpc_sync(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method and returns its result. Blocks; see ``rpc.rpc_sync``.

        Raises:
            ArgumentTypeError: ``method`` is not a method of a class.
            MethodNotFound: The value has no such method.
        """
        return self._call("sync", method, args, kwargs)

    @overload
    def rpc_async(
        self, method: Callable[Concatenate[V, P], Answer[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    @overload
    def rpc_async(
        self, method: Callable[Concatenate[V, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    def rpc_async(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Starts a method and returns a future of its result; raises as ``rpc_sync`` does."""
        return self._call("async", method, args, kwargs)

    @overload
    def remote(
        self, method: Callable[Concatenate[V, P], Answer[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RRef[T]: ...
    @overload
    def remote(
        self, method: Callable[Concatenate[V, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> RRef[T]: ...
    def remote(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Starts a method whose result stays on the owner; raises as ``rpc_sync`` does."""
        return self._call("remote", method, args, kwargs)

    def _call(self, way: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            name = method_name(method)
            check_method(self._reference, name)
            return call_method(self._reference, way, name, args, kwargs, self._timeout)
        except Exception as error:
            shorten(error)
            raise

    def __repr__(self) -> str:
        return f"on({self._reference!r})"


def method_name(method: object) -> str:
    """Returns the name of a method that is passed as an attribute of its class.

    Raises:
        ArgumentTypeError: It is none.
    """
    if isinstance(method, _METHODS):
        home, _, name = method.__qualname__.rpartition(".")
        if home and not home.endswith("<locals>"):
            return name
    raise wrong_type("method", method, "pass a method as its class has it, like Model.loss")
