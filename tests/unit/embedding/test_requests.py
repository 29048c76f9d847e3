"""What lookups send, without servers: the shards are here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torchweft.embedding import SGD, RowWise, TableConfig, TableWise, plan_tables
from torchweft.embedding.inputs import Checker
from torchweft.embedding.requests import (
    Router,
    RowRequest,
    StackRequest,
    SumRequest,
    TableIds,
    prepare,
)
from torchweft.embedding.shard import Gradients, Shard

SERVERS = ("a", "b", "c")


def prepared(
    tables: list[TableConfig], ids: list[Any], place: Any
) -> tuple[Router, list[StackRequest]]:
    places = {each.name: place(number) for number, each in enumerate(tables)}
    (stack,) = plan_tables(tables, SERVERS, places=places).layout.stacks
    router = Router(stack)
    looked = [
        TableIds(number, member, Checker(member.config).flat(value))
        for number, (member, value) in enumerate(zip(stack.members, ids, strict=True))
    ]
    return router, prepare(0, router, looked)


def striped(number: int) -> Any:
    return RowWise(*SERVERS)


def whole(number: int) -> Any:
    return TableWise(SERVERS[-number % 3])


def skewed(count: int, rows: int, seed: int = 0) -> Tensor:
    """Returns ids with the frequencies of words: the id r has a share of about 1 / r."""
    draws = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (rows**draws).long().sub_(1).clamp_(max=rows - 1)


@pytest.mark.parametrize("place", [striped, whole])
def test_lookups_and_pushes_are_those_of_embedding_bag(place: Any) -> None:
    tables = [
        TableConfig("long", 50, 32, "sum"),
        TableConfig("none", 20, 32, "none"),
        TableConfig("mean", 90, 32, "mean"),
        TableConfig("idle", 10, 32),
    ]
    ids = [skewed(160, 50).view(2, 80), skewed(9, 20), skewed(12, 90).view(3, 4)]
    ids.append(torch.empty(2, 0, dtype=torch.int64))
    router, found = prepared(tables, ids, place)
    assert {type(each) for each in found} == {RowRequest, SumRequest}
    shards = {name: Shard(router.stack, k, 0) for k, name in enumerate(router.stack.servers)}
    before = {table.name: assembled(router, shards, table.name) for table in tables}
    for shard in shards.values():
        shard.set_rule(SGD(lr=1.0))
    for pulled in found:
        answers = {}
        for server, (_, *request) in pulled.requests().items():
            shard = shards[server]
            answers[server] = shard.pool(*request) if len(request) > 1 else shard.pull(*request)
        values = pulled.gather(answers).requires_grad_()
        total = values.sum() * 0
        for member, output in pulled.outputs(values):
            weights = before[member.config.name].requires_grad_()
            expected = looked_up(member.config, weights, ids[tables.index(member.config)])
            assert torch.allclose(output, expected, atol=1e-5), member.config.name
            expected.square().sum().backward()
            total = total + output.square().sum()
        (gradient,) = torch.autograd.grad(total, values)
        for server, part in pulled.pushes(gradient).items():
            pushed = Gradients(pulled.used, [part])
            shards[server].check(pushed)
            shards[server].apply([pushed], 1.0, 1, 1)
    for table in tables:
        weights = before[table.name]
        expected = weights.detach() - weights.grad
        assert torch.allclose(assembled(router, shards, table.name), expected, atol=1e-4)


def assembled(router: Router, shards: dict[str, Shard], name: str) -> Tensor:
    """Returns a table from its shards."""
    stack = router.stack
    member = next(each for each in stack.members if each.config.name == name)
    whole = torch.empty(member.config.rows, stack.dim)
    for shard in shards.values():
        rows = shard.rows_of(member)
        if rows:
            whole[rows.start :: rows.step] = shard.weights[member.base : member.base + len(rows)]
    return whole


def looked_up(config: TableConfig, weights: Tensor, ids: Tensor) -> Tensor:
    if config.pooling == "none":
        return functional.embedding(ids, weights)
    offsets = torch.arange(len(ids)) * ids.shape[1]
    return functional.embedding_bag(ids.reshape(-1), weights, offsets, mode=config.pooling)


def test_servers_pool_exactly_where_that_moves_fewer_bytes() -> None:
    table = TableConfig("t", 1000, 64)
    row = 4 + 256
    for length in (1, 2, 3, 4, 8):
        ids = torch.arange(4 * length).view(4, length)
        (pulled,) = prepared([table], [ids], whole)[1]
        (moved,) = pulled.moved.values()
        as_rows = 2 * 4 * length * row
        as_sums = 2 * 4 * length * 4 + 4 * 256 + 2 * 4 * length * 4 + 4 * 256
        assert isinstance(pulled, SumRequest) == (as_sums < as_rows)
        assert moved.pulled_bytes + moved.pushed_bytes == min(as_rows, as_sums)


@pytest.mark.parametrize("place", [striped, whole])
@pytest.mark.parametrize("count", [3, 200])
def test_keys_are_those_of_a_sort_with_positions(count: int, place: Any) -> None:
    tables = [TableConfig("a", 50, 4), TableConfig("b", 900, 4), TableConfig("c", 7, 4)]
    places = {each.name: place(number) for number, each in enumerate(tables)}
    (stack,) = plan_tables(tables, SERVERS, places=places).layout.stacks
    router = Router(stack)
    flats = [
        TableIds(
            number,
            member,
            Checker(member.config).flat(skewed(count, member.config.rows).view(1, -1)),
        )
        for number, member in enumerate(stack.members)
    ]
    expected = [len(flat.ids.unique()) for _, _, flat in flats]
    ordered, by_keys = router.route(flats), router.route(flats)
    assert torch.equal(by_keys.distinct, ordered.order.unique)
    assert torch.equal(ordered.distinct, ordered.order.unique)
    assert by_keys.cuts == ordered.cuts
    for routed in (ordered, by_keys, router.route(flats)):
        assert routed.counts == expected
    first = router.route(flats[:1]).counts
    assert first == [expected[0], 0, 0]


@pytest.mark.parametrize("place", [striped, whole])
def test_as_many_ids_are_looked_at_as_it_takes(place: Any) -> None:
    tables = [TableConfig("early", 500, 4), TableConfig("late", 500, 4), TableConfig("few", 500, 4)]
    places = {each.name: place(number) for number, each in enumerate(tables)}
    (stack,) = plan_tables(tables, SERVERS, places=places).layout.stacks
    router = Router(stack)
    rising, zeros = torch.arange(500), torch.zeros(500, dtype=torch.int64)
    ids = {"early": torch.cat([rising, zeros]), "late": torch.cat([zeros, rising])}
    ids["few"] = torch.cat([rising[:30], zeros])
    flats = [
        TableIds(number, member, Checker(member.config).flat(ids[member.config.name].view(1, -1)))
        for number, member in enumerate(stack.members)
    ]
    names = [member.config.name for member in stack.members]
    for limit in (0, 1, 7, 28, 29, 30, 250, 498, 499, 500, 1000):
        found = router.route(flats).beyond(dict.fromkeys(range(3), limit))
        expected = {name for name in names if len(ids[name].unique()) > limit}
        assert {names[number] for number in found} == expected
    assert router.route(flats).beyond({1: 1}) == {1}
