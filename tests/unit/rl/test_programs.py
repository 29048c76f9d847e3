from __future__ import annotations

import functools
import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from torchweft.rl import FollowingPolicy
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


WRAPPING = """
import functools

def limited(make):
    @functools.wraps(make)
    def limit():
        return make()
    return limit
"""


class Factory:
    def __init__(self, make: Any) -> None:
        self.__wrapped__ = make

    def __call__(self) -> Any:
        return self.__wrapped__()


def test_the_modules_of_wrapped_callables_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def versions(source: str, wrapping: str) -> list[str]:
        world = loaded(tmp_path, source, monkeypatch)
        wrapper = loaded(tmp_path, wrapping, monkeypatch, "a_wrapper")
        return [
            program_of(functools.partial(world.make)),
            program_of(functools.partial(functools.partial(print, world.make), end="")),
            program_of(world.World().step),
            program_of(Factory(world.make)),
            program_of(lambda: world.make()),
            program_of(wrapper.limited(world.make)),
        ]

    before = versions(SOURCE, WRAPPING)
    assert versions(SOURCE, WRAPPING) == before
    assert "by value" not in before[:4]
    after = versions(SOURCE.replace("STEP = 0.1", "STEP = 0.2"), WRAPPING)
    assert [one == other for one, other in zip(before, after, strict=True)] == [
        False,
        False,
        False,
        False,
        True,  # It refers to a module, and travels by value.
        False,
    ]
    rewritten = versions(SOURCE, WRAPPING.replace("return make()", "return make"))
    assert rewritten[:5] == before[:5]
    assert rewritten[5] != before[5]


def test_the_function_that_makes_copies_of_a_policy_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(source: str) -> str:
        following = FollowingPolicy(
            loaded(tmp_path, source, monkeypatch).make,
            None,  # type: ignore[arg-type]
        )
        return program_of(test_names_and_functions_that_travel_by_value, following)

    versions = [version(SOURCE.replace(*change)) for change in CHANGES]
    assert versions[0] == versions[1]
    assert len(set(versions)) == 4
    assert versions[0].startswith(program_of(test_names_and_functions_that_travel_by_value))


def test_names_and_functions_that_travel_by_value() -> None:
    def make() -> None:
        pass

    assert program_of(make) == "by value"
    make.__qualname__, make.__module__ = "make", "__main__"
    assert program_of(make) == "by value"


def test_the_version_of_gymnasium_counts_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1.2.0", "1.3.0"):
        monkeypatch.setattr(metadata, "version", {"gymnasium": version}.__getitem__)
        assert program_of("CartPole-v1") == f"CartPole-v1 of gymnasium {version}"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert program_of("CartPole-v1") == ""
