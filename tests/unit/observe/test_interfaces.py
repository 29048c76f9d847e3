"""The interface on the way to another host, of real and made-up ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchweft.engine.io import addresses
from torchweft.observe.examining import NetworkLink, link_towards


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The route to each host begins at loopback, which every host has."""
    monkeypatch.setattr(addresses, "own_address_towards", lambda host: "127.0.0.1")


@pytest.mark.usefixtures("on_loopback")
@pytest.mark.parametrize(
    ("text", "speed"), [("10000\n", 1.25e9), ("-1\n", 0.0), ("", 0.0), (None, 0.0)]
)
def test_the_speed_of_an_interface(text: str | None, speed: float, tmp_path: Path) -> None:
    folder = tmp_path / "class/net/lo"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "speed").write_text(text)
    found = link_towards(["unix:@x", "tcp:127.0.0.1:5", "tcp:198.51.100.7:6"], tmp_path)
    assert found == NetworkLink("lo", speed)


def test_an_interface_that_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert link_towards(["tcp:127.0.0.1:5"], tmp_path) == NetworkLink()
    for own in ("", "198.51.100.7", "2001:db8::7"):
        monkeypatch.setattr(addresses, "own_address_towards", lambda host, own=own: own)
        assert link_towards(["tcp:198.51.100.8:5"], tmp_path) == NetworkLink()
