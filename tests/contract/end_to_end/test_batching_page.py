"""The page on batched calls: its programs run unchanged."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.contract.end_to_end.apart import LIMIT_S
from tests.inside import RunPage

PAGE = "docs/batching.md"

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_the_server_answers_each_caller_as_if_it_were_alone(run: RunPage, guide: Path) -> None:
    *answers, last = run(guide / "server.py")
    names = runpy.run_path(str(guide / "server.py"))
    server = names["Server"]()
    for place, line in enumerate(answers):
        expected = [
            int(server.classify(names["image"](100 * place + number)).argmax())
            for number in range(100)
        ]
        assert line == " ".join(map(str, [f"worker{place + 1}", *expected]))
    assert len(answers) == 2
    largest = re.fullmatch(r"200 calls, the largest batch had (\d+)", last)
    assert largest is not None
    assert 1 < int(largest[1]) <= 32


def test_the_agent_learns(run: RunPage, guide: Path) -> None:
    *episodes, last = run(guide / "agent.py")
    rewards = [float(line.split()[-1]) for line in episodes]
    assert len(rewards) == 5
    assert rewards[-1] > 0.85
    assert re.fullmatch(r"6400 actions, [\d.]+ at a time", last)


def test_the_samplers_follow_the_learner(run: RunPage, guide: Path) -> None:
    found = [
        re.fullmatch(r"step (\d+): reward ([\d.]+), (\d+) steps old", line)
        for line in run(guide / "samplers.py")
    ]
    assert [int(each[1]) for each in found if each] == [10, 20, 30, 40]
    assert float(found[-1][2]) > 0.9  # type: ignore[index]
    # Two values of either stream are under way, and the weights of some steps.
    assert all(int(each[3]) <= 8 for each in found if each)
