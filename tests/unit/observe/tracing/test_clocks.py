"""The stated error of aligned clocks holds, whatever the delays and the rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.observe.tracing.chrome import Alignment
from torchweft.reports import Lead, lead_of

delays = st.floats(0.0, 0.5)
offsets = st.floats(-1e6, 1e6)
rates = st.floats(0.999, 1.001)
# Of doubles at the size of the offsets.
TOLERANCE_S = 1e-8


class Clock:
    """Another worker's clock, which differs from the own one by an offset and a rate."""

    def __init__(self, offset_s: float, rate: float) -> None:
        self.offset_s, self.rate = offset_s, rate

    def at(self, own_s: float) -> float:
        return self.offset_s + self.rate * own_s

    def read(self, sent_s: float, there_s: float, back_s: float) -> tuple[float, float, float]:
        """Returns a reading by a call with two delays."""
        read_s = sent_s + there_s
        return sent_s, self.at(read_s), read_s + back_s


def lead_by(clock: Clock, begin_s: float, calls: list[tuple[float, float]]) -> Lead:
    readings = []
    for there_s, back_s in calls:
        readings.append(clock.read(begin_s, there_s, back_s))
        begin_s = readings[-1][2]
    return lead_of(readings)


calls = st.lists(st.tuples(delays, delays), min_size=1, max_size=5)


@given(offset_s=offsets, calls=calls)
def test_the_lead_is_off_by_no_more_than_its_error(
    offset_s: float, calls: list[tuple[float, float]]
) -> None:
    found = lead_by(Clock(offset_s, 1.0), 100.0, calls)
    assert abs(found.ahead_s - offset_s) <= found.error_s + TOLERANCE_S
    assert found.error_s <= min(map(sum, calls)) / 2 + TOLERANCE_S


@given(
    offset_s=offsets,
    rate=rates,
    before=calls,
    after=calls,
    duration_s=st.floats(0.0, 1000.0),
    share=st.floats(0.0, 1.0),
)
def test_a_converted_time_is_off_by_no_more_than_the_error(
    offset_s: float,
    rate: float,
    before: list[tuple[float, float]],
    after: list[tuple[float, float]],
    duration_s: float,
    share: float,
) -> None:
    clock = Clock(offset_s, rate)
    first = lead_by(clock, 100.0, before)
    begin_s = 100.0 + sum(map(sum, before))
    last = lead_by(clock, begin_s + duration_s, after)
    alignment = Alignment(first, last)
    true_s = begin_s + share * duration_s
    # The error is one of leads, by the other clock's rate; a drift within a reading adds its own.
    allowed_s = alignment.error_s / rate + 0.001 * (2 * sum(map(sum, before + after)) + 1e-6)
    assert abs(alignment.own(clock.at(true_s)) - true_s) <= allowed_s + TOLERANCE_S


def test_a_drift_between_the_measurements_is_followed() -> None:
    clock = Clock(7.0, 1.0005)
    alignment = Alignment(*[lead_of([clock.read(at_s, 0.0, 0.0)]) for at_s in (0.0, 1000.0)])
    assert alignment.error_s == 0.0
    for at_s in (0.0, 250.0, 1000.0):
        assert alignment.own(clock.at(at_s)) == pytest.approx(at_s)
