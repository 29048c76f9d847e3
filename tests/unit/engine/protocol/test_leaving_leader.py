from __future__ import annotations

from torchweft.engine.protocol.leaving import (
    Action,
    Leader,
    Missing,
    Report,
    Step,
)

IDLE = Report(is_idle=True, activity=7)
BUSY = Report(is_idle=False, activity=7)


def tell_report(leader: Leader, worker: int, probe_round: int, report: Report) -> list[Action]:
    return leader.received(worker, Step.REPORT, [probe_round, int(report.is_idle), report.activity])


def report_all(leader: Leader, *reports: Report) -> list[Action]:
    actions: list[Action] = []
    for worker, report in enumerate(reports):
        assert actions == []
        actions = tell_report(leader, worker, leader.round, report)
    return actions


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
