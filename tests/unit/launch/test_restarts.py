from __future__ import annotations

import math
from typing import Any

import pytest

from torchweft.errors import ConfigurationError
from torchweft.launch.restarts import GROUP, WORKER, Attempts, RestartPlan, RestartPolicy


def policy(limit: int = 3, **others: Any) -> RestartPolicy:
    defaults: dict[str, Any] = {"backoff_s": 1.0, "backoff_limit_s": 8.0, "window_s": 100.0}
    return RestartPolicy(limit, **{**defaults, "healthy_s": 20.0, **others})


class Subject:
    """A fake worker that lives for a while, dies, waits and restarts, on a virtual clock."""

    def __init__(self, policy: RestartPolicy, draw: float = 1.0) -> None:
        self.attempts = Attempts(policy, lambda: draw)
        self.now_s = 1000.0
        self.attempts.started(self.now_s)

    def live(self, seconds: float) -> tuple[float, int] | None:
        """Dies after ``seconds``; returns the restart's delay and number, None if there is none."""
        self.now_s += seconds
        attempt = self.attempts.next(self.now_s)
        if attempt is None:
            return None
        self.now_s += attempt.delay_s
        self.attempts.started(self.now_s)
        return attempt


def test_waits_double_up_to_a_limit() -> None:
    subject = Subject(policy(limit=6, window_s=math.inf))
    assert [subject.live(1.0) for _ in range(7)] == [
        (1.0, 1),
        (2.0, 2),
        (4.0, 3),
        (8.0, 4),
        (8.0, 5),
        (8.0, 6),
        None,
    ]
    assert subject.attempts.total == 6


@pytest.mark.parametrize(("draw", "delays"), [(0.0, [0.5, 1.0, 2.0]), (0.5, [0.75, 1.5, 3.0])])
def test_chance_takes_up_to_half_of_a_wait(draw: float, delays: list[float]) -> None:
    subject = Subject(policy(), draw)
    assert [subject.live(1.0) for _ in range(3)] == list(zip(delays, (1, 2, 3), strict=True))


def test_a_time_of_health_makes_the_next_wait_short_again() -> None:
    subject = Subject(policy(limit=10))
    assert [subject.live(seconds) for seconds in (1.0, 1.0, 19.9, 20.0, 1.0)] == [
        (1.0, 1),
        (2.0, 2),
        (4.0, 3),
        (1.0, 4),
        (2.0, 5),
    ]


def test_restarts_count_within_the_window_only() -> None:
    subject = Subject(policy(limit=2, backoff_s=0.0))
    assert subject.live(0.0) == (0.0, 1)
    assert subject.live(60.0) == (0.0, 2)
    assert subject.live(40.0) == (0.0, 2)  # the first restart was 100 s ago
    assert subject.live(59.0) is None  # the restarts 59 s and 99 s ago count
    assert subject.attempts.total == 3


def test_many_restarts_in_a_row_overflow_nothing() -> None:
    subject = Subject(policy(limit=5000, window_s=math.inf, healthy_s=1e9))
    for _ in range(5000):
        attempt = subject.live(0.0)
    assert attempt == (8.0, 5000)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": -1}, "number of restarts is -1; it must be 0"),
        ({"scope": "all"}, "scope 'all'; it must be one of group, worker"),
        ({"backoff_s": -1.0}, "backoff_s of the restarts is -1.0"),
        ({"backoff_s": math.nan}, "backoff_s of the restarts is nan"),
        ({"backoff_limit_s": math.inf}, "backoff_limit_s of the restarts is inf"),
        ({"window_s": 0.0}, "window_s of the restarts is 0.0; it must be more than 0"),
        ({"window_s": math.nan}, "window_s of the restarts is nan"),
    ],
)
def test_values_that_cannot_work_are_refused(given: dict[str, Any], message: str) -> None:
    RestartPolicy(window_s=math.inf).check()
    with pytest.raises(ConfigurationError, match=message):
        RestartPolicy(**given).check()


# The restarts of a run


NAMES = ("ps", "trainer0", "trainer1")


def plan(scope: str, limit: int = 2) -> RestartPlan:
    return RestartPlan(RestartPolicy(limit, scope, backoff_s=2.0), NAMES, 0.0, lambda: 1.0)


def test_of_a_group_all_start_again_once_all_have_ended() -> None:
    group = plan(GROUP)
    assert group.died("trainer1", 10.0) == (2.0, 1)
    assert (group.is_waiting, group.is_regrouping, group.wait_s(10.0)) == (True, True, None)
    assert group.take_due(1000.0) == []  # some workers still run
    assert group.all_ended(15.0) == (2.0, 1)
    assert (group.is_regrouping, group.wait_s(15.5)) == (False, 1.5)
    assert group.take_due(16.9) == []
    assert group.take_due(17.0) == list(NAMES)
    assert (group.is_waiting, group.wait_s(17.0)) == (False, None)
    assert [group.count(name) for name in NAMES] == [1, 1, 1]
    assert group.total() == 1


def test_the_limit_of_a_group_is_for_all_its_workers_together() -> None:
    group = plan(GROUP)
    for number, name in enumerate(("ps", "trainer0"), start=1):
        attempt = group.died(name, float(number))
        assert attempt is not None
        assert attempt.number == number
        group.all_ended(float(number))
        group.take_due(100.0)
    assert group.died("trainer1", 3.0) is None
    assert not group.is_waiting


def test_of_workers_only_the_dead_one_starts_again() -> None:
    workers = plan(WORKER)
    assert workers.died("ps", 10.0) == (2.0, 1)
    assert workers.died("trainer1", 11.0) == (2.0, 1)
    assert not workers.is_regrouping
    assert workers.wait_s(11.0) == 1.0
    assert workers.take_due(12.0) == ["ps"]
    assert workers.wait_s(12.0) == 1.0
    assert workers.take_due(20.0) == ["trainer1"]
    assert [workers.count(name) for name in NAMES] == [1, 0, 1]
    assert workers.total() == 2


def test_the_end_of_the_run_cancels_what_was_waited_for() -> None:
    workers = plan(WORKER, limit=1)
    workers.died("ps", 1.0)
    workers.take_due(10.0)
    workers.died("trainer0", 10.0)
    assert workers.died("ps", 10.5) is None
    assert (workers.is_waiting, workers.take_due(100.0)) == (False, [])


def test_what_is_waited_for_can_be_cancelled() -> None:
    for scope in (GROUP, WORKER):
        cancelled = plan(scope)
        cancelled.died("ps", 1.0)
        assert (cancelled.count("ps"), cancelled.total()) == (1, 1)
        cancelled.cancel()
        cancelled.cancel()
        assert (cancelled.count("ps"), cancelled.total()) == (0, 0)
        assert not cancelled.is_waiting
        assert cancelled.all_ended(2.0) is None
        assert cancelled.take_due(100.0) == []
