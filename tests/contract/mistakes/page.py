"""The page of errors: the outcomes of the mistakes when they were last run."""

from __future__ import annotations

import html
import json
from pathlib import Path

from tests.contract.mistakes.calling import CALLING
from tests.contract.mistakes.mistake import Mistake
from tests.contract.mistakes.running import Outcome
from tests.contract.mistakes.starting import STARTING
from tests.contract.mistakes.using import USING

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "errors.md"
OUTCOMES = Path(__file__).with_name("outcomes.json")

TOPICS: dict[str, tuple[Mistake, ...]] = {
    "Starting": STARTING,
    "Calls, and workers that end": CALLING,
    "References, gradients, devices": USING,
}
ALL = tuple(mistake for mistakes in TOPICS.values() for mistake in mistakes)

_HEAD = """# Mistakes and their messages

This page has {count} mistakes that are easily made, the message that each one leads to, and the
seconds from the mistake to the message (from the start of the program, where the mistake is made
there). `python -m tests.contract.mistakes --write` runs all of them and writes the page; a part of
them runs with every test run.

- Every error that Weft raises is a `WeftError`, and a built-in exception as well;
  `torchweft.errors` has the tree.
- What a remote function raises arrives as what it was. Its notes say where it was raised: the
  worker, and the frames of your program there.
- Frames of Weft itself are left out. `WEFT_TRACEBACKS=full` shows them.
- An `rpc_async` or `remote` that fails, and whose result nobody looks at, is logged at the caller,
  by the logger `torchweft`. `rpc.on_unseen_error(function)` tells the program as well.
"""


def load() -> dict[str, Outcome]:
    """Returns the stored outcomes of the mistakes, by title."""
    stored = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    return {title: Outcome(**outcome) for title, outcome in stored.items()}


def store(outcomes: dict[str, Outcome]) -> None:
    """Stores the outcomes of the mistakes, and writes the page if none is missing."""
    known = [mistake.title for mistake in ALL if mistake.title in outcomes]
    rows = {title: outcomes[title]._asdict() for title in known}
    OUTCOMES.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    if len(known) == len(ALL):
        PAGE.write_text(render(outcomes))


def render(outcomes: dict[str, Outcome]) -> str:
    """Returns the text of the page."""
    parts = [_HEAD.format(count=len(ALL))]
    for topic, mistakes in TOPICS.items():
        parts.append(f"\n## {topic}\n\n| mistake | message | s |\n|---|---|---|\n")
        parts += [_row(mistake, outcomes[mistake.title]) for mistake in mistakes]
    return "".join(parts)


def _row(mistake: Mistake, outcome: Outcome) -> str:
    code, message = _code(mistake.code), _code(outcome.message)
    return f"| {mistake.title}<br>{code} | {message} | {outcome.seconds:.1f} |\n"


def _code(text: str) -> str:
    lines = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        shown = html.escape(line.lstrip(), quote=False).replace("|", "&#124;")
        lines.append(f"{'&nbsp;' * indent}<code>{shown}</code>")
    return "<br>".join(lines)
