"""The plan of one run of training by maps, drawn from its number."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.faults.plan import (
    AT_ANY_TIME,
    CABLE,
    CUT,
    CUTS,
    DATA,
    EXIT,
    HEAD,
    HOLD,
    HOSTS,
    KILL,
    LEFT,
    PARTITION,
    RIGHT,
    SPARE,
    STALL,
    STOP,
    TCP,
    TRAINER,
    UNIX,
    Fault,
    Plan,
)

STEPS = 5
_LAST_STEP = STEPS - 1
_DELAY_S = 0.4
"""The longest delay of a timed fault after the start of a step."""

BACKWARD, GRAD, TWICE, RECORDED = WAYS = ("backward", "grad", "twice", "recorded")
"""How gradients are computed: once into ``.grad``, or returned; twice through one graph; or with a
graph of their own, through which gradients of their squares are computed, too."""

PLAIN, DEPENDENT, BESIDE, NESTED, INNER = SHAPES = (
    *("plain", "dependent", "beside", "nested"),
    "inner",
)
"""One map; a map whose arguments are results of another; two maps at a time; a map in each part; a
map in each step of an inner loop, with gradients computed there."""

EACH, WHOLE_EACH, CHUNKS, CHOSEN = CUTS_OF_TASKS = ("each", "whole each", "chunks", "chosen")
"""One task per part, without or with its dimension; one part per worker; a function decides."""

POINTS = {
    "part": 12,
    "part done": 12,
    "gradient comes": 8,
    "gradient made": 8,
    "inner part": 20,
    "object": 5,
    "content": 3,
    "filled": 5,
    "answered": 60,
    "gradients": 40,
    "discovered": 12,
    "sending": 80,
    "context ends": 4,
}
"""The points where a worker may end, and the last pass at which it may."""

_OF_NESTED = "inner part"
_OF_TREES = "content"


@dataclass(frozen=True)
class Program:
    """The computation of a run.

    Attributes:
        shape: Which maps there are.
        way: How gradients are computed.
        cut: How tasks are divided among parts and workers.
        takes_part: Whether the trainer runs parts, too.
        balance: As for a map.
        concurrency: As for a map.
        may_rerun: As ``rerun`` for a map.
        fan_out: ``knobs.FAN_OUT``.
        tasks: How many there are in each step.
        threads: How many each worker has.
        is_second_order: Whether gradients lead through the inner loop.
        has_reference: Whether parts get a reference to a tensor of the trainer, too.
    """

    shape: str = PLAIN
    way: str = BACKWARD
    cut: str = EACH
    takes_part: bool = False
    balance: bool = False
    concurrency: int = 1
    may_rerun: bool = True
    fan_out: int = 4
    tasks: int = 8
    threads: int = 3
    is_second_order: bool = True
    has_reference: bool = False

    def __str__(self) -> str:
        flags = ("takes_part", "balance", "is_second_order", "has_reference")
        told = [name.replace("_", " ") for name in flags if getattr(self, name)]
        if not self.may_rerun:
            told.append("once")
        return (
            f"{self.shape} {self.way} {self.cut} of {self.tasks}, fan-out {self.fan_out}, "
            f"{self.concurrency} at a time, {self.threads} threads; {', '.join(told)}"
        )


def draw_maps(number: int) -> Plan:
    """Returns the plan of the run with a number."""
    chance = random.Random(f"maps {number}")
    others = [LEFT, RIGHT, HEAD, SPARE][: chance.choice((2, 3, 3, 4))]
    program = _program(chance)
    network = chance.choice((UNIX, UNIX, UNIX, TCP, TCP, CUT, HOSTS))
    # A worker must be left to run parts, and the parts of nested maps.
    has_caller = program.takes_part and program.shape not in (NESTED, INNER)
    most = len(others) if has_caller else len(others) - 1
    kinds = [KILL] * (number % 8 != 0) + [KILL] * (chance.random() < 0.4)
    victims = chance.sample(others, min(len(kinds), most))
    if number % 25 == 24:
        victims = [TRAINER]
    faults = [_fatal(chance, victim, program, network, len(others)) for victim in victims]
    for _ in range(chance.choice((0, 0, 0, 1, 2)) if faults else 2):
        faults.insert(0, _beside(chance, network, [TRAINER, *others]))
    return Plan(
        number,
        network,
        network != UNIX and chance.random() < 0.2,
        {name: rank for rank, name in enumerate((TRAINER, *others))},
        tuple(faults),
        cut_bytes=chance.choice((20_000, 200_000, 2_000_000)),
        shares_memory=chance.random() < 0.6,
        detection_s=2.0,
        reconnect_s=2.0,
        program=program,
    )


def _program(chance: random.Random) -> Program:
    return Program(
        shape=chance.choice(SHAPES),
        way=chance.choice((BACKWARD, GRAD, GRAD, TWICE, RECORDED)),
        cut=chance.choice(CUTS_OF_TASKS),
        takes_part=chance.random() < 0.4,
        balance=chance.random() < 0.5,
        concurrency=chance.choice((1, 1, 2)),
        may_rerun=chance.random() < 0.9,
        fan_out=chance.randint(1, 4),
        tasks=chance.randint(8, 12),
        threads=chance.randint(2, 4),
        is_second_order=chance.random() < 0.6,
        has_reference=chance.random() < 0.3,
    )


def _fatal(
    chance: random.Random, victim: str, program: Program, network: str, workers: int
) -> Fault:
    step = chance.randint(1, _LAST_STEP)
    delay_s = chance.uniform(0.0, _DELAY_S)
    if network == HOSTS and victim != TRAINER and chance.random() < 0.4:
        return Fault(PARTITION, victim, AT_ANY_TIME, 1, step, delay_s)
    kind = EXIT if chance.random() < 0.1 else KILL
    if victim == TRAINER or chance.random() < 0.3:
        return Fault(KILL, victim, AT_ANY_TIME, 1, step, delay_s)
    points = [
        point
        for point in POINTS
        if (point != _OF_NESTED or program.shape in (NESTED, INNER))
        and (point != _OF_TREES or program.fan_out < workers)
    ]
    point = chance.choice(points)
    return Fault(kind, victim, point, chance.randint(1, POINTS[point]), step)


def _beside(chance: random.Random, network: str, names: list[str]) -> Fault:
    kinds = [STOP, HOLD, *{CUT: (CUTS, STALL), HOSTS: (CABLE,), TCP: (DATA,)}.get(network, ())]
    seconds = {CUTS: 0.0, DATA: 0.0}
    kind = chance.choice(kinds)
    lasting_s = seconds.get(kind, chance.uniform(0.1, 1.0))
    step, delay_s = chance.randint(1, _LAST_STEP), chance.uniform(0.0, _DELAY_S)
    return Fault(kind, chance.choice(names), AT_ANY_TIME, 1, step, delay_s, lasting_s)
