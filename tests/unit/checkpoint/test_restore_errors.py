from __future__ import annotations

from pathlib import Path

from torchweft.checkpoint import restoring, snapshots
from torchweft.checkpoint.reading import Differences
from torchweft.checkpoint.snapshots import Manifest, Part, Snapshot

SNAPSHOT = Snapshot("/d", "000003-step9-0123abcd", 9)
FILE = "1-ps.pt"


def manifest() -> Manifest:
    part = Part("ps", 1, FILE, 1, "", True)
    return Manifest(9, "", "driver", ["driver", "ps"], [part], {}, {}, [], {})


def test_who_lacks_what_and_who_wrote_it_is_said() -> None:
    error = restoring.lacking(SNAPSHOT, manifest(), FILE, "trainer", ["driver", "trainer"])
    assert (error.worker, error.step, error.directory) == ("trainer", 9, "/d")
    assert "/d/000003-step9-0123abcd/1-ps.pt" in str(error)
    assert "'ps', which wrote it, is not in the group now" in str(error)
    here = restoring.lacking(SNAPSHOT, manifest(), FILE, "trainer", ["ps"])
    assert "is not in the group" not in str(here)


def test_the_other_snapshots_are_named_the_last_one_first(tmp_path: Path) -> None:
    for number, step in enumerate((3, 6, 9), start=1):
        path = tmp_path / f"{number:06}-step{step}-0123abcd"
        path.mkdir()
        (path / snapshots.MANIFEST).touch()
    damaged = snapshots.latest(tmp_path)
    assert damaged is not None
    error = restoring.corrupt(damaged, "/d/x", "ps", "a bit flipped")
    assert error.alternatives == (6, 3)
    assert "there are 6, 3" in str(error)
    assert "a bit flipped" in str(error)
    alone = restoring.corrupt(SNAPSHOT, "/d/x", "ps", "a bit flipped")
    assert "no other snapshot" in str(alone)


def test_many_differences_are_cut_short_in_the_text_only() -> None:
    missing = [f"entry{number}" for number in range(20)]
    error = restoring.mismatch(SNAPSHOT, Differences(missing, [], []))
    assert "entry7 and 12 more" in str(error)
    assert "strict=False" in str(error)
    assert error.missing == tuple(missing)
    assert "strict=False" not in str(restoring.mismatch(SNAPSHOT, Differences([], [], ["a"])))


def test_there_may_be_other_steps() -> None:
    assert "those of steps 9" in str(restoring.not_found("/d", 4, [SNAPSHOT]))
    assert str(restoring.not_found("/d", None, [])) == "there is no snapshot in /d"
