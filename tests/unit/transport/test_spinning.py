from __future__ import annotations

import os

import pytest

from weft import knobs
from weft.transport.spinning import Spinning


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def rests(spinning: Spinning) -> int:
    """Counts the waits that sleep at once before one may spin again."""
    count = 0
    while not spinning.is_worthwhile():
        count += 1
    return count


def test_each_failure_doubles_the_rest_up_to_a_bound() -> None:
    spinning = Spinning()
    counts = []
    for _ in range(15):
        counts.append(rests(spinning))
        spinning.failed()
    assert counts == [0, *(2**n for n in range(13)), 4096]


def test_a_success_ends_the_long_rests() -> None:
    spinning = Spinning()
    for _ in range(8):
        spinning.failed()
        rests(spinning)
    spinning.succeeded()
    assert rests(spinning) == 0
    spinning.failed()
    assert rests(spinning) == 1


def test_it_can_be_switched_off() -> None:
    with knobs.SPIN_S.override(0.0):
        assert not Spinning().is_worthwhile()


def test_a_machine_with_one_core_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert not Spinning().is_worthwhile()
