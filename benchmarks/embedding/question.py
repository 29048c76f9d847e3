"""The rows, sides and targets of the benchmark of embedding tables."""

from __future__ import annotations

import os
from collections.abc import Iterator

from benchmarks.embedding.shapes import SHAPES
from benchmarks.frame import TORCH, WEFT, Form, Question, Row, Side, Target, Unit, times_faster

IDS_PER_S = Unit("ids/s", is_rate=True)
SERVERS = (1, 2, 4)
TORCHREC = Side(
    "torchrec",
    runner="ranks",
    module="torchrec",
    interpreter=os.environ.get("TORCHREC_PYTHON", ""),
)


def _rows() -> Iterator[Row]:
    for servers in SERVERS:
        for shape in SHAPES:
            for work, what in (("lookup", "lookup"), ("step", "lookup, backward, push")):
                name = f"{shape.name} {work}"
                yield Row(
                    f"{name} {servers}",
                    f"{shape.title}, {what}, {_servers(servers)}",
                    operations=shape.operations,
                    unit=IDS_PER_S,
                    amount=shape.ids,
                    work=name,
                    targets=(
                        times_faster(3),
                        Target("limit", 6, "median", "at least 6x faster than torchrec"),
                    ),
                    is_short=servers == 1 and work == "step" and shape in SHAPES[:2],
                    size=1 + servers,
                    warm_up=5,
                    limit="torchrec",
                    check=f"{shape.name} losses",
                )


def _servers(count: int) -> str:
    return "1 server" if count == 1 else f"{count} servers"


QUESTION = Question(
    "benchmarks.embedding",
    "Embedding tables on servers",
    tuple(_rows()),
    sides=(TORCH, WEFT, TORCHREC),
    about=(
        "One trainer and its servers; torch: nn.EmbeddingBag(sparse=True) on each server, one call "
        "for all tables of a server, distributed autograd and optimizer. torchrec (the limit): as "
        "many ranks as both have processes, which hold whole tables and each train on a part of "
        "the batch; gloo, fused optimizer. CPU: of all processes, a step. Losses must be equal on "
        "all sides."
    ),
    full=Form(rounds=6),
    short=Form(rounds=3, scale=0.5, placements=("a core each",)),
)
