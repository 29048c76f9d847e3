from __future__ import annotations

from pathlib import Path

import pytest

from torchweft.launch.memory_kills import MemoryKills


class ControlGroups:
    """A fake file system of control groups, written by the test."""

    def __init__(self, root: Path) -> None:
        self.mount = root / "mount"
        self.membership = root / "cgroup"

    def belong_to(self, *lines: str) -> None:
        self.membership.write_text("\n".join(lines) + "\n")

    def count(self, file: str, kills: int) -> None:
        path = self.mount / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"low 0\noom {kills + 3}\noom_kill {kills}\n")

    def watch(self) -> MemoryKills:
        return MemoryKills(self.mount, self.membership)


@pytest.fixture
def groups(tmp_path: Path) -> ControlGroups:
    return ControlGroups(tmp_path)


VERSIONS = [
    (("0::/user/run",), "user/run/memory.events"),
    (("5:devices:/other", "4:memory:/user/run", "0::/"), "memory/user/run/memory.oom_control"),
    (("0::/not/seen/here",), "memory.events"),
    (("4:memory:/not/seen/here",), "memory/memory.oom_control"),
]


@pytest.mark.parametrize(("lines", "file"), VERSIONS)
def test_each_new_kill_is_told_of_once(
    lines: tuple[str, ...], file: str, groups: ControlGroups
) -> None:
    groups.belong_to(*lines)
    groups.count(file, 5)
    kills = groups.watch()
    assert kills.take_one() is False
    groups.count(file, 7)
    assert [kills.take_one() for _ in range(3)] == [True, True, False]


def test_nothing_is_claimed_where_nothing_is_counted(groups: ControlGroups) -> None:
    assert groups.watch().take_one() is None
    groups.belong_to("0::/", "1:name=systemd:/")
    assert groups.watch().take_one() is None
    groups.count("memory.events", 1)
    (groups.mount / "memory.events").write_text("oom 3\n")
    assert groups.watch().take_one() is None


def test_a_counter_that_vanishes_says_nothing(groups: ControlGroups) -> None:
    groups.belong_to("0::/")
    groups.count("memory.events", 1)
    kills = groups.watch()
    (groups.mount / "memory.events").unlink()
    assert kills.take_one() is None


def test_this_machine_is_read_without_an_error() -> None:
    assert MemoryKills().take_one() in (None, False)
