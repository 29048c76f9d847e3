"""The reports of a folder, and those that are missing or broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.observers import said_by
from tests.unit.protocol.observing.reports import calling, member, report, thread
from torchweft.errors import GroupNotFound
from torchweft.observe.files import read_folder
from torchweft.protocol.observing.report import Report, encode

PAIR = (member("a"), member("b", 1))


def write(folder: Path, *reports: Report) -> None:
    for each in reports:
        (folder / f"{each.worker}.weft.json").write_bytes(encode(each))


def test_a_broken_file_is_named_and_the_others_are_explained(tmp_path: Path) -> None:
    write(tmp_path, report("a", thread(waits=(calling("a", 1, "b"),)), members=PAIR))
    path = tmp_path / "b.weft.json"
    path.write_bytes(encode(report("b", members=PAIR))[:100])
    status, said, err = said_by("explain", str(tmp_path))
    assert status == 0
    assert (
        f"torchweft explain: left out, as it cannot be read: '{path}': a report is no JSON" in err
    )
    assert f"worker 'b', which has written a file that cannot be read, '{path}'" in said


def test_a_folder_of_broken_files_alone(tmp_path: Path) -> None:
    (tmp_path / "a.weft.json").mkdir()
    (tmp_path / "b.weft.json").write_text("{}")
    with pytest.raises(GroupNotFound) as caught:
        read_folder(str(tmp_path))
    assert "a.weft.json': Is a directory; " in str(caught.value)
    assert "b.weft.json': Report of a report lacks" in str(caught.value)


def test_reports_of_far_apart_moments_are_told(tmp_path: Path) -> None:
    write(tmp_path, report("a", time=1000.0), report("b", time=1100.0))
    _, warnings = read_folder(str(tmp_path))
    assert warnings == ["the reports are 100 s apart; the oldest may be of another problem"]
