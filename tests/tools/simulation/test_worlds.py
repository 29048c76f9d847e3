"""Checks that the simulated worlds are as bad as intended."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation import test_calls_simulated as calls
from tests.simulation import test_connecting_simulated as connecting
from tests.simulation import test_sessions_simulated as sessions
from tests.simulation import test_shutdown_simulated as shutdown
from torchweft.engine.protocol.leaving import Step
from torchweft.engine.wire import session


def test_everything_happens_to_calls_that_may_happen() -> None:
    counts: Counter[str] = Counter()
    for seed in range(60):
        for program, has_strange in calls.PROGRAMS.items():
            run = calls.Run(seed, has_strange=has_strange)
            program(run)
            counts += run.world.counts
            counts["left"] += len(run.world.polite)
    expected = (
        "begins,goes on,not begun,refused,late answer,no nested call,turns away,dies,leaves,lost,"
        "left,object,ValueError,QueueFull,CallTimeout,CallCancelled,WorkerLost,NotInitialized"
    )
    assert {name for name in expected.split(",") if counts[name] < 5} == set(), counts


def test_the_seeds_break_connections_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACKNOWLEDGE_BYTES", "ALONE_BYTES"):
        monkeypatch.setattr(session, name, getattr(session, name))  # Runs set them.
    breaks = resumptions = partial = 0
    for seed in range(30):
        run = sessions.Run(seed)
        sessions.outlive_breaks(run)
        breaks += run.world.streams.breaks
        for worker in run.world.workers.values():
            for half in worker.node.halves.values():
                resumptions += half.resumptions
                partial += half.has_gone_on_inside_a_frame
    assert breaks > 100
    assert resumptions > 150
    assert partial > 20


def test_the_seeds_cross_dials_and_lose_greetings() -> None:
    told: dict[str, int] = {}
    for seed in range(40):
        run = connecting.Run(seed)
        connecting.meet(run)
        for event in run.world.trace:
            if event[2:3] == ("is asked by",):
                told[event[5]] = told.get(event[5], 0) + 1
    assert told["ACCEPT"] >= 40
    assert told["REFUSE"] >= 10, "dials hardly ever cross"
    assert told["WELCOME_AGAIN"] >= 3, "welcomes hardly ever get lost"
    assert told["HANG_UP"] >= 3
    assert told["RESUME"] >= 10
    assert told["BREAK_OFF"] >= 1


def test_the_seeds_lose_workers_in_every_phase() -> None:
    phases: set[Step] = set()
    for seed in range(200):
        group = shutdown.Group(seed)
        group.run()
        phases |= group.phases_of_loss
    assert phases == {Step.READY, Step.PROBE, Step.SETTLE, Step.CLOSE}
