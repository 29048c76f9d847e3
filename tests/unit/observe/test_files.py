"""The reports of a folder, and those that are missing or broken."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.command_line import said_by
from tests.reports import calling, member, report, thread
from torchweft.errors import GroupNotFound
from torchweft.observe.group import read_folder
from torchweft.reports import Report, encode

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


def test_hostile_files_are_left_out_in_a_moment(tmp_path: Path) -> None:
    write(tmp_path, report("a", thread(waits=(calling("a", 1, "b"),)), members=PAIR))
    os.mkfifo(tmp_path / "pipe.weft.json")
    (tmp_path / "zeros.weft.json").symlink_to("/dev/zero")
    (tmp_path / "deep.weft.json").write_text("[" * 1_000_000)
    (tmp_path / "digits.weft.json").write_text("9" * 100_000)
    for name, number in (("large", "1e400"), ("none", "NaN"), ("long", "9" * 30)):
        text = encode(report("a")).decode()
        (tmp_path / f"{name}.weft.json").write_text(
            re.sub(r'"memory_bytes": \d+', f'"memory_bytes": {number}', text)
        )
    answers, warnings = read_folder(str(tmp_path))
    assert [each.worker for each in answers.reports] == ["a"]
    assert len(warnings) == 7


def test_what_a_report_says_does_not_control_the_terminal(tmp_path: Path) -> None:
    hostile = "\x1b]0;owned\x07\x9b31m"
    waits = (calling("a", 1, hostile), calling(hostile, 1, "b"))
    write(tmp_path, report("a", thread(hostile, waits=waits, place=hostile), members=PAIR))
    (tmp_path / f"{hostile}.weft.json").write_text("{}")
    for command in (["explain", str(tmp_path)], ["explain", str(tmp_path), "--json"]):
        status, said, err = said_by(*command)
        assert status == 0
        assert "\x1b" not in said + err
        assert "\x9b" not in said + err
    assert r"\x1b]0;owned" in err
