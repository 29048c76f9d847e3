"""The file by which a worker tells that its host will be given up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchweft import notice


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    found = tmp_path / "notice"
    monkeypatch.setenv(notice.VARIABLE, str(found))
    notice.heed_notice()
    yield found
    signal.signal(signal.SIGTERM, before)


def test_the_signal_makes_the_file(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert path.read_bytes() == b""
