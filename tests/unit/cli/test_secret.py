from __future__ import annotations

from pathlib import Path

import pytest

from torchweft.cli.main import USAGE_STATUS, main
from torchweft.secret import Secret


def test_a_new_secret_is_made_and_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "group.secret"
    assert main(["secret", "new", str(path)]) == 0
    Secret.from_file(path)
    printed = capsys.readouterr()
    assert f"WEFT_SECRET_FILE={path}" in printed.out
    assert path.read_text().strip() not in printed.out + printed.err


def test_a_file_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "group.secret"
    path.write_text("mine")
    assert main(["secret", "new", str(path)]) == USAGE_STATUS
    assert path.read_text() == "mine"
    assert capsys.readouterr().err.startswith(f"torchweft secret: '{path}' is there already")
