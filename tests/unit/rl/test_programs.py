from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from torchweft.rl.observer import program_of

SOURCE = """
STEP = 0.1

class World:
    def step(self):
        return [part for part in (STEP, 2) if part in {1, 2}]

def make():
    return World()
"""


def loaded(folder: Path, source: str, patch: pytest.MonkeyPatch, name: str = "a_world") -> Any:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    patch.setattr(sys, "dont_write_bytecode", True)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


CHANGES = (
    ("", ""),
    ("STEP = 0.1", "# the step\nSTEP = 0.1"),
    ("STEP = 0.1", "STEP = 0.2"),
    ("{1, 2}", "{1, 3}"),
    ("World()", "World"),
)


def test_the_version_changes_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [loaded(tmp_path, SOURCE.replace(*change), monkeypatch) for change in CHANGES]
    versions = []
    for module in modules:
        monkeypatch.setitem(sys.modules, "a_world", module)
        versions.append(program_of(module.make))
    assert versions[0] == versions[1]
    assert len(set(versions)) == 4


def test_the_version_of_gymnasium_counts_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1.2.0", "1.3.0"):
        monkeypatch.setattr(metadata, "version", {"gymnasium": version}.__getitem__)
        assert program_of("CartPole-v1") == f"CartPole-v1 of gymnasium {version}"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert program_of("CartPole-v1") == ""
