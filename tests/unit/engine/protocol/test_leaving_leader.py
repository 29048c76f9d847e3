from __future__ import annotations

from torchweft.engine.protocol.leaving import (
    Action,
    Leader,
    Left,
    Missing,
    ProbeLater,
    Report,
    Send,
    Step,
)

IDLE = Report(is_idle=True, activity=7)
BUSY = Report(is_idle=False, activity=7)


def tell(*workers: int, step: Step, arguments: tuple[int, ...] = ()) -> list[Action]:
    return [Send(worker, step, arguments) for worker in workers]


def probing(workers: int = 2) -> Leader:
    """Returns a leader that has just started its first round."""
    leader = Leader(set(range(workers)))
    for worker in range(workers - 1):
        assert leader.received(worker, Step.READY, []) == []
    expected = tell(*range(workers), step=Step.PROBE, arguments=(1,))
    assert leader.received(workers - 1, Step.READY, []) == expected
    return leader


def tell_report(leader: Leader, worker: int, probe_round: int, report: Report) -> list[Action]:
    return leader.received(worker, Step.REPORT, [probe_round, int(report.is_idle), report.activity])


def report_all(leader: Leader, *reports: Report) -> list[Action]:
    actions: list[Action] = []
    for worker, report in enumerate(reports):
        assert actions == []
        actions = tell_report(leader, worker, leader.round, report)
    return actions


def settling(workers: int = 2) -> Leader:
    leader = probing(workers)
    report_all(leader, *[IDLE] * workers)
    leader.probe_again()
    assert report_all(leader, *[IDLE] * workers) == tell(*range(workers), step=Step.SETTLE)
    return leader


def test_one_look_is_not_enough() -> None:
    leader = probing()
    assert report_all(leader, IDLE, IDLE) == [ProbeLater()]
    assert leader.probe_again() == tell(0, 1, step=Step.PROBE, arguments=(2,))
    assert report_all(leader, IDLE, IDLE) == tell(0, 1, step=Step.SETTLE)


def test_what_was_done_between_two_looks_starts_over() -> None:
    leader = probing()
    report_all(leader, IDLE, IDLE)
    leader.probe_again()
    assert report_all(leader, IDLE, Report(is_idle=True, activity=8)) == [ProbeLater()]
    leader.probe_again()
    assert report_all(leader, IDLE, Report(is_idle=True, activity=8))[0] == Send(0, Step.SETTLE)


def test_somebody_busy_is_waited_for() -> None:
    leader = probing()
    for _ in range(5):
        assert report_all(leader, IDLE, BUSY) == [ProbeLater()]
        leader.probe_again()
    assert report_all(leader, IDLE, IDLE) == [ProbeLater()]
    leader.probe_again()
    assert report_all(leader, IDLE, IDLE) == tell(0, 1, step=Step.SETTLE)


def test_an_answer_to_an_older_round_is_ignored() -> None:
    leader = probing()
    report_all(leader, IDLE, IDLE)
    leader.probe_again()
    tell_report(leader, 0, 2, IDLE)
    assert tell_report(leader, 1, 1, IDLE) == []
    assert tell_report(leader, 1, 2, BUSY) == [ProbeLater()]


def test_probing_before_all_are_ready_or_after_the_group_is_quiet_does_nothing() -> None:
    assert Leader({0, 1}).probe_again() == []
    assert settling().probe_again() == []


def test_all_are_let_go_when_the_last_has_settled() -> None:
    leader = settling(3)
    assert leader.received(2, Step.SETTLED, []) == []
    assert leader.received(0, Step.SETTLED, []) == []
    assert leader.received(1, Step.SETTLED, []) == [*tell(0, 1, 2, step=Step.CLOSE), Left(())]


def test_messages_that_come_twice_change_nothing() -> None:
    leader = settling()
    leader.received(1, Step.READY, [])
    leader.received(1, Step.SETTLED, [])
    assert leader.received(1, Step.SETTLED, []) == []
    assert leader.received(0, Step.SETTLED, [])[-1] == Left(())
    assert leader.received(0, Step.SETTLED, []) == []
    assert leader.member_lost(1) == []


def test_a_worker_lost_before_it_is_ready_is_left_out_and_named() -> None:
    leader = Leader({0, 1, 2})
    leader.received(0, Step.READY, [])
    leader.received(2, Step.READY, [])
    assert leader.member_lost(1) == tell(0, 2, step=Step.PROBE, arguments=(1,))
    tell_report(leader, 0, 1, IDLE)
    tell_report(leader, 2, 1, IDLE)
    leader.probe_again()
    tell_report(leader, 0, 2, IDLE)
    assert tell_report(leader, 2, 2, IDLE) == tell(0, 2, step=Step.SETTLE)
    leader.received(0, Step.SETTLED, [])
    assert leader.received(2, Step.SETTLED, []) == [
        *tell(0, 2, step=Step.CLOSE, arguments=(1,)),
        Left((1,)),
    ]


def test_a_worker_lost_while_its_report_is_awaited_is_left_out() -> None:
    leader = probing()
    tell_report(leader, 0, 1, IDLE)
    assert leader.member_lost(1) == [ProbeLater()]
    assert leader.probe_again() == [Send(0, Step.PROBE, (2,))]


def test_a_worker_lost_while_it_settles_is_left_out() -> None:
    leader = settling()
    leader.received(0, Step.SETTLED, [])
    assert leader.member_lost(1) == [Send(0, Step.CLOSE, (1,)), Left((1,))]


def test_a_lone_leader_closes() -> None:
    leader = probing(1)
    report_all(leader, IDLE)
    leader.probe_again()
    assert report_all(leader, IDLE) == [Send(0, Step.SETTLE)]
    assert leader.received(0, Step.SETTLED, []) == [Send(0, Step.CLOSE), Left(())]


def test_a_stranger_who_is_lost_is_not_named() -> None:
    leader = Leader({0, 1})
    leader.member_lost(5)
    assert leader.lost == set()


def test_who_is_waited_for_is_known_at_every_moment() -> None:
    leader = Leader({0, 1, 2})
    assert leader.missing() == Missing("had not called shutdown", (0, 1, 2))
    for worker in (0, 2):
        leader.received(worker, Step.READY, [])
    assert leader.missing() == Missing("had not called shutdown", (1,))
    leader.received(1, Step.READY, [])
    tell_report(leader, 0, 1, IDLE)
    assert leader.missing() == Missing("did not answer", (1, 2))
    tell_report(leader, 1, 1, BUSY)
    assert leader.missing() == Missing("had calls under way, or did not answer", (1, 2))
    tell_report(leader, 2, 1, BUSY)
    assert leader.missing() == Missing("had calls under way", (1, 2))
    leader.probe_again()
    tell_report(leader, 2, 2, IDLE)
    assert leader.missing() == Missing("had calls under way", (1,))
    tell_report(leader, 0, 2, IDLE)
    tell_report(leader, 1, 2, IDLE)
    leader.probe_again()
    report_all(leader, IDLE, IDLE, IDLE)
    leader.received(1, Step.SETTLED, [])
    assert leader.missing() == Missing("had not let go of all references", (0, 2))


def test_who_is_lost_is_not_waited_for() -> None:
    leader = Leader({0, 1, 2})
    leader.member_lost(1)
    assert leader.missing().workers == (0, 2)
