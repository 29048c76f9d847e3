from __future__ import annotations

from torchweft.launch.restart_plan import RestartPlan
from torchweft.launch.restarts import GROUP, WORKER, RestartPolicy

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


def test_every_worker_has_a_limit_of_its_own() -> None:
    workers = plan(WORKER, limit=1)
    assert workers.died("ps", 1.0) is not None
    assert workers.died("trainer0", 1.0) is not None
    workers.take_due(10.0)
    assert workers.died("ps", 11.0) is None


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


def test_a_group_that_is_about_to_start_can_be_cancelled() -> None:
    group = plan(GROUP)
    group.died("ps", 1.0)
    group.all_ended(2.0)
    group.cancel()
    assert (group.is_waiting, group.total(), group.take_due(100.0)) == (False, 0, [])
