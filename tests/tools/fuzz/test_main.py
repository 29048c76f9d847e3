from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fuzz import __main__ as command
from tests.fuzz.__main__ import FOUND, NOTHING_FOUND, main
from torchweft.native import native

QUICK = ["--frames", "300", "--engine", "mutational"]


def test_a_target_is_run_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["references", *QUICK, "--findings", str(tmp_path)]) == NOTHING_FOUND
    said = capsys.readouterr().out
    assert "references        mutational           300" in said
    assert "300 frames, 0 bare" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(native is None, reason="there is no native twin here")
def test_bare_inputs_are_reported_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inline", "--frames", "50", "--bare", "1000", "--findings", str(tmp_path)]) == 0
    assert "50 frames, 1,000 bare" in capsys.readouterr().out


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["nothing"])


def test_bare_inputs_are_for_the_engine_that_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["values", "--engine", "guided", "--bare", "10"])
    assert "--bare is for the engine mutational" in capsys.readouterr().err


def test_a_process_that_dies_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly = tmp_path / "python"
    # Replaces the interpreter: notes an input as the child does, and dies.
    deadly.write_text(
        '#!/bin/sh\nfor last; do :; done\nprintf "\\003\\000\\000\\000bad" > "$last/last"\n'
        f"kill -{int(signal.SIGSEGV)} $$\n"
    )
    deadly.chmod(0o700)
    monkeypatch.setattr(command.sys, "executable", str(deadly))
    findings = tmp_path / "found"
    assert main(["references", *QUICK, "--findings", str(findings)]) == FOUND
    assert "the process has died" in capsys.readouterr().out
    (told,) = findings.glob("*.txt")
    assert told.with_suffix("").read_bytes() == b"bad"
    assert "exit code -11" in told.read_text()
