"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests.contract.processes.embedding_functions import (
    RULES,
    close_tables,
    configs_of,
    open_tables,
    outputs_loss,
    skewed,
    train_step,
)
from tests.contract.processes.test_embedding import own_tables
from tests.contract.processes.test_embedding_cache import OTHER, ROWS, SERVERS, STEPS, counters
from tests.contract.processes.test_embedding_dynamic import RULES as DYNAMIC_RULES
from tests.contract.processes.test_embedding_dynamic import SERVERS as DYNAMIC_SERVERS
from tests.contract.processes.test_embedding_dynamic import (
    change,
    check_same,
    make_steps,
    on_all,
    on_first,
    open_on,
)
from tests.contract.processes.test_embedding_dynamic import make_tables as make_dynamic_tables
from tests.contract.processes.test_embedding_streams import batches_of, check_equal, inputs_of
from tests.dynamic_ids import close_dynamic, occupancy_of, rows_of
from tests.dynamic_ids_alone import OneProcess
from tests.processes.embedding_internals import refuse_to_change, set_rule_of_server
from torchweft import rpc
from torchweft.embedding import (
    SGD,
    Cache,
    CapacityError,
    Dynamic,
    InputError,
    Occupancy,
    StepError,
    TableConfig,
    Tables,
    TablesMismatch,
    TableWise,
    Wire,
    plan_tables,
)
from torchweft.embedding.dynamic import server_of
from torchweft.embedding.requests import TableIds, prepare
from torchweft.errors import CallCancelled, ConfigurationError
from torchweft.launch import Nursery

# The tests share workers, which connect to one another on first use.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # from Adagrad itself
]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


def test_a_server_refuses_gradients_that_do_not_fit_before_they_count() -> None:
    tables, optimizer = own_tables("checking")
    before = tables.weights("words")
    rows, values = torch.tensor([0]), torch.ones(1, 6, dtype=torch.float64)
    stack = next(
        number
        for number, each in enumerate(tables.plan.layout.stacks)
        if each.members[0].config.name == "words"
    )
    for part in [
        (rows + 10**6, values),
        (rows - 1, values),
        (rows, values[:, 1:]),
        (rows, values.float()),
        (torch.tensor([0, 2, 0]), 1, None, values),
        (torch.tensor([0, -1, 0]), 1, None, values),
        (torch.tensor([0, 1, 1]), 1, None, values),
        (torch.tensor([0, 1, -1]), 1, None, values),
        (torch.tensor([0, 1, 0]), 2, None, values),
        (torch.tensor([0, 1, 0]), -1, None, values),
        (torch.tensor([0, 1, 0]), 1, values[0], values),
        (torch.tensor([0, 1, 0]), 1, None, values[:, 1:]),
        (torch.tensor([0.0, 1.0, 0.0]), 1, None, values),
        (rows, rows, values),
    ]:
        pushes = [(stack, 1, [part])]
        with pytest.raises(InputError, match="server 'worker2' was") as caught:
            tables._client.call("push", {"worker2": (0, 0, 0.1, 0, pushes)})
        assert "words" in caught.value.table.split(", ")
    optimizer.step()  # The step was not counted: this one is expected.
    assert torch.equal(tables.weights("words"), before)
    tables.close()


def test_a_server_refuses_bags_that_do_not_fit() -> None:
    tables, _ = own_tables("bags")
    stack = next(
        number
        for number, each in enumerate(tables.plan.layout.stacks)
        if each.members[0].config.name == "words"
    )
    numbers, weights = torch.tensor([0, 1, 2]), torch.ones(3, dtype=torch.float64)
    for request in [
        (numbers, 1, 2, None),
        (numbers, 4, 0, None),
        (numbers, 2, 0, None),
        (numbers, -3, -1, None),
        (numbers, -1, 0, None),
        (torch.tensor([0, 1, 3, -1]), 2, 0, None),
        (numbers.float(), 1, 3, None),
        (numbers.view(1, 3), 1, 3, None),
        (numbers + 10**6, 1, 3, None),
        (numbers, 1, 3, weights[:2]),
        (numbers, 1, 3, weights.float()),
    ]:
        with pytest.raises(InputError, match="server 'worker2' was") as caught:
            tables._client.call("pull", {"worker2": (-1, 0, [(stack, *request)])})
        assert "words" in caught.value.table.split(", ")
    tables.close()


def test_a_server_that_could_not_apply_a_step_refuses_everything_after_it() -> None:
    tables, optimizer = own_tables("unapplied", {"words": TableWise("worker2")})
    ids = {"words": torch.tensor([[1, 2]])}
    tables(ids)["words"].sum().backward()
    optimizer.step()
    rpc.rpc_sync("worker2", refuse_to_change, ("unapplied",))
    tables(ids)["words"].sum().backward()
    optimizer.step()  # It is answered when it was checked, before it is applied.
    text = r"'worker2' has failed in the middle of a step.*no memory for the step.*restore a snapsh"
    for ask in (
        lambda: tables(ids),
        optimizer.step,
        lambda: tables.weights("words"),
        lambda: tables.set_weights("words", torch.zeros(40, 6, dtype=torch.float64)),
        tables.staleness,
    ):
        with pytest.raises(StepError, match=text) as caught:
            ask()
        assert (caught.value.server, caught.value.step, caught.value.expected) == ("worker2", 1, 1)
    tables.close()


@pytest.fixture
def make() -> Iterator[Any]:
    made = []

    def make_tables(configs: Any = None, **options: Any) -> Tables:
        plan = plan_tables(configs or configs_of(torch.float64), SERVERS)
        made.append(Tables(plan, **options))
        return made[-1]

    yield make_tables
    for tables in made:
        tables.close()


def draw_ids(step: int, trainer: int = 0, count: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * trainer + step)
    return skewed(count, ROWS, generator)


def push_to_all(tables: Tables, optimizer: Any) -> None:
    """Makes a step that adds 1 to each value, so that a row tells its version."""
    optimizer.zero_grad()
    # Beside the cache: a lookup of its own would make all rows young.
    flats = tables.reader.flats({"words": torch.arange(ROWS)})
    pushes: Any = {}
    for number, router in enumerate(tables.reader._routers):
        (each,) = prepare(number, router, [TableIds(0, router.stack.members[0], flats["words"])])
        for server, part in each.pushes(-torch.ones(ROWS, 4, dtype=torch.float64)).items():
            pushes.setdefault(server, {})[each.number] = each.used, [part]
    tables._client.push(1.0, tables._client.step, pushes)


def train_counters(
    trainers: list[str], me: int, bound: int, ahead: int | None
) -> tuple[list[int], int]:
    """Trains with a cache; returns the staleness of the oldest rows, and the largest counted."""
    cache = Cache(0.5 if ahead is None else 0.0)
    tables = Tables(counters(), trainers=trainers, staleness=bound, reduction="mean", cache=cache)
    optimizer = tables.optimizer(SGD(lr=1.0))
    batches = [{"words": draw_ids(step, me)} for step in range(STEPS)]
    found = []
    stream = None if ahead is None else tables.stream(batches, ahead)
    for step, batch in enumerate(batches):
        out = tables(batch) if stream is None else next(stream)[1]
        found.append(step - int(out["words"].min()))
        push_to_all(tables, optimizer)
    counted = max(tables.staleness())
    moved = tables.traffic()["words"]
    assert (moved.hits > 0) == (bound > 0)
    tables.close()
    return found, counted


@pytest.mark.parametrize(("bound", "ahead"), [(1, None), (2, 2), (6, 2)])
def test_no_trainer_uses_a_row_beyond_the_bound(bound: int, ahead: int | None) -> None:
    trainers = [rpc.get_worker_info().name, OTHER]
    other = rpc.rpc_async(OTHER, train_counters, args=(trainers, 1, bound, ahead))
    for found, counted in (train_counters(trainers, 0, bound, ahead), other.wait()):
        assert 0 <= min(found) <= max(found) <= bound
        assert counted <= bound


def test_rows_in_the_asynchronous_mode_are_used_for_so_many_steps() -> None:
    tables = Tables(counters(), name="async", staleness=None, cache=Cache(1.0, steps=2))
    optimizer = tables.optimizer(SGD(lr=1.0))
    found = []
    for _ in range(7):
        found.append(int(tables({"words": torch.tensor([3])})["words"].min()))
        push_to_all(tables, optimizer)
    assert found == [0, 0, 0, 3, 3, 3, 6]
    with pytest.raises(ConfigurationError, match=r"has steps=2, .* pass at most ahead=2"):
        tables.stream([], 3)
    tables.close()


def test_trainers_agree_on_the_form_and_servers_refuse_another(make: Any) -> None:
    tables = make(wire=Wire("fp16", "fp16"))
    with pytest.raises(TablesMismatch, match="differ in wire"):
        make(wire=Wire("bf16", "fp16"))
    tables.optimizer(SGD())
    before = tables.weights("words")
    pushes = [(0, 1, [(torch.zeros(1, dtype=torch.int32), torch.zeros(1, 6))])]
    with pytest.raises(
        InputError, match=r"sent values of torch.float32 for .*; its tables take 'fp16'"
    ):
        tables._client.call("push", {SERVERS[0]: (0, 0, 0.1, 0, pushes)})
    assert torch.equal(tables.weights("words"), before)


def wait_for_all_ahead(stream: Any) -> set[int]:
    """Returns the versions of the rows that are pulled ahead, once they are here."""
    lookups = [each.lookup for each in stream._waiting]
    return {future.wait()[0] for each in lookups for future in each.futures.values()}


@pytest.mark.parametrize("cache", [None, Cache(0.0), Cache(1.0)])
def test_rows_that_have_become_too_old_are_pulled_again(make: Any, cache: Cache | None) -> None:
    trainers = [rpc.get_worker_info().name, OTHER]
    plan = plan_tables(configs_of(torch.float64), SERVERS)
    rpc.rpc_sync(OTHER, open_tables, (plan, trainers, "sgd"), kwargs={"staleness": 1})
    tables = make(trainers=trainers, staleness=1, cache=cache)
    optimizer = tables.optimizer(RULES["sgd"])

    def other_steps(step: int) -> None:
        rpc.rpc_sync(OTHER, train_step, ("tables", 1, step, torch.float64))

    def step_on(batch: Any, outputs: Any) -> None:
        outputs_loss(outputs, batch.target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with tables.stream(batches_of(), 1, inputs_of) as stream:
        step_on(*next(stream))
        second = next(stream)
        assert wait_for_all_ahead(stream) == {0}  # the third batch
        other_steps(0)
        step_on(*second)
        batch, outputs = next(stream)  # in step 2, which must see version 1
        check_equal(outputs, tables(batch.inputs))
        other_steps(1)
    assert max(tables.staleness()) == 1
    rpc.rpc_sync(OTHER, close_tables, ("tables",))


def test_a_closed_stream_has_no_open_pull_and_the_tables_go_on(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[Any] = []
    cancel = rpc.Future.cancel

    def noted_cancel(future: Any) -> bool:
        cancelled.append(future)
        return cancel(future)

    monkeypatch.setattr(rpc.Future, "cancel", noted_cancel)
    tables = make()
    with tables.stream(batches_of(), 2, inputs_of) as stream:
        _, first = next(stream)
        ahead: list[Any] = [each.lookup for each in stream._waiting]
    futures = [future for each in ahead for future in each.futures.values()]
    assert len(futures) >= len(ahead) == 2
    assert {id(each) for each in cancelled} == {id(each) for each in futures}
    for future in futures:
        try:
            future.wait()  # Race: another thread has read its answer, and is completing it.
        except CallCancelled:
            pass
        assert future.done()
    check_equal(tables(next(batches_of()).inputs), first)


DYNAMIC_STEPS = 20


@pytest.mark.parametrize(("rule", "count"), [("sgd", 2), ("row-wise", 2), ("adam", 1)])
def test_two_trainers_equal_dicts_of_rows_in_one_process(rule: str, count: int) -> None:
    open_on(DYNAMIC_SERVERS[:count], rule)
    losses, rows = make_steps(0, DYNAMIC_STEPS), on_first(rows_of, "tables")
    occupancy = on_first(occupancy_of, "tables")
    on_all(close_dynamic, "tables")
    alone = OneProcess(count, DYNAMIC_RULES[rule])
    for step in range(DYNAMIC_STEPS):
        assert losses[step] == pytest.approx(alone.train_step(2, step), abs=1e-12, rel=0)
    for name, (ids, values) in rows.items():
        expected = alone.rows(name)
        assert ids.tolist() == sorted(expected), name
        wanted = torch.stack([expected[number] for number in ids.tolist()])
        assert float((values - wanted).abs().max()) <= 1e-12, name
        parts = alone.parts[name]
        assert occupancy[name] == Occupancy(
            len(expected),
            parts[0].config.rows,
            sum(len(part.waiting) for part in parts),
            sum(part.admitted for part in parts),
            sum(part.evicted for part in parts),
            sum(part.dropped for part in parts),
        )
    # The scenario has what the test is about.
    assert min(occupancy[name].evicted for name in ("clicks", "visits")) > 0
    assert min(occupancy[name].dropped for name in ("tags", "rare")) > 0
    # These expire while there is room.
    assert min(occupancy[name].evicted for name in ("rare", "often")) > 0
    assert occupancy["pages"].evicted == 0


def test_no_server_takes_part_of_a_step_that_another_has_no_rows_for() -> None:
    tables = make_dynamic_tables(
        TableConfig("users", 8, 3, "sum", torch.float64, dynamic=Dynamic())
    )
    optimizer = tables.optimizer(SGD())
    ids = torch.arange(40)
    servers = server_of(ids, 2)
    first, second = ids[servers == 0], ids[servers == 1]
    with pytest.raises(CapacityError, match=r"5 ids .* 'worker3'"):
        change(tables, optimizer, torch.cat([first[:2], second[:5]]))
    assert tables.occupancy()["users"].admitted == 0
    change(tables, optimizer, torch.cat([first[:4], second[:4]]))
    assert tables.occupancy()["users"].rows == 8
    tables.close()


@pytest.mark.parametrize(
    ("stack", "parts", "error"),
    [
        ((torch.arange(3), 1, 3, None), None, "asked for sums of 'users'"),
        ((torch.arange(3, dtype=torch.int32),), None, "ids of 'users' of torch.int32"),
        (None, [(torch.arange(3).float(), torch.zeros(3, 3).double())], "of torch.float32"),
        (None, [(torch.arange(2), torch.zeros(3, 3).double())], r"gradients \[3, 3\]"),
        (None, [(torch.arange(21), torch.zeros(21, 3).double())], "21 ids"),
        (
            None,
            [(torch.tensor([0, 1, 0]), 1, None, torch.zeros(1, 3))],
            "gradients of bags",
        ),
    ],
    ids=["sums", "int32", "floats", "shape", "too many", "bags"],
)
def test_servers_refuse_messages_that_do_not_fit(stack: Any, parts: Any, error: str) -> None:
    tables = make_dynamic_tables()
    optimizer = tables.optimizer(SGD())
    change(tables, optimizer, torch.arange(5))
    rows = tables.rows("users")
    method, given = "push", (0, 1, 0.1, 0, [(0, 1, parts)])
    if parts is None:
        method, given = "pull", (-1, 0, [(0, *stack)])
    with pytest.raises(InputError, match=error) as info:
        tables._client.call(method, {"worker2": given})
    assert (info.value.server, info.value.table) == ("worker2", "users")
    check_same({"users": tables.rows("users")}, {"users": rows})
    change(tables, optimizer, torch.arange(5))
    tables.close()


def test_after_a_step_that_one_server_refused_no_other_server_takes_the_next() -> None:
    tables, optimizer = own_tables("refused")
    ids = {"words": torch.arange(8)[None]}
    rpc.rpc_sync(DYNAMIC_SERVERS[1], set_rule_of_server, ("refused", None))
    tables(ids)["words"].sum().backward()
    with pytest.raises(ConfigurationError, match="no optimizer is set for the tables on 'worker3'"):
        optimizer.step()
    rpc.rpc_sync(DYNAMIC_SERVERS[1], set_rule_of_server, ("refused", SGD(lr=0.1)))
    before = tables.weights("words")
    for _ in range(2):
        with pytest.raises(
            StepError, match=r"step 0 .* has failed before.* Nothing was sent"
        ) as it:
            optimizer.step()
        assert it.value.server == "worker2, worker3"
    assert torch.equal(tables.weights("words"), before)
    tables.close()
