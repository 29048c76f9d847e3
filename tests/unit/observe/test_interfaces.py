"""The interface on the way to another host, of real and made-up ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchweft.observe.examining import interface_of, speed_of


@pytest.mark.parametrize(
    ("text", "speed"), [("10000\n", 1.25e9), ("-1\n", 0.0), ("", 0.0), (None, 0.0)]
)
def test_the_speed_of_an_interface(text: str | None, speed: float, tmp_path: Path) -> None:
    folder = tmp_path / "class/net/lo"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "speed").write_text(text)
    assert speed_of("lo", tmp_path) == speed


def test_an_interface_is_known_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert [interface_of(each) for each in ("", "198.51.100.7", "2001:db8::7")] == ["", "", ""]
