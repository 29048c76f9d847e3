"""The engine without dependencies, which changes valid messages, and changes the results again.

It does not see branches. An input counts as new if its refusal came from lines that no earlier
refusal came from, or if it was accepted with a length unlike earlier lengths. New inputs are
changed further.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from tests.fuzz.campaign import Campaign, Plan, Report, starting_inputs
from tests.fuzz.findings import signature_of
from tests.fuzz.last_input import LastInput
from tests.fuzz.mutating import Mutator
from tests.fuzz.target import Target

NAME = "mutational"
_KNOWN = 0.6
"""Share of inputs that are made from a starting input."""
_INNERMOST = 2
_MADE = 0.5
"""Share of a grammar's inputs that are tried unchanged."""


def fuzz(target: Target, plan: Plan, last_input: LastInput | None = None) -> Report:
    """Tries inputs until the plan is fulfilled; returns the report."""
    chance = random.Random(f"{plan.seed} {target.name}")
    mutator = Mutator(chance, target)
    campaign = Campaign(target, plan, last_input)
    pool = starting_inputs(target, plan)
    known_count = len(pool)
    seen: set[object] = set()
    for data in list(pool):
        seen.add(_behaviour(campaign.try_one(data), data))
    while not campaign.is_over:
        # Mostly the starting inputs: few inputs that were refused already get further.
        is_known = len(pool) == known_count or chance.random() < _KNOWN
        first = (
            chance.randrange(known_count) if is_known else chance.randrange(known_count, len(pool))
        )
        data = mutator.mutate(pool[first], pool[chance.randrange(len(pool))])
        if target.make is not None:
            made = target.make(chance)
            data = made if chance.random() < _MADE else mutator.mutate(made, data)
        behaviour = _behaviour(campaign.try_one(data), data)
        if behaviour not in seen:
            seen.add(behaviour)
            pool.append(data)
            if plan.corpus is not None:
                _save(plan.corpus, data)
    return campaign.report(NAME, len(seen))


def _behaviour(raised: BaseException | None, data: bytes) -> object:
    # Not all lines: nested values reach the same refusal in thousands of ways.
    return len(data).bit_length() if raised is None else signature_of(raised)[-_INNERMOST:]


def _save(corpus: Path, data: bytes) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
