"""Makes holes in a strict worker, which the fuzzed attack on it must find."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz.strict import program
from tests.fuzz.targets import strict_member
from torchweft.engine.codec import functions, reading
from torchweft.nn import owner

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.keeps("descriptors")]
INPUTS = 20_000
"""At most this many; with the seeds below, the rarest hole takes about 100."""


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _followed(names: Any, name: bytes) -> Any:
    """Follows names of the program only; following others might end this process."""
    is_program = name.startswith(program.__name__.encode())
    return functions.resolve(name) if is_program else names._refuse_name(name)


HOLES: dict[str, tuple[int, Any, str, Callable[..., Any]]] = {
    "names are followed": (10, reading.StrictNames, "resolve", _followed),
    "any method is called": (
        12,
        reading.StrictNames,
        "method_of",
        lambda names, value, name: getattr(value, name),
    ),
    "any module is used": (
        13,
        owner,
        "_module",
        lambda reference: reference.local_value(),
    ),
    "forward of any module is called": (22, owner, "_check_declares_forward", _nothing),
}
"""Each with a seed that finds it soon, and the function that a faulty one replaces."""


def find(hole: str) -> None:
    """Raises AssertionError unless messages find a hole; only in a process of its own."""
    seed, home, name, instead = HOLES[hole]
    strict_member.run(strict_member.make(random.Random(0)))
    setattr(home, name, instead)
    chance = random.Random(seed)
    for _ in range(INPUTS):
        try:
            strict_member.run(strict_member.make(chance))
        except AssertionError:
            return
    raise AssertionError("no message had the worker do what it must not do")


LIMIT_S = 180
"""It waits for nothing, and takes ten seconds of a core: a busy machine may need long."""


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize(
    "hole",
    [
        pytest.param(hole, marks=() if hole == "names are followed" else pytest.mark.thorough)
        for hole in HOLES
    ],
)
def test_a_hole_is_found(hole: str) -> None:
    """In a new process: which messages are made depends on what was imported and run before."""
    text = f"from tests.tools.fuzz.test_strict_member import find; find({hole!r})"
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    subprocess.run([sys.executable, "-c", text], env=environment, check=True, timeout=LIMIT_S)
