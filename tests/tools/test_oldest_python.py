"""Looks for what Python 3.10 cannot run and mypy does not see; most tests run on a newer one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("src", "examples", "benchmarks", "tests")


def problems_of(source: str) -> list[str]:
    """Returns what Python 3.10 would refuse of a module, with its lines."""
    found: list[str] = []
    if "NamedTuple" not in source:
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and len(node.bases) > 1:
            names = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            if "NamedTuple" in names:
                found.append(f"line {node.lineno}: {node.name} has a base beside NamedTuple")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_named_tuple_has_another_base(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    problems = {file: problems_of(file.read_text(encoding="utf-8")) for file in files}
    assert not {str(file.relative_to(ROOT)): each for file, each in problems.items() if each}


def test_a_named_tuple_with_another_base_is_found() -> None:
    generic = "class Due(typing.NamedTuple, Generic[P]):\n    step: P\n"
    assert problems_of(generic) == ["line 1: Due has a base beside NamedTuple"]
    assert problems_of(generic.replace(", Generic[P]", "")) == []
