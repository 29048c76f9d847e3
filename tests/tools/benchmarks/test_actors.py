from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from benchmarks.calls.actors import monarch_works, ray_works
from benchmarks.frame.measuring import available
from benchmarks.frame.question import Side
from benchmarks.frame.work import Work


class Call:
    """The future that a call on an actor returns."""

    def __init__(self, value: object) -> None:
        self._value = value

    def get(self) -> object:
        return self._value


class Method:
    """A method of an actor, callable in Ray's way and in Monarch's way."""

    calls = 0

    def __init__(self, actor: object, function: Any) -> None:
        self._actor, self._function = actor, function

    def remote(self, value: object) -> Call:
        Method.calls += 1
        return Call(self._function(self._actor, value))

    call_one = remote


class Handle:
    """A handle of an actor of the given class."""

    def __init__(self, kind: type) -> None:
        self.echo = Method(kind(), vars(kind)["echo"])


def fake_ray(stopped: list[str]) -> types.SimpleNamespace:
    def get(calls: Any) -> object:
        return [call.get() for call in calls] if isinstance(calls, list) else calls.get()

    return types.SimpleNamespace(
        init=lambda **options: None,
        remote=lambda kind: types.SimpleNamespace(remote=lambda: Handle(kind)),
        get=get,
        shutdown=lambda: stopped.append("ray"),
    )


def fake_monarch(stopped: list[str]) -> types.SimpleNamespace:
    def stop() -> Call:
        stopped.append("monarch")
        return Call(None)

    processes = types.SimpleNamespace(spawn=lambda name, kind: Handle(kind), stop=stop)
    host = types.SimpleNamespace(spawn_procs=lambda per_host: processes)
    return types.SimpleNamespace(
        Actor=object, endpoint=lambda method: method, this_host=lambda: host
    )


def check_works(works: dict[str, Work]) -> None:
    for work in works.values():
        before = Method.calls
        work.run()
        assert Method.calls - before == work.operations


def test_ray_makes_the_calls_and_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setitem(sys.modules, "ray", fake_ray(stopped))
    with ray_works() as works:
        check_works(works)
        assert not stopped
    assert stopped == ["ray"]


def test_monarch_makes_the_calls_and_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setitem(sys.modules, "monarch.actor", fake_monarch(stopped))
    with monarch_works() as works:
        check_works(works)
        assert not stopped
    assert stopped == ["monarch"]


def test_side_that_is_not_installed_is_skipped_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = Side("here", module="json")
    absent = Side("absent", module="no_such_module_anywhere")
    assert available([here, absent]) == [here]
    assert "skipping absent: no_such_module_anywhere" in capsys.readouterr().err
