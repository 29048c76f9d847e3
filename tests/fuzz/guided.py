"""The engine with atheris: libFuzzer, which sees the branches that an input takes.

libFuzzer decides which inputs to change. Half of the changes are its own, half are those of
``Mutator``, which knows what lengths and counts look like.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import atheris

from tests.fuzz import targets
from tests.fuzz.campaign import Campaign, Plan, starting_inputs
from tests.fuzz.last_input import LastInput
from tests.fuzz.mutating import Mutator

NAME = "guided"
_INPUT_TIMEOUT_S = 10
_MEMORY_LIMIT_MB = 2048


def fuzz(name: str, plan: Plan, report_path: Path, last_input: LastInput) -> None:
    """Tries inputs until the plan is fulfilled, writes a report and ends the process.

    Args:
        name: Name of the target, whose modules must not be imported yet.
        plan: How much to try.
        report_path: Where to write the report.
        last_input: Gets every input before it is tried.
    """
    with atheris.instrument_imports(include=["torchweft"]):
        target = targets.load(name)
    chance = random.Random(f"{plan.seed} {name}")
    mutator = Mutator(chance, target)
    inputs = starting_inputs(target, plan)
    campaign = Campaign(target, plan, last_input)

    def try_one(data: bytes) -> None:
        campaign.try_one(data)
        if campaign.is_over:
            campaign.report(NAME, 0).write(report_path)
            sys.stdout.flush()
            os._exit(0)

    def mutate(data: bytes, limit_bytes: int, seed: int) -> bytes:
        if seed & 1:
            return bytes(atheris.Mutate(data, limit_bytes))
        other = inputs[seed % len(inputs)]
        return mutator.mutate(data, other)[:limit_bytes]

    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(inputs):
            (Path(folder) / str(number)).write_bytes(data)
        if plan.corpus is not None:
            plan.corpus.mkdir(parents=True, exist_ok=True)
        arguments = [
            sys.argv[0],
            f"-seed={plan.seed + 1}",
            f"-max_len={target.length_limit}",
            f"-timeout={_INPUT_TIMEOUT_S}",
            f"-rss_limit_mb={_MEMORY_LIMIT_MB}",
            "-artifact_prefix=" + os.path.join(folder, "artifact-"),
            *([] if plan.corpus is None else [str(plan.corpus)]),
            folder,
        ]
        atheris.Setup(arguments, try_one, custom_mutator=mutate)
        atheris.Fuzz()
