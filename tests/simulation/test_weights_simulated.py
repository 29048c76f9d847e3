"""Weights by version under delays, losses, slow samplers, deaths and damaged deltas."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.simulation.seeds import batches, name_of, try_seeds
from tests.simulation.timeline import Timeline
from torchweft.weights.versions import Following, Offer, Offers, Version

WORDS = 5
MOST_EVENTS = 20_000
Words = tuple[int, ...]


class Trainer:
    """One life of a publisher, with the bytes of its versions."""

    def __init__(self, life: int, after: int, bases: int) -> None:
        self.life = life
        self.bases = bases
        self.offers = Offers(life, after, bases)
        self.bytes: dict[int, Words] = {}
        self.is_alive = True


class Cargo(NamedTuple):
    offer: Offer
    words: dict[int, int]
    """All words of a version, or those that have changed."""


class Sampler:
    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.machine = Following()
        self.trainer: Trainer | None = None
        self.fetch = 0
        self.is_fetching = False
        self.has_error = False
        self.in_use: Words = ()
        self.ready: Words = ()
        self.deltas = 0


class World(Timeline):
    """Trainers, one at a time, and samplers that follow them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = chance = random.Random(seed)
        self.history: dict[Version, Words] = {}
        self.lives = 0
        self.delay_s = chance.choice((0.0, 0.1, 3.0))
        self.damage = chance.choice((0.0, 0.0, 0.3))
        self.failures = chance.choice((0.0, 0.0, 0.3))
        self.trainer = self.begin()
        self.samplers = [
            Sampler(is_shared=chance.random() < 0.3) for _ in range(chance.randint(1, 4))
        ]
        self.trace: list[object] = []

    def begin(self) -> Trainer:
        """Starts a trainer, from a snapshot: its numbers may have been used by the former."""
        self.lives += 1
        after = self.chance.randint(0, 3) if self.lives > 1 else 0
        return Trainer(self.lives, after, self.chance.choice((0, 1, 3)))

    def run(self) -> None:
        chance, at_s = self.chance, 0.0
        for sampler in self.samplers:
            self.later(0.0, self.follow, sampler)
        for _ in range(chance.randint(1, 40)):
            at_s += chance.expovariate(1.0)
            self.later(at_s, self.restart if chance.random() < 0.05 else self.publish)
        for sampler in self.samplers:
            pause_s = chance.choice((0.1, 1.0, 5.0))
            for number in range(1, int(at_s / pause_s) + 2):
                self.later(number * pause_s, self.update, sampler)
        self.finish()
        self.settle()

    def finish(self) -> None:
        """Runs until all is quiet."""
        for _ in range(MOST_EVENTS):
            if not self.step():
                return
            self.check()
        raise AssertionError("the workers never come to rest")

    def settle(self) -> None:
        """All is quiet, so every sampler can take the newest version, whatever came before."""
        self.damage = self.failures = 0.0
        if self.trainer.offers.newest is None:
            self.publish()
            self.finish()
        for sampler in self.samplers:
            for _ in range(4):  # An error or the version that waits, then the newest.
                self.update(sampler)
                self.finish()
            assert sampler.machine.current == self.trainer.offers.newest

    def check(self) -> None:
        for sampler in self.samplers:
            current = sampler.machine.current
            assert sampler.in_use == (() if current is None else self.history[current])
        assert len(self.trainer.bytes) <= 1 + self.trainer.bases

    # Events

    def publish(self) -> None:
        trainer = self.trainer
        words = tuple(self.chance.randint(0, 2) for _ in range(WORDS))
        version = trainer.offers.published()
        trainer.bytes[version.number] = self.history[version] = words
        trainer.bytes = {number: trainer.bytes[number] for number in trainer.offers.kept}
        self.trace.append((self.now_s, "published", version, words, trainer.offers.kept))
        for sampler in self.samplers:
            self.after(self.announce, sampler, version)

    def restart(self) -> None:
        self.trainer.is_alive = False
        self.trainer = self.begin()
        self.trace.append((self.now_s, "restarted", self.lives))
        for sampler in self.samplers:
            self.after(self.follow, sampler)

    def follow(self, sampler: Sampler) -> None:
        self.after(self.subscribed, sampler, self.trainer, self.trainer.offers.newest)

    def subscribed(self, sampler: Sampler, trainer: Trainer, newest: Version | None) -> None:
        if sampler.trainer is None or sampler.trainer.life < trainer.life:
            sampler.trainer = trainer
            sampler.fetch += 1
            sampler.is_fetching = False
            self.carry_out(sampler, sampler.machine.followed(trainer.life))
            if newest is not None:
                self.announce(sampler, newest)

    def announce(self, sampler: Sampler, version: Version) -> None:
        self.carry_out(sampler, sampler.machine.announced(version))

    def carry_out(self, sampler: Sampler, is_fetch_due: bool) -> None:
        if is_fetch_due:
            assert not sampler.is_fetching, "the bytes of the former fetch are wasted"
            sampler.is_fetching = True
            sampler.machine.fetching()
            sampler.fetch += 1
            args = (sampler, sampler.trainer, sampler.fetch, sampler.machine.have)
            self.after(self.serve, *args)

    def serve(self, sampler: Sampler, trainer: Trainer, fetch: int, have: Version | None) -> None:
        if not trainer.is_alive or self.chance.random() < self.failures:
            self.after(self.fail, sampler, fetch)
            return
        offer = trainer.offers.fetched(have, is_shared=sampler.is_shared)
        cargo = None
        if offer is not None:
            new = trainer.bytes[offer.version.number]
            old: Words = ()
            if offer.base is not None:
                old = trainer.bytes[offer.base.number]
            words = {n: word for n, word in enumerate(new) if not old or old[n] != word}
            cargo = Cargo(offer, words)
        self.after(self.arrive, sampler, trainer, fetch, cargo)

    def fail(self, sampler: Sampler, fetch: int) -> None:
        if fetch == sampler.fetch:
            sampler.is_fetching = False
            sampler.has_error = True
            sampler.machine.failed()

    def arrive(self, sampler: Sampler, trainer: Trainer, fetch: int, cargo: Cargo | None) -> None:
        if fetch != sampler.fetch:
            return
        if not trainer.is_alive and self.chance.random() < 0.5:
            self.fail(sampler, fetch)  # It was killed while it sent.
            return
        machine = sampler.machine
        offer = None if cargo is None else cargo.offer
        if not machine.arrived(offer, is_shared=sampler.is_shared):
            sampler.is_fetching = False
            self.carry_out(sampler, machine.is_fetch_due)
            return
        assert cargo is not None
        is_delta = cargo.offer.base is not None
        words = dict(enumerate(sampler.in_use)) if is_delta else {}
        found = tuple(each for _, each in sorted((words | cargo.words).items()))
        assert found == self.history[cargo.offer.version], "a delta was applied to another base"
        self.after(self.place, sampler, fetch, cargo.offer, found)

    def place(self, sampler: Sampler, fetch: int, offer: Offer, found: Words) -> None:
        """The bytes are in place, some time after they arrived."""
        if fetch != sampler.fetch:
            return
        sampler.is_fetching = False
        is_delta = offer.base is not None
        is_good = not is_delta or self.chance.random() >= self.damage
        if is_good:
            sampler.ready = found
            sampler.deltas += is_delta
        self.carry_out(sampler, sampler.machine.checked(offer.version, is_good=is_good))

    def update(self, sampler: Sampler) -> None:
        if sampler.has_error:
            sampler.has_error = False
            self.carry_out(sampler, sampler.machine.is_fetch_due)
        elif sampler.machine.ready is not None:
            sampler.in_use = sampler.ready
            self.carry_out(sampler, sampler.machine.took())
            self.trace.append((self.now_s, "took", id(sampler), sampler.machine.current))

    def after(self, event: Callable[..., None], *args: object) -> None:
        self.later(self.chance.random() * self.delay_s, event, *args)


@pytest.mark.parametrize("batch", batches(20_000), ids=name_of)
def test_every_sampler_has_a_whole_version_and_names_it(batch: range) -> None:
    deltas = 0

    def run(world: World) -> None:
        nonlocal deltas
        world.run()
        deltas += sum(each.deltas for each in world.samplers)

    try_seeds(batch, World, run, lambda world: world.trace)
    assert len(batch) < 20 or deltas, "no world has sent a delta"
