"""Which twin runs, and that the one in C leaks nothing and survives a failing program."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchweft.native as loading
from torchweft import knobs
from torchweft.engine.codec import values
from torchweft.engine.codec.tensors import decode_tensors, encode_tensors
from torchweft.engine.wire.frames import HEADER_BYTES, Frame
from torchweft.engine.wire.messages import (
    NO_CREATION,
    Kind,
    decode_reply,
    encode_call,
    encode_reply,
)
from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.rpc import codec  # noqa: F401 (it tells the twin in C of torch's modes)

native = loading.native
needs_native = pytest.mark.skipif(native is None, reason=loading.reason)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("setting", "word"), [("0", "turns"), ("yes", "none of")])
def test_a_setting_chooses_or_is_refused(setting: str, word: str) -> None:
    with knobs.NATIVE.override(setting):
        if setting == "0":
            module, reason = loading._find()
            assert module is None
            assert word in reason
        else:
            with pytest.raises(ConfigurationError, match=f"WEFT_NATIVE=yes is {word}"):
                loading._find()


def test_a_demanded_twin_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchweft._native", None)
    monkeypatch.delattr("torchweft._native", raising=False)
    with knobs.NATIVE.override("auto"):
        assert loading._find()[0] is None
    with (
        knobs.NATIVE.override("1"),
        pytest.raises(ConfigurationError, match="demands the native twin, but it was not built"),
    ):
        loading._find()


def test_the_package_is_built_without_a_compiler(tmp_path: Path) -> None:
    environment = {**os.environ, "CC": str(tmp_path / "none"), "PYTHONPATH": ""}
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "made")]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torchweft: the native twin is left out, as ") == 1
    assert [*tmp_path.rglob("torchweft/native.py")]
    assert not [*tmp_path.rglob("_native*.so")]


def _rounds(run: Callable[[], object]) -> int:
    """Returns how many bytes more are allocated after many rounds than after some."""
    for _ in range(50):
        run()
    gc.collect()
    tracemalloc.start()
    try:
        run()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(300):
            run()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def _every_kind() -> Any:
    shared = [1, 2]
    return (
        None, True, -5, 1 << 200, 2.5, 1 + 2j, "text" * 20, b"bytes" * 20,
        [shared, shared], {1, "a"}, frozenset((2, 3)), {"key": {"inner": (1, 2)}},
        OrderedDict(a=1, b=[2]), torch.float32, torch.device("cpu"), torch.Size([2]), len,
        [torch.ones(2) for _ in range(40)], [[index] for index in range(40)],
    )  # fmt: skip


@needs_native
def test_answering_calls_leaks_nothing() -> None:
    assert native is not None
    leaf, value = torch.ones(2, requires_grad=True), _every_kind()[:4]
    answer = native.encode_result(7, 0, (*value, torch.ones(3)), True, 9, values.no_home)
    assert answer
    control = bytes(answer[HEADER_BYTES:])
    *_, start, end = decode_reply(control)
    payload, tensors = control[start:end], control[end:]

    def fail(_: object) -> None:
        raise RuntimeError("this program fails")

    def read(control: bytes, most: int = 9) -> Any:
        return native.decode_answer(Frame(Kind.REPLY, 0, 7, control, ()), (most, fail, fail))

    def run() -> None:
        for results, expected in (((*value, leaf), None), ([object()], False), (leaf, None)):
            assert native.encode_result(7, 0, results, True, 9, values.no_home) is expected
        native.encode_result(7, 0, (*value, torch.ones(3)), True, 9, values.no_home)
        with pytest.raises(RuntimeError, match="this program fails"):
            native.encode_result(7, 0, [object()], True, 9, fail)
        assert read(encode_reply(0, 0, (), b"")) is None
        assert read(encode_reply(0, 0, (), b"", tensors)).shape == (3,)
        assert read(control)[:4] == value
        assert read(control, 0) is NotImplemented
        for cut in (control[: end - 3], control[:-3], encode_reply(0, 0, (), payload[:-3])):
            assert read(cut) is NotImplemented

    assert _rounds(run) < 2000


class _Call:
    """A served call that forgets all that it is told."""

    is_wanted = True

    def starts(self, *_: object) -> bool:
        return self.is_wanted

    def answer(self, frame: bytearray) -> None:
        assert frame

    def __call__(self, result: object, error: BaseException) -> None:
        assert isinstance(error, RuntimeError)


@needs_native
@pytest.mark.parametrize("end", ["answered", "raises", "unusual", "unwanted", "malformed"])
def test_whole_calls_leak_nothing(end: str) -> None:
    assert native is not None
    call = _Call()
    call.is_wanted = end != "unwanted"

    def function(*args: object) -> object:
        if end == "raises":
            raise RuntimeError
        return [args, torch.ones(2)]

    def settle(*_: object) -> None:
        pytest.fail("the result was not encoded")

    usual = {b"module:name": (SimpleNamespace(name=function), "name", function)}
    rest = True, 9, values.no_home, 9, values.no_home, values.refuse_home
    server = None, usual, ContextVar("served"), {}, settle, str, *rest
    payload = b"\xff" if end == "malformed" else values.encode(([2], "a"), [], True)
    assert payload is not None
    name = b"module:other" if end == "unusual" else b"module:name"
    control = encode_call(math.inf, NO_CREATION, 0, 0, name, b"", (), payload)
    frame = Frame(Kind.CALL, 0, 7, control, ())
    answer = Frame(Kind.REPLY, 0, 7, encode_reply(0, 0, (), payload), ())

    def run() -> None:
        assert native.serve_call(server, call, frame) is (end not in ("unusual", "malformed"))
        decoded = native.decode_answer(answer, rest[3:])
        assert (decoded is NotImplemented) is (end == "malformed")

    assert _rounds(run) < 2000


@needs_native
def test_encoding_and_decoding_leak_nothing() -> None:
    value = _every_kind()

    def run() -> None:
        tensors: list[torch.Tensor] = []
        payload = values.encode(value, tensors, True)
        content = encode_tensors(tensors)
        assert payload is not None
        assert content is not None
        values.decode(payload, decode_tensors(content[0], 0)[0], ())

    assert _rounds(run) < 2000


@needs_native
def test_every_cut_leaks_nothing() -> None:
    value = _every_kind()
    tensors: list[torch.Tensor] = []
    payload = values.encode(value, tensors, True)
    content = encode_tensors([*tensors, torch.ones(3, requires_grad=True)])
    assert payload is not None
    assert content is not None

    def run() -> None:
        for end in range(0, len(payload), 7):
            with pytest.raises(ProtocolError):
                values.decode(payload[:end], tensors, ())
        for end in range(1, len(content[0]), 7):
            try:
                decode_tensors(content[0][:end], 0)
            except ProtocolError:
                pass

    for _ in range(3):
        run()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(10):
        run()
    gc.collect()
    assert sys.getallocatedblocks() - before < 200
