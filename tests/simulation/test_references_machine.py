"""Reference counting against an adversary that picks every step and every packet.

The seeded simulation tries many long programs; this one shrinks a failure to the few steps that
matter.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.simulation.network import SteeredNetwork
from tests.simulation.reference_world import ARRIVAL_S, World
from tests.thorough import examples
from torchweft.ids import ReferenceId

WORKERS = 3
MOST_ROUNDS = 20

worker_ids = st.integers(0, WORKERS - 1)
choices = st.integers(0, 15)


class ReferenceAdversary(RuleBasedStateMachine):
    """Steers three workers and the network between them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = SteeredNetwork()
        self.world = World(WORKERS, self.network)
        self.now_s = dict.fromkeys(range(WORKERS), 0.0)

    @rule(worker=worker_ids, owner=worker_ids, is_sent=st.booleans(), is_sure=st.booleans())
    def call(self, worker: int, owner: int, is_sent: bool, is_sure: bool) -> None:
        self.world.call(worker, owner, is_sent, is_sure)

    @rule(worker=worker_ids)
    def own(self, worker: int) -> None:
        self.world.own(worker)

    @precondition(lambda self: self.world.holdings())
    @rule(choice=choices, to=worker_ids, is_sure=st.booleans(), is_refused=st.booleans())
    def hand_on(self, choice: int, to: int, is_sure: bool, is_refused: bool) -> None:
        worker, reference = self._choose(choice)
        self.world.hand_on(worker, reference, to, is_sure=is_sure, is_refused=is_refused)

    @precondition(lambda self: self.world.holdings())
    @rule(choice=choices)
    def drop(self, choice: int) -> None:
        self.world.drop(*self._choose(choice))

    @precondition(lambda self: self.world.holdings())
    @rule(choice=choices)
    def bring_home(self, choice: int) -> None:
        worker, reference = self._choose(choice)
        if worker != reference.owner:
            self.world.bring_home(worker, reference)

    @precondition(lambda self: self.world.calls_home())
    @rule(choice=choices)
    def give_up_call_home(self, choice: int) -> None:
        calls = self.world.calls_home()
        self.world.end_call_home(calls[choice % len(calls)])

    @precondition(lambda self: self.network.packets)
    @rule(choice=choices)
    def arrive(self, choice: int) -> None:
        self.world.arrive(self.network.take(choice))

    @precondition(lambda self: self.network.packets)
    @rule(choice=choices)
    def duplicate(self, choice: int) -> None:
        self.network.duplicate(choice)

    @rule(worker=worker_ids)
    def tick(self, worker: int) -> None:
        self.now_s[worker] += ARRIVAL_S
        self.world.tick(worker, self.now_s[worker])

    def teardown(self) -> None:
        self._calm()
        self.world.check_calm()
        for worker, reference in list(self.world.holdings()):
            while self.world.handles[worker][reference]:
                self.world.drop(worker, reference)
        self._calm()
        self.world.check_empty()

    def _choose(self, choice: int) -> tuple[int, ReferenceId]:
        holdings = self.world.holdings()
        return holdings[choice % len(holdings)]

    def _calm(self) -> None:
        for _ in range(MOST_ROUNDS):
            while self.network.packets:
                self.world.arrive(self.network.take(0))
            for worker in range(WORKERS):
                self.tick(worker)
        assert not self.network.packets, "the workers never come to rest"


TestReferenceAdversary = ReferenceAdversary.TestCase
TestReferenceAdversary.settings = settings(
    max_examples=examples(60),
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
)
