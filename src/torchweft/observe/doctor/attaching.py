"""Examines a group that runs, from outside, as ``torchweft top`` looks at it.

The workers tell their facts, and some of them measure their ways to others: one way at a time, as
two would disturb each other, and briefly, since the group is at work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from torchweft.observe.doctor.checks import diagnose
from torchweft.observe.doctor.findings import Diagnosis, Finding, Level
from torchweft.observe.group import Group
from torchweft.protocol.observing.facts import PairFacts, WorkerFacts

_MEASURING_S = 5.0
_LISTED = 3


def examine_group(group: Group, timeout_s: float = 2.0, most_pairs: int = 32) -> Diagnosis:
    """Examines a group from outside; some milliseconds of two workers for each measured pair.

    Pairs without a connection are not measured, since that would make one. Blocks.

    Args:
        group: The group.
        timeout_s: How long to wait for the facts of each worker.
        most_pairs: How many pairs to measure, at most, spread over all workers.
    """
    facts, answers = group.facts(timeout_s)
    fix = "examine with the version of Weft that the workers have, if torchweft top reaches them"
    failed = [
        Finding(Level.ERROR, "worker", name, why, fix if "the greeting" in why else "")
        for name, why in answers.silent.items()
    ]
    known = [pair for each in facts for pair in each.pairs]
    pairs, count = _measured(group, known, set(answers.silent), most_pairs)
    found = merged(diagnose([each.host for each in facts], pairs))
    return Diagnosis((*failed, *found, *_coverage(facts, len(known), count, most_pairs)))


def _measured(
    group: Group, known: Sequence[PairFacts], silent: set[str], most: int
) -> tuple[list[PairFacts], int]:
    """Measures some pairs in place of what is known of them; returns all, and how many."""
    rank = {name: number for number, name in enumerate(group.workers)}
    able = [each for each in known if not each.error and each.callee not in silent]
    chosen = {each.where for each in sample(able, rank, most)}
    pairs, busy, count = [], set[str](), 0
    for each in known:
        if each.where in chosen and each.callee not in busy:
            each = group.measure(each.caller, each.callee, _MEASURING_S)
            count += not each.error
            if each.is_busy:  # Its other pairs would wait as long.
                busy.add(each.callee)
        pairs.append(each)
    return pairs, count


def sample(pairs: Sequence[PairFacts], rank: dict[str, int], most: int) -> list[PairFacts]:
    """Returns some of the pairs: each worker's turn comes as often, to near and to far ranks."""

    def distance(pair: PairFacts) -> int:
        return (rank.get(pair.callee, 0) - rank.get(pair.caller, 0)) % max(len(rank), 1)

    ways: dict[str, list[PairFacts]] = {}
    for pair in sorted(pairs, key=lambda each: (distance(each), rank.get(each.caller, 0))):
        ways.setdefault(pair.caller, []).append(pair)
    turns = itertools.zip_longest(*map(_near_and_far, ways.values()))
    ordered = [pair for turn in turns for pair in turn if pair is not None]
    if most < len(ways):
        return [ordered[number * len(ways) // most] for number in range(most)]
    return ordered[:most]


def _near_and_far(ways: Sequence[PairFacts]) -> list[PairFacts]:
    """Returns the ways of one worker, those of both halves in turns."""
    half = (len(ways) + 1) // 2
    both = itertools.zip_longest(ways[:half], ways[half:])
    return [pair for turn in both for pair in turn if pair is not None]


def merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yields the findings, and those of channels that differ in nothing but the pair as one."""
    same: dict[object, list[Finding]] = {}
    for number, each in enumerate(findings):
        is_alike = each.check == "channel"
        same.setdefault((each.level, each.text, each.fix) if is_alike else number, []).append(each)
    for group in same.values():
        where = ", ".join(each.where for each in group[:_LISTED])
        if len(group) > _LISTED:
            where += f" and {len(group) - _LISTED} more pairs"
        first = group[0]
        yield Finding(first.level, first.check, where, first.text, first.fix)


def _coverage(
    facts: Sequence[WorkerFacts], known: int, measured: int, most: int
) -> Iterator[Finding]:
    """Yields how many of the pairs have been measured, if not all."""
    pairs = len(facts) * (len(facts) - 1)
    if measured == pairs:
        return
    text = f"{measured} of {pairs} pairs are measured"
    if known < pairs:
        text += (
            f"; {pairs - known} have no connection, as neither has called the other, so they have "
            "chosen no channels yet"
        )
    fix = f"torchweft doctor --group --pairs {known} measures all" if most < known else ""
    yield Finding(Level.GOOD, "pairs", "all workers", text, fix)
