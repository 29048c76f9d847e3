"""Fuzzes each target briefly with the same inputs every time, to notice broken decoders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import mutational, targets
from tests.fuzz.campaign import Plan
from torchweft.native import native

# torch warns once about a coming change, which does not affect these tests.
pytestmark = pytest.mark.filterwarnings("ignore")

FOLDER = Path(targets.__file__).parent
FRAMES = 1000
BARE = 5000
NATIVE = ("values", "inline", "frames", "ring", "messages")
"""The targets that have a twin in C."""


def test_every_target_is_listed() -> None:
    assert sorted(targets.NAMES) == sorted(path.stem for path in FOLDER.glob("[!_]*.py"))


@pytest.mark.parametrize("name", targets.NAMES)
def test_what_it_starts_from_is_mostly_valid(name: str) -> None:
    target = targets.load(name)
    assert target.name == name
    outcomes = [target.check_memory(seed) for seed in target.seeds()]
    target.end()
    assert outcomes.count(None) >= 2
    assert all(len(seed) <= target.length_limit for seed in target.seeds())


@pytest.mark.parametrize("name", targets.NAMES)
def test_a_moment_of_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    if name == "ring" and native is None:
        pytest.skip("there is no native twin here, and no other one")
    target = targets.load(name)
    report = mutational.fuzz(target, Plan(FRAMES, seed=5, findings=tmp_path))
    target.end()
    found = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert not found, found[0]
    assert report.frames == FRAMES
    # Some inputs pass the first check, and not all are accepted.
    assert FRAMES // 100 < report.accepted < FRAMES * 99 // 100
    assert report.reached >= 4


@pytest.mark.skipif(native is None, reason="there is no native twin here")
@pytest.mark.parametrize("name", targets.NAMES)
def test_a_native_twin_takes_bytes_alone(name: str, tmp_path: Path) -> None:
    target = targets.load(name)
    assert (target.bare is not None) == (name in NATIVE)
    if target.bare is None:
        return
    report = mutational.fuzz(target, Plan(200, seed=5, findings=tmp_path, bare=BARE))
    found = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert not found, found[0]
    assert report.bare == BARE
    assert BARE // 100 < report.bare_accepted < BARE * 99 // 100
