from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from torchweft.rl.programs import program_of

SOURCE = """
STEP = 0.1

class World:
    def step(self):
        return [part for part in (STEP, 2) if part in {1, 2}]

def make():
    return World()
"""


def version(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> str:
    path = folder / "a_world.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("a_world", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "a_world", module)
    spec.loader.exec_module(module)
    return program_of(module.make)


def test_the_version_changes_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [
        version(tmp_path, SOURCE.replace(*change), monkeypatch)
        for change in (
            ("", ""),
            ("STEP = 0.1", "# the step\nSTEP = 0.1"),
            ("STEP = 0.1", "STEP = 0.2"),
            ("{1, 2}", "{1, 3}"),
            ("World()", "World"),
        )
    ]
    assert versions[0] == versions[1]
    assert len(set(versions)) == 4


def test_names_and_functions_that_travel_by_value() -> None:
    def make() -> None:
        pass

    assert program_of("CartPole-v1") == "CartPole-v1"
    make.__module__ = "__main__"
    assert program_of(make) == "by value"
