"""A full snapshot and increments give the rows that a later full snapshot gives, in any layout."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.thorough import examples
from torchweft.embedding import (
    Adagrad,
    ColumnWise,
    Dynamic,
    Plan,
    RowWise,
    RowWiseAdagrad,
    Rule,
    SparseAdam,
    TableConfig,
    TableWise,
    pieces,
    plan_tables,
)
from torchweft.embedding.dynamic import server_of
from torchweft.embedding.pieces import Entry
from torchweft.embedding.server import Host, Options
from torchweft.embedding.shard import Gradients, Shard

SERVERS = ("a", "b", "c")
TABLES = (
    TableConfig("words", 23, 4, dtype=torch.float64),
    TableConfig("users", 9, 4, dtype=torch.float64, dynamic=Dynamic(2, "age", 4, 0.2)),
    TableConfig("pages", 11, 4, dtype=torch.float64),
)
WHOLE, BY_ROW, TWO = TableWise("b"), RowWise(*SERVERS), RowWise("c", "a")
BY_COLUMN = ColumnWise("b", "c")
IDS = st.lists(st.integers(0, 22), max_size=7, unique=True)


class Received(Entry):
    """An entry of a snapshot on this worker, as references give it."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__()
        self.content = content

    def is_owner(self) -> bool:
        return True

    def local_value(self) -> Entry:
        return self


class Servers:
    """All servers of a collection."""

    def __init__(self, places: list[Any], rule: Rule, seed: int) -> None:
        names = [each.name for each in TABLES]
        plan = plan_tables(TABLES, SERVERS, places=dict(zip(names, places, strict=True)))
        self.plan: Plan = plan
        options = Options(plan.layout, ("trainer",), 0, True, seed)
        self.hosts = [Host("tables", options, name) for name in plan.layout.servers]
        for host in self.hosts:
            for shard in host.shards.values():
                shard.set_rule(rule)

    def step(self, number: int, ids: list[list[int]]) -> None:
        """Changes rows of tables, as a push of one trainer does."""
        for host in self.hosts:
            host.steps.version += 1
            for shard in host.shards.values():
                pushed = [_pushed(shard, host.server, number, ids)]
                shard.apply(pushed, 0.1, 1, host.steps.version)

    def save(self, mark: str, since: str | None) -> list[Any]:
        """Returns the pieces of a snapshot."""
        found: list[Any] = []
        for host in self.hosts:
            base = None if since is None else host.marks[since]
            for held in host.held():
                content = host.content_of(held, base)
                found.append((held.piece.plain(), Received(content)))
            host.set_mark(mark)
        return found

    def restore(self, links: list[Any]) -> None:
        """Takes a chain over."""
        for host in self.hosts:
            host.adopt(links, "restored", 1.0)

    def content(self) -> list[dict[str, Tensor]]:
        """Returns all that a snapshot has of the rows, in the order of ids."""
        return [
            {**shard.copied(number), "steps": shard.steps[number].clone()}
            for host in self.hosts
            for shard in host.shards.values()
            for number, member in enumerate(shard.stack.members)
            if shard.rows_of(member)
        ]


def _pushed(shard: Shard, server: str, number: int, ids: list[list[int]]) -> Gradients:
    stack, used, rows = shard.stack, 0, []
    place = stack.servers.index(server)
    for position, member in enumerate(stack.members):
        of_table = torch.tensor(
            sorted(ids[[each.name for each in TABLES].index(member.config.name)]),
            dtype=torch.int64,
        )
        if len(of_table):
            used |= 1 << position
        if stack.is_dynamic:
            rows.append(of_table[server_of(of_table, len(stack.servers)) == place][:3])
            continue
        held = member.rows_on(place, stack.stripes)
        own = [member.base + held.index(each) for each in of_table.tolist() if each in held]
        rows.append(torch.tensor(own, dtype=torch.int64))
    joined = torch.cat(rows)
    values = (joined.double()[:, None] + 1) * torch.linspace(0.1, 1, stack.dim).double() + number
    return Gradients(used, [(joined, values)])


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(IDS, IDS, st.booleans()), min_size=1, max_size=12),
    st.sampled_from([WHOLE, BY_ROW, TWO, BY_COLUMN]),
    st.sampled_from([WHOLE, BY_ROW, TWO]),
    st.sampled_from([WHOLE, BY_ROW, TWO, BY_COLUMN]),
    st.sampled_from([WHOLE, BY_ROW, TWO]),
    st.sampled_from([Adagrad(), SparseAdam(), RowWiseAdagrad()]),
    st.sampled_from([1, 100, 1 << 26]),
)
def test_a_chain_is_the_full_snapshot_of_its_last_link(
    steps: list[tuple[list[int], list[int], bool]],
    place: Any,
    of_ids: Any,
    later: Any,
    later_of_ids: Any,
    rule: Rule,
    chunk_bytes: int,
) -> None:
    if isinstance(rule, RowWiseAdagrad) and BY_COLUMN in (place, later):
        return
    servers = Servers([place, of_ids, WHOLE], rule, seed=1)
    links, mark = [servers.save("0", None)], "0"
    for number, (words, users, is_saved) in enumerate(steps):
        pages = [each for each in words if each < 11]
        servers.step(number, [words, users, pages])
        if is_saved:
            links.append(servers.save(str(number + 1), mark))
            mark = str(number + 1)
    links.append(servers.save("last", mark))
    whole = [servers.save("whole", None)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(pieces, "_CHUNK_BYTES", chunk_bytes)
        found = []
        for chain in (links, whole):
            others = Servers([later, later_of_ids, TWO], rule, seed=2)
            others.restore(chain)
            found.append(others.content())
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for name, values in one.items():
            assert torch.equal(values, other[name]), name


def test_an_increment_has_the_changed_rows_alone() -> None:
    servers = Servers([BY_ROW, WHOLE, WHOLE], Adagrad(), seed=1)
    servers.save("0", None)
    servers.step(0, [[0, 3, 4], [5, 6], []])
    servers.step(1, [[3], [5], []])
    counts: Counter[str] = Counter()
    for plain, entry in servers.save("1", "0"):
        tensors = entry.content["tensors"]
        rows = tensors["rows.weights"] if plain[0] == "users" else tensors["weights"]
        counts[plain[0]] += len(rows)
    assert counts == {"words": 3, "users": 1, "pages": 0}
    assert (
        sum(len(each.content["tensors"].get("changed", [])) for _, each in servers.save("2", "1"))
        == 0
    )
