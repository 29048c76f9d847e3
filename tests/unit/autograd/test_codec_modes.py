from __future__ import annotations

import itertools

from tests.tables import cases
from torchweft.autograd.codec import (
    CREATE_GRAPH,
    FOR_INPUTS,
    INTO_GRAD,
    RETAIN_GRAPH,
    PassMode,
    mode_of,
)

MODES = [PassMode(*flags) for flags in itertools.product([False, True], repeat=4)]


@cases("mode", MODES)
def test_a_mode_travels_as_flags(mode: PassMode) -> None:
    assert mode_of(mode.flags) == mode


def test_each_mode_has_flags_of_its_own() -> None:
    assert len({mode.flags for mode in MODES}) == len(MODES)
    assert PassMode().flags == 0


def test_flags_of_others_do_not_matter() -> None:
    others = 0xFF & ~(RETAIN_GRAPH | CREATE_GRAPH | FOR_INPUTS | INTO_GRAD)
    assert mode_of(others) == PassMode()
