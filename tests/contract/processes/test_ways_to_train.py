"""Torch's ways to train, across workers: each row of the page's table beside one process."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.contract.processes import (  # noqa: F401 (their import fills the table)
    ways_autograd,
    ways_methods,
    ways_modules,
    ways_optim,
)
from tests.contract.processes.ways_table import (
    DIFFERS,
    ERROR,
    OWN,
    ROWS,
    SAME,
    WEIGHT,
    Alone,
    InContext,
    Row,
    Side,
    take_gradient,
)
from tests.pages import text_of
from torchweft import autograd, rpc
from torchweft.launch import Nursery, cluster

pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore"),
]

VERDICTS = (SAME, ERROR, OWN, DIFFERS)
PAGE = "docs/ways-to-train.md"
_LINE = re.compile(r"^\| (.+?) \| (.+?) \|", re.M)


@pytest.fixture(scope="module", autouse=True)
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=1, nursery=nursery):
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    yield
    WEIGHT.grad = None
    rpc.rpc_sync("worker0", take_gradient, (0,))
    gc.collect()


def outcome(row: Row, where: str) -> Any:
    if where == "context":
        with autograd.context() as context_id:
            return row.program(InContext(context_id))
    return row.program(Side() if where == "outside" else Alone())


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.section}: {row.name}" for row in ROWS])
def test_row(row: Row) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if row.verdict == SAME:
            wanted = outcome(row, "alone")
            WEIGHT.grad = None
            for where in row.where:
                torch.testing.assert_close(outcome(row, where), wanted, msg=where_of(where))
        else:
            for where in row.where:
                if row.verdict in (OWN, DIFFERS):
                    outcome(row, where)
                    continue
                with pytest.raises(Exception, match=row.match) as raised:
                    outcome(row, where)
                assert not isinstance(raised.value, AssertionError)


def where_of(where: str) -> Any:
    return lambda text: f"{where}: {text}"


def test_the_page_has_these_rows() -> None:
    told = []
    for part in re.split(r"^## ", text_of(PAGE), flags=re.M)[1:]:
        title = part.partition("\n")[0]
        lines = _LINE.findall(part)
        told += [(title, name, verdict) for name, verdict in lines if verdict in VERDICTS]
    assert told == [(row.section, row.name, row.verdict) for row in ROWS]
