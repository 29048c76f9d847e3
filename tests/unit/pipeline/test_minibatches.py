"""Feeding an asynchronous pipeline: bounded, in order, and never in the way of a loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.pipeline.schedules import Action, Kind, SchedulePipeDream
from torchweft.pipeline.schedules.table import chain, run


@st.composite
def schedules(draw: st.DrawFn) -> tuple[SchedulePipeDream, int]:
    replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    weights = draw(st.sampled_from(["stashing", "vertical-sync", "2bw"]))
    return SchedulePipeDream(weights=weights, replicas=replicas), sum(replicas)


@given(given=schedules(), n_entered=st.integers(1, 12))
def test_a_loss_waits_for_no_later_minibatch(
    given: tuple[SchedulePipeDream, int], n_entered: int
) -> None:
    """So that no bound can deadlock: workers finish all parts of the minibatches that entered."""
    schedule, n_workers = given
    parts = [schedule.rows(n_workers, number, 1) for number in range(n_entered)]
    rows = [[action for part in parts for action in part[row]] for row in range(n_workers)]
    n_stages = 1 + max(stage for held in schedule.placement(n_workers) for stage in held)
    for row in rows:
        # It sends its gradients here, and waits for those of other replicas when it has more to do.
        while row and row[-1].kind is Kind.UPDATE:
            row.pop()
    ran = run(rows, chain(n_stages), lambda action: 0.0)
    assert not ran.missing
    done = {span.action for spans in ran.spans for span in spans}
    for number in range(n_entered):
        assert Action(n_stages - 1, Kind.FORWARD, number) in done


@pytest.mark.parametrize("weights", ["stashing", "vertical-sync", "2bw"])
@given(given=schedules(), count=st.integers(1, 30))
def test_the_bound_covers_what_is_under_way(
    weights: str, given: tuple[SchedulePipeDream, int], count: int
) -> None:
    """Stage 0 can have its next minibatch before the loss of an earlier one is taken."""
    schedule, n_workers = given
    held = [stage for stages in schedule.placement(n_workers) for stage in stages]
    n_first, most = held.count(0), max(map(held.count, held))
    rows = schedule.rows(n_workers, 0, count)
    entered: list[int] = []
    for row in rows[:n_first]:
        open_here = peak = 0
        for action in row:
            open_here += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
            peak = max(peak, open_here)
        entered.append(peak)
    assert sum(entered) <= n_workers + most - 1
