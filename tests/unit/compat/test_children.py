from __future__ import annotations

import os

import pytest

from torchweft.compat import installing
from torchweft.compat.installing import FOLDER, disable_in_children, enable_in_children
from torchweft.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")  # so that monkeypatch restores it after the test
    monkeypatch.delenv("PYTHONPATH")


def test_the_folder_is_the_one_that_python_shall_find() -> None:
    assert os.path.isfile(os.path.join(FOLDER, "sitecustomize.py"))


@pytest.mark.parametrize("before", [None, "", "/a", "/a:/b", "/a::"])
def test_the_folder_comes_first_and_goes_again(before: str | None) -> None:
    if before is not None:
        os.environ["PYTHONPATH"] = before
    enable_in_children()
    enable_in_children()
    # An empty entry at the end would add the current folder to every child's path.
    assert os.environ["PYTHONPATH"] == (f"{FOLDER}:{before}" if before else FOLDER)
    for _ in range(2):
        disable_in_children()
        assert os.environ.get("PYTHONPATH") == (before or None)


def test_what_others_change_meanwhile_stays() -> None:
    enable_in_children()
    os.environ["PYTHONPATH"] = "/new:" + os.environ["PYTHONPATH"] + ":/last"
    disable_in_children()
    assert os.environ["PYTHONPATH"] == "/new:/last"
    enable_in_children()
    del os.environ["PYTHONPATH"]
    disable_in_children()
    assert "PYTHONPATH" not in os.environ


@pytest.mark.parametrize(("inherited", "left"), [(FOLDER, None), (f"{FOLDER}:/a", "/a")])
def test_a_child_takes_back_what_its_parent_has_put_there(inherited: str, left: str | None) -> None:
    os.environ["PYTHONPATH"] = inherited
    enable_in_children()
    assert os.environ["PYTHONPATH"] == inherited
    disable_in_children()
    assert os.environ.get("PYTHONPATH") == left


def test_a_folder_that_no_variable_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "FOLDER", "/a:b/bootstrap")
    with pytest.raises(ConfigurationError, match="in_children=False"):
        enable_in_children()
    assert "PYTHONPATH" not in os.environ
