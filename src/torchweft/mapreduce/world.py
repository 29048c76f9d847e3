"""The world of a map: this process's place, rank-dependent functions, and starting all workers.

These are the names of ``torchopt.distributed.world``, and ``WorldInfo``.

The place of this process is determined at each query. A process that has joined a group, in
whichever way, asks the group; before that, it reads the environment variables that its launcher
has set. ``auto_init_rpc`` makes each process join the group: the same script runs in every
process, started by ``torchrun``, by ``torchweft run`` or, alone, by ``python``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torchweft import extending, rpc
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.extending import Member
from torchweft.ids import WorkerInfo
from torchweft.rpc import shutdown

__all__ = [
    "WorldInfo",
    "auto_init_rpc",
    "barrier",
    "default_worker_name_format",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_worker_id",
    "get_world_info",
    "get_world_rank",
    "get_world_size",
    "not_on_rank",
    "on_rank",
    "rank_all",
    "rank_non_zero_only",
    "rank_zero_only",
]

# This process's place


def default_worker_name_format(
    world_rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
) -> str:
    """Returns ``worker`` and the rank, with as many digits as the number of workers has."""
    return f"worker{world_rank:0{len(str(world_size))}d}"


class WorldInfo(NamedTuple):
    """The place of one worker in its group.

    Attributes:
        world_rank: Its number in the group, from 0.
        world_size: How many workers the group has; in an open group, how many it has now.
        local_rank: Its number among the workers of the same host, from 0.
        local_world_size: How many workers are on that host.
    """

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def rank(self) -> int:
        """The same as ``world_rank``."""
        return self.world_rank

    @property
    def worker_name(self) -> str:
        """The name of the worker; before this process joins, the default name.

        Raises:
            UnknownWorker: The group has no worker of this rank.
        """
        if extending.is_worker():
            return extending.find_worker(self.world_rank).name
        return _launched_name() or default_worker_name_format(*self)


def get_world_info() -> WorldInfo:
    """Returns the place of this process among the workers. Never blocks.

    Before this process joins a group, its launcher's environment variables define it, such as
    ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``; by default, the process is
    alone.

    Raises:
        ConfigurationError: One of the variables is not a number, or they contradict each other.
    """
    if not extending.is_worker():
        return _launched_place()
    me, members = extending.this_worker(), extending.present_workers()
    rank, size = me.info.id, len(members)
    launched_rank, launched_size, local_rank, _ = extending.launched_place()
    # A launcher knows best which worker is on which host, if it has started this group.
    if (launched_rank, launched_size) == (rank, size) and local_rank is not None:
        return _launched_place()
    here = [member.info.id for member in members if member.host == me.host]
    return WorldInfo(rank, size, here.index(rank), len(here))


def get_world_rank() -> int:
    """Returns the number of this worker in the group, from 0; see ``get_world_info``."""
    return rpc.get_worker_info().id if extending.is_worker() else _launched_place().rank


get_rank = get_world_rank


def get_world_size() -> int:
    """Returns how many workers the group has; see ``get_world_info``."""
    if extending.is_worker():
        return len(extending.present_workers())
    return _launched_place().world_size


def get_local_rank() -> int:
    """Returns the number of this worker on its host, from 0; see ``get_world_info``."""
    return get_world_info().local_rank


def get_local_world_size() -> int:
    """Returns how many workers are on this host; see ``get_world_info``."""
    return get_world_info().local_world_size


def get_worker_id(id: str | int | WorkerInfo | None = None) -> int:
    """Returns the rank of a worker.

    Args:
        id: Its name or ``WorkerInfo``; None for this worker. A rank is returned as it is, whether
            or not there is such a worker.

    Raises:
        NotInitialized: ``id`` is a name, and this process has not joined a group.
        UnknownWorker: There is no such worker; lists the workers of the group.
    """
    if isinstance(id, int):
        return id
    return get_world_rank() if id is None else rpc.get_worker_info(id).id


def _launched_place() -> WorldInfo:
    """Returns the place that the launcher gave this process; by default, it is alone."""
    rank, size, local_rank, local_size = extending.launched_place()
    return WorldInfo(rank or 0, size or 1, local_rank or 0, local_size or 1)


def _launched_name() -> str | None:
    """Returns the name that ``torchweft run`` has given to this process, or None."""
    return os.environ.get("WEFT_WORKER_NAME")


# Functions that run on some of the workers only. The rank is looked up at each call. So a function
# may be decorated before its process joins a group, and in a remote call the rank of the called
# worker decides.


P = ParamSpec("P")
T = TypeVar("T")
Selected = Callable[[Callable[P, T]], Callable[P, "T | None"]]


def on_rank(*ranks: int) -> Selected[P, T]:
    """Returns a decorator: the function runs on these workers, and returns None on all others.

    Args:
        ranks: Ranks of workers, from 0; the workers need not exist. Negative ranks do not count
            from the end: -1 is refused.

    Raises:
        ArgumentTypeError: A rank is not an integer: a function, for instance, if the parentheses
            are missing.
        ConfigurationError: A rank is negative.
    """
    chosen = _checked("on_rank", ranks)
    return lambda function: _selective(function, lambda rank: rank in chosen)


def not_on_rank(*ranks: int) -> Selected[P, T]:
    """Returns a decorator: the function runs on all other workers, and returns None on these.

    Args:
        ranks: As for ``on_rank``.

    Raises:
        ArgumentTypeError: A rank is not an integer.
        ConfigurationError: A rank is negative.
    """
    excluded = _checked("not_on_rank", ranks)
    return lambda function: _selective(function, lambda rank: rank not in excluded)


def rank_all(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function unchanged: it runs on all workers."""
    return function


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Has a function run on the worker of rank 0 only, and return None on all others.

    Raises:
        ArgumentTypeError: ``function`` is not callable.
    """
    return _selective(function, lambda rank: rank == 0)


def rank_non_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Has a function run on all workers except rank 0, where it returns None.

    Raises:
        ArgumentTypeError: ``function`` is not callable.
    """
    return _selective(function, lambda rank: rank != 0)


def _selective(
    function: Callable[P, T], is_selected: Callable[[int], bool]
) -> Callable[P, T | None]:
    if not callable(function):
        raise ArgumentTypeError(
            f"a function is to run on some workers only, and {function!r} is none"
        )

    @functools.wraps(function)
    def run_where_selected(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_selected(get_world_rank()) else None

    return run_where_selected


def _checked(decorator: str, ranks: tuple[Any, ...]) -> frozenset[int]:
    for rank in ranks:
        if not hasattr(rank, "__index__"):
            like = f"; write @{decorator}(0) above a function" if callable(rank) else ""
            raise ArgumentTypeError(
                f"{decorator} takes ranks, each an integer of its own, and {rank!r} is none{like}"
            )
        if rank < 0:
            raise ConfigurationError(
                f"{decorator} was given rank {rank}; ranks go from 0 on, and are not counted from "
                "the end"
            )
    return frozenset(map(operator.index, ranks))


# Starting all workers

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
        ArgumentTypeError: An argument is not a function. A call of the decorated function raises it
            if the parentheses of the decorator are missing.

    The decorated function raises the errors of ``torchweft.init_rpc``, and:

    Raises:
        ConfigurationError: Only one of ``RANK`` and ``WORLD_SIZE`` is set, or one is not a number.
        WorkerLost: Another worker was lost before all could begin; gives the cause if that worker
            could report it.
    """
    for argument, value in (
        ("worker_init_fn", worker_init_fn or _nothing),
        ("worker_name_format", worker_name_format),
    ):
        if not callable(value):
            raise ArgumentTypeError(f"{argument} is {value!r}; it must be a function")

    def decorate(function: Any = None, *given: Any, **keywords: Any) -> Callable[P, T]:
        if given or keywords or not callable(function):
            raise ArgumentTypeError(
                "auto_init_rpc(...) decorates one function; if it was to decorate "
                f"{worker_init_fn!r}, write @auto_init_rpc(), which has parentheses"
            )

        @functools.wraps(function)
        def join_and_run(*args: P.args, **kwargs: P.kwargs) -> T:
            initialize = worker_init_fn or _nothing
            if extending.is_worker():
                initialize()
                result: T = function(*args, **kwargs)
                return result
            with recorded():
                me = _join(worker_name_format, backend, rpc_backend_options)
            with staying(me), recorded():
                # All have joined: ``init_rpc`` has waited for them.
                initialize()
                rpc.barrier(timeout=_NO_LIMIT)
                result = function(*args, **kwargs)
                return result

        return join_and_run

    return decorate


def _nothing() -> None:
    pass


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


def _join(worker_name_format: NameFormat, backend: Any, options: Options | None) -> Member:
    place = _launched_place()
    _check_launched()
    # A launcher names the workers of any program. A format is specific to this program, whose
    # calls use its names, so it takes precedence.
    is_default = worker_name_format is default_worker_name_format
    name = (_launched_name() if is_default else None) or worker_name_format(*place)
    rpc.init_rpc(name, backend, place.world_rank, place.world_size, options)
    return extending.this_worker()


def _check_launched() -> None:
    """Raises ConfigurationError if this is one of several workers, but rank or size is unknown."""
    rank, size, *_ = extending.launched_place()
    if size is None and "WEFT_INIT_METHOD" in os.environ:
        raise ConfigurationError(
            "auto_init_rpc needs to know how many workers there are, which 'torchweft run "
            "--restart worker' does not say, as they come and go; use '--restart group', or "
            "torchweft.init_rpc()"
        )
    for found, value, lacking, other, least in (
        ("RANK", rank, "WORLD_SIZE", size, 0),
        ("WORLD_SIZE", size, "RANK", rank, 1),
    ):
        if other is None and (value or 0) > least:
            raise ConfigurationError(
                f"environment variable {found} is {value}, but {lacking} is not set; start the "
                f"script with 'torchweft run' or 'torchrun', or unset {found} to run it alone"
            )


# How a worker leaves its group
#
# A worker whose main function has returned keeps serving, since other workers may still need it.
# It leaves when the interpreter exits, together with all other workers. A worker whose main
# function has failed leaves at once, and tells the other workers why. Calls that wait for it fail
# with a ``WorkerLost`` that names this cause, and the end of the group does not wait for it.


_BEHIND_S = 1.0
"""How much later than a failed worker the others exit; unloading torch takes a while."""


@contextlib.contextmanager
def staying(me: Member) -> Iterator[None]:
    """Keeps this worker in the group while the block runs the main function, and after it.

    The worker stays until the interpreter exits and all other workers are done. If the block
    raises, it stays only until the other workers have been told, which takes a moment.
    """
    atexit.register(_leave, me)
    try:
        yield
    except SystemExit as error:
        if error.code:
            _leave_at_once(me, error)
        raise
    except BaseException as error:
        _leave_at_once(me, error)
        raise


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Reports an error that the block raises to ``torchrun``, if it has started this process."""
    try:
        yield
    except Exception as error:
        _record(error)
        raise


def _record(error: Exception) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _leave_at_once(me: Member, error: BaseException) -> None:
    if _is_still(me):
        shutdown(error=error)


def _is_still(me: Member) -> bool:
    # The program may have called shutdown itself, or this may be a forked process.
    return extending.is_worker() and extending.this_worker() is me


def _leave(me: Member) -> None:
    """Leaves together with all other workers; an ``atexit`` handler."""
    if not _is_still(me):
        return
    try:
        shutdown()
    except KeyboardInterrupt:
        _end_badly(me, "interrupted while it waited for the others to be done", 130)
    except Exception as error:
        _end_badly(me, str(error), 1)
        _let_others_end_first()
        _record(error)


def _end_badly(me: Member, what: str, status: int) -> None:
    print(f"weft: worker {me.name!r}: {what}", file=sys.stderr)
    vars(sys)["_weft_exit_status"] = _ExitStatus(status)


def _let_others_end_first() -> None:
    """Waits so that the worker at fault exits first: launchers report the first process to exit."""
    if "LOCAL_RANK" in os.environ:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(_BEHIND_S)


class _ExitStatus:
    """Sets the exit status of the process, at the very end.

    An ``atexit`` handler cannot change the status; and if it ended the process, the handlers after
    it would not run. The interpreter releases the attributes of ``sys`` after all handlers, and
    after it has flushed the standard streams.

    Args:
        status: The exit status.
    """

    def __init__(self, status: int) -> None:
        self._end: Any = functools.partial(os._exit, status)

    def __del__(self) -> None:
        self._end()
