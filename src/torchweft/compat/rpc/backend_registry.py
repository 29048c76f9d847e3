"""The registry of back-ends: ``TENSORPIPE``, which is Weft, and those that programs add."""

# ruff: noqa: F401

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from torchweft.compat.rpc import api, names
from torchweft.compat.rpc.agents import TensorPipeAgent
from torchweft.compat.rpc.references import RRef
from torchweft.errors import AlreadyInitialized, ArgumentTypeError
from torchweft.rpc import TensorPipeRpcBackendOptions, constants, torch_names

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]

rpc_constants = constants
globals().update(names.MEMBERSHIP)


class BackendValue(NamedTuple):
    """The handlers of a back-end.

    Attributes:
        construct_rpc_backend_options_handler: Makes its options.
        init_backend_handler: Makes this process a worker, and returns its agent.
    """

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class Backend(enum.Enum):
    """The base of every ``BackendType``, before and after a registration."""

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def _enumerate(members: dict[str, BackendValue]) -> Any:
    kind: Any = Backend("BackendType", members, module=__name__)  # type: ignore[call-arg]
    kind.__doc__ = (
        "The back-ends that there are: ``BackendType.TENSORPIPE``, which is Weft, and those that "
        "``register_backend`` has added."
    )
    return kind


BackendType: Any = _enumerate({})
"""An enumeration's members are fixed, so each registration replaces the enumeration."""


def backend_registered(backend_name: str) -> bool:
    """Whether there is a back-end of that name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Adds a back-end.

    Args:
        backend_name: Its name in ``BackendType``.
        construct_rpc_backend_options_handler: Makes its options, from ``rpc_timeout`` and
            ``init_method`` by position and other arguments by name.
        init_backend_handler: Called by ``init_rpc`` with ``store``, ``name``, ``rank``,
            ``world_size`` and ``rpc_backend_options`` by name; returns the agent.

    Returns:
        The member of the new ``BackendType``.

    Raises:
        AlreadyInitialized: A back-end of that name exists.
    """
    global BackendType
    if backend_registered(backend_name):
        raise AlreadyInitialized(f"RPC backend {backend_name}: already registered")
    added = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    known = {member.name: member.value for member in BackendType}
    # The newest first: its options may be a subclass of those of another, which would claim them.
    BackendType = _enumerate({backend_name: added, **known})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Returns the options of a back-end."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes this process a worker by a back-end, and returns its agent."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    _transports: list[str] | None = None,
    _channels: list[str] | None = None,
    **others: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
    )


def _tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> Any:
    if not isinstance(store, Store):
        raise ArgumentTypeError(f"`store` must be a torch.distributed.Store, got {store!r}")
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise ArgumentTypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, got "
            f"{rpc_backend_options!r}"
        )
    torch_names.join(store, name, rank, world_size, rpc_backend_options, RRef)
    return TensorPipeAgent(rpc_backend_options, store)


register_backend(
    "TENSORPIPE",
    _tensorpipe_construct_rpc_backend_options_handler,
    _tensorpipe_init_backend_handler,
)
