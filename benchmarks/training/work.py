"""The programs by name: each returns its first losses after seeding, and then is timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.frame.api import Api, use
from benchmarks.frame.work import Numbers, Work
from benchmarks.training.one_process import OneProcess

EPISODE = 10
"""Steps that workers make on one order of the first worker."""
CHECKED_STEPS = 20


def works(api: Api) -> dict[str, Work | Numbers]:
    """Returns the programs for a group of this size."""
    return {2: _rnn, 3: _server_and_agent, 4: _hybrids}[api.size]()


def local_works() -> dict[str, Work | Numbers]:
    """Returns the program that can run in one process; its losses differ, as it has one seed."""
    use(OneProcess())
    return {"rnn": _rnn()["rnn"]}


def _rnn() -> dict[str, Work | Numbers]:
    from benchmarks.training.rnn import Trainer

    return _program("rnn", Trainer, steps=1)


def _server_and_agent() -> dict[str, Work | Numbers]:
    from benchmarks.training.parameter_server import Training
    from benchmarks.training.reinforcement import Agent

    return {**_program("server", Training), **_program("agent", Agent)}


def _hybrids() -> dict[str, Work | Numbers]:
    from benchmarks.training.hybrid import Training

    ddp = functools.partial(Training, is_ddp=True)
    by_hand = functools.partial(Training, is_ddp=False)
    return {
        **_program("hybrid", ddp, is_in_lockstep=True),
        **_program("hybrid by hand", by_hand, is_in_lockstep=True),
    }


def _program(
    name: str, make: Callable[[], Any], steps: int = EPISODE, **checked: object
) -> dict[str, Work | Numbers]:
    # Made on the first order, so that a program that fails does not affect others in its group.
    made = functools.cache(make)
    return {
        f"{name} losses": Numbers(lambda: made().train(CHECKED_STEPS, **checked)),
        name: Work(lambda: made().train(steps), steps),
    }
