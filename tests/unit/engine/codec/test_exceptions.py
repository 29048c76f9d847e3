from __future__ import annotations

import asyncio
import itertools
import pickle
import sys
import types
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.codec.exceptions import as_runtime_error, pack_error, unpack_error
from torchweft.engine.codec.objects import pack_plain
from torchweft.engine.codec.tracebacks import PRINTS_NOTES, RemoteTraceback, places_of
from torchweft.errors import CallTimeout, RemoteError, WeftError


class Keyword(Exception):
    """Takes arguments that it does not pass to its base."""

    def __init__(self, *, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code = code
        self.where = where


class Wrapping(ValueError):
    """Builds its message in ``__init__``: a second call would build it twice."""

    def __init__(self, path: str) -> None:
        super().__init__(f"cannot read {path}")
        self.path = path


class Stop(BaseException):
    """Does not derive from Exception."""


def trip(error: BaseException, worker: str = "w1", **options: Any) -> BaseException:
    return unpack_error(pack_error(error, worker, **options))


def raised(error: BaseException) -> BaseException:
    """Returns ``error`` with a traceback, as an agent catches it."""
    try:
        raise error
    except BaseException as caught:
        return caught


def local_error(base: type = Exception) -> BaseException:
    class Local(base):  # type: ignore[misc]
        pass

    return Local("local")


def test_causes_contexts_and_suppression_survive() -> None:
    try:
        try:
            try:
                raise KeyError("first")
            except KeyError as first:
                raise Wrapping("second") from first
        except Wrapping:
            raise Keyword(code=1, where="third")  # noqa: B904
    except Keyword as caught:
        arrived = trip(caught)
    assert arrived.__cause__ is None
    second = arrived.__context__
    assert type(second) is Wrapping
    assert not arrived.__suppress_context__
    assert type(second.__cause__) is KeyError
    assert second.__context__ is second.__cause__
    last = second.__cause__.__cause__
    assert PRINTS_NOTES if last is None else type(last) is RemoteTraceback
    hidden = RuntimeError("from None")
    hidden.__context__, hidden.__suppress_context__ = KeyError("unseen"), True
    arrived = trip(hidden)
    assert type(arrived.__context__) is KeyError
    assert arrived.__suppress_context__


def test_a_very_long_chain_is_cut() -> None:
    error = ValueError("0")
    for number in range(1, 500):
        following = ValueError(str(number))
        following.__cause__ = error
        error = following
    arrived: BaseException | None = trip(error)
    assert str(arrived) == "499"
    length = 0
    while arrived is not None:
        arrived, length = arrived.__cause__, length + 1
    assert 10 < length < 100


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_exception_groups_keep_their_members() -> None:
    try:
        raise KeyError("cause")
    except KeyError as caught:
        member = Keyword(code=1, where="inside")
        member.__cause__ = caught
    inner = ExceptionGroup("inner", [member, local_error(ValueError)])  # noqa: F821
    group = ExceptionGroup("outer", [inner, OSError(2, "no file")])  # noqa: F821
    member.__context__ = group  # as a handler of the group may set it
    arrived: Any = trip(raised(group))
    assert type(arrived) is ExceptionGroup  # noqa: F821
    assert arrived.message == "outer"
    assert arrived.exceptions[1].errno == 2
    first, second = arrived.exceptions[0].exceptions
    assert (first.code, type(first.__cause__), first.__context__) == (1, KeyError, arrived)
    assert isinstance(second, ValueError)
    fatal = BaseExceptionGroup("mixed", [KeyboardInterrupt(), ValueError("x")])  # noqa: F821
    arrived = trip(fatal)
    assert type(arrived) is ExceptionGroup  # noqa: F821
    assert [type(error) for error in arrived.exceptions] == [RemoteError, ValueError]


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), Stop("now"), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
def test_what_would_stop_the_receiver_arrives_as_remote_error(error: BaseException) -> None:
    arrived = trip(raised(error), "w9")
    assert type(arrived) is RemoteError
    assert arrived.type_name.endswith(type(error).__qualname__)
    assert arrived.worker == "w9"
    assert type(error).__qualname__ in str(arrived)
    assert places_of(arrived)


@pytest.fixture
def vanishing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a module whose exceptions a receiver without the module cannot rebuild."""
    module = types.ModuleType("vanishing_module")
    source = (
        "class Known(LookupError): pass\n"
        "class Strange(Known):\n"
        "    def __init__(self, a, b):\n"
        "        super().__init__(a); self.b = b\n"
        "class Fatal(Exception):\n"
        "    def __init__(self): super().__init__('quiet')\n"
    )
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, "vanishing_module", module)
    return module


def test_the_nearest_base_takes_the_place_of_an_unknown_type(
    vanishing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = pack_error(vanishing.Strange("lost key", 5), "w4")
    only_base = types.ModuleType("vanishing_module")
    only_base.Known = vanishing.Known  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vanishing_module", only_base)
    arrived = unpack_error(content)
    assert type(arrived) is vanishing.Known
    monkeypatch.delitem(sys.modules, "vanishing_module")
    arrived = unpack_error(content)
    assert type(arrived) is LookupError
    for part in ("lost key", "vanishing_module.Strange", "'w4'"):
        assert part in str(arrived)
    assert arrived.b == 5  # type: ignore[attr-defined]
    assert places_of(arrived)


def test_an_error_that_fights_back_still_arrives() -> None:
    class Hostile(LookupError):
        def __getattribute__(self, name: str) -> Any:
            raise ValueError(f"no {name} for you")

        __str__ = __reduce__ = __getattribute__  # type: ignore[assignment]

    arrived = trip(Hostile())
    assert type(arrived) is LookupError
    assert "its text cannot be made" in str(arrived)
    assert "Hostile" in str(arrived)


def test_a_huge_traceback_is_cut() -> None:
    names = [f"function_{number}_{'x' * 2000}" for number in range(300)]
    source = "\n".join(
        f"def {name}(): {following}()" for name, following in itertools.pairwise(names)
    )
    variables: dict[str, Any] = {}
    exec(f"{source}\ndef {names[-1]}(): raise ValueError('deep')", variables)
    try:
        variables[names[0]]()
    except ValueError as caught:
        (place,) = places_of(trip(caught))
    assert len(place) < 300_000
    assert "characters left out" in place


@settings(max_examples=examples(50))
@given(st.binary(max_size=60))
def test_garbage_makes_a_remote_error(content: bytes) -> None:
    assert isinstance(unpack_error(content), WeftError)


def test_an_error_that_names_a_function_is_not_read() -> None:
    content = pack_plain(("w", [print]), main_by_name=True).payload
    arrived = unpack_error(content)
    assert isinstance(arrived, RemoteError)
    assert "print" in str(arrived)
    assert isinstance(unpack_error(pickle.dumps(("w", []))), RemoteError)


def test_what_is_one_already_or_cannot_be_one_stays() -> None:
    timeout = CallTimeout("late")
    assert as_runtime_error(timeout) is timeout
    cancelled = asyncio.CancelledError()
    assert as_runtime_error(cancelled) is cancelled

    class Unfriendly(Exception):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

    error = Unfriendly("x")
    assert as_runtime_error(error) is error
