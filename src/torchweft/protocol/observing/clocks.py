"""Compares the clocks of two workers by calls that read the other one. Pure.

A worker notes the time, has the other worker read its clock, and notes the time again. The other
clock was read in between, at an unknown moment: the delays of request and answer may differ. So its
lead over the own clock lies in an interval as long as the call. The middle of that interval is
wrong by at most half of its length. The shortest of several calls counts.

Two such measurements, before and after a trace, give the lead for all times in between, where both
clocks run at constant rates meanwhile. The error there is at most the larger one of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Reading(NamedTuple):
    """One call that read another worker's clock; all in seconds.

    Attributes:
        sent_s: The own time before the call.
        read_s: The other clock.
        received_s: The own time after the call.
    """

    sent_s: float
    read_s: float
    received_s: float


class Lead(NamedTuple):
    """By how much another worker's clock is ahead of the own one; all in seconds.

    Attributes:
        at_s: The own time at which it was measured.
        ahead_s: The lead.
        error_s: By how much ``ahead_s`` may be wrong.
    """

    at_s: float
    ahead_s: float
    error_s: float


def lead_of(readings: Iterable[Reading]) -> Lead:
    """Returns the lead that the shortest of some calls shows.

    Raises:
        ValueError: There are no readings.
    """
    sent_s, read_s, received_s = min(readings, key=lambda each: each.received_s - each.sent_s)
    middle_s = (sent_s + received_s) / 2
    return Lead(middle_s, read_s - middle_s, (received_s - sent_s) / 2)


class Alignment(NamedTuple):
    """Converts times of another worker's clock to the own one.

    Attributes:
        first: The lead before the times to convert.
        last: The lead after them.
    """

    first: Lead
    last: Lead

    @property
    def error_s(self) -> float:
        """By how much a converted time may be wrong, between both measurements."""
        return max(self.first.error_s, self.last.error_s)

    def own(self, their_s: float) -> float:
        """Returns the own time at which the other clock showed a time."""
        begin_s = self.first.at_s + self.first.ahead_s
        duration_s = self.last.at_s + self.last.ahead_s - begin_s
        if duration_s <= 0:
            return their_s - self.first.ahead_s
        share = (their_s - begin_s) / duration_s
        return self.first.at_s + share * (self.last.at_s - self.first.at_s)


SAME = Alignment(Lead(0.0, 0.0, 0.0), Lead(0.0, 0.0, 0.0))
"""The alignment of workers that read one clock."""
