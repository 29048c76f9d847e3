from __future__ import annotations

import pytest

from torchweft.launch.repeats import AT_ONCE_S, Repeats
from torchweft.launch.worker import WorkerExit

TRACE = """\
    Traceback (most recent call last):
      File "train.py", line 3, in <module>
        import nothing
    ModuleNotFoundError: No module named 'nothing'"""


def ended(name: str = "a", exit_code: int = 1, ran_s: float = 0.5) -> WorkerExit:
    return WorkerExit(name, 0, 77, exit_code, ran_s=ran_s)


def test_the_same_traceback_at_once_is_a_bug() -> None:
    repeats = Repeats(is_of_group=True)
    assert not repeats.is_repeated(ended(), TRACE)
    assert repeats.is_repeated(ended("b"), TRACE)


def test_numbers_and_addresses_may_differ() -> None:
    repeats = Repeats(is_of_group=True)
    assert not repeats.is_repeated(ended(), f"{TRACE} of <object at 0x7f3a>, process 12")
    assert repeats.is_repeated(ended(), f"{TRACE} of <object at 0x99bb>, process 345")


@pytest.mark.parametrize(
    ("second", "tail"),
    [
        (ended(ran_s=AT_ONCE_S), TRACE),
        (ended(exit_code=-9), TRACE),
        (ended(), TRACE.replace("nothing", "something")),
        (ended(), "    no licence"),
        (ended(), ""),
    ],
)
def test_what_may_pass_is_none(second: WorkerExit, tail: str) -> None:
    repeats = Repeats(is_of_group=True)
    assert not repeats.is_repeated(ended(), TRACE)
    assert not repeats.is_repeated(second, tail)
    assert not repeats.is_repeated(ended(), TRACE)  # not twice in a row


def test_without_a_traceback_nothing_is_known() -> None:
    repeats = Repeats(is_of_group=True)
    assert not repeats.is_repeated(ended(), "    no licence")
    assert not repeats.is_repeated(ended(), "    no licence")


def test_workers_that_begin_anew_by_themselves_are_told_apart() -> None:
    repeats = Repeats(is_of_group=False)
    assert not repeats.is_repeated(ended("a"), TRACE)
    assert not repeats.is_repeated(ended("b"), TRACE)
    assert repeats.is_repeated(ended("a"), TRACE)
