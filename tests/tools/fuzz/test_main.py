from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fuzz import __main__ as command
from tests.fuzz.__main__ import FOUND, main

QUICK = ["--frames", "300", "--engine", "mutational"]


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
