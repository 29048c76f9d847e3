from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import linecache
import pickle
import sys
import threading
import traceback
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import cases
from tests.thorough import examples
from torchweft import errors
from torchweft.engine.codec.exceptions import as_runtime_error, fresh_copy, pack_error, unpack_error
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


class Silent(Exception):
    """Does not call ``__init__`` of its base."""

    def __init__(self, code: int) -> None:
        self.code = code


class Slotted(Exception):
    __slots__ = ("detail",)


class OwnReduce(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")
        self.pair = (left, right)

    def __reduce__(self) -> Any:
        return (type(self), self.pair)


class BadReduce(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


class BadText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class MyOSError(OSError):
    def __init__(self, code: int, host: str) -> None:
        super().__init__(code, f"cannot reach {host}")
        self.host = host


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


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


SIMPLE = [
    ValueError("bad", 3),
    KeyError("missing"),
    IndexError(),
    StopIteration("value"),
    RuntimeError("text with \u00e4\u00f6\u00fc and \U0001f600"),
    ZeroDivisionError("division by zero"),
    AssertionError((1, 2)),
    torch.OutOfMemoryError("no memory"),
    Keyword(code=3, where="here"),
    Wrapping("/data"),
    Silent(5),
    OwnReduce(1, 2),
    BadReduce("still"),
    errors.CallTimeout("late", worker="w2", call="f", elapsed_s=2.5),
    errors.WorkerLost("gone", worker="w3", since=1.0, cause="end of file"),
    errors.OwnerLost("gone", worker="w3"),
    errors.RendezvousTimeout("alone", (1, 2), 3.0),
    errors.AutogradError("no", worker="w", operation="mul"),
    errors.UnknownFunction("what"),
    errors.RemoteError("far", type_name="a.B", worker="w"),
    errors.LaunchError("died", worker="w", exit_code=-9),
]


@cases("error", SIMPLE)
def test_type_message_arguments_and_attributes_survive(error: Exception) -> None:
    arrived = trip(raised(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    assert {**vars(arrived), "__notes__": []} == {**vars(error), "__notes__": []}


def test_fields_that_are_written_in_c_survive() -> None:
    missing: Any = trip(FileNotFoundError(2, "No such file", "/a", None, "/b"))
    assert (missing.errno, missing.strerror) == (2, "No such file")
    assert (missing.filename, missing.filename2) == ("/a", "/b")
    decode: Any = trip(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    assert (decode.encoding, decode.object, decode.start, decode.end) == ("utf-8", b"\xff", 0, 1)
    assert "invalid start byte" in str(decode)
    imported: Any = trip(ImportError("no", name="module", path="/x"))
    assert (imported.name, imported.path) == ("module", "/x")
    syntax: Any = trip(SyntaxError("bad", ("file.py", 3, 5, "x =", 3, 6)))
    assert (syntax.filename, syntax.lineno, syntax.text) == ("file.py", 3, "x =")
    parsed: Any = trip(json.JSONDecodeError("Expecting value", "doc", 1))
    assert (type(parsed), parsed.doc, parsed.pos) == (json.JSONDecodeError, "doc", 1)
    assert trip(StopIteration(7)).value == 7  # type: ignore[attr-defined]
    mine: Any = trip(MyOSError(111, "node7"))
    assert (type(mine), mine.errno, mine.host) == (MyOSError, 111, "node7")
    assert str(mine) == "[Errno 111] cannot reach node7"


def test_slots_and_frozen_fields_survive() -> None:
    error = Slotted("text")
    error.detail = {"deep": 1}
    assert trip(error).detail == {"deep": 1}  # type: ignore[attr-defined]
    frozen = trip(Frozen(4))
    assert type(frozen) is Frozen
    assert frozen.code == 4


def test_tensors_in_attributes_survive() -> None:
    error = ValueError("loss is not finite", torch.tensor([1.0, float("inf")]))
    error.step = torch.arange(4).view(2, 2).t()  # type: ignore[attr-defined]
    arrived: Any = trip(error)
    assert arrived.args[1].tolist() == [1.0, float("inf")]
    assert arrived.step.tolist() == [[0, 2], [1, 3]]
    arrived.step.zero_()


def test_what_cannot_be_pickled_is_left_out() -> None:
    error = RuntimeError("stuck", threading.Lock())
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.queue = [1, 2]  # type: ignore[attr-defined]
    arrived: Any = trip(error)
    assert type(arrived) is RuntimeError
    assert arrived.args[0] == "stuck"
    assert "lock" in arrived.args[1]  # replaced by its text
    assert not hasattr(arrived, "lock")
    assert arrived.queue == [1, 2]


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


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def test_the_remote_traceback_is_part_of_the_printed_error() -> None:
    def innermost() -> None:
        raise Wrapping("/data/part-7")

    try:
        innermost()
    except Wrapping as caught:
        arrived = trip(caught, "trainer 5")
    (place,) = places_of(arrived)
    assert place.startswith('On worker "trainer 5":\n  File ')
    text = printed(arrived)
    assert text.count("in innermost") == 1
    assert text.count('raise Wrapping("/data/part-7")') == 1
    assert text.count("cannot read /data/part-7") == 1
    if PRINTS_NOTES:
        assert arrived.__cause__ is None
        assert text.index("cannot read /data/part-7") < text.index("in innermost")


def test_lines_of_a_cell_are_shown_where_the_cell_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "def outer(x):\n    return 1 / inner(x)\n\n\ndef inner(x):\n    return 1 / x\n"
    names: dict[str, Any] = {}
    exec(compile(cell, "/tmp/cell/1.py", "exec"), names)
    try:
        names["outer"](0)
    except ZeroDivisionError as error:
        packed = pack_error(error, "worker0")
    frames = [
        '  File "/tmp/cell/1.py", line 2, in outer',
        '  File "/tmp/cell/1.py", line 6, in inner',
    ]
    here, elsewhere = 'On worker "worker0":', "\n".join(frames)
    (place,) = places_of(unpack_error(packed))
    assert place.startswith(here)
    assert place.endswith(elsewhere)
    entry = (len(cell), None, cell.splitlines(keepends=True), "/tmp/cell/1.py")
    monkeypatch.setitem(linecache.cache, "/tmp/cell/1.py", entry)
    (place,) = places_of(unpack_error(packed))
    shown = [frames[0], "    return 1 / inner(x)", frames[1], "    return 1 / x"]
    assert place.endswith("\n".join(shown))
    again = pack_error(unpack_error(packed), "worker1")
    assert places_of(unpack_error(again))[0] == place


def test_an_error_that_crosses_two_workers_tells_of_both() -> None:
    def passes_through(error: BaseException) -> None:
        raise error

    inner = trip(raised(ValueError("deep")), "far")
    try:
        passes_through(inner)
    except ValueError as caught:
        arrived = trip(caught, "near")
    far, near = places_of(arrived)
    assert far.startswith('On worker "far":')
    assert near.startswith('On worker "near":')
    assert "passes_through" in near
    assert "passes_through" not in far
    text = printed(arrived)
    assert text.count('On worker "far":') == text.count('On worker "near":') == 1
    assert text.count("in passes_through") == 1


def test_an_error_that_is_only_handed_on_has_no_second_place() -> None:
    kept = trip(raised(ValueError("kept")), "owner")
    assert len(places_of(trip(kept, "owner"))) == 1


def test_each_error_of_a_chain_has_its_own_frames() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise ValueError("second") from first
    except ValueError as caught:
        text = printed(trip(caught, "w"))
    assert text.count('raise KeyError("first")') == 1
    assert text.count('raise ValueError("second") from first') == 1
    assert "Traceback (most recent call last)" not in text


def test_circles_in_the_chain_are_no_trouble() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__context__, second.__context__ = second, first
    arrived = trip(first)
    assert type(arrived.__context__) is KeyError
    assert arrived.__context__.__context__ is arrived


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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_groups_of_many_errors_keep_all_of_them() -> None:
    group = ExceptionGroup("many", [ValueError(number) for number in range(300)])  # noqa: F821
    arrived: Any = trip(raised(group))
    assert [error.args for error in arrived.exceptions] == [(number,) for number in range(300)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
def test_notes_survive() -> None:
    error = ValueError("text")
    error.add_note("while loading shard 3")
    assert trip(error).__notes__ == ["while loading shard 3", 'On worker "w1"']


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


def test_local_types_go_by_value() -> None:
    arrived = trip(local_error())
    assert type(arrived).__name__ == "Local"
    assert str(arrived) == "local"


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


def test_the_main_program_goes_by_name_or_by_value(
    vanishing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vanishing.Strange.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", vanishing)
    error = vanishing.Strange("key", 1)
    assert type(trip(error)) is vanishing.Strange
    content = pack_error(error, "w", main_by_name=False)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    arrived: Any = unpack_error(content)
    assert type(arrived).__name__ == "Strange"
    assert arrived.b == 1


def test_an_error_without_text_still_arrives() -> None:
    assert type(trip(BadText("x"))) is BadText


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


class Text(str):
    """A text of the program's own class."""


class Told(ValueError):
    def __str__(self) -> str:
        return Text("wrong")


@pytest.mark.parametrize("is_plain", [False, True])
def test_texts_of_the_programs_own_class_arrive(is_plain: bool) -> None:
    error: Any = Told()
    error.__notes__ = [Text("note")]
    arrived: Any = unpack_error(pack_error(error, "w", is_plain=is_plain))
    assert type(arrived) is Told
    assert str(arrived) == "wrong"
    assert arrived.__notes__[0] == "note"


def both(error: BaseException) -> BaseException:
    return as_runtime_error(unpack_error(pack_error(raised(error), "w")))


@pytest.mark.parametrize(
    "error",
    [
        KeyError("missing"),
        FileNotFoundError(2, "no such file", "/data"),
        AssertionError("not ready"),
        ValueError("bad"),
        StopIteration(3),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "no"),
        Keyword(code=3, where="here"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_what_it_was_and_a_runtime_error(error: Exception) -> None:
    arrived: Any = both(error)
    for each in (arrived, fresh_copy(arrived)):
        assert isinstance(each, RuntimeError)
        assert isinstance(each, type(error))
        assert type(each).__name__ == type(error).__name__
        assert (str(each), each.args) == (str(error), error.args)
        assert {**vars(each), "__notes__": []} == {**vars(error), "__notes__": []}
    if isinstance(error, OSError):
        assert (arrived.errno, arrived.filename) == (2, "/data")


@pytest.mark.parametrize("error", [KeyError("missing"), FileNotFoundError(2, "no", "/data")])
def test_it_survives_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(both(error)))
    assert isinstance(copy, RuntimeError)
    assert isinstance(copy, type(error))
    assert str(copy) == str(error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no groups of exceptions")
def test_a_group_is_a_runtime_error_and_comes_apart() -> None:
    group: Any = ExceptionGroup("two", [ValueError("a"), KeyError("b")])  # noqa: F821
    arrived: Any = both(group)
    assert isinstance(arrived, RuntimeError)
    assert isinstance(arrived, type(group))
    assert str(arrived) == str(group)
    assert [repr(each) for each in arrived.exceptions] == ["ValueError('a')", "KeyError('b')"]
    assert repr(arrived.subgroup(KeyError).exceptions) == "(KeyError('b'),)"


def test_another_worker_gets_the_original_type() -> None:
    try:
        raise both(Keyword(code=3, where="here"))
    except Keyword as caught:
        arrived = unpack_error(pack_error(caught, "nearer"))
    assert type(arrived) is Keyword
    assert arrived.code == 3
    assert "in test_another_worker" in arrived.__notes__[-1]  # type: ignore[attr-defined]


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


def test_a_type_is_made_once() -> None:
    assert type(both(KeyError("a"))) is type(both(KeyError("b")))
