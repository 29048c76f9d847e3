"""Trains a click-through model on generated data: ``python train.py``, ``make demo-embedding``.

Servers hold the tables. Trainers pull the rows of their impressions, and average the dense part by
``DistributedDataParallel``. This program, the driver, tells the trainers how many steps to make.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from choices import RULES, Options, parse_options
from clicks import HELD_OUT, TABLES, World, flat_ids
from drawing import draw_picture
from quality import ClickRates, Quality, quality_of
from ranking import Place, Trainer, mean_losses

import torchweft as weft
from torchweft import rpc
from torchweft.embedding import Plan, plan_tables, touched_shares
from torchweft.errors import WeftError
from torchweft.probe import usable_cores
from torchweft.progress import Display

ADVICE = "in the clone, pip install '.[embedding]'"
REPORTED_STEPS = 10
COUNTED_BATCHES = 4
TESTED = 20_000


class Unusable(ValueError):
    """The program cannot run as requested; the message is for the user."""


@dataclass
class History:
    """The record of a training run.

    Attributes:
        losses: The mean loss of the trainers in each step.
        seconds: Duration of the steps, without those to draw impressions.
        trainers: By trainer and table, its counts, bytes and staleness.
        staleness: How often each staleness was observed on the servers.
        network_bytes: Size of the dense part.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    trainers: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)
    network_bytes: int = 0

    def total(self, table: str, key: str) -> int:
        """Returns a count of a table, of all trainers."""
        return sum(moved[table][key] for moved in self.trainers)


def make_folder(path: Path | None) -> Path:
    """Creates the folder for the results if it is missing, and checks that it is writable."""
    path = path or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unusable(f"{path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise Unusable(f"{path} cannot be written to")
    return path


def run(options: Options, history: History) -> None:
    """Trains, tests, and writes figures and a picture."""
    folder = make_folder(options.out)
    world = World(options.seed)
    plan = make_plan(options, world)
    print(plan)
    tested = world.draw(TESTED, HELD_OUT, 0)
    with started_trainers(options, plan) as trainers:
        train(trainers, options, history)
        logits = trainers[0].rpc_sync().logits(tested.ids)
    rates = ClickRates()
    for rank in range(options.trainers):
        rates.count(world.draw(options.batch, rank, step) for step in range(options.steps))
    found = {
        "model": quality_of(logits, tested.clicked),
        "click rates": quality_of(rates.logits(tested), tested.clicked),
        "best possible": quality_of(torch.logit(tested.chances), tested.clicked),
    }
    figures = make_figures(options, plan, history, found)
    print(summary(figures))
    write_results(figures, folder)


def make_plan(options: Options, world: World) -> Plan:
    """Places the tables by the rows that some batches of a trainer touch."""
    batches = [flat_ids(world.draw(options.batch, 0, step)) for step in range(COUNTED_BATCHES)]
    shares = touched_shares(TABLES, batches)
    servers = [f"worker{options.trainers + number}" for number in range(options.servers)]
    return plan_tables(TABLES, servers, trainers=options.trainers, touched=shares)


@contextlib.contextmanager
def started_trainers(options: Options, plan: Plan) -> Iterator[list[rpc.RRef[Trainer]]]:
    """Starts servers and trainers, and yields the trainers."""
    names = tuple(f"worker{rank}" for rank in range(options.trainers))
    with (
        weft.cluster(workers=options.trainers + options.servers) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        for name in cluster.names:
            rpc.rpc_sync(name, torch.set_num_threads, args=(1,))
        store, rule = str(Path(folder) / "store"), RULES[options.optimizer]
        trainers = []
        for rank, name in enumerate(names):
            place = Place(rank, names, store, options.seed, options.batch)
            given = (place, plan, rule, options.staleness, options.cache)
            trainers.append(rpc.remote(name, Trainer, args=given))
        yield trainers
        for closing in [trainer.rpc_async().close() for trainer in trainers]:
            closing.wait()


def train(trainers: Sequence[rpc.RRef[Trainer]], options: Options, history: History) -> None:
    """Makes all steps, and reads the figures of the trainers."""
    with Display(options.steps, "step") as shown:
        while (left := options.steps - len(history.losses)) > 0:
            count = min(left, REPORTED_STEPS)
            calls = [trainer.rpc_async().steps(count) for trainer in trainers]
            answers = [call.wait() for call in calls]
            history.losses += mean_losses([losses for losses, _, _ in answers])
            history.seconds += max(seconds for _, seconds, _ in answers)
            sent = sum(moved for _, _, moved in answers)
            step_mb = sent / len(history.losses) / 1e6
            shown.step(count, loss=history.losses[-1], mb_per_step=step_mb)
    history.trainers = [trainer.rpc_sync().moved() for trainer in trainers]
    history.staleness = trainers[0].rpc_sync().staleness()
    history.network_bytes = trainers[0].rpc_sync().network_bytes()


def bytes_of_a_step(options: Options, plan: Plan, history: History) -> dict[str, dict[str, float]]:
    """Returns the bytes of a step by part of the model and kind, of all trainers.

    Those of rows were counted, and those of a ring all-reduce are computed.
    """
    found: dict[str, dict[str, float]] = {}
    for name, placed in plan.placed.items():
        found[name] = {"all-reduce": placed.copies_bytes}
        if not placed.is_copied:
            found[name] = {
                kind: history.total(name, f"{kind}_bytes") / options.steps
                for kind in ("pulled", "pushed")
            }
    found["network"] = {"all-reduce": 2 * (options.trainers - 1) * history.network_bytes}
    return found


def make_figures(
    options: Options, plan: Plan, history: History, found: dict[str, Quality]
) -> dict[str, Any]:
    """Returns all figures, as JSON has them."""
    on_servers = [name for name, placed in plan.placed.items() if not placed.is_copied]
    rows = sum(history.total(name, "rows") for name in on_servers)
    ids = sum(history.total(name, "ids") for name in on_servers)
    return {
        "options": {**asdict(options), "out": None if options.out is None else str(options.out)},
        "cores": len(usable_cores()),
        "data": "generated: ids by Zipf's law, clicks by planted vectors",
        "quality": {name: each._asdict() for name, each in found.items()},
        "seconds": history.seconds,
        "rows_per_s": rows / history.seconds,
        "ids_per_s": ids / history.seconds,
        "impressions_per_s": options.trainers * options.batch * options.steps / history.seconds,
        "bytes_per_step": bytes_of_a_step(options, plan, history),
        "bytes_per_step_of_copies": {
            name: placed.copies_bytes for name, placed in plan.placed.items()
        },
        "unique_share": {
            name: history.total(name, "rows") / history.total(name, "ids") for name in on_servers
        },
        "cache_hits": {
            name: history.total(name, "hits") / history.total(name, "rows") for name in on_servers
        },
        "places": {name: type(placed.place).__name__ for name, placed in plan.placed.items()},
        "staleness": history.staleness,
        "trainers": [
            {name: shares_of(moved[name], options.steps) for name in on_servers}
            for moved in history.trainers
        ],
        "losses": history.losses,
    }


def shares_of(moved: dict[str, Any], steps: int) -> dict[str, Any]:
    """Returns the figures of one trainer and table."""
    return {
        "ids": moved["ids"],
        "rows": moved["rows"],
        "unique_share": moved["rows"] / moved["ids"],
        "cache_hits": moved["hits"] / moved["rows"],
        "pulled_bytes_per_step": moved["pulled_bytes"] / steps,
        "pushed_bytes_per_step": moved["pushed_bytes"] / steps,
        "staleness": moved["staleness"],
    }


def summary(figures: dict[str, Any]) -> str:
    """Returns the results as text."""
    options = figures["options"]
    lines = [
        f"{options['steps']:,} steps of {options['trainers']} x {options['batch']:,} impressions "
        f"in {figures['seconds']:.0f} s, without drawing them: {figures['rows_per_s']:,.0f} rows/s",
        f"{'':13}  {'AUC':>6}  log loss",
    ]
    for name, quality in figures["quality"].items():
        lines.append(f"{name:13}  {quality['auc']:6.4f}  {quality['log_loss']:.4f}")
    sent = sum(sum(kinds.values()) for kinds in figures["bytes_per_step"].values())
    whole = sum(figures["bytes_per_step_of_copies"].values())
    lines.append(f"{sent / 1e6:.2f} MB a step; copies of all tables: {whole / 1e6:.1f} MB")
    shares = ", ".join(f"{name} {share:.0%}" for name, share in figures["unique_share"].items())
    lines.append(f"unique ids in a batch: {shares}")
    if options["cache"]:
        hits = ", ".join(f"{name} {share:.0%}" for name, share in figures["cache_hits"].items())
        lines.append(f"rows that the cache had: {hits}")
    lines.append(f"staleness: {figures['staleness']}")
    return "\n".join(lines)


def write_results(figures: dict[str, Any], folder: Path) -> None:
    """Writes the figures and the picture, and prints which files were written."""
    text = json.dumps(figures, indent=1)
    (folder / "figures.json").write_text(text + "\n", encoding="utf-8")
    written = "figures.json"
    names = ("click rates", "best possible")
    levels = {f"{name}, on the test": figures["quality"][name]["log_loss"] for name in names}
    parts = figures["bytes_per_step"], figures["bytes_per_step_of_copies"]
    staleness = [
        {name: each["staleness"] for name, each in trainer.items()}
        for trainer in figures["trainers"]
    ]
    try:
        draw_picture(figures["losses"], levels, *parts, staleness, folder / "training.png")
        written = "training.png and " + written
    except ImportError:
        print(f"no picture was drawn: matplotlib is missing ({ADVICE})")
    print(f"{written} in {folder}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    options = parse_options(arguments)
    history = History()
    try:
        run(options, history)
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped after {len(history.losses):,} steps; nothing was kept")
        return 130
    except WeftError as error:
        print(f"error after {len(history.losses):,} steps: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
