"""A hostile member between two honest workers: ``python -m tests.fuzz.third_worker``.

Hostile members send a strict worker messages about others (``tests.fuzz.strict.others``) while an
honest worker makes calls, values, references and backward passes there. After each round the honest
worker must have the results, and be in the group, as without the hostile members
(``tests.fuzz.strict.trio``). Each group is made anew after some thousand messages, from a seed of
its own: ``--only GROUP`` repeats one.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import random
import sys
import time
import traceback
import warnings
from collections.abc import Sequence

from tests.fuzz.strict.others import Others
from tests.fuzz.strict.trio import Trio
from torchweft import knobs

FRAMES_A_GROUP = 20_000
_FRAMES_A_ROUND = 800
_FRAMES_AT_ONCE = 32
_REPORT_S = 60.0


class Group:
    """One group, and the messages that its hostile members have still to send in this round.

    Args:
        seed: The same seed makes the same messages.
    """

    def __init__(self, seed: str) -> None:
        self._left = self.rounds = 0
        self.trio = Trio(self._attack)
        self._others = Others(random.Random(seed), self.trio)

    def _attack(self) -> Sequence[bytes]:
        if not self._left:
            return ()
        count = min(self._left, _FRAMES_AT_ONCE)
        self._left -= count
        return [self._others.message() for _ in range(count)]

    def round(self) -> None:
        """Has the honest worker do all that it does, and hostile members send in between.

        Raises:
            Exception: The honest worker noticed the others.
        """
        self._left = _FRAMES_A_ROUND
        self.trio.round(self.rounds)
        self.rounds += 1


def attack(seed: str, frames: int) -> tuple[int, int]:
    """Lets hostile members send a group some frames; returns how many were sent, and refused.

    Raises:
        AssertionError: The honest worker noticed them; the error says in which frames, and why.
    """
    logging.disable(logging.CRITICAL)
    group = Group(seed)
    try:
        while group.trio.sent < frames:
            group.round()
    except Exception as error:
        where = f"seed {seed!r}, round {group.rounds}, after {group.trio.sent} frames"
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        group.trio.close()
        logging.disable(logging.NOTSET)
    return group.trio.sent, group.trio.refused


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs groups until enough frames are sent; returns how many groups were harmed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.third_worker")
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, default=None, help="the number of one group")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    knobs.Knob.get = knobs.Constant.get = functools.cache(knobs.Knob.get)  # type: ignore
    sent = refused = harmed = 0
    number = 0 if given.only is None else given.only
    began_s = reported_s = time.monotonic()
    while sent < given.frames:
        seed, least = f"{given.seed} {number}", min(FRAMES_A_GROUP, given.frames - sent)
        try:
            counts = attack(seed, least)
        except Exception:
            harmed += 1
            counts = (least, 0)
            print(f"FOUND in group {number}:", traceback.format_exc(), flush=True)
        sent, refused, number = sent + counts[0], refused + counts[1], number + 1
        if number == 1:
            gc.collect()
            gc.freeze()
        if time.monotonic() - reported_s > _REPORT_S or given.only is not None:
            reported_s = time.monotonic()
            print(_report(sent, refused, number, harmed, reported_s - began_s), flush=True)
        if given.only is not None:
            break
    print("the end:", _report(sent, refused, number, harmed, time.monotonic() - began_s))
    return harmed


def _report(sent: int, refused: int, groups: int, harmed: int, elapsed_s: float) -> str:
    return (
        f"{sent:,} frames, {refused:,} refused, {groups:,} groups, {harmed} harmed, "
        f"{elapsed_s:,.0f} s, {sent / max(elapsed_s, 1e-9):,.0f} frames/s"
    )


if __name__ == "__main__":
    sys.exit(min(main(), 1))
