from __future__ import annotations

import ast
import functools
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.tables import cases
from torchweft import knobs, rpc
from torchweft.compat import rpc as compat_rpc
from torchweft.errors import ConfigurationError
from torchweft.knobs import INTERNAL_VARIABLE, Constant, Knob, check_environment

KNOBS = {name: value for name, value in vars(knobs).items() if isinstance(value, Knob)}
CONSTANTS = {name: value for name, value in vars(knobs).items() if isinstance(value, Constant)}
SOURCE = Path(knobs.__file__).read_text()
PAGE = Path(__file__).parents[2] / "docs/variables.md"


@pytest.fixture
def knob(monkeypatch: pytest.MonkeyPatch) -> Knob[int]:
    monkeypatch.delenv("WEFT_EXAMPLE_BYTES", raising=False)
    return Knob("EXAMPLE_BYTES", 7)


@pytest.fixture
def constant(monkeypatch: pytest.MonkeyPatch) -> Constant[int]:
    monkeypatch.delenv("WEFT_INTERNAL", raising=False)
    return Constant("EXAMPLE_BYTES", 7)


@pytest.mark.parametrize(
    "text", ["", "many", "1.5", "256M", "1k", "MiB", "1 2", "1.0001KB", "0x10", "inf", "1XiB"]
)
def test_bad_value_is_refused_with_variable_and_fix(
    knob: Knob[int], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("WEFT_EXAMPLE_BYTES", text)
    with pytest.raises(ConfigurationError, match=r"WEFT_EXAMPLE_BYTES.*no size.*64KiB.*=7"):
        knob.get()


@cases(
    ("variable", "text", "message"),
    [
        ("WEFT_RPC_TIMEOUT_S", "5s", "no number of seconds; unset it or set it like .*_S=60.0"),
        ("WEFT_RPC_TIMEOUT_S", "nan", "no number of seconds"),
        ("WEFT_RPC_TIMEOUT_S", "-1", "no number of seconds"),
        ("WEFT_WORKER_THREADS", "4.5", "no whole number"),
        ("WEFT_STRANGER_LIMIT", "-1", "no whole number"),
        ("WEFT_FRAME_LIMIT_BYTES", "-1KiB", "no size"),
        ("WEFT_WORKER_THREADS", "4KiB", "no whole number"),
        ("WEFT_TLS_MUTUAL", "true", "no whole number"),
        ("WEFT_RPC_TIMEOUT", "5", "unknown to Weft; did you mean 'WEFT_RPC_TIMEOUT_S'"),
        ("WEFT_SECRETFILE", "x", "unknown to Weft; did you mean 'WEFT_SECRET_FILE'"),
        ("WEFT_WORKER_NAMES", "x", "unknown to Weft; did you mean 'WEFT_WORKER_NAME'"),
        ("WEFT_QQQ", "x", "is unknown to Weft$"),
        ("WEFT_", "x", "is unknown to Weft$"),
        ("WEFT_REARM_S", "60", "is unknown to Weft"),
        (
            "WEFT_INTERNAL",
            "SPIN=0",
            "sets SPIN, which is no constant of Weft; did you mean 'SPIN_S'",
        ),
        ("WEFT_INTERNAL", "LISTEN=::1", "sets LISTEN, which is no constant of Weft$"),
        ("WEFT_INTERNAL", "SPIN_S=0,FAN_OUT=x", "sets FAN_OUT to 'x', .* no whole .*FAN_OUT=4$"),
        ("WEFT_INTERNAL", "SPIN_S=0,REARM_S", "has a part 'REARM_S', which sets no constant"),
        ("WEFT_INTERNAL", "SPIN_S=0,", "has a part '', which sets no constant"),
        ("WEFT_INTERNAL", "=0", "has a part '=0', which sets no constant"),
    ],
)
def test_a_variable_that_is_unknown_or_cannot_be_read_is_named(
    variable: str, text: str, message: str
) -> None:
    with pytest.raises(
        ConfigurationError, match=f"environment variable {variable} (.* )?{message}"
    ):
        check_environment({"PATH": "/bin", "WEFT_DETECTION_S": "5", variable: text})


def test_all_variables_that_the_package_names_are_known() -> None:
    """A variable that code reads but the registry lacks would be refused at start."""
    package = Path(knobs.__file__).parent
    named = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r"\bWEFT_[A-Z][A-Z_]*[A-Z]\b", path.read_text())
    }
    assert "WEFT_DEVICE" in named
    known = {knob.variable for knob in KNOBS.values()} | knobs._OTHERS | {INTERNAL_VARIABLE}
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 7),
        ("OTHER=1", 7),
        ("EXAMPLE_BYTES=8", 8),
        ("OTHER=1,EXAMPLE_BYTES=64KiB", 65_536),
        ("EXAMPLE_BYTES=8,EXAMPLE_BYTES=9", 9),
    ],
)
def test_a_constant_is_read_from_the_internal_variable(
    constant: Constant[int], monkeypatch: pytest.MonkeyPatch, text: str, value: int
) -> None:
    monkeypatch.setenv("WEFT_INTERNAL", text)
    monkeypatch.setenv("WEFT_EXAMPLE_BYTES", "5")
    assert constant.get() == value
    with constant.override(0):
        assert constant.get() == 0
    assert constant.get() == value


def test_a_constant_that_cannot_be_read_is_named(
    constant: Constant[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_INTERNAL", "EXAMPLE_BYTES=8M")
    with pytest.raises(ConfigurationError, match=r"sets EXAMPLE_BYTES to '8M'.*EXAMPLE_BYTES=7"):
        constant.get()


def test_every_tunable_is_named_like_its_attribute() -> None:
    tunables = {**KNOBS, **CONSTANTS}
    assert {name: tunable.name for name, tunable in tunables.items()} == {n: n for n in tunables}
    assert tunables.keys() <= meanings().keys()


def test_the_page_has_the_knobs_as_they_are_declared() -> None:
    """The page repeats the meanings in ``torchweft.knobs``, and adds a unit to each."""
    rows = table_of("## Set by operators")
    assert [row[0] for row in rows] == [f"`{knob.variable}`" for knob in KNOBS.values()]
    for knob, (_, default, unit, meaning, when) in zip(KNOBS.values(), rows, strict=True):
        assert knob.read(default.strip("`")) == knob.default, knob.name
        assert meaning == meanings()[knob.name].replace("``", "`")
        assert unit
        assert (unit == "seconds") == knob.name.endswith("_S")
        assert (unit == "bytes") == knob.name.endswith("_BYTES")
        assert when.endswith(".")


def test_the_page_has_the_variables_that_are_no_knobs() -> None:
    rows = table_of("## The secret, and variables set by launchers")
    assert sorted(row[0].strip("`") for row in rows) == sorted(knobs._OTHERS)


def table_of(heading: str) -> list[list[str]]:
    """Returns the rows of the table below a heading of the page, as lists of cells."""
    section = PAGE.read_text().split(f"{heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@functools.cache
def meanings() -> dict[str, str]:
    """Returns the text below each declaration, on one line."""
    body = ast.parse(SOURCE).body
    return {
        node.targets[0].id: " ".join(text.value.value.split())
        for node, text in pairwise(body)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
