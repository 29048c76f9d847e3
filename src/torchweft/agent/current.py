"""The one current agent of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from torchweft.agent.agent import Agent
from torchweft.errors import AlreadyInitialized, NotInitialized
from torchweft.patching import check_unpatched
from torchweft.runtime.forks import Children, end_when_back
from torchweft.runtime.timers import Timer

_current: Agent | None = None
_forked_from = ""
_make_way: Callable[[], None] | None = None
_children: tuple[Agent, Children, Timer] | None = None
"""The children of an agent, once it has forked one."""


def current() -> Agent:
    """Returns the agent of this process.

    Raises:
        NotInitialized: ``init_rpc`` was not called, or the worker has shut down, or this process
            was forked from a worker.
    """
    if _current is None:
        if _forked_from:
            raise NotInitialized(
                "RPC has not been initialized in this process, which was forked from worker "
                f"{_forked_from!r}: only that process is the worker; make calls there, for "
                "instance outside of the worker processes of a DataLoader"
            )
        raise NotInitialized(
            "RPC has not been initialized: call torchweft.init_rpc(...) first, or use "
            "'with torchweft.cluster(workers=3):'"
        )
    return _current


def is_set() -> bool:
    """Whether this process is a worker now."""
    return _current is not None


def is_forked() -> bool:
    """Whether this process is no worker, but was forked from one."""
    return _current is None and bool(_forked_from)


def check_unset() -> None:
    """Raises AlreadyInitialized where this process is a worker already, and remains one.

    Raises ConfigurationError where it can be none; see ``patching``.
    """
    check_unpatched()
    if _current is not None and _make_way is not None:
        _make_way()
    if _current is not None:
        raise AlreadyInitialized(
            f"RPC is already initialized: this process is worker {_current.info.name!r}; "
            "call torchweft.shutdown() before it joins another group"
        )


def when_in_the_way(make_way: Callable[[], None] | None) -> None:
    """Has ``make_way`` called before another group is joined; it may leave this one."""
    global _make_way
    _make_way = make_way


def install(agent: Agent | None) -> None:
    """Sets the current agent, or clears it with None."""
    global _current, _forked_from
    _current, _forked_from = agent, ""


def _prepare_fork() -> None:
    """Makes what parent and child share, in the parent."""
    global _children
    agent = _current
    if agent is not None and (_children is None or _children[0] is not agent):
        children = Children()
        _children = agent, children, agent.timers.add(children.collect)


def _look_after_child() -> None:
    """Has the parent look whether the child ends as it comes back."""
    if _children is not None:
        _, children, timer = _children
        timer.wake_by(children.forked())


def _leave_to_parent() -> None:
    """Clears the agent in a forked process: only the parent is a worker.

    The child must also drop the parent's connections: otherwise no peer would notice the parent's
    death.
    """
    global _current, _forked_from, _children
    agent, _current = _current, None
    shared, _children = _children, None
    if agent is not None:
        _forked_from = agent.info.name
        agent.abandon()
        children = shared[1] if shared is not None and shared[0] is agent else None
        end_when_back(agent.info.name, children, sys._getframe().f_back)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_prepare_fork,
        after_in_parent=_look_after_child,
        after_in_child=_leave_to_parent,
    )
