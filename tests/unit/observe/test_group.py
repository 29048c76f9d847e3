"""Groups that are found on this host, and the reports of a folder, some missing or broken."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command_line import said_by
from tests.reports import calling, member, report, thread
from torchweft.errors import GroupNotFound, ObserveError, ObserverRefused
from torchweft.observe import group
from torchweft.observe.group import Group, find, read_folder
from torchweft.observe.session import Access
from torchweft.reports import Identity, Report, encode
from torchweft.secret import Secret

OPEN = Access()


def identity(name: str, of_group: str, pid: int) -> Identity:
    members = (member(name), member("other", 1))
    return replace(report(name).identity, group=of_group, pid=pid, members=members)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, Identity | Exception]:
    """The answers of the workers of this host, by address."""
    answers: dict[str, Identity | Exception] = {}

    def ask(address: str, question: str, *_: object) -> bytes:
        answer = answers[address]
        if isinstance(answer, Exception):
            raise answer
        return encode(answer)

    monkeypatch.setattr(group, "ask", ask)
    monkeypatch.setattr(group, "listeners_here", lambda: list(answers))
    monkeypatch.setattr(group, "process_at", lambda address: None)
    return answers


def test_the_only_group_need_not_be_named(host: dict[str, object]) -> None:
    host["unix:@1"] = identity("a", "cafe01", 11)
    host["unix:@2"] = identity("b", "cafe01", 12)
    host["unix:@3"] = ObserverRefused("of another user")
    for target in ("", "cafe01", "ca", "11", "b"):
        assert find(target, OPEN).name == "cafe01"


def test_of_several_groups_one_must_be_named(host: dict[str, object]) -> None:
    host["unix:@1"] = identity("a", "cafe01", 11)
    host["unix:@2"] = identity("a", "beef02", 12)
    assert find("12", OPEN).name == "beef02"
    with pytest.raises(GroupNotFound, match="2 groups run here; name one: beef02 with a, other"):
        find("", OPEN)
    with pytest.raises(GroupNotFound, match="2 groups could be meant"):
        find("a", OPEN)
    with pytest.raises(GroupNotFound, match="no group 'x' on this host; there are: beef02"):
        find("x", OPEN)


def test_a_worker_that_does_not_answer_names_its_group(
    host: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = replace(member("b", 1), addresses=("unix:@2", "tcp:10.0.0.1:4000"))
    host["unix:@1"] = replace(identity("a", "cafe01", 11), members=(member("a"), stopped))
    host["unix:@2"] = TimeoutError()
    monkeypatch.setattr(group, "process_at", {"unix:@2": 12}.get)
    for target in ("b", "12"):
        assert find(target, OPEN).name == "cafe01"
    with pytest.raises(GroupNotFound, match="no group '13' on this host"):
        find("13", OPEN)


def test_workers_with_another_secret_are_named_beside_other_groups(host: dict[str, object]) -> None:
    host["unix:@1"] = identity("a", "cafe01", 11)
    host["unix:@2"] = ObserverRefused("no")
    with pytest.raises(GroupNotFound, match="that refuse this observer: 1; set WEFT_SECRET"):
        find("12", OPEN)


def test_workers_with_another_secret_are_told_from_none(host: dict[str, object]) -> None:
    host["unix:@1"] = ObserverRefused("no")
    with pytest.raises(ObserverRefused, match="the workers here have a secret, and this"):
        find("", OPEN)
    with pytest.raises(ObserverRefused, match="do not take the secret of this observer"):
        find("", Access(Secret(b"a secret of these tests")))


def test_a_worker_that_waits_for_tls_is_told_from_others(host: dict[str, object]) -> None:
    address = "tcp:10.0.0.1:4000"
    host[address] = TimeoutError("timed out")
    with pytest.raises(ObserveError, match=r"timed out; if its group has TLS, set WEFT_TLS_CERT"):
        find(address, OPEN)
    host[address] = ConnectionRefusedError("refused")
    with pytest.raises(ObserveError, match="refused; a group names the addresses"):
        find(address, OPEN)


def test_of_two_lives_of_a_name_the_later_one_counts() -> None:
    first, second = member("a"), replace(member("a"), id=20_000)
    lost = replace(second, state="lost")
    base = report("a").identity
    for told in ((first, lost, second), (lost, second, first)):
        identities = [replace(base, members=(each,)) for each in told]
        found = Group(identities, OPEN)
        assert found._members["a"] == lost


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
