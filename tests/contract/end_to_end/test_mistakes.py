"""The page of errors shows what mistakes lead to; quick mistakes are repeated, in forks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.contract.mistakes import page
from tests.contract.mistakes.running import alike, environment

LIMIT_S = 150.0
BY_TITLE = {mistake.title: mistake for mistake in page.ALL}
QUICK = [mistake.title for mistake in page.ALL if mistake.is_quick]


@pytest.fixture(scope="module")
def made() -> Any:
    """The outcomes of the quick mistakes, made now, by title."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.contract.mistakes.quick"],
        cwd=page.ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize("title", QUICK)
def test_the_message_is_that_of_the_page(made: Any, title: str) -> None:
    assert alike(made[title]["message"]) == alike(page.load()[title].message)
    assert made[title]["seconds"] < 10.0


def test_every_mistake_has_a_row() -> None:
    outcomes = page.load()
    assert len(BY_TITLE) == len(page.ALL) >= 32
    assert list(outcomes) == list(BY_TITLE)
    assert page.PAGE.read_text() == page.render(outcomes), (
        "run python -m tests.contract.mistakes --write"
    )
    for title, outcome in outcomes.items():
        assert re.search(BY_TITLE[title].message, outcome.message), title


def test_messages_are_short_and_show_no_frames_of_weft() -> None:
    for title, outcome in page.load().items():
        assert "/torchweft/" not in outcome.message, title
        assert not re.search(r'File "/', outcome.message), title
        assert "b'torchweft" not in outcome.message, title
        assert len(outcome.message.splitlines()[0]) < 500, title
        assert outcome.seconds < 30.0, title
