"""The plan of one run, drawn from its number: the network, the roles, the faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.map_plan import Program

TRAINER, LEFT, RIGHT, HEAD = NAMES = ("trainer", "left", "right", "head")
"""The trainer; the two shards of the table; the model's other part."""

SPARE = "spare"
"""One more worker, in training by maps."""

STEPS = 10
MOST_CUTS = 30

LAST_STEP = STEPS - 2
"""The last step at which a fault may begin, so that it strikes while there is work to do."""

UNIX, TCP, CUT, HOSTS = "unix", "tcp", "cut", "hosts"
"""Unix sockets; TCP; TCP through a process that breaks it; TCP between removable addresses."""

SURVIVED, LOST, RAISED, TORN, WENT_ON = "survived", "lost", "raised", "torn", "went on"
"""How a run must end: as without faults; with the loss of a worker; with an error in one call; with
two workers that lose each other; with the loss of a worker, and the result nevertheless."""

KILL, EXIT, PARTITION = FATAL = ("kill", "exit", "partition")
MEMORY, STARVE = "memory", "starve"
"""A lack of memory in an operation of the program, or of Weft when it receives."""

CUTS, STALL, CABLE, STOP, HOLD, DATA = BESIDE = ("cuts", "stall", "cable", "stop", "hold", "data")
"""Faults by which no worker is lost."""

AT_ANY_TIME = ""
POINTS: dict[str, tuple[str, ...]] = {
    # The roles that get there.
    AT_ANY_TIME: NAMES,
    "sending": NAMES,
    "hello": (HEAD, RIGHT),
    "welcome": (LEFT, RIGHT),
    "serving": NAMES,
    "gradients": NAMES,
    "discovered": (HEAD, RIGHT),
    "optimizer": NAMES,
    "handing on": (TRAINER,),
    "taking over": (RIGHT, HEAD),
    "registering": NAMES,
    "registered": NAMES,
    "joined": NAMES,
    "probed": NAMES,
    "settling": NAMES,
    "closing": NAMES,
    "leasing": (TRAINER, HEAD),
    "pulling": (TRAINER, HEAD),
    "streaming": (TRAINER, HEAD),
    "arriving": (TRAINER, HEAD),
}
"""Points where a fault can strike, and the workers that get there; see ``tests.faults.points``."""

OF_JOINING = ("registering", "registered")
"""Faults at these points are not noticed by other workers until their time to join is up."""

OF_CONNECTING = ("hello", "welcome", "joined")
_REPEATED = {
    "sending": 40,
    "serving": 10,
    "gradients": 12,
    "discovered": 8,
    "handing on": 8,
    "taking over": 8,
    "closing": 3,
    "leasing": 8,
    "pulling": 8,
    "streaming": 6,
    "arriving": 6,
}
"""For points that a worker passes often: the last pass at which a fault may strike."""

CYCLE: tuple[tuple[str, str], ...] = (
    (CUTS, AT_ANY_TIME),
    (KILL, AT_ANY_TIME),
    (STALL, AT_ANY_TIME),
    (KILL, "sending"),
    (CABLE, AT_ANY_TIME),
    (KILL, "gradients"),
    (STOP, AT_ANY_TIME),
    (PARTITION, AT_ANY_TIME),
    (HOLD, AT_ANY_TIME),
    (KILL, "optimizer"),
    (DATA, AT_ANY_TIME),
    (KILL, "serving"),
    (MEMORY, "serving"),
    (KILL, "hello"),
    (CUTS, AT_ANY_TIME),
    (KILL, "welcome"),
    (EXIT, AT_ANY_TIME),
    (KILL, "discovered"),
    (MEMORY, "optimizer"),
    (KILL, "taking over"),
    (KILL, "handing on"),
    (EXIT, "sending"),
    (MEMORY, "taking over"),
    (KILL, "registering"),
    (CABLE, AT_ANY_TIME),
    (KILL, "joined"),
    (KILL, "probed"),
    (EXIT, "gradients"),
    (KILL, "settling"),
    (KILL, AT_ANY_TIME),
    (KILL, "closing"),
    (KILL, "registered"),
    (DATA, AT_ANY_TIME),
    (STARVE, "leasing"),
    (KILL, "pulling"),
    (CUTS, AT_ANY_TIME),
    (KILL, "streaming"),
    (KILL, "arriving"),
    (EXIT, "discovered"),
    (STOP, AT_ANY_TIME),
)
"""The main fault of each run, by its number, so that any stretch of numbers has all kinds."""

_NEEDS = {
    CUTS: CUT,
    STALL: CUT,
    CABLE: HOSTS,
    PARTITION: HOSTS,
    DATA: TCP,
    "pulling": UNIX,
    "streaming": HOSTS,
    "arriving": TCP,
}
"""The network that a fault, or its point, requires."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: What goes wrong.
        victim: The worker that it hits; meaningless if it hits the network.
        point: Where in the victim's code; empty for a time that the injector chooses.
        count: The pass of the victim through that point at which it strikes.
        step: The step of the training from which on the injector may do it.
        delay_s: How long after that.
        seconds: How long it lasts.
    """

    kind: str
    victim: str
    point: str = AT_ANY_TIME
    count: int = 1
    step: int = 0
    delay_s: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.kind == CUTS:
            return self.kind
        victim = "" if self.kind == STALL else f" {self.victim}"
        where = f" at '{self.point}' #{self.count}" if self.point else f" in step {self.step}"
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}{victim}{where}{lasting}"


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        number: The number from which the rest was drawn.
        network: The network between the workers.
        is_secure: Whether it uses TLS.
        ranks: The rank of each worker.
        faults: What goes wrong.
        cut_bytes: After how many bytes a connection breaks, on average.
        has_store_server: Whether rank 0 serves the store by which they find each other.
        shares_memory: Whether tensors over Unix sockets go through shared memory, or are pulled.
        detection_s: As in the workers' options.
        reconnect_s: As in the workers' options.
        program: The computation by maps; None for the training without maps.
    """

    number: int
    network: str
    is_secure: bool
    ranks: dict[str, int]
    faults: tuple[Fault, ...] = ()
    cut_bytes: int = 0
    has_store_server: bool = False
    shares_memory: bool = True
    detection_s: float = 3.0
    reconnect_s: float = 3.0
    program: Program | None = None

    @property
    def leader(self) -> str:
        """The worker of rank 0."""
        return min(self.ranks, key=self.ranks.__getitem__)

    def __str__(self) -> str:
        network = f"{self.network}+tls" if self.is_secure else self.network
        if self.has_store_server:
            network += ", store"
        if self.network == UNIX and not self.shares_memory:
            network += ", pull"
        faults = "; ".join(map(str, self.faults)) or "no fault"
        if self.program is not None:
            return f"{network:9} {len(self.ranks)} workers, {self.program}; {faults}"
        return f"{network:18} rank 0: {self.leader:8} {faults}"


def draw(number: int) -> Plan:
    """Returns the plan of the run with a number."""
    chance = random.Random(number)
    kind, point = CYCLE[number % len(CYCLE)]
    network = _NEEDS.get(kind) or _NEEDS.get(point) or chance.choice((UNIX, UNIX, TCP, CUT, HOSTS))
    is_secure = network != UNIX and chance.random() < 0.25
    order = chance.sample(range(len(NAMES)), len(NAMES))
    ranks = dict(zip(NAMES, order, strict=True))
    faults = [_fault(chance, kind, point, ranks)]
    for _ in range(chance.choice((0, 0, 0, 1, 1, 2))):
        others = [other for other in BESIDE if _NEEDS.get(other, network) == network]
        faults.insert(0, _fault(chance, chance.choice(others), AT_ANY_TIME, ranks))
    if kind == KILL and point not in OF_JOINING and chance.random() < 0.2:
        second = _fault(chance, KILL, AT_ANY_TIME, ranks)
        if second.victim != faults[-1].victim:
            faults.insert(0, second)
    is_parted = kind == PARTITION
    patience_s = chance.choice((1.5, 2.5)) if is_parted else 3.0
    return Plan(
        number,
        network,
        is_secure,
        ranks,
        tuple(faults),
        cut_bytes=chance.choice((5_000, 20_000, 200_000, 2_000_000)),
        has_store_server=chance.random() < 0.3,
        shares_memory=point not in ("pulling", "leasing") and chance.random() < 0.5,
        detection_s=patience_s,
        reconnect_s=patience_s,
    )


def _fault(chance: random.Random, kind: str, point: str, ranks: dict[str, int]) -> Fault:
    candidates = POINTS[point]
    leader = min(ranks, key=ranks.__getitem__)
    if point == "closing":
        candidates = (leader,)
    elif kind == MEMORY and point != "optimizer":
        candidates = tuple(name for name in candidates if name != TRAINER)
    seconds = {
        STOP: chance.uniform(0.2, 4.0),
        HOLD: chance.uniform(0.2, 4.0),
        STALL: chance.uniform(0.2, 2.0),
        CABLE: chance.uniform(0.1, 1.0),
    }
    # During joining, only the workers' own actions are at the same point in every run.
    step = chance.randint(1, LAST_STEP)
    return Fault(
        kind,
        chance.choice(candidates),
        point,
        chance.randint(1, _REPEATED.get(point, 1)),
        step,
        chance.uniform(0.0, 0.05),
        seconds.get(kind, 0.0),
    )
