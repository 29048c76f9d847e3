from __future__ import annotations

import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.reports import report
from torchweft import knobs
from torchweft.engine.threads.reports import Events
from torchweft.errors import ConfigurationError
from torchweft.reports import Report, decode
from torchweft.rpc.reporter import Dumps


@pytest.fixture
def dumps() -> Dumps:
    agent: Any = SimpleNamespace(
        receiver=SimpleNamespace(on=lambda *_, **__: None),
        info=SimpleNamespace(name="trainer:0"),
        events=Events(),
        slots={},
    )
    reporter: Any = SimpleNamespace(report=lambda question: report("trainer:0"))
    return Dumps(SimpleNamespace(agent=agent), reporter, "cafe")  # type: ignore[arg-type]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_default_folder_is_of_this_user_alone(dumps: Dumps, temporary: Path) -> None:
    path = Path(dumps.write("a test asks"))
    assert path.name == "trainer_0.weft.json"
    assert path.parent.name == "cafe"
    assert path.parent.parent.parent == temporary
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    assert decode(Report, path.read_bytes()).worker == "trainer:0"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_folder_that_others_have_prepared_is_refused(dumps: Dumps, temporary: Path) -> None:
    folder = Path(dumps.folder()).parent
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="is no folder of this user alone"):
        dumps.write("a test asks")


def test_a_report_that_cannot_be_written_is_one_line_of_the_log(
    dumps: Dumps, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with knobs.DUMP_DIR.override(str(tmp_path / "file" / "below")):
        dumps.try_to_write("a test asks", True)
    (line,) = caplog.text.splitlines()
    assert "worker 'trainer:0' could not write what it does: cannot make the folder" in line
