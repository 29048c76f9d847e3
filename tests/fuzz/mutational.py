"""The engine without dependencies, which changes valid messages, and changes the results again.

It does not see branches. An input counts as new if its refusal came from lines that no earlier
refusal came from, or if it was accepted with a length unlike earlier lengths. New inputs are
changed further.

Where the target has a twin in C, that alone gets a lot of further inputs beside each of the others,
which the plain twin takes as well. One of each lot is then tried whole.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from tests.fuzz.campaign import Campaign, Plan, Report, starting_inputs
from tests.fuzz.findings import signature_of
from tests.fuzz.last_input import LastInput
from tests.fuzz.mutating import Mutator, Varier
from tests.fuzz.target import Target

NAME = "mutational"
_KNOWN = 0.6
"""Share of inputs that are made from a starting input."""
_CHANGED = 0.5
"""Share of lots that are made near the changed input, not near the known input before it."""
_INNERMOST = 2
_MADE = 0.5
"""Share of a grammar's inputs that are tried unchanged."""


def fuzz(target: Target, plan: Plan, last_input: LastInput | None = None) -> Report:
    """Tries inputs until the plan is fulfilled; returns the report."""
    chance = random.Random(f"{plan.seed} {target.name}")
    mutator, varier = Mutator(chance, target), Varier(chance, target)
    campaign = Campaign(target, plan, last_input)
    pool = starting_inputs(target, plan)
    known_count = len(pool)
    seen: set[object] = set()
    for data in list(pool):
        seen.add(_behaviour(campaign.try_one(data), data))

    def try_whole(data: bytes) -> None:
        """Tries an input, and keeps it if it is new."""
        raised = campaign.try_one(data)
        behaviour = _behaviour(raised, data)
        if behaviour not in seen:
            seen.add(behaviour)
            pool.append(data)
            if plan.corpus is not None:
                _save(plan.corpus, data)

    while not campaign.is_over:
        # Mostly the starting inputs: few inputs that were refused already get further.
        is_known = len(pool) == known_count or chance.random() < _KNOWN
        first = (
            chance.randrange(known_count) if is_known else chance.randrange(known_count, len(pool))
        )
        known, other = pool[first], pool[chance.randrange(len(pool))]
        data = mutator.mutate(known, other)
        if target.make is not None:
            made = target.make(chance)
            known, other = made, data
            data = made if chance.random() < _MADE else mutator.mutate(made, data)
        try_whole(data)
        if campaign.lot:
            # Most changes of an input that C refuses are refused where it was.
            base = data if chance.random() < _CHANGED else known
            try_whole(campaign.try_lot(varier.vary(base, other, campaign.lot)))
    return campaign.report(NAME, len(seen))


def _behaviour(raised: BaseException | None, data: bytes) -> object:
    # Not all lines: nested values reach the same refusal in thousands of ways.
    return len(data).bit_length() if raised is None else signature_of(raised)[-_INNERMOST:]


def _save(corpus: Path, data: bytes) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
