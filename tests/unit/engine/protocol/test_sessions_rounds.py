from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.engine.protocol.sessions import ACKNOWLEDGE_S, Rounds


@pytest.mark.parametrize(
    ("detection_s", "probe_s", "interval_s", "prompt_after_s"),
    [
        (10.0, 2.0, 2.0, math.inf),
        (4.0, 1.0, 0.8, math.inf),
        (3.0, 1.0, 0.6, 0.375),
        (0.4, 1.0, 0.08, 0.05),
    ],
)
def test_a_kernel_that_probes_too_rarely_is_prompted(
    detection_s: float, probe_s: float, interval_s: float, prompt_after_s: float
) -> None:
    rounds = Rounds(detection_s, probe_s)
    assert rounds.interval_s == pytest.approx(interval_s)
    assert rounds.must_prompt(detection_s) is (prompt_after_s < math.inf)
    if prompt_after_s < math.inf:
        assert rounds.must_prompt(prompt_after_s)
        assert not rounds.must_prompt(prompt_after_s - 0.001)


@given(st.floats(0.1, 1000.0), st.integers(1, 200))
def test_a_silent_peer_is_heard_before_it_is_suspected(detection_s: float, probe_s: int) -> None:
    """Suspicion begins after half of the time; a look every ``interval_s`` must come before."""
    rounds = Rounds(detection_s, float(probe_s))
    last_look_s = detection_s / 2 - rounds.interval_s
    assert rounds.must_prompt(last_look_s) or probe_s <= detection_s / 4


def test_data_is_acknowledged_at_intervals() -> None:
    rounds = Rounds(10.0, 2.0)
    assert not rounds.must_acknowledge(5.0)
    assert rounds.acknowledge_at_s == 5.0 + ACKNOWLEDGE_S
    assert not rounds.must_acknowledge(5.0 + ACKNOWLEDGE_S / 2)
    assert rounds.acknowledge_at_s == 5.0 + ACKNOWLEDGE_S
    assert rounds.must_acknowledge(9.0)
    assert rounds.acknowledge_at_s == 9.0 + ACKNOWLEDGE_S
    assert not rounds.must_acknowledge(9.0)
