from __future__ import annotations

import sys
from types import ModuleType

import pytest

from torchweft.deferred import import_name


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("made_package")
    monkeypatch.setitem(sys.modules, "made_package", made)
    return made


def test_a_name_is_put_into_the_package(package: ModuleType) -> None:
    import torchweft.ids

    found = import_name("made_package", "WorkerInfo", "torchweft.ids")
    assert found is torchweft.ids.WorkerInfo
    assert vars(package)["WorkerInfo"] is found


def test_a_module_of_the_package_is_found_by_its_name(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = ModuleType("made_package.below")
    monkeypatch.setitem(sys.modules, "made_package.below", below)
    assert import_name("made_package", "below", "made_package.below") is below


def test_a_name_that_the_module_lacks_is_an_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="nothing_such"):
        import_name("made_package", "nothing_such", "torchweft.ids")
    assert "nothing_such" not in vars(package)
