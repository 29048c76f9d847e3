"""The page on embedding tables: its programs run unchanged, its tables and messages are true."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contract.end_to_end.apart import LIMIT_S
from tests.inside import RunPage
from tests.pages import figure_of, python_of, text_of
from torchweft.embedding import (
    SGD,
    Adagrad,
    ColumnWise,
    Dynamic,
    Jagged,
    RowWiseAdagrad,
    Rule,
    Shard,
    Shards,
    SparseAdam,
    TableConfig,
    Tables,
    plan_tables,
)
from torchweft.launch import cluster

PAGE = "docs/embedding.md"

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_a_run_recovers_from_a_killed_server_by_itself(run: RunPage, guide: Path) -> None:
    lines = [line for line in run(guide / "recovering.py") if line.startswith("step")]
    assert [line[:7] for line in lines] == [f"step {step}:" for step in (0, 1, 2, 2, 3, 4)]
    assert lines[2] == lines[3]


def test_servers_compute_the_same_as_one_process(run: RunPage, guide: Path) -> None:
    expected = [figure_of(line) for line in run(guide / "alone.py")]
    assert len(expected) == 5
    lines = run(guide / "on_servers.py")
    # The tolerance is that of the printed digits.
    assert [figure_of(line) for line in lines[:5]] == pytest.approx(expected, abs=2e-4)
    plan = "\n".join(lines[5:])
    assert f"```\n{plan}\n```" in text_of(PAGE)


def test_figures_are_printed(run: RunPage, guide: Path) -> None:
    lines = run(guide / "figures.py")
    assert [line.partition(":")[0] for line in lines[:2]] == ["word", "day"]
    unique = [int(re.findall(r"(\d+)% unique", line)[0]) for line in lines[:2]]
    assert unique[1] == round(100 * 7 / 64)  # every day, of 64 ids
    assert unique[1] < unique[0] < 100
    assert lines[2] == "staleness {0: 40}"


def test_ids_that_are_no_row_numbers(run: RunPage, guide: Path) -> None:
    printed = "\n".join(run(guide / "any_ids.py"))
    assert f"```\n{printed}\n```" in text_of(PAGE)


def test_increments_are_restored(run: RunPage, guide: Path) -> None:
    assert run(guide / "increments.py") == ["done: 30", "same rows: True"]


def test_the_number_of_servers_is_tuned(run: RunPage, guide: Path) -> None:
    lines = run(guide / "tuned.py")
    assert lines[0].split() == ["servers", "measured", "predicted"]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert sum(line.endswith("chosen") for line in lines[1:4]) == 1
    assert lines[4].startswith("t(P) = ")


def test_the_number_of_servers_is_the_one_that_the_comment_says() -> None:
    (block,) = [block for block in python_of(PAGE) if "__main__" not in block]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block, {})
    assert f"# {printed.getvalue().strip()}\n" in block


def test_the_state_of_a_row_is_as_large_as_the_table_says() -> None:
    rules: dict[str, Rule] = {
        "SGD": SGD(),
        "SGD(momentum=0.9)": SGD(momentum=0.9),
        "Adagrad": Adagrad(),
        "RowWiseAdagrad": RowWiseAdagrad(),
        "SparseAdam": SparseAdam(),
    }
    sizes = {"0": 0, "1": 1, "D": 16, "2 D": 32}
    for name, rule in rules.items():
        size = sum(each.numel() for each in rule.state_for(torch.zeros(1, 16)).values())
        (row,) = [line for line in text_of(PAGE).splitlines() if line.startswith(f"| `{name}` |")]
        assert sizes[row.split("|")[3].strip()] == size, name


def make_mistakes(guide: Path) -> dict[str, Callable[[], object]]:
    names = runpy.run_path(str(guide / "on_servers.py"))
    configs: list[TableConfig] = names["TABLES"]
    servers = ["worker0", "worker1"]
    plan = plan_tables(configs, servers)
    columns = plan_tables(configs, servers, places={"word": ColumnWise(*servers)})
    users = TableConfig("user", 4, 16, dynamic=Dynamic())
    dynamic = Tables(plan_tables([users], ["worker0"]), name="dynamic")

    def exceed() -> None:
        optimizer = dynamic.optimizer(Adagrad())
        dynamic({"user": torch.arange(5).view(1, 5)})["user"].sum().backward()
        optimizer.step()

    def train_again() -> None:
        former = Tables(plan, name="words")
        optimizer = former.optimizer(Adagrad())
        for _ in range(5):
            optimizer.step()
        Tables(plan, name="words").optimizer(Adagrad())

    half = Shard("worker0", range(configs[0].rows), range(8))
    Tables(plan, name="first").close()  # The servers import everything: no part of the timeout.
    tables = Tables(plan, trainers=["driver", "worker1"], timeout=3)
    return {
        "IdOutOfRange": lambda: tables({"word": torch.tensor([[3, 20_000]])}),
        "BadOffsets": lambda: tables({"word": Jagged(torch.arange(3), torch.tensor([0, 2, 1]))}),
        "CapacityError": exceed,
        "BadIds: table": lambda: tables({"word": torch.rand(3, 2)}),
        "BadIds: there": lambda: tables({"words": torch.ones(2, 2, dtype=torch.int64)}),
        "TablesMismatch": lambda: Tables(plan, trainers=["driver", "worker1"], staleness=2),
        "PlanError: table 'word' cannot": lambda: plan_tables(
            configs, servers, places={"word": Shards([half])}
        ),
        "PlanError: table 'word' is": lambda: Tables(columns, name="columns").optimizer(
            RowWiseAdagrad()
        ),
        "StepError": train_again,
        "CallTimeout": lambda: tables.optimizer(Adagrad()).step(),
    }


def test_the_messages_are_those_of_the_page(guide: Path) -> None:
    shown = re.findall(r"^\| .* \| `(\w+: [^`]*?)(?:\.\.\.)?`", text_of(PAGE), re.M)
    assert len(shown) == 10
    with cluster(workers=2):
        for beginning, mistake in make_mistakes(guide).items():
            with pytest.raises(Exception, match=r".") as raised:
                mistake()
            found = f"{type(raised.value).__name__}: {raised.value}"
            (expected,) = [text for text in shown if text.startswith(beginning)]
            assert found.startswith(expected), found
            assert found == expected or expected.endswith(": ")
