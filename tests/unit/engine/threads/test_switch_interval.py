"""The interpreter's switch interval while a worker is in a group."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from torchweft import knobs
from torchweft.engine.worker.process import ShortSwitches


@pytest.fixture(autouse=True)
def interval_s() -> Iterator[float]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(before_s)


def test_it_is_shortened_and_put_back(interval_s: float) -> None:
    switches = ShortSwitches()
    assert sys.getswitchinterval() == pytest.approx(knobs.SWITCH_INTERVAL_S.get())
    switches.close()
    assert sys.getswitchinterval() == pytest.approx(interval_s)


def test_what_the_program_has_set_since_stays() -> None:
    switches = ShortSwitches()
    sys.setswitchinterval(0.002)
    switches.close()
    assert sys.getswitchinterval() == pytest.approx(0.002)
