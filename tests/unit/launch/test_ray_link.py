"""The link with the agent in an actor of Ray; a stand-in plays Ray."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from torchweft.launch import ray as launcher
from torchweft.launch.ray import ActorLink, Bundles

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
