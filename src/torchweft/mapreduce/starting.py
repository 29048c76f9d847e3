"""Starting a program on all workers: ``auto_init_rpc`` makes each process join the group.

The same script runs in every process, started by ``torchrun``, by ``torchweft run`` or, alone, by
``python``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, cast

from torch.distributed import HashStore  # type: ignore[attr-defined]

from torchweft import rpc
from torchweft.agent import current as current_agent
from torchweft.agent.agent import Agent
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.ids import WorkerInfo
from torchweft.mapreduce.ending import recorded, staying
from torchweft.mapreduce.identity import (
    WorldInfo,
    default_worker_name_format,
    launched_name,
    launched_place,
)
from torchweft.rpc.joining import INIT_METHOD_VARIABLE
from torchweft.rpc.options import from_tensorpipe

P = ParamSpec("P")
T = TypeVar("T")
NameFormat = Callable[[int, int, int, int], str]
Options = rpc.RpcBackendOptions | rpc.TensorPipeRpcBackendOptions

_NO_LIMIT = 0.0


def auto_init_rpc(
    worker_init_fn: Callable[[], Any] | None = None,
    worker_name_format: NameFormat = default_worker_name_format,
    *,
    backend: Any = None,
    rpc_backend_options: Options | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator for the main function: it runs when this process has joined its group.

    A call of the decorated function blocks until all workers have joined and have run
    ``worker_init_fn``. Then it runs the function, and returns its result. The process stays a
    worker until the interpreter exits, and then keeps serving until the main functions of all
    workers have returned. If the main function raises, the worker leaves at once instead, and
    tells the other workers why. If workers were lost, the remaining workers report it when they
    leave, and exit with status 1.

    The group is the one that ``torchrun`` or ``torchweft run`` has started, by ``RANK`` and
    ``WORLD_SIZE``. Without them the process is the only worker of a group of its own. If the
    process is a worker already, as in ``with torchweft.cluster(...)``, it stays in its group:
    ``worker_init_fn``, on this worker only, and the function are called. The code that joined the
    group leaves it.

    Args:
        worker_init_fn: Called without arguments on every worker, before any main function begins;
            it may take any time.
        worker_name_format: Makes this worker's name from its rank, the number of workers, its rank
            on its host and the number of workers there. By default the name is the one that
            ``torchweft run`` has given, and marks output with; without that, ``worker`` and
            the rank.
        backend: Accepted for compatibility; there is only one backend.
        rpc_backend_options: All other options; see ``torchweft.init_rpc``.

    Raises:
        ArgumentTypeError: An argument is not a function that can be called. A call of the
            decorated function raises it if the parentheses of the decorator are missing.

    The decorated function raises the errors of ``torchweft.init_rpc``, and:

    Raises:
        ConfigurationError: Only one of ``RANK`` and ``WORLD_SIZE`` is set, or one is not a number.
        WorkerLost: Another worker was lost before all could begin; gives the cause if that worker
            could report it.
    """
    _check_functions(worker_init_fn, worker_name_format)

    def decorate(*given: Any, **keywords: Any) -> Callable[P, T]:
        function = cast("Callable[P, T]", _one_function(given, keywords, worker_init_fn))

        @functools.wraps(function)
        def join_and_run(*args: P.args, **kwargs: P.kwargs) -> T:
            if current_agent.is_set():
                _initialize(worker_init_fn)
                return function(*args, **kwargs)
            with recorded():
                agent = _join(worker_name_format, backend, rpc_backend_options)
            with staying(agent), recorded():
                # All have joined: ``init_rpc`` has waited for them.
                _initialize(worker_init_fn)
                rpc.barrier(timeout=_NO_LIMIT)
                return function(*args, **kwargs)

        return join_and_run

    return decorate


def barrier(
    worker_names: Iterable[str | int | WorkerInfo] | None = None,
    timeout: float = rpc.UNSET_RPC_TIMEOUT,
) -> None:
    """Blocks until all given workers have called this; see ``torchweft.rpc.barrier``.

    Args:
        worker_names: The workers that take part, this worker among them; by default, and if it is
            empty, the whole group.
        timeout: Seconds to wait at most; 0 for no limit, and by default the timeout of the worker.

    Raises:
        ArgumentTypeError: ``worker_names`` is a single name.
        UnknownWorker: No worker has a given name; lists the workers of the group.
        ConfigurationError: This worker is not in ``worker_names``.
        CallTimeout: Not all workers called this in time.
        WorkerLost: A worker was lost before it called this.
    """
    if isinstance(worker_names, str):
        raise ArgumentTypeError(
            f"worker_names is {worker_names!r}; pass several names, as a list or set"
        )
    rpc.barrier(tuple(worker_names or ()) or None, timeout)


def _join(worker_name_format: NameFormat, backend: Any, options: Options | None) -> Agent:
    place = launched_place()
    _check_launched(place)
    # A launcher names the workers of any program. A format is specific to this program, whose
    # calls use its names, so it takes precedence.
    is_default = worker_name_format is default_worker_name_format
    name = (launched_name() if is_default else None) or worker_name_format(*place)
    if place.world_size == 1:
        options = _alone(options)
    rpc.init_rpc(name, backend, place.world_rank, place.world_size, options)
    return current_agent.current()


def _alone(options: Options | None) -> rpc.RpcBackendOptions:
    """Returns the options of the only worker of a group: it needs no store of another process."""
    if isinstance(options, rpc.TensorPipeRpcBackendOptions):
        options = from_tensorpipe(options)
    own = rpc.RpcBackendOptions() if options is None else copy.copy(options)
    if isinstance(own, rpc.RpcBackendOptions) and own.store is None and own.init_method is None:
        own.store = HashStore()
    return own


def _check_launched(place: WorldInfo) -> None:
    """Raises ConfigurationError if this is one of several workers, but rank or size is unknown."""
    is_told = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    is_open = INIT_METHOD_VARIABLE in os.environ and "WORLD_SIZE" not in os.environ
    is_alone = place.world_rank == 0 and place.world_size == 1
    if is_open:
        raise ConfigurationError(
            "auto_init_rpc needs to know how many workers there are, which 'torchweft run "
            "--restart worker' does not say, as they come and go; use '--restart group', or "
            "torchweft.init_rpc()"
        )
    if not is_told and not is_alone:
        found, lacking = ("RANK", "WORLD_SIZE") if place.world_rank else ("WORLD_SIZE", "RANK")
        raise ConfigurationError(
            f"environment variable {found} is {os.environ[found]}, but {lacking} is not set; start "
            f"the script with 'torchweft run' or 'torchrun', or unset {found} to run it alone"
        )


def _initialize(worker_init_fn: Callable[[], Any] | None) -> None:
    if worker_init_fn is not None:
        worker_init_fn()


# Checks of the decorated function and of the decorator's arguments


def _check_functions(worker_init_fn: Any, worker_name_format: Any) -> None:
    for argument, value in (
        ("worker_init_fn", worker_init_fn or _initialize),
        ("worker_name_format", worker_name_format),
    ):
        if not callable(value):
            raise ArgumentTypeError(f"{argument} is {value!r}; it must be a function")
    if worker_init_fn is not None and not _needs_no_arguments(worker_init_fn):
        raise ArgumentTypeError(
            f"worker_init_fn is {_name_of(worker_init_fn)}, which cannot be called without "
            f"arguments; {_PARENTHESES}"
        )


def _needs_no_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # Built-in functions may have no signature.
        pass
    return True


def _one_function(
    given: tuple[Any, ...], keywords: dict[str, Any], worker_init_fn: Any
) -> Callable[..., Any]:
    if len(given) == 1 and not keywords and callable(given[0]):
        function: Callable[..., Any] = given[0]
        return function
    raise ArgumentTypeError(
        "there is no function that auto_init_rpc(...) could decorate"
        if worker_init_fn is None
        else f"{_name_of(worker_init_fn)} was given to auto_init_rpc as worker_init_fn, and there "
        f"is no main function; {_PARENTHESES}"
    )


def _name_of(function: Any) -> str:
    return f"function {getattr(function, '__name__', function)!r}"


_PARENTHESES = (
    "if it is the main function, decorate it with @auto_init_rpc(), which has parentheses"
)
