"""``RRef``: a handle to a value that lives on some worker."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torchweft.agent.agent import Agent
from torchweft.agent.current import current
from torchweft.agent.references import ReferenceKeeper
from torchweft.arguments import limit_of
from torchweft.errors import (
    CallTimeout,
    NotInitialized,
    NotOwner,
    ReferenceGone,
    SerializationError,
)
from torchweft.ids import ReferenceId, WorkerInfo
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.current_call import remaining_time
from torchweft.serialize.exceptions import fresh_copy
from torchweft.serialize.objects import register_external
from torchweft.serialize.registry import has_callable_methods
from torchweft.serialize.tracebacks import shorten

if TYPE_CHECKING:
    from torchweft.rpc.proxies import AsyncProxy, RemoteProxy

T = TypeVar("T")
_WEFT = __name__.partition(".")[0] + "."


@has_callable_methods
class RRef(Generic[T]):
    """A reference to a value of type ``T`` on the worker that owns it.

    The value lives for as long as a reference to it exists anywhere. A reference can be sent in
    arguments and results, alone or inside containers; the value then stays where it is.
    References cannot be pickled in any other way: nobody would count the copy.

    Args:
        value: A value of this worker, which thereby becomes its owner.
        type_hint: Accepted for compatibility; Weft needs no type.

    Raises:
        NotInitialized: This process is no worker.
    """

    __slots__ = ("__weakref__", "_keeper", "id", "value_type")

    id: ReferenceId
    value_type: type
    """The class of the value; only where ``remote`` has been told to make an object of it."""
    _keeper: ReferenceKeeper

    def __init__(self, value: T, type_hint: Any = None) -> None:
        keeper = _keeper()
        self._bind(keeper, keeper.own(value), is_new=True)

    @classmethod
    def from_received(cls, keeper: ReferenceKeeper, reference: ReferenceId) -> RRef[Any]:
        """Wraps a reference for which ``keeper`` has counted a handle."""
        handle: RRef[Any] = cls.__new__(cls)
        handle._bind(keeper, reference, is_new=False)
        return handle

    @classmethod
    def from_created(
        cls, keeper: ReferenceKeeper, reference: ReferenceId, maker: str = ""
    ) -> RRef[Any]:
        """Wraps a reference that this worker has just had created by the function ``maker``."""
        handle: RRef[Any] = cls.__new__(cls)
        handle._bind(keeper, reference, is_new=True, maker=maker)
        return handle

    def _bind(
        self, keeper: ReferenceKeeper, reference: ReferenceId, *, is_new: bool, maker: str = ""
    ) -> None:
        self.id = reference
        self._keeper = keeper
        if is_new:
            # Where the program made it, not where Weft did on its behalf.
            frame = sys._getframe(2)
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
                _WEFT
            ):
                frame = frame.f_back
            keeper.note_site(reference, (frame.f_code, frame.f_lineno, maker))

    def __del__(self) -> None:
        try:
            self._keeper.end_handle(self.id)
        except AttributeError:
            pass  # Never bound: the constructor raised.

    # Whose it is

    def agent(self) -> Agent:
        """Returns the current agent, if the reference is of its group.

        Raises:
            NotInitialized: This process is no worker any more.
            ReferenceGone: It is of a former group; its number may name something else now.
        """
        try:
            agent = current()
        except NotInitialized:
            raise NotInitialized(
                "the group of this reference has been shut down, and the value is gone with it; "
                "fetch what is still needed by to_here() before the shutdown"
            ) from None
        if agent.parts[ReferenceKeeper] is not self._keeper:
            raise ReferenceGone("this reference belongs to a group that has been shut down")
        return agent

    check_travels = agent
    """Called before the reference is handed on; a subclass may refuse that by raising."""

    def owner(self) -> WorkerInfo:
        """Returns the worker that owns the value."""
        return self.agent().peers[self.id.owner].info

    def owner_name(self) -> str:
        """Returns the name of the worker that owns the value."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether this worker owns the value."""
        return self.id.owner == self.agent().me.id

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to count this worker as a user of the value."""
        return self._keeper.is_confirmed(self.id)

    # The value

    def local_value(self) -> T:
        """Returns the value itself; only on its owner. Waits, for a limited time, until it is made.

        Raises:
            NotOwner: Another worker owns it; use ``to_here``.
            Exception: Whatever the function that was to make the value raised.
        """
        try:
            if not self.is_owner():
                raise NotOwner(
                    "local_value() works on the owner only, which is worker "
                    f"{self.owner_name()!r}; use to_here() for a copy"
                )
            return self._wait_for_value(self.agent().default_timeout_s)
        except Exception as error:
            shorten(error)
            raise

    def _wait_for_value(self, timeout_s: float) -> T:
        owned = self._keeper.value_of(self.id)
        if not owned.is_ready:
            timeout_s = min(timeout_s, remaining_time())  # Of the caller, if there is one.
            reactor = self.agent().reactor
            is_counted = reactor.begin_wait()
            try:
                if not owned.wait(timeout_s):
                    raise CallTimeout(
                        f"RPC ran for more than set timeout ({timeout_s * 1e3:.0f} ms): "
                        f"the value of {self._keeper.describe(self.id)} is still being made",
                        worker=self.owner_name(),
                        elapsed_s=timeout_s,
                    )
            finally:
                if is_counted:
                    reactor.end_wait()
        if owned.error is not None:
            raise fresh_copy(owned.error)
        value: T = owned.value
        return value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Returns a copy of the value, fetched from its owner; on the owner, the value itself.

        Blocks until the value is made and has arrived.

        Args:
            timeout: Seconds to wait at most; 0 for no limit, and by default that of the worker.

        Raises:
            CallTimeout: It did not arrive in time.
            OwnerLost: The owner is lost, and the value with it.
            Exception: Whatever the function that was to make the value raised.
        """
        from torchweft.rpc.calls import fetch  # Calls make references.

        try:
            if self.is_owner():
                agent = self.agent()
                return self._wait_for_value(limit_of(timeout, agent.default_timeout_s))
            self._keeper.check_alive(self.id)
            value: T = fetch(self, timeout)
            return value
        except Exception as error:
            shorten(error)
            raise

    # Calls on the value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Returns a proxy: its methods run on the owner, and return their results.

        To an editor and a type checker it is the value itself, whose methods they know. The result
        of an ``async def`` is that of the coroutine, which only ``torchweft.rpc.on`` tells them.

        Args:
            timeout: Seconds for each call; 0 for no limit, and by default that of the worker.
        """
        proxy: T = self._proxy("sync", timeout)
        return proxy

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> AsyncProxy:
        """Returns a proxy: its methods run on the owner, and return futures.

        ``torchweft.rpc.on(reference)`` does the same with types.
        """
        proxy: AsyncProxy = self._proxy("async", timeout)
        return proxy

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> RemoteProxy:
        """Returns a proxy: its methods run on the owner, and return references to the results.

        ``torchweft.rpc.on(reference)`` does the same with types.
        """
        proxy: RemoteProxy = self._proxy("remote", timeout)
        return proxy

    def _proxy(self, way: str, timeout: float) -> Any:
        from torchweft.rpc.proxies import Proxy

        return Proxy(self, way, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs a backward pass from the value, a scalar tensor, on its owner.

        Args:
            dist_autograd_ctx_id: The autograd context; -1 for a local pass into ``.grad``, on the
                owner only.
            retain_graph: Whether the graph is kept for another pass.
        """
        from torchweft.rpc.calls import backward_from

        backward_from(self, dist_autograd_ctx_id, retain_graph)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise SerializationError(
            "Can not pickle rref in python pickler: an RRef can only travel in the arguments or "
            "the result of an RPC; to keep the value, fetch it with to_here() and save that"
        )

    def __copy__(self) -> RRef[T]:
        return self

    def __deepcopy__(self, memo: object) -> RRef[T]:
        return self

    def __dir__(self) -> list[str]:
        return [
            name for name in super().__dir__() if not name.startswith("_") and name not in _FOR_WEFT
        ]

    def __repr__(self) -> str:
        number = f"{self.id.creator}.{self.id.number}"
        try:
            return f"RRef({number} on {self.owner_name()!r})"
        except Exception:
            return f"RRef({number} on rank {self.id.owner})"


_FOR_WEFT = frozenset("agent check_travels from_created from_received id value_type".split())
"""Public for other modules of Weft, and nothing that a program needs."""

register_external(RRef)


def _keeper() -> ReferenceKeeper:
    keeper: ReferenceKeeper = current().part(ReferenceKeeper)
    return keeper
