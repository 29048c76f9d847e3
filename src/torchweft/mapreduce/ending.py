"""How a worker that ``auto_init_rpc`` has started leaves its group.

A worker whose main function has returned goes on serving: the others may still need it. So it
leaves when the interpreter exits, together with all others. One whose main function has failed
leaves at once, and tells the others why: what waits for it fails with a ``WorkerLost`` that says
so, and the end of the group does not wait for it.
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

from torchweft.agent import current as current_agent
from torchweft.agent.agent import Agent
from torchweft.agent.served_calls import current_call
from torchweft.errors import WeftError
from torchweft.rpc import rpc_async, shutdown
from torchweft.rpc.strictness import check_types
from torchweft.serialize.registry import remotely_callable

_TELL_LIMIT_S = 2.0
"""How long telling the others of a failure may take: some may have no thread to listen with."""

_BEHIND_S = 1.0
"""How much later than a worker that has failed the others end; taking torch apart takes a while."""

_SHOWN_LENGTH = 200


@contextlib.contextmanager
def staying(agent: Agent) -> Iterator[None]:
    """Runs the main function, in the block, and has this worker stay in the group as it should.

    That is until the interpreter exits and all others are done; where the block raises, it is
    until the others have been told, which takes a moment.
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
    """Tells ``torchrun``, where it has started this process, of the error that the block raises."""
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
        _tell_all(agent, _describe(error))
        shutdown(graceful=False)


def _is_current(agent: Agent) -> bool:
    # The program may have shut down itself, or this may be a process that it has forked.
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
    others.sort(key=lambda peer: peer.link is None)  # Those first who need not be dialled.
    calls = []
    for peer in others:
        left_s = end_s - time.monotonic()
        with contextlib.suppress(WeftError):
            if left_s > 0:
                calls.append(rpc_async(peer.info, failed, (cause,), timeout=left_s))
    for call in calls:
        # There is no answer: whoever has heard of it hangs up.
        with contextlib.suppress(WeftError):
            call.wait()


@remotely_callable
def failed(cause: str) -> None:
    """Notes that the program of the calling worker has failed, so that it is lost."""
    check_types(cause=(cause, str))
    call = current_call.get()
    if call is not None and not call.peer.is_self:
        current_agent.current().lose(call.peer, cause)


def _leave(agent: Agent) -> None:
    """Leaves with all others; a handler for the exit of the interpreter."""
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
    """Gives whoever has led to this a moment: launchers report the one that ends first."""
    if "LOCAL_RANK" in os.environ:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(_BEHIND_S)


class _ExitStatus:
    """Gives the process an exit status, at the very end.

    A handler for the exit of the interpreter cannot change the status; and were it to end the
    process, the handlers after it would not run. What ``sys`` refers to is let go after all of
    them, and after the standard streams have been flushed.

    Args:
        status: The exit status.
    """

    def __init__(self, status: int) -> None:
        self._end: Any = functools.partial(os._exit, status)

    def __del__(self) -> None:
        self._end()
