from __future__ import annotations

import pytest

from weft import knobs
from weft.errors import ConfigurationError
from weft.knobs import Knob

ALL_KNOBS = {name: value for name, value in vars(knobs).items() if isinstance(value, Knob)}


@pytest.fixture
def knob(monkeypatch: pytest.MonkeyPatch) -> Knob[int]:
    monkeypatch.delenv("WEFT_EXAMPLE_BYTES", raising=False)
    return Knob("EXAMPLE_BYTES", 7, "Bytes of an example.")


def test_default_holds_where_nothing_else_is_said(knob: Knob[int]) -> None:
    assert knob.get() == 7


def test_environment_is_read_at_each_use(knob: Knob[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_EXAMPLE_BYTES", "8")
    assert knob.get() == 8
    monkeypatch.setenv("WEFT_EXAMPLE_BYTES", "9")
    assert knob.get() == 9


def test_value_has_the_type_of_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_EXAMPLE_S", "3")
    value = Knob("EXAMPLE_S", 1.5, "Seconds of an example.").get()
    assert (value, type(value)) == (3.0, float)


@pytest.mark.parametrize("text", ["", "many", "1.5"])
def test_bad_value_is_refused_with_variable_and_fix(
    knob: Knob[int], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("WEFT_EXAMPLE_BYTES", text)
    with pytest.raises(ConfigurationError, match=r"WEFT_EXAMPLE_BYTES.*no int.*=7"):
        knob.get()


def test_override_wins_over_the_environment_and_ends(
    knob: Knob[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_EXAMPLE_BYTES", "8")
    with knob.override(0):
        assert knob.get() == 0
        with knob.override(1):
            assert knob.get() == 1
        assert knob.get() == 0
    assert knob.get() == 8


def test_override_ends_with_an_error_inside(knob: Knob[int]) -> None:
    with pytest.raises(KeyError), knob.override(0):
        raise KeyError
    assert knob.get() == 7


@pytest.mark.parametrize("name", ALL_KNOBS)
def test_every_knob_is_named_like_its_variable_and_says_what_it_means(name: str) -> None:
    knob = ALL_KNOBS[name]
    assert knob.variable == f"WEFT_{name}"
    assert knob.meaning.endswith(".")
