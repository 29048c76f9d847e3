"""``RRef``: a reference to a value that lives on some worker, and proxies of its methods."""

from __future__ import annotations

import difflib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from torchweft.arguments import limit_of
from torchweft.engine.codec.exceptions import fresh_copy
from torchweft.engine.codec.registry import has_callable_methods
from torchweft.engine.codec.tracebacks import shorten, without_own_frames
from torchweft.engine.protocol.observing import VALUE, Wait, reference_key
from torchweft.engine.threads import device_streams
from torchweft.engine.worker.references import Handle
from torchweft.errors import CallTimeout, MethodNotFound, NotOwner, SerializationError
from torchweft.rpc.calls import BACKWARD_FROM, CALL_METHOD, FETCH, use
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.current_call import remaining_time
from torchweft.rpc.futures import Future
from torchweft.rpc.serving import run_backward
from torchweft.rpc.worker import WORKER, current_worker

T = TypeVar("T")


@has_callable_methods
class RRef(Handle, Generic[T]):
    """A reference to a value of type ``T`` on the worker that owns it.

    The value lives for as long as a reference to it exists anywhere. A reference can be sent in
    arguments and results, alone or inside containers; the value then stays where it is.
    References cannot be pickled in any other way, as the copy would not be counted.

    Args:
        value: A value of this worker, which thereby becomes its owner.
        type_hint: Accepted for compatibility; Weft needs no type.

    Raises:
        NotInitialized: This process is not a worker.
    """

    __slots__ = ()

    def __init__(self, value: T, type_hint: Any = None) -> None:
        keeper = current_worker().references
        self._bind(keeper, keeper.own(value), is_new=True)

    # The value

    @without_own_frames
    def local_value(self) -> T:
        """Returns the value itself; only on its owner. Waits, for a limited time, until it is made.

        Raises:
            NotOwner: Another worker owns it; use ``to_here``.
            Exception: The error of the function that was to make the value.
        """
        if not self.is_owner():
            raise NotOwner(
                "local_value() works on the owner only, which is worker "
                f"{self.owner_name()!r}; use to_here() for a copy"
            )
        return self._wait_for_value(self.agent().default_timeout_s)

    def _wait_for_value(self, timeout_s: float) -> T:
        owned = self._keeper.value_of(self.id)
        if not owned.is_ready:
            timeout_s = min(timeout_s, remaining_time())  # The caller's limit, if any.
            began_s = time.monotonic()

            def parts() -> list[Wait]:
                name, age_s = reference_key(self.id), time.monotonic() - began_s
                return [] if owned.is_ready else [Wait(VALUE, name, age_s, name, (owner,))]

            owner = self.owner_name()
            with self.agent().reactor.waiting(parts):
                if not owned.wait(timeout_s):
                    raise CallTimeout(
                        f"RPC ran for more than set timeout ({timeout_s * 1e3:.0f} ms): "
                        f"the value of {self._keeper.describe(self.id)} is still being made",
                        worker=owner,
                        elapsed_s=time.monotonic() - began_s,
                    )
        if owned.error is not None:
            raise fresh_copy(owned.error)
        value: T = owned.value
        if owned.mark is not None:
            device_streams.use(owned.mark, value)
        return value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Returns a copy of the value, fetched from its owner; on the owner, the value itself.

        Blocks until the value is made and has arrived.

        Args:
            timeout: Seconds to wait at most; 0 for no limit, by default the ``rpc_timeout``.

        Raises:
            CallTimeout: The value did not arrive in time.
            OwnerLost: The owner is lost, and the value with it.
            Exception: The error of the function that was to make the value.
        """
        try:
            if self.is_owner():
                agent = self.agent()
                return self._wait_for_value(limit_of(timeout, agent.default_timeout_s))
            self._keeper.check_alive(self.id)
            value: T = use(self, "sync", FETCH, (), {}, timeout, "to_here")
            return value
        except Exception as error:
            shorten(error)
            raise

    # Calls on the value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Returns a proxy: its methods run on the owner, and return their results.

        Editors and type checkers take the proxy for the value itself, whose methods they know. An
        ``async def`` returns its coroutine's result; only ``torchweft.rpc.on`` types that.

        Args:
            timeout: Seconds for each call; 0 for no limit, by default the ``rpc_timeout``.

        Raises:
            MethodNotFound: By the proxy: the value is known to have no such method.
            CallTimeout: By a method: it took longer.
            OwnerLost: By a method: the owner is lost, and the value with it.
            Exception: By a method: its own error.
        """
        proxy: T = self._proxy("sync", timeout)
        return proxy

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> AsyncProxy:
        """Returns a proxy: its methods run on the owner, and return futures.

        ``timeout`` and errors are those of ``rpc_sync``; a future's ``wait`` raises them.
        ``torchweft.rpc.on(reference)`` does the same with types.
        """
        proxy: AsyncProxy = self._proxy("async", timeout)
        return proxy

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> RemoteProxy:
        """Returns a proxy: its methods run on the owner, and return references to the results.

        ``timeout`` and errors are those of ``rpc_sync``; a reference's ``to_here`` raises them.
        ``torchweft.rpc.on(reference)`` does the same with types.
        """
        proxy: RemoteProxy = self._proxy("remote", timeout)
        return proxy

    def _proxy(self, way: str, timeout: float) -> Any:
        return Proxy(self, way, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs a backward pass from the value, a scalar tensor, on its owner. Blocks.

        Args:
            dist_autograd_ctx_id: The autograd context; -1 for a local pass into ``.grad``, on the
                owner only.
            retain_graph: Whether the graph is kept for another pass.

        Raises:
            AutogradError: The value requires no grad, the context is not open, or the pass failed.
            OwnerLost: The owner is lost.
        """
        if self.is_owner():
            worker = self.agent().slots[WORKER]
            run_backward(worker, self.local_value(), dist_autograd_ctx_id, retain_graph)
        elif dist_autograd_ctx_id < 0:
            raise NotOwner(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: the value is on worker "
                f"{self.owner_name()!r}; pass the number of an autograd context, from "
                "'with torchweft.autograd.context() as context_id'"
            )
        else:
            args = (dist_autograd_ctx_id, retain_graph)
            use(self, "sync", BACKWARD_FROM, args, {}, 0.0, "backward")

    def __reduce__(self) -> str | tuple[Any, ...]:
        if sys._getframe(1).f_code is _FINDS_TENSORS:
            return str, ()
        raise SerializationError(
            "Can not pickle rref in python pickler: an RRef can only travel in the arguments or "
            "the result of an RPC; to keep the value, fetch it with to_here() and save that"
        )

    def __copy__(self) -> RRef[T]:
        return self

    def __deepcopy__(self, memo: object) -> RRef[T]:
        return self

    def __repr__(self) -> str:
        number = f"{self.id.creator}.{self.id.number}"
        try:
            return f"RRef({number} on {self.owner_name()!r})"
        except Exception:
            return f"RRef({number} on worker number {self.id.owner})"


_FINDS_TENSORS = getattr(getattr(torch._jit_internal, "_extract_tensors", None), "__code__", None)
"""The code of the function by which PyTorch pickles the result of a future, to find tensors."""


class Proxy:
    """Calls the methods of a referenced value on the worker that owns it.

    Args:
        reference: The reference to the value.
        way: ``sync``, ``async`` or ``remote``: what a method returns.
        timeout: Seconds for each call; 0 for no limit, -1 for the worker's ``rpc_timeout``.
    """

    def __init__(self, reference: RRef[Any], way: str, timeout: float) -> None:
        self._reference = reference
        self._way = way
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
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
            args = (name, *args)
            return use(self._reference, self._way, CALL_METHOD, args, kwargs, self._timeout, name)
        except Exception as error:
            shorten(error)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return Proxy, (self._reference, self._way, self._timeout)

    def __repr__(self) -> str:
        return f"{self._reference!r}.rpc_{self._way}()"


if TYPE_CHECKING:

    class AsyncProxy(Proxy):
        """The type of a proxy whose methods return futures, for type checkers."""

        def __getattr__(self, name: str) -> Callable[..., Future[Any]]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Future[Any]: ...  # noqa: D102

    class RemoteProxy(Proxy):
        """The type of a proxy whose methods return references, for type checkers."""

        def __getattr__(self, name: str) -> Callable[..., RRef[Any]]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> RRef[Any]: ...  # noqa: D102


# The caller's knowledge of a referenced value: its class, and so its methods. ``remote(worker,
# Model, ...)`` names the class of the value. A method that such a value cannot have is refused at
# once. A name that is not in the class may still be an attribute of the object, set by ``__init__``
# or by any other method. So a name counts as missing only if no method of the class can set it.

_ANSWERS = frozenset("__getattr__ __getattribute__ __setattr__".split())
"""Methods of a class that may make any name an attribute."""
_SETS = _ANSWERS | frozenset("__dict__ add_module register_module setattr vars".split())
"""Names by which a method can set attributes that its code does not name."""
_WITHOUT_OWN = (object, nn.Module)
"""Classes whose own methods set no callable attributes, except through the names above."""


def known_type(reference: Handle) -> type | None:
    """Returns the class of the value behind a reference, where this worker knows it."""
    made_by: type | None = getattr(reference, "value_type", None)
    return made_by


def check_method(reference: Handle, name: str) -> None:
    """Raises MethodNotFound if the value is known to have no such method."""
    value_type = known_type(reference)
    if value_type is None or hasattr(value_type, name):
        return
    if not is_made_plainly(value_type) or may_set(value_type, name):
        return
    text = f"{value_type.__qualname__!r} object has no attribute {name!r}: value of {reference!r}"
    close = difflib.get_close_matches(name, methods_of(value_type), 1)
    raise MethodNotFound(f"{text}; did you mean {close[0]!r}?" if close else text)


def is_made_plainly(value_type: type) -> bool:
    """Whether calling a class is just ``object.__new__`` and its ``__init__``."""
    new: Any = value_type.__new__
    return type(value_type).__call__ is type.__call__ and new is object.__new__


def methods_of(value_type: type) -> list[str]:
    """Returns the names of the public methods of a class."""
    return [
        name
        for name in dir(value_type)
        if not name.startswith("_") and callable(getattr(value_type, name, None))
    ]


@functools.lru_cache(maxsize=256)
def may_set(value_type: type, name: str) -> bool:
    """Whether methods of a class may give its objects an attribute of that name."""
    for base in value_type.__mro__:
        if base in _WITHOUT_OWN:
            continue
        held = vars(base)
        if name in held.get("__annotations__", ()) or not _ANSWERS.isdisjoint(held):
            return True
        for code in _codes_of(held.values()):
            used = code.co_names
            # A constant may be the name of an annotation, or an argument of setattr elsewhere.
            if name in used or name in code.co_consts or not _SETS.isdisjoint(used):
                return True
    return False


def _codes_of(attributes: Any) -> Iterator[CodeType]:
    """Yields the code of all functions among the attributes of a class, with nested code."""
    todo = list(attributes)
    while todo:
        each = todo.pop()
        if isinstance(each, CodeType):
            yield each
            todo += [part for part in each.co_consts if isinstance(part, CodeType)]
        elif isinstance(each, property):
            todo += [each.fget, each.fset]
        else:
            held = [getattr(each, name, None) for name in ("__code__", "__func__", "__wrapped__")]
            todo += [part for part in held if part is not None]
