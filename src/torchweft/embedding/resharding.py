"""Moves a collection to the places of another plan, while it is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from torchweft import rpc
from torchweft.embedding import host, saving
from torchweft.embedding.client import Client
from torchweft.embedding.errors import PlanError
from torchweft.embedding.options import check_rule
from torchweft.embedding.plan import Plan
from torchweft.errors import ConfigurationError, WeftError
from torchweft.rpc import get_worker_info


class Resharding(NamedTuple):
    """One trainer's part of a re-sharding; all trainers make each part. See ``Tables.reshard``.

    Attributes:
        client: The client of the collection as it is.
        collection: The collection as it is.
        options: All that its trainers and servers agree on.
    """

    client: Client
    collection: saving.Collection
    options: host.Options

    def begin(self, plan: Plan, *, has_gradients: bool) -> None:
        """Checks the plan, and that no trainer is in a step. Blocks.

        Args:
            plan: The places that the tables move to.
            has_gradients: Whether this trainer has gradients that were not pushed.

        Raises:
            ConfigurationError: A trainer cannot do its part.
            PlanError: The tables cannot be moved there.
        """
        before = self.collection.plan
        if self.client.trainer < 0:
            raise ConfigurationError(
                f"this worker is not among the trainers {self.options.trainers}"
            )
        if has_gradients:
            raise ConfigurationError(
                f"tables {self.collection.name!r} have gradients that were not pushed; make the "
                "step first, or drop them by zero_grad()"
            )
        if plan.configs != before.configs or plan.copied != before.copied:
            raise PlanError("the plan has other tables or other copies than these tables")
        if self.collection.optimizer is not None:
            check_rule(self.collection.optimizer.rule, plan)
        self._agreed(None)

    def make(self, plan: Plan, options: host.Options, number: int, limit_s: float) -> Client:
        """Makes the collection at its new places, with the rows and their state. Blocks.

        Args:
            plan: The places.
            options: All that trainers and servers agree on then.
            number: How many re-shardings were begun, this one included.
            limit_s: Limit of each call.

        Returns:
            Its client. If it fails, the collection is as it was.
        """
        base, _, _ = self.collection.name.partition("@")
        opened: list[Client] = []

        def make() -> None:
            opened.append(Client(f"{base}@{number}", options, limit_s))
            if self.collection.optimizer is not None:
                opened[0].call_all(host.set_rule, self.collection.optimizer.rule)

        def move() -> None:
            (new,) = opened
            moved = self.collection._replace(name=new.name, plan=plan, servers=new.servers)
            saving.move(self.collection, moved)

        try:
            self._agreed(make)
            self._agreed(move if self.client.trainer == 0 else None)
        except BaseException:
            for client in opened:
                with contextlib.suppress(WeftError):
                    client.close()
            raise
        return opened[0]

    def _agreed(self, action: Callable[[], None] | None) -> None:
        """Does this trainer's part of something; raises if any trainer could not. Blocks."""
        failure: Exception | None = None
        try:
            if action is not None:
                action()
        except Exception as error:
            failure = error
        told = "" if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes, trainers = {get_worker_info().name: told}, self.options.trainers
        if len(trainers) > 1:
            outcomes = rpc.all_gather(told, trainers, timeout=self.client.timeout_s)
        if failure is not None:
            raise failure
        for trainer, problem in outcomes.items():
            if problem:
                raise ConfigurationError(
                    f"trainer {trainer!r} could not re-shard {self.collection.name!r}: {problem}"
                )
