from __future__ import annotations

from torchweft.pipeline.schedules import Span, Table
from torchweft.pipeline.schedules.table import Run, chain, run


def ran(rows: str, latency_s: float = 0.0) -> Run:
    table = Table.from_csv(rows)
    return run(table.rows, chain(table.n_stages), lambda action: 1.0, latency_s)


def test_an_action_starts_when_its_worker_is_free_and_its_needs_are_there() -> None:
    result = ran("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", latency_s=0.5)
    assert result.missing == {}
    assert [span.start_s for span in result.spans[0]] == [0, 1, 4, 6]
    assert [span.start_s for span in result.spans[1]] == [1.5, 2.5, 3.5, 4.5]
    assert isinstance(result.spans[0][0], Span)


def test_a_worker_that_waits_for_ever_is_reported_with_the_missing_result() -> None:
    result = ran("0F0,0B0\n1I0,1F0")
    assert [len(row) for row in result.spans] == [1, 0]
    assert {worker: str(need) for worker, need in result.missing.items()} == {0: "1I0", 1: "1F0"}


def test_an_update_needs_the_minibatches_since_the_last_one_of_every_replica() -> None:
    result = ran("0F0,0B0,0U1,0F2,0B2,0U3\n0F1,0F3,0B1,0U1,0B3,0U3")
    ends = {str(span.action): span.end_s for row in result.spans for span in row}
    assert result.missing == {}
    assert ends["0F2"] == 5
    assert result.spans[0][2].start_s == 3
