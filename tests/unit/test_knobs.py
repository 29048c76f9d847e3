from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchweft import knobs, rpc
from torchweft.compat import rpc as compat_rpc
from torchweft.errors import ConfigurationError
from torchweft.knobs import Knob, check_environment

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


@pytest.mark.parametrize(
    "text", ["", "many", "1.5", "256M", "1k", "MiB", "1 2", "1.0001KB", "0x10", "inf", "1XiB"]
)
def test_bad_value_is_refused_with_variable_and_fix(
    knob: Knob[int], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("WEFT_EXAMPLE_BYTES", text)
    with pytest.raises(ConfigurationError, match=r"WEFT_EXAMPLE_BYTES.*no size.*64KiB.*=7"):
        knob.get()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 65_536),
        ("64KiB", 65_536),
        ("64 kib", 65_536),
        ("256MiB", 256 << 20),
        ("1GB", 10**9),
        ("1.5GiB", 3 << 29),
        ("2TB", 2 * 10**12),
        ("8B", 8),
        (" 8 ", 8),
        ("-1", -1),
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_a_size_may_have_a_unit(
    knob: Knob[int], monkeypatch: pytest.MonkeyPatch, text: str, size: int
) -> None:
    monkeypatch.setenv("WEFT_EXAMPLE_BYTES", text)
    assert knob.get() == size


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("WEFT_RPC_TIMEOUT_S", "5s", "no number of seconds; unset it or set it like .*_S=60.0"),
        ("WEFT_RPC_TIMEOUT_S", "nan", "no number of seconds"),
        ("WEFT_WORKER_THREADS", "4.5", "no whole number"),
        ("WEFT_WORKER_THREADS", "4KiB", "no whole number"),
        ("WEFT_UNIX_SOCKETS", "true", "no whole number"),
        ("WEFT_RPC_TIMEOUT", "5", "unknown to Weft; did you mean 'WEFT_RPC_TIMEOUT_S'"),
        ("WEFT_SECRETFILE", "x", "unknown to Weft; did you mean 'WEFT_SECRET_FILE'"),
        ("WEFT_WORKER_NAMES", "x", "unknown to Weft; did you mean 'WEFT_WORKER_NAME'"),
        ("WEFT_QQQ", "x", "is unknown to Weft$"),
        ("WEFT_", "x", "is unknown to Weft$"),
    ],
)
def test_a_variable_that_is_unknown_or_cannot_be_read_is_named(
    variable: str, text: str, message: str
) -> None:
    with pytest.raises(
        ConfigurationError, match=f"environment variable {variable} (.* )?{message}"
    ):
        check_environment({"PATH": "/bin", "WEFT_SPIN_S": "0", variable: text})


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"WEFT_SPIN_S is 'x'.*; .*WEFT_TYPO is unknown"):
        check_environment({"WEFT_TYPO": "1", "WEFT_SPIN_S": "x"})


def test_what_is_known_may_be_set() -> None:
    others = ("WEFT_SECRET", "WEFT_WORKER_NAME", "WEFT_INIT_METHOD", "WEFT_RESTART_COUNT")
    check_environment(
        {knob.variable: str(knob.default) for knob in ALL_KNOBS.values()}
        | dict.fromkeys((*others, "WEFT_DEVICE", "WEFT_TEST_ANYTHING"), "x")
        | {"WEFTY": "x", "OTHER": "x"}
    )


def test_all_variables_that_the_package_names_are_known() -> None:
    """A variable that is read somewhere, and not in the registry, would be refused at start."""
    package = Path(knobs.__file__).parent
    named = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r"\bWEFT_[A-Z][A-Z_]*[A-Z]\b", path.read_text())
    }
    assert "WEFT_DEVICE" in named
    known = {knob.variable for knob in ALL_KNOBS.values()} | set(knobs._OTHERS)
    assert {name for name in named if not name.startswith(knobs._RESERVED)} <= known


def test_a_worker_does_not_join_with_a_variable_that_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT_S", "5")
    for init in (rpc.init_rpc, compat_rpc.init_rpc):
        with pytest.raises(ConfigurationError, match="WEFT_TIMEOUT_S is unknown to Weft"):
            init("alone", rank=0, world_size=1)


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
