"""Counts the bytes of messages in training on a text: dense and sparse pushes, and an all-gather.

``... --text FOLDER`` takes the words of all ``*.txt`` there, such as the validation and test parts
of WikiText-2; without it, the text is generated, with words as frequent as Zipf's law says.
All figures are differences of ``torchweft.rpc.traffic``: bytes of real messages, with their heads.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import torchweft as weft
from benchmarks.embedding.text_cache import DIM, LENGTH, ROWS, read_batches
from torchweft import rpc
from torchweft.embedding import (
    SGD,
    Constant,
    RowWise,
    TableConfig,
    Tables,
    TablesOptimizer,
    plan_tables,
    touched_shares,
)

Line = tuple[str, bool]
STEPS = 20
WORDS = 18_328
TRAINERS = (2, 4)


class Pushes(NamedTuple):
    """Bytes that one trainer sends to one server in a step, for the gradients of one table.

    Attributes:
        dense: The whole gradient.
        repeated: The sparse gradient as ``nn.Embedding`` leaves it, a row for each id.
        sparse: The push of ``Tables``.
    """

    dense: float
    repeated: float
    sparse: float


class Exchanged(NamedTuple):
    """Bytes that all trainers send in a step.

    Attributes:
        gathered: Each trainer has the summed sparse gradient of each other one.
        served: Pulls and pushes of ``Tables``, whose servers are the trainers.
    """

    gathered: float
    served: float


def zipf_batches(words: int = WORDS, count: int = STEPS) -> list[Tensor]:
    """Returns batches of ids ``(20, 35)``; about 360 of a batch differ, as in WikiText-2."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.arange(1, words + 1, dtype=torch.float64) ** -1.08
    ids = torch.multinomial(shares, count * ROWS * LENGTH, replacement=True, generator=generator)
    return list(ids.view(count, ROWS, LENGTH).unbind())


def receive(gradient: Tensor) -> None:
    """Takes a gradient; runs on the other worker."""


def pushes_of(server: str, words: int, batches: Sequence[Tensor]) -> Pushes:
    """Trains one table on a server, and sends the same gradients in two other forms."""
    totals = [0, 0, 0]
    tables = _tables(words, [server], "pushes", [rpc.get_worker_info().name])
    optimizer = tables.optimizer(SGD(lr=0.01))
    for ids in batches:
        for place, is_sparse in enumerate((False, True)):
            send = functools.partial(_send, server, gradient_of(ids, words, is_sparse))
            totals[place] += _sent(send)
        tables({"word": ids})["word"].square().sum().backward()
        totals[2] += _sent(optimizer.step)
    tables.close()
    return Pushes(*(total / len(batches) for total in totals))


def gradient_of(ids: Tensor, words: int, is_sparse: bool) -> Tensor:
    """Returns the gradient of a table, ``(words, 64)``, of the same loss."""
    weight = torch.ones(words, DIM, requires_grad=True)
    output = functional.embedding(ids, weight, sparse=is_sparse)
    (gradient,) = torch.autograd.grad(output.square().sum(), weight)
    return gradient


def _send(worker: str, gradient: Tensor) -> None:
    rpc.rpc_sync(worker, receive, args=(gradient,))


def _sent(act: Callable[[], object]) -> int:
    before = rpc.traffic().bytes_sent
    act()
    return rpc.traffic().bytes_sent - before


def exchanged_by(trainers: Sequence[str], words: int, batches: Sequence[Tensor]) -> Exchanged:
    """Has trainers train on batches of their own, by both ways; counts what all of them send."""
    count = len(trainers)
    steps = len(batches) // count
    given = [
        (list(trainers), words, list(batches[number : steps * count : count]))
        for number in range(count)
    ]
    _all(trainers, open_exchange, given)
    before = _sent_by(trainers)
    _all(trainers, gather)
    between = _sent_by(trainers)
    _all(trainers, train)
    after = _sent_by(trainers)
    _all(trainers, close_exchange)
    return Exchanged((between - before) / steps, (after - between) / steps)


def _all(
    workers: Sequence[str], act: Callable[..., object], given: Sequence[tuple[Any, ...]] = ()
) -> None:
    pairs = zip(workers, given or [()] * len(workers), strict=True)
    for call in [rpc.rpc_async(worker, act, args=args) for worker, args in pairs]:
        call.wait()


def _sent_by(workers: Sequence[str]) -> int:
    """Returns what workers have sent so far; the answers to this question are a few bytes of it."""
    return sum(rpc.rpc_sync(worker, rpc.traffic).bytes_sent for worker in workers)


class Exchange(NamedTuple):
    """What a trainer needs for both ways."""

    others: list[str]
    words: int
    batches: list[Tensor]
    tables: Tables
    optimizer: TablesOptimizer


_open: list[Exchange] = []
"""The exchange that this worker takes part in."""


def open_exchange(trainers: list[str], words: int, batches: list[Tensor]) -> None:
    """Makes the tables of a trainer, cut by row over all trainers; runs on it."""
    others = [name for name in trainers if name != rpc.get_worker_info().name]
    tables = _tables(words, trainers, "exchange", trainers)
    _open.append(Exchange(others, words, batches, tables, tables.optimizer(SGD(lr=0.01))))


def close_exchange() -> None:
    """Releases the tables; runs on a trainer."""
    _open.pop().tables.close()


def gather() -> None:
    """Sends the summed sparse gradients of this trainer to all others; runs on it."""
    mine = _open[-1]
    for ids in mine.batches:
        summed = gradient_of(ids, mine.words, is_sparse=True).coalesce()
        _all(mine.others, receive, [(summed,)] * len(mine.others))


def train() -> None:
    """Trains the tables, as a trainer and as a server; runs on each."""
    mine = _open[-1]
    for ids in mine.batches:
        mine.optimizer.zero_grad()
        mine.tables({"word": ids})["word"].square().sum().backward()
        mine.optimizer.step()


def _tables(words: int, servers: Sequence[str], name: str, trainers: Sequence[str]) -> Tables:
    config = TableConfig("word", words, DIM, "none", initial=Constant())
    plan = plan_tables([config], servers, places={"word": RowWise(*servers)})
    return Tables(plan, name=name, trainers=trainers, timeout=60)


def is_dense_copied(server: str, rows: int = 2000) -> bool:
    """Returns whether two trainers have copies of a table of which they touch half the rows."""
    config = TableConfig("word", rows, DIM, "none")
    batches = [{"word": torch.arange(begin, begin + rows // 2)} for begin in (0, rows // 2)]
    shares = touched_shares([config], batches)
    return plan_tables([config], [server], trainers=2, touched=shares).placed["word"].is_copied


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints all figures and their targets; returns 1 if one is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embedding.traffic", description=__doc__
    )
    parser.add_argument("--text", type=Path, metavar="FOLDER", help="its *.txt are the text")
    parser.add_argument("--steps", type=int, default=80, help="batches that are counted")
    options = parser.parse_args(arguments)
    if options.text is None:
        words, batches, name = WORDS, zipf_batches(count=options.steps), "generated Zipf text"
    else:
        words, found = read_batches(sorted(options.text.glob("*.txt")))
        # Over the whole text: its parts differ.
        batches, name = found[:: max(1, len(found) // options.steps)][: options.steps], "text"
    unique = sum(len(torch.unique(ids)) for ids in batches) / len(batches)
    print(
        f"{name}: {words:,} words, {len(batches)} batches of {ROWS} x {LENGTH} with {unique:.1f} "
        f"different words, {DIM} columns"
    )
    with weft.cluster(workers=max(TRAINERS)) as cluster:
        lines = list(_lines(list(cluster.names), words, batches))
    for text, is_met in lines:
        print(f"- {'met' if is_met else 'missed'}: {text}")
    return 0 if all(is_met for _, is_met in lines) else 1


def _lines(names: Sequence[str], words: int, batches: Sequence[Tensor]) -> Iterator[Line]:
    """Yields each figure, and whether it meets its target."""
    pushes = pushes_of(names[0], words, batches)
    ratio, repeated = pushes.dense / pushes.sparse, pushes.dense / pushes.repeated
    yield (
        f"a dense push has {pushes.dense:,.0f} bytes, {ratio:.1f} times the {pushes.sparse:,.0f} "
        "of the sparse one (target: at least 44)",
        ratio >= 44,
    )
    yield (
        f"and {repeated:.1f} times the {pushes.repeated:,.0f} of a row for each id (target: 25.4 "
        "within 10%)",
        abs(repeated / 25.4 - 1) <= 0.1,
    )
    for count in TRAINERS:
        found = exchanged_by(names[:count], words, batches)
        share = found.served / found.gathered
        target = "1 within 10%" if count == 2 else "at most 0.55"
        yield (
            f"{count} trainers that are the servers send {found.served:,.0f} bytes a step, "
            f"{share:.2f} of the {found.gathered:,.0f} of an all-gather (target: {target})",
            abs(share - 1) <= 0.1 if count == 2 else share <= 0.55,
        )
    is_copied = is_dense_copied(names[0])
    chosen = "copies" if is_copied else "servers"
    yield f"with half of the rows touched, the plan chooses {chosen} (target: copies)", is_copied


if __name__ == "__main__":
    # Its functions are then found by name, so that a worker has one list of what is open.
    from benchmarks.embedding import traffic

    sys.exit(traffic.main())
