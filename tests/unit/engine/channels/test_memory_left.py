from __future__ import annotations

from pathlib import Path

import pytest

from torchweft.engine.channels import memory as kernel


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB available, and no limits yet."""
    monkeypatch.setattr(kernel, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(kernel, "OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(kernel, "GROUPS", tmp_path / "groups")
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:  8388608 kB\n")
    (tmp_path / "groups").mkdir()
    return tmp_path


def limit(system: Path, group: str, **files: str) -> None:
    folder = system / "groups" / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text + "\n")


def test_a_limit_of_any_group_around_counts(system: Path) -> None:
    (system / "cgroup").write_text("0::/outer/inner\n")
    limit(system, "outer/inner", memory_max="max", memory_current="50")
    assert kernel.available_bytes() == 8 << 30
    limit(system, "outer", memory_max="1000", memory_current="300")
    assert kernel.available_bytes() == 700
    limit(system, "outer", memory_stat="anon 5\ninactive_file 200")
    assert kernel.available_bytes() == 900


def test_a_group_beyond_its_limit_has_nothing_left(system: Path) -> None:
    (system / "cgroup").write_text("0::/\n")
    limit(system, ".", memory_max="1000", memory_current="1200")
    assert kernel.available_bytes() == 0
