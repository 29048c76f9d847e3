"""The options of ``--on ray``, and what is missing without it; Ray itself is not needed."""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable
from typing import Any

import pytest

from torchweft.errors import ConfigurationError
from torchweft.launch import ray
from torchweft.launch import ray as launcher
from torchweft.launch.ray import ActorLink, Bundles, Ray


@pytest.fixture(autouse=True)
def with_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "package", lambda: types.SimpleNamespace(__version__="2.60.0"))


@pytest.fixture
def bundles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Takes what would be reserved, on nodes a, b, and so on."""
    taken: list[Any] = []

    class Reserved:
        def __init__(self, bundles: Any, strategy: str, labels: Any) -> None:
            taken.extend([*bundles, strategy, labels])
            self._count = len(bundles)

        def make(self, address: str | None, limit_s: float) -> None:
            taken.extend([address, limit_s])

        def addresses(self) -> list[str]:
            return list("abcdef"[: self._count])

        def release(self) -> None:
            taken.append("released")

    monkeypatch.setattr(ray, "Bundles", Reserved)
    return taken


def parsed(*arguments: str) -> Ray:
    parser = argparse.ArgumentParser()
    Ray.add_options(parser.add_argument_group())
    return Ray.from_options(parser.parse_args(arguments))


def test_a_bundle_for_each_worker(bundles: list[Any]) -> None:
    launcher = Ray()
    hosts = launcher.hosts(3)
    assert [(host.name, host.address, host.workers) for host in hosts] == [
        ("bundle 0", "a", 1),
        ("bundle 1", "b", 1),
        ("bundle 2", "c", 1),
    ]
    assert bundles == [{"CPU": 1}] * 3 + ["PACK", {}, None, 60.0]
    launcher.release()
    launcher.release()
    assert bundles[7:] == ["released"]


def test_options_and_several_workers_in_a_bundle(bundles: list[Any]) -> None:
    options = "--ray-address h:1 --num-cpus 0 --num-gpus 0.5 --resources special=1,other=0.25"
    more = "--labels zone=a,kind=b --workers-per-bundle 4 --strategy SPREAD --ray-timeout 9"
    hosts = parsed(*options.split(), *more.split()).hosts(6)
    assert [(host.workers, host.timeout_s) for host in hosts] == [(4, 9), (2, 9)]
    assert bundles == [
        {"GPU": 2.0, "special": 4.0, "other": 1.0},
        {"GPU": 1.0, "special": 2.0, "other": 0.5},
        "SPREAD",
        {"zone": "a", "kind": "b"},
        "h:1",
        9.0,
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_cpus": -1}, "CPU of a worker is -1; it must be 0 or more"),
        ({"num_gpus": float("nan")}, "GPU of a worker is nan"),
        ({"resources": {"special": float("inf")}}, "special of a worker is inf"),
        ({"num_cpus": 0}, "workers that reserve nothing cannot be placed"),
        ({"workers_per_bundle": 0}, "workers_per_bundle is 0; it must be at least 1"),
        ({"strategy": "spread"}, "'spread'; Ray has PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
        ({"timeout": 0}, "timeout is 0; it must be more than 0 seconds"),
    ],
)
def test_values_that_cannot_be(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Ray(**given)


LOST = "The actor died unexpectedly before finishing this task."


class Actor:
    """An actor whose agent has just been killed, with its output at the end.

    Args:
        exit_code: Answers the question for the agent's exit code.
    """

    def __init__(self, exit_code: Callable[[float], int]) -> None:
        answers: dict[str, Callable[..., Any]] = {
            "start": lambda command, environment: "10.0.0.1",
            "read": lambda: b"",
            "read_error": lambda: b"",
            "exit_code": exit_code,
        }
        for name, answer in answers.items():
            setattr(self, name, types.SimpleNamespace(remote=_later(answer)))


def _later(answer: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    return lambda *arguments: lambda: answer(*arguments)


def link_to(monkeypatch: pytest.MonkeyPatch, exit_code: Callable[[float], int]) -> ActorLink:
    ray = types.SimpleNamespace(
        is_initialized=lambda: True,
        wait=lambda references, timeout: (references, []),
        get=lambda reference: reference(),
        exceptions=types.SimpleNamespace(RayActorError=LookupError),
    )
    monkeypatch.setattr(launcher, "package", lambda: ray)
    bundles = Bundles([{"CPU": 1}], "PACK", {})
    monkeypatch.setattr(bundles, "actor", lambda index: Actor(exit_code))
    return ActorLink(bundles, 0, ["agent"], {})


def test_an_output_that_ends_before_ray_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(reason_s: float) -> int:
        raise LookupError(LOST)

    link = link_to(monkeypatch, lost)
    assert link.receive() == b""
    assert list(link.said()) == []
    assert link.why_ended() == "Ray: The actor died unexpectedly before finishing this task"


@pytest.mark.parametrize(("code", "reason"), [(-9, "its command ended with exit code -9"), (0, "")])
def test_an_agent_that_ends_in_a_living_actor(
    monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    link = link_to(monkeypatch, lambda reason_s: code)
    assert link.receive() == b""
    assert link.why_ended() == reason
