from __future__ import annotations

import math

import pytest

from torchweft.engine.protocol.sessions import Rounds


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
