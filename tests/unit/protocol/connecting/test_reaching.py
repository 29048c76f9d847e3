from __future__ import annotations

import pytest

from torchweft.protocol.connecting import Failure, Outcome, Reaching


@pytest.mark.parametrize(
    ("outcomes", "is_here", "failure"),
    [
        ([], True, Failure.REFUSED),
        ([Outcome.REFUSED], True, Failure.GONE),
        ([Outcome.REFUSED, Outcome.REFUSED], True, Failure.GONE),
        ([Outcome.REFUSED], False, Failure.REFUSED),
        ([Outcome.REFUSED, Outcome.UNSUITABLE], True, Failure.REFUSED),
        ([Outcome.UNSUITABLE], True, Failure.REFUSED),
        ([Outcome.REFUSED, Outcome.UNANSWERED], True, Failure.BROKEN),
    ],
)
def test_what_failed_addresses_mean(
    outcomes: list[Outcome], is_here: bool, failure: Failure
) -> None:
    reaching = Reaching(is_here=is_here)
    for outcome in outcomes:
        reaching.failed("tcp:x:1", outcome, "why")
    assert reaching.failure is failure


def test_the_cause_names_the_addresses_that_tell_anything() -> None:
    reaching = Reaching(is_here=False)
    assert reaching.cause == "none of its addresses can be reached from here"
    reaching.failed("unix:@a", Outcome.REFUSED, "refused")
    assert reaching.cause == "unix:@a: refused"
    reaching.failed("tcp:x:1", Outcome.UNANSWERED, "no route")
    assert reaching.cause == "tcp:x:1: no route"
    gone = Reaching(is_here=True)
    gone.failed("unix:@a", Outcome.REFUSED, "refused")
    assert "its process has ended" in gone.cause
