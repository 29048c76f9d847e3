"""How a worker that ``auto_init_rpc`` has started leaves its group.

A worker whose main function has returned keeps serving, since other workers may still need it.
It leaves when the interpreter exits, together with all other workers. A worker whose main function
has failed leaves at once, and tells the other workers why. Calls that wait for it fail with a
``WorkerLost`` that names this cause, and the end of the group does not wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from torchweft.engine.codec.registry import remotely_callable
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.calls import current_call
from torchweft.errors import WeftError
from torchweft.rpc import rpc_async, shutdown
from torchweft.rpc.current_call import check_types

_TELL_LIMIT_S = 2.0
"""Time limit for reporting a failure to the other workers: some may have no thread to serve it."""

_BEHIND_S = 1.0
"""How much later than a failed worker the others exit; unloading torch takes a while."""

_SHOWN_LENGTH = 200


@contextlib.contextmanager
def staying(agent: Agent) -> Iterator[None]:
    """Keeps this worker in the group while the block runs the main function, and after it.

    The worker stays until the interpreter exits and all other workers are done. If the block
    raises, it stays only until the other workers have been told, which takes a moment.
    """
    atexit.register(_leave, agent)
    try:
        yield
    except SystemExit as error:
        if error.code:
            _leave_at_once(agent, error)
        raise
    except BaseException as error:
        _leave_at_once(agent, error)
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


def _leave_at_once(agent: Agent, error: BaseException) -> None:
    if _is_current(agent):
        agent.lifetime.has_failed = True
        _tell_all(agent, _describe(error))
        shutdown(graceful=False)


def _is_current(agent: Agent) -> bool:
    # The program may have called shutdown itself, or this may be a forked process.
    return current_agent.is_set() and current_agent.current() is agent


def _describe(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"its program called sys.exit({error.code!r})"
    if isinstance(error, KeyboardInterrupt):
        return "its program was interrupted"
    first_line, *_ = str(error).splitlines() or [""]
    shown = first_line if len(first_line) <= _SHOWN_LENGTH else f"{first_line[:_SHOWN_LENGTH]}..."
    kind = type(error).__name__
    return f"its program raised {kind}: {shown}" if shown else f"its program raised {kind}"


def _tell_all(agent: Agent, cause: str) -> None:
    end_s = time.monotonic() + _TELL_LIMIT_S
    others = [peer for peer in agent.members.present() if not peer.is_self and peer.lost is None]
    others.sort(key=lambda peer: peer.link is None)  # First the peers that need no dialling.
    calls = []
    for peer in others:
        left_s = end_s - time.monotonic()
        with contextlib.suppress(WeftError):
            if left_s > 0:
                calls.append(rpc_async(peer.info, failed, (cause,), timeout=left_s))
    for call in calls:
        # No answer comes: a peer that received the call closes its connection.
        with contextlib.suppress(WeftError):
            call.wait()


@remotely_callable
def failed(cause: str) -> None:
    """Marks the calling worker as lost, because its program has failed."""
    check_types(cause=(cause, str))
    call = current_call.get()
    if call is not None and not call.peer.is_self:
        current_agent.current().lose(call.peer, cause)


def _leave(agent: Agent) -> None:
    """Leaves together with all other workers; an ``atexit`` handler."""
    if not _is_current(agent):
        return
    try:
        shutdown()
    except KeyboardInterrupt:
        _end_badly(agent, "interrupted while it waited for the others to be done", 130)
    except Exception as error:
        _end_badly(agent, str(error), 1)
        _let_others_end_first()
        _record(error)


def _end_badly(agent: Agent, what: str, status: int) -> None:
    print(f"weft: worker {agent.info.name!r}: {what}", file=sys.stderr)
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
