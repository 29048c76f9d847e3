from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from torchweft.compat import __main__ as program


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["python", "-m", "torchweft.compat"], ["python"]),
        (["python", "-mtorchweft.compat"], ["python"]),
        (["python", "-X", "dev", "-um", "torchweft.compat"], ["python", "-X", "dev", "-u"]),
        (["python", "-m", "pdb", "-m", "torchweft.compat"], ["python", "-m", "pdb"]),
    ],
)
def test_other_options_of_python_stay(options: list[str], left: list[str]) -> None:
    assert program._without_module(options) == left


@pytest.mark.parametrize("option", ["ignore_environment", "no_site"])
def test_options_without_which_no_child_is_told_are_refused(
    monkeypatch: pytest.MonkeyPatch, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = SimpleNamespace(**{"ignore_environment": 0, "no_site": 0, option: 1})
    monkeypatch.setattr(sys, "flags", flags)
    with pytest.raises(SystemExit) as caught:
        program.main([__file__])
    assert caught.value.code == program.USAGE_STATUS
    assert "-E, -I and -S ignore PYTHONPATH" in capsys.readouterr().err
