"""The engine that needs nothing installed: valid messages, changed, and changed again.

It knows nothing of branches. An input counts as new where its refusal came from lines that no
earlier one came from, or where it was accepted with a length unlike those before; such inputs are
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
"""Share of inputs that are made of one of those to start from."""
_INNERMOST = 2
_MADE = 0.5
"""Share of inputs that are left as a grammar has made them."""


def fuzz(target: Target, plan: Plan, last_input: LastInput | None = None) -> Report:
    """Tries inputs until the plan is fulfilled; returns how it went."""
    chance = random.Random(f"{plan.seed} {target.name}")
    mutator = Mutator(chance, target)
    campaign = Campaign(target, plan, last_input)
    pool = starting_inputs(target, plan)
    known_count = len(pool)
    seen: set[object] = set()
    for data in list(pool):
        seen.add(_behaviour(campaign.try_one(data), data))
    while not campaign.is_over:
        # Mostly the valid ones: of what was refused already, little goes further.
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
    # Not all lines: nested values come to the same refusal by thousands of ways.
    return len(data).bit_length() if raised is None else signature_of(raised)[-_INNERMOST:]


def _save(corpus: Path, data: bytes) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
