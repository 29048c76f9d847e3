"""``RRef`` with the undocumented methods that ``torch.distributed.rpc`` programs use.

A worker made by ``torchweft.compat.rpc.init_rpc`` uses this class for all its references. The
owner is asked only if the program asks, with one exception: a ``remote`` with its own time limit,
which is the limit for making the value, is watched from the start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch.autograd.profiler import record_function

import torchweft.rpc
from torchweft.compat.rpc.names import module_of
from torchweft.compat.waiting import note_future
from torchweft.errors import (
    CallError,
    CallTimeout,
    NotInitialized,
    NotOwner,
    ReferenceGone,
    SerializationError,
)
from torchweft.extending import (
    is_worker,
    when_ready,
    worker_of,
)
from torchweft.free_threading import shared_count
from torchweft.ids import ReferenceId, WorkerInfo
from torchweft.rpc import UNSET_RPC_TIMEOUT, OrderedFuture, torch_names
from torchweft.rpc.functions import async_execution

__all__ = ["PyRRef", "RRef", "RRefProxy"]

T = TypeVar("T")
AnyFuture = torch.futures.Future[Any]

_POLL_S = 0.001
_NOT_MADE_HERE = -1
_local_ids = shared_count()
"""Numbers the references that this process makes: PyTorch shows such numbers in texts."""


_WAYS = {"rpc_sync": "sync", "rpc_async": "async", "remote": "remote"}
_SCRIPTED = (torch.jit.ScriptModule, torch._C.ScriptModule)


class RRefProxy(torch_names.Proxy):
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
            value_type = self._reference._get_type(self._timeout)
        except SerializationError:
            return  # The class cannot be sent; using the result raises the error.
        if not issubclass(value_type, _SCRIPTED):
            getattr(value_type, name)


class RRef(torchweft.rpc.RRef[T]):
    """A reference to a value on some worker; see ``torchweft.rpc.RRef``.

    Args:
        value: A value of this worker, which thereby becomes its owner.
        type_hint: Accepted for compatibility; Weft needs no type.
    """

    __slots__ = ("_created", "_fork_id", "_local_id", "_profiled", "_type")

    _of_creation: ClassVar[tuple[type[CallError], ...]] = (CallTimeout,)
    """Errors after which there may be no value; a back-end that injects faults has more."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if not is_worker():
            raise NotInitialized(
                "Current RPC agent is not set! Did you initialize the RPC framework "
                "(e.g. by calling `rpc.init_rpc`)? Only a worker can own referenced values"
            )
        super().__init__(value, type_hint)

    def _bind(self, keeper: Any, reference: ReferenceId, *, is_new: bool, maker: str = "") -> None:
        super()._bind(keeper, reference, is_new=is_new, maker=maker)
        self._local_id = next(_local_ids) if is_new else _NOT_MADE_HERE
        is_user = not is_new or reference.creator != reference.owner
        self._fork_id = next(_local_ids) if is_user else _NOT_MADE_HERE
        self._created: AnyFuture | None = None
        self._type: AnyFuture | None = None
        self._profiled: AnyFuture | None = None

    # The value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Returns a copy of the value; see ``torchweft.rpc.RRef.to_here``.

        Raises:
            CallTimeout: The value was not made within the limit of its ``remote``, or did not
                arrive within ``timeout``.
            ReferenceGone: The group has been shut down.
        """
        self._check_current("to_here() on it")
        self._check_created()
        return super().to_here(timeout)

    def local_value(self) -> T:
        """Returns the value itself, on its owner; see ``torchweft.rpc.RRef.local_value``."""
        if not self.is_owner():
            rref_id, fork_id = self._ids()
            here = torchweft.rpc.get_worker_info()
            raise NotOwner(
                f"For UserRRef(rref_id={rref_id}, fork_id={fork_id}), can't call localValue() on "
                f"user {_shown(here)}. Call it on owner {_shown(self.owner())}, or use to_here() "
                "for a copy"
            )
        return super().local_value()

    def confirmed_by_owner(self) -> bool:
        """Whether the owner counts this worker as a user of the value.

        PyTorch begins a call when the references among its arguments are confirmed, Weft at once.
        To meet programs' expectations, this waits for the confirmation of a reference received in
        a message, at most the worker's time limit. It does not wait for a reference made here.
        """
        if self._local_id == _NOT_MADE_HERE:
            self._await_confirmation()
        return super().confirmed_by_owner()

    def _await_confirmation(self) -> None:
        limit_s = time.monotonic() + self.agent().default_timeout_s
        self._keeper.flush()
        while not super().confirmed_by_owner() and time.monotonic() < limit_s:
            self._keeper.check_alive(self.id)
            time.sleep(_POLL_S)

    # Creation

    def _get_future(self) -> AnyFuture:
        """Returns a future that is done when the owner has made the value, or failed to.

        An error of the function is raised to users of the value. The future itself fails if the
        time limit of ``remote`` has passed. If that call had no limit, the worker's limit applies,
        counted from the first call of this method.
        """
        if self._created is None:
            self._watch_creation(UNSET_RPC_TIMEOUT)
        assert self._created is not None
        return self._created

    def _watch_creation(self, timeout: float) -> None:
        """Asks the owner to report when the value is made."""
        self._created = torchweft.rpc.rpc_async(
            self.owner(), when_made, ((*self.id,),), None, timeout
        )

    def _check_created(self) -> None:
        """Raises if the value is known not to have been made in time."""
        if self._created is None or not self._created.done():
            return
        try:
            self._created.wait()
        except self._of_creation as error:
            raise type(error)(
                f"RRef creation on worker {self.owner_name()!r} was given up, and there may be no "
                f"value: {error}",
                worker=error.worker,
                call=error.call,
                elapsed_s=error.elapsed_s,
            ) from None
        except Exception:
            return  # Using the value reports any other error.

    def _get_profiling_future(self) -> AnyFuture:
        """Returns the future that ends the profiler's event of the ``remote``."""
        return self._get_future() if self._profiled is None else self._profiled

    def _set_profiling_future(self, future: AnyFuture) -> None:
        self._profiled = future

    def end_event(self, event: record_function) -> None:
        """Ends the profiler's event when the owner has made the value."""
        self._set_profiling_future(end_with(event, self._get_future()))

    # Type

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Returns the type of the value; asks the owner at most once.

        Args:
            timeout: Seconds to wait at most; 0 for no limit, and by default that of the worker.
            blocking: Whether to wait for the type; otherwise a future of it is returned.

        Raises:
            CallTimeout: The value was not made in time.
            Exception: The error of the function that was to make the value.
        """
        future = self._type
        if future is None or (future.done() and _has_failed(future)):
            future = self._type = self._ask_type(timeout)
        return future.wait() if blocking else future

    def _ask_type(self, timeout: float) -> AnyFuture:
        if not self.is_owner():
            return torchweft.rpc.rpc_async(
                self.owner(), _rref_typeof_on_owner, (self,), None, timeout
            )
        # A class of this process must not go through a pickle, which may copy it.
        future: OrderedFuture[Any] = OrderedFuture()
        limit_s = self.agent().default_timeout_s if timeout < 0 else timeout or math.inf
        try:
            future.set_result(type(self._wait_for_value(limit_s)))
        except Exception as error:
            future.set_exception(error)
        return future

    # Calls on the value

    def _proxy(self, way: str, timeout: float) -> RRefProxy:
        return RRefProxy(self, way, timeout)

    # Serialization

    def check_travels(self) -> Any:
        """Raises if the reference cannot be passed on."""
        self._check_current("fork an UserRRef")
        self._check_created()
        return super().check_travels()

    def _serialize(self) -> NoReturn:
        """Raises: references travel only in calls, which count them."""
        self.check_travels()
        raise SerializationError(
            "an RRef cannot be serialized by itself: its receiver has to be counted by the owner; "
            "pass it in the arguments of a call, or return it"
        )

    @staticmethod
    def _deserialize(data: object) -> NoReturn:
        """Raises: see ``_serialize``."""
        raise SerializationError("an RRef can only be received in a call or its result")

    def _check_current(self, what: str) -> None:
        try:
            self.agent()
        except (NotInitialized, ReferenceGone):
            raise ReferenceGone(
                f"{self} has no value any more, for its group has been shut down. Cannot call "
                f"{what} after deletion."
            ) from None

    # Text

    def _ids(self) -> tuple[str, str]:
        """Returns the ids of the reference and of this fork of it, as PyTorch shows them.

        A reference made by another worker shows Weft's number instead, with the owner's.
        """
        creator, owner, number = self.id
        local_id = f"{owner}.{number}" if self._local_id == _NOT_MADE_HERE else str(self._local_id)
        here = torchweft.rpc.get_worker_info().id
        return (
            _unique_id(worker_of(creator).info.id, local_id),
            _unique_id(here, str(self._fork_id)),
        )

    def __str__(self) -> str:
        try:
            self.agent()
        except (NotInitialized, ReferenceGone):
            return repr(self)
        rref_id, fork_id = self._ids()
        if self.is_owner():
            return f"OwnerRRef({rref_id})"
        return f"UserRRef(RRefId = {rref_id}, ForkId = {fork_id})"


PyRRef = RRef


def end_with(
    event: record_function, future: torch.futures.Future[Any]
) -> torch.futures.Future[Any]:
    """Ends ``event`` with ``future``; returns a future of the same result, done afterwards."""
    ended: torch.futures.Future[None] = torch.futures.Future()
    event._call_end_callbacks_on_future(ended)
    result: OrderedFuture[Any] = OrderedFuture()

    def pass_on(done: torch.futures.Future[Any]) -> None:
        ended.set_result(None)
        try:
            result.set_result(torch_names.wait_unseen(done))
        except Exception as error:
            result.set_exception(error)

    future.add_done_callback(pass_on)
    return result


def _unique_id(worker: int, local_id: str) -> str:
    return f"GloballyUniqueId(created_on={worker}, local_id={local_id})"


def _shown(info: WorkerInfo) -> str:
    return f"WorkerInfo(id={info.id}, name={info.name})"


def _has_failed(future: AnyFuture) -> bool:
    try:
        future.wait()
    except Exception:
        return True
    return False


# Requests to the workers that own the values


@torch_names.remotely_callable_unless_strict
@async_execution
def when_made(reference: tuple[int, int, int]) -> torch.futures.Future[None]:
    """Returns a future that is done when a value of this worker has been made, or cannot be."""
    return torch_names.when_made(reference)


when_made.has_no_event = True  # type: ignore[attr-defined]  # a step of ``remote``


@torch_names.remotely_callable_unless_strict
def _rref_typeof_on_owner(reference: torchweft.rpc.RRef[Any]) -> Any:
    """Returns the type of a value of this worker, when the value has been made."""
    return when_ready(reference.id, partial(_typed, reference))


def _typed(reference: torchweft.rpc.RRef[Any], value: Any) -> tuple[Any, Callable[[], type]]:
    """Returns the function that is called, and what does it; the reference keeps the value."""
    return _rref_typeof_on_owner, partial(type, value)


module_of(
    "rref_proxy", ["RRefProxy"], {"RRefProxy": RRefProxy, "UNSET_RPC_TIMEOUT": UNSET_RPC_TIMEOUT}
)
