"""The model, and a trainer of it: rows from servers, and a dense part under DDP."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from clicks import DIM, Impressions, World
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from torchweft.embedding import Cache, Plan, Rule, Tables

HIDDEN = 64


class Ranker(nn.Module):
    """Predicts the log-odds of clicks: products of rows, and a network over them."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.network = nn.Sequential(nn.Linear(6 * DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, ids: Mapping[str, Any]) -> Tensor:
        """Returns the log-odds of each impression, ``(n,)``."""
        out = self.tables(ids)
        user, item, word, hour = (out[name] for name in ("user", "item", "word", "hour"))
        products = [user * item, word * item]
        found: Tensor = self.network(torch.cat([*products, user, item, word, hour], dim=1))
        return (found + sum(each.sum(1, keepdim=True) for each in products)).squeeze(1)


class Place(NamedTuple):
    """A trainer's part in the training.

    Attributes:
        rank: Its number.
        trainers: The names of all trainers.
        store: A file through which they find each other.
        seed: Where random numbers start.
        batch: Impressions of a step, of each trainer.
    """

    rank: int
    trainers: tuple[str, ...]
    store: str
    seed: int
    batch: int


class Trainer:
    """Trains on its own impressions, together with the other trainers.

    Args:
        place: Its part.
        plan: The places of the tables.
        rule: The optimizer of the rows.
        staleness: The bound of the tables.
        cache: The share of the rows to keep; 0 for none.
    """

    def __init__(
        self, place: Place, plan: Plan, rule: Rule, staleness: int | None, cache: float
    ) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # All processes are on this host.
        size = len(place.trainers)
        store = f"file://{place.store}"
        distributed.init_process_group("gloo", init_method=store, rank=place.rank, world_size=size)
        torch.manual_seed(place.seed)
        self._place = place
        self._world = World(place.seed)
        self._tables = Tables(
            plan,
            trainers=place.trainers,
            staleness=staleness,
            seed=place.seed,
            cache=Cache(cache) if cache else None,
        )
        self._model = DistributedDataParallel(Ranker(self._tables))
        self._rows = self._tables.optimizer(rule)
        # The copies of small tables are parameters of the model, too.
        self._dense = torch.optim.Adam(self._model.parameters(), lr=2e-3)
        self._step = 0

    def steps(self, count: int) -> tuple[list[float], float, int]:
        """Makes steps.

        Returns:
            Their losses; the seconds without those to draw batches; and the bytes of rows that this
            trainer has pulled and pushed, of all steps until now.
        """
        losses, seconds = [], 0.0
        for step in range(self._step, self._step + count):
            batch = self._world.draw(self._place.batch, self._place.rank, step)
            began = time.perf_counter()
            losses.append(self._learn(batch))
            seconds += time.perf_counter() - began
        self._step += count
        moved = self._tables.traffic().values()
        return losses, seconds, sum(each.pulled_bytes + each.pushed_bytes for each in moved)

    def _learn(self, batch: Impressions) -> float:
        self._rows.zero_grad()
        self._dense.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(self._model(batch.ids), batch.clicked)
        loss.backward()
        self._rows.step()
        self._dense.step()
        return loss.item()

    def moved(self) -> dict[str, dict[str, Any]]:
        """Returns the figures of ``Tables.traffic`` of this trainer, by table."""
        return {name: asdict(each) for name, each in self._tables.traffic().items()}

    def staleness(self) -> dict[int, int]:
        """Returns the observed staleness of all trainers."""
        return self._tables.staleness()

    def network_bytes(self) -> int:
        """Returns the size of the dense part, without copies of tables."""
        parameters = self._model.module.network.parameters()
        return sum(each.numel() * each.element_size() for each in parameters)

    @torch.no_grad()
    def logits(self, ids: Mapping[str, Any]) -> Tensor:
        """Returns the log-odds of impressions that were not trained on, ``(n,)``."""
        # Beside DDP, which would wait for the other trainers.
        return self._model.module(ids)

    def close(self) -> None:
        """Releases the tables and leaves the other trainers."""
        self._tables.close()
        distributed.destroy_process_group()


def mean_losses(by_trainer: list[list[float]]) -> list[float]:
    """Returns the losses of all trainers as one; their batches are of one size."""
    return [math.fsum(each) / len(each) for each in zip(*by_trainer, strict=True)]
