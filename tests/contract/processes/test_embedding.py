"""Tables on two servers with two trainers, compared with one process on the joined batch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes.embedding_functions import (
    OneProcess,
    close_tables,
    configs_of,
    draw_batch,
    open_tables,
    outputs_loss,
    staleness_of,
    train,
    train_step,
)
from torchweft import rpc
from torchweft.embedding import (
    SGD,
    BadIds,
    BadOffsets,
    ColumnWise,
    Copies,
    IdOutOfRange,
    InputError,
    Jagged,
    Plan,
    PlanError,
    RowWise,
    StepError,
    TableConfig,
    Tables,
    TablesMismatch,
    TableWise,
    Traffic,
    plan_tables,
)
from torchweft.errors import (
    ArgumentTypeError,
    CallTimeout,
    ConfigurationError,
    SerializationError,
    UnknownWorker,
)
from torchweft.launch import Nursery

# The tests share workers, which connect to one another on first use.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # from Adagrad itself
]
TRAINERS = ["worker0", "worker1"]
SERVERS = ["worker2", "worker3"]
STEPS = 20
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6}
Trained = tuple[dict[str, Tensor], list[float], dict[int, int]]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


def mixed_plan(dtype: torch.dtype) -> Plan:
    """Returns three tables by row, and one whole table on each server."""
    places = {"users": TableWise("worker3"), "tags": TableWise("worker2")}
    return plan_tables(configs_of(dtype), SERVERS, trainers=2, places=places)


def train_all(
    plan: Plan, rule: str, dtype: torch.dtype, steps: int = STEPS, **options: Any
) -> list[Trained]:
    futures = [
        rpc.rpc_async(
            name, train, args=(plan, TRAINERS, number, rule, steps, dtype), kwargs=options
        )
        for number, name in enumerate(TRAINERS)
    ]
    return [future.wait() for future in futures]


def initial_weights(plan: Plan) -> dict[str, Tensor]:
    tables = Tables(plan, name="initial")
    found = {each.name: tables.weights(each.name) for each in plan.configs}
    tables.close()
    return found


def check_equal(trained: list[Trained], plan: Plan, rule: str, dtype: torch.dtype) -> None:
    alone = OneProcess(plan.configs, initial_weights(plan))
    losses = alone.train(rule, STEPS, len(TRAINERS), dtype)
    bound = BOUNDS[dtype]
    for weights, _, _ in trained:
        for name, found in weights.items():
            expected = alone.modules[name].weight.detach()
            assert float((found - expected).abs().max()) <= bound, name
    means = torch.tensor([own for _, own, _ in trained], dtype=torch.float64).mean(0)
    assert means.tolist() == pytest.approx(losses, abs=10 * bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "row-wise", "adam"])
def test_two_trainers_and_two_servers_equal_one_process(rule: str, dtype: torch.dtype) -> None:
    plan = mixed_plan(dtype)
    check_equal(train_all(plan, rule, dtype), plan, rule, dtype)


@pytest.mark.parametrize("way", ["two calls", "outside", "context"])
def test_all_ways_to_run_a_backward_pass_train_alike(way: str) -> None:
    plan = mixed_plan(torch.float64)
    expected = train_all(plan, "adagrad", torch.float64, steps=4)
    found = train_all(plan, "adagrad", torch.float64, steps=4, way=way)
    check_same(found, expected, bound=1e-14 if way == "two calls" else 0.0)


def check_same(found: list[Trained], expected: list[Trained], bound: float = 0.0) -> None:
    for (weights, losses, _), (others, other_losses, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(other_losses, abs=bound, rel=0)
        for name, values in weights.items():
            assert float((values - others[name]).abs().max()) <= bound, name


@pytest.mark.parametrize(
    "places",
    [
        dict.fromkeys(
            ("words", "users", "pages", "tags", "seen"), ColumnWise("worker3", "worker2")
        ),
        dict.fromkeys(("words", "users", "pages", "tags", "seen"), RowWise("worker0")),
        dict.fromkeys(("words", "users", "pages", "tags", "seen"), TableWise("worker1")),
    ],
    ids=["by column", "a trainer is the server", "whole"],
)
def test_the_layout_does_not_change_the_result(places: dict[str, Any]) -> None:
    expected = train_all(mixed_plan(torch.float64), "adam", torch.float64, steps=4)
    plan = plan_tables(configs_of(torch.float64), SERVERS, trainers=2, places=places)
    check_same(train_all(plan, "adam", torch.float64, steps=4), expected, bound=1e-13)


def test_runs_repeat_bit_by_bit() -> None:
    plan = mixed_plan(torch.float32)
    first = train_all(plan, "adam", torch.float32, steps=6)
    for _ in range(2):
        check_same(train_all(plan, "adam", torch.float32, steps=6), first)


def test_a_bound_of_zero_is_the_synchronous_mode_and_no_bound_is_exceeded() -> None:
    plan = mixed_plan(torch.float64)
    expected = train_all(plan, "sgd", torch.float64)
    assert expected[0][2] == {0: 2 * len(SERVERS) * STEPS}
    for bound in (1, 3):
        for _, _, staleness in train_all(plan, "sgd", torch.float64, staleness=bound):
            assert max(staleness) <= bound
            assert sum(staleness.values()) <= 2 * len(SERVERS) * STEPS
    check_same(train_all(plan, "sgd", torch.float64, staleness=0), expected)


@pytest.fixture
def open_group() -> Iterator[Any]:
    """Makes tables that both trainers keep open; closes them after the test."""
    names: list[str] = []

    def make(name: str, **options: Any) -> None:
        plan = mixed_plan(torch.float64)
        names.append(name)
        for trainer in TRAINERS:
            given = (plan, TRAINERS, "sgd")
            rpc.rpc_sync(trainer, open_tables, given, kwargs={"name": name, **options})

    yield make
    for name in names:
        for trainer in TRAINERS:
            rpc.rpc_sync(trainer, close_tables, (name,))


def step_of(name: str, trainer: int, step: int) -> Any:
    return rpc.rpc_async(TRAINERS[trainer], train_step, (name, trainer, step, torch.float64))


def test_a_trainer_is_ahead_by_the_bound_and_no_more(open_group: Any) -> None:
    bound = 2
    open_group("bounded", staleness=bound)
    for step in range(bound):
        step_of("bounded", 0, step).wait()
    ahead = step_of("bounded", 0, bound)
    for step in range(3):
        assert step > 0 or not ahead.done()
        step_of("bounded", 1, step).wait()
        ahead.wait()  # Later, its pull would be less far ahead.
    staleness = rpc.rpc_sync(TRAINERS[0], staleness_of, ("bounded",))
    # Pulls of the steps 0, 1, 2 of either trainer: the first is 0, 1, 2 steps ahead of the second.
    assert set(staleness) == {0, 1, 2}
    assert sum(staleness.values()) == 6 * len(SERVERS)


def test_without_a_bound_no_trainer_waits_and_staleness_is_counted_in_pushes(
    open_group: Any,
) -> None:
    open_group("free", staleness=None)
    for step in range(4):
        step_of("free", 0, step).wait()
    step_of("free", 1, 0).wait()
    assert rpc.rpc_sync(TRAINERS[0], staleness_of, ("free",)) == {0: 5 * len(SERVERS)}


def test_a_step_that_waits_too_long_names_the_trainers_that_it_waits_for(open_group: Any) -> None:
    open_group("late", timeout=0.3)
    with pytest.raises(CallTimeout, match="tables 'late' waits for the trainers 'worker1'"):
        step_of("late", 0, 0).wait()


def own_tables(name: str, places: Any = None, **options: Any) -> tuple[Tables, Any]:
    """Returns tables that the test trains itself."""
    plan = plan_tables(configs_of(torch.float64), SERVERS, places=places)
    tables = Tables(plan, name=name, **options)
    return tables, tables.optimizer(SGD(lr=0.1))


BAD: list[tuple[str, Any, type[Exception], str]] = [
    (
        "words",
        torch.tensor([[0, 40]]),
        IdOutOfRange,
        r"id 40 at position 1 .*words' on worker2",
    ),
    ("words", torch.tensor([[0, -1]]), IdOutOfRange, r"id -1 at position 1"),
    ("words", torch.tensor([[0.5, 1.0]]), BadIds, r"ids has torch.float32"),
    ("words", [[1, 2]], BadIds, r"a list was passed"),
    ("words", torch.tensor([1, 2]), BadIds, r"ids have 1 dimensions"),
    (
        "words",
        Jagged(torch.arange(3), torch.tensor([0, 2, 1])),
        BadOffsets,
        r"offset 2 is 1",
    ),
    ("words", Jagged(torch.arange(3), torch.tensor([1])), BadOffsets, r"they begin with 1"),
    ("words", Jagged(torch.arange(3), torch.tensor([0, 4])), BadOffsets, r"the last is 4"),
    ("users", (torch.arange(3)[None], None, torch.ones(1, 3)), BadIds, r"pooling is 'mean'"),
    ("pages", Jagged(torch.arange(3), torch.tensor([0])), BadIds, r"pooling is 'none'"),
    ("wrods", torch.tensor([[1]]), BadIds, r"no table 'wrods'.*did you mean 'words'"),
]


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    tables, optimizer = own_tables("refusing")
    before = {name: tables.weights(name) for name in ("words", "users", "pages")}
    for name, value, error, message in BAD:
        with pytest.raises(error, match=message) as caught:
            tables({"tags": torch.tensor([[1]]), name: value})
        assert caught.value.table == name  # type: ignore[attr-defined]
    optimizer.step()
    for name, values in before.items():
        assert torch.equal(tables.weights(name), values)
    assert tables.traffic()["tags"].ids == 0
    tables.close()


def test_a_step_that_cannot_be_taken_is_refused_before_anything_is_sent() -> None:
    tables, optimizer = own_tables("unsent")
    before = tables.weights("words")
    tables({"words": torch.tensor([[1, 2]])})["words"].sum().backward()
    rate = optimizer.param_groups[0]["lr"]
    for bad in (float("nan"), float("inf"), -0.1):
        optimizer.param_groups[0]["lr"] = bad
        with pytest.raises(ConfigurationError, match="the learning rate is"):
            optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    (leaf,) = optimizer.param_groups[0]["params"]
    leaf.grad = leaf.grad.to_sparse()
    with pytest.raises(InputError, match=r"of words on worker2, worker3 .* be dense"):
        optimizer.step()
    optimizer.step()
    assert torch.equal(tables.weights("words"), before)
    tables.close()


def test_another_collection_under_the_same_name_is_refused() -> None:
    tables, _ = own_tables("named")
    smaller = [each for each in configs_of(torch.float64) if each.name != "tags"]
    for plan, options, part in [
        (tables.plan, {"seed": 1}, "seed"),
        (tables.plan, {"trainers": ["worker0"]}, "trainers"),
        (plan_tables(smaller, SERVERS), {}, "table 'tags'"),
        (plan_tables(configs_of(torch.float32), SERVERS), {}, "table 'words'"),
    ]:
        with pytest.raises(TablesMismatch, match=r"server 'worker[23]' has .*differ") as caught:
            Tables(plan, name="named", **options)  # type: ignore[arg-type]
        assert (caught.value.part, caught.value.server[:6]) == (part, "worker")
    with pytest.raises(TablesMismatch, match="all trainers use the same"):
        Tables(tables.plan, name="named").optimizer(SGD(lr=0.2))
    tables.close()


def test_tables_that_were_trained_and_not_closed_are_not_trained_again_by_mistake() -> None:
    plan = plan_tables([TableConfig("left", 8, 2)], SERVERS[:1])
    former = Tables(plan, name="left open")
    former.optimizer(SGD()).step()
    again = Tables(plan, name="left open")
    with pytest.raises(StepError, match=r"1 steps of tables 'left open' before.*close them on all"):
        again.optimizer(SGD())
    again.close()
    former.close()
    made = Tables(plan, name="left open")
    made.optimizer(SGD()).step()
    made.close()


def test_zero_grad_of_the_module_drops_gradients_of_rows_and_copies() -> None:
    configs = [TableConfig("rows", 8, 2, "none"), TableConfig("copies", 8, 2, "none")]
    tables = Tables(plan_tables(configs, SERVERS[:1], places={"copies": Copies()}), name="zeroed")
    optimizer = tables.optimizer(SGD())
    before = tables.weights("rows")
    out = tables({"rows": torch.arange(3), "copies": torch.arange(3)})
    (out["rows"] + out["copies"]).sum().backward()
    tables.zero_grad()
    optimizer.step()
    assert torch.equal(tables.weights("rows"), before)
    assert tables.copies["copies"].grad is None
    tables.close()


def test_what_could_not_be_made_leaves_nothing_on_servers() -> None:
    config = configs_of(torch.float64)[0]
    first = Tables(plan_tables([config], ["worker3"]), name="half", seed=1)
    with pytest.raises(TablesMismatch, match="server 'worker3' has tables") as caught:
        Tables(plan_tables([config], SERVERS, places={"words": RowWise(*SERVERS)}), name="half")
    first.close()
    # While the error is there, as in an interpreter that shows its traceback.
    second = Tables(plan_tables([config], ["worker2"]), name="half", seed=2)
    second.close()
    del caught


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": []}, "plan is a list; pass what plan_tables returns"),
        ({"name": 3}, "name is 3, an int"),
        ({"trainers": "worker0"}, "trainers is 'worker0'; pass a list of names"),
        ({"seed": 1.5}, "seed is 1.5, a float"),
        ({"cache": 0.1}, "cache is 0.1, a float; pass a Cache"),
        ({"wire": "fp16"}, "wire is 'fp16', a str; pass a Wire"),
    ],
)
def test_options_of_wrong_types_are_named(options: dict[str, Any], message: str) -> None:
    plan = plan_tables(configs_of(torch.float64), SERVERS)
    with pytest.raises(ArgumentTypeError, match=message):
        Tables(**{"plan": plan, "name": "typed", **options})


def test_a_trainer_that_there_is_not_is_named_at_once() -> None:
    plan = plan_tables(configs_of(torch.float64), SERVERS)
    with pytest.raises(UnknownWorker, match="trainer7"):
        Tables(plan, name="unknown", trainers=["driver", "trainer7"])


def test_calls_with_wrong_types_are_named() -> None:
    tables = Tables(plan_tables(configs_of(torch.float64), SERVERS), name="typed")
    before = tables.weights("words")
    for inputs in (torch.tensor([[1]]), ["words"], None):
        with pytest.raises(BadIds, match="pass a dict with the ids of each table"):
            tables(inputs)
    for values in ([[0.0] * 6] * 40, before.to_sparse(), before.to("meta")):
        with pytest.raises(BadIds, match=r"table 'words' was given .*; pass a dense tensor"):
            tables.set_weights("words", values)  # type: ignore[arg-type]
    for rule in (torch.optim.SGD, SGD, "sgd"):
        with pytest.raises(ArgumentTypeError, match=r"rule is .*; pass a rule"):
            tables.optimizer(rule)  # type: ignore[arg-type]
    optimizer = tables.optimizer(SGD(lr=0.1))
    for use in (lambda: tables.reshard("there"), lambda: tables.stream(None, 2)):  # type: ignore[arg-type]
        with pytest.raises(ArgumentTypeError, match=r"pass what plan_tables|batches is None"):
            use()
    for lr in ("fast", None):
        tables({"words": torch.tensor([[1]])})["words"].sum().backward()
        optimizer.param_groups[0]["lr"] = lr
        with pytest.raises(ConfigurationError, match=f"the learning rate is {lr!r}"):
            optimizer.step()
    assert torch.equal(tables.weights("words"), before)
    tables.close()


@pytest.mark.parametrize("place", [RowWise(*SERVERS), TableWise("worker2"), Copies()])
def test_a_single_id_is_one_row_without_a_dimension_of_its_own(place: Any) -> None:
    config = configs_of(torch.float64)[2]
    tables = Tables(plan_tables([config], SERVERS, places={"pages": place}), name="single")
    found = tables({"pages": torch.tensor(4)})["pages"]
    assert torch.equal(found, tables.weights("pages")[4])
    tables.close()


def test_a_copy_cannot_have_the_name_of_a_method_of_its_dict() -> None:
    config = TableConfig("items", 4, 2)
    plan = plan_tables([config], SERVERS, places={"items": Copies()})
    with pytest.raises(PlanError, match="none can be named 'items'"):
        Tables(plan, name="named")


def test_weights_of_empty_bags_get_gradients_as_well() -> None:
    tables, _ = own_tables("weighted")
    weights = torch.rand(0, dtype=torch.float64, requires_grad=True)
    given = Jagged(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]), weights)
    tables({"words": given})["words"].sum().backward()
    assert weights.grad is not None
    tables.close()


def test_per_sample_weights_get_gradients() -> None:
    tables, optimizer = own_tables("weighted")
    weights = {"words": tables.weights("words")}
    ids, offsets = torch.tensor([5, 7, 5, 0, 39]), torch.tensor([0, 2, 2])
    own = torch.rand(5, dtype=torch.float64, requires_grad=True)
    other = own.detach().clone().requires_grad_()
    local = nn.EmbeddingBag(40, 6, mode="sum", _weight=weights["words"])
    found = tables({"words": Jagged(ids, offsets, own)})["words"]
    expected = local(ids, offsets, other)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert own.grad is not None
    assert torch.allclose(own.grad, other.grad, rtol=0, atol=1e-14)
    optimizer.step()
    gradient = local.weight.grad
    assert torch.allclose(tables.weights("words"), weights["words"] - 0.1 * gradient, atol=1e-14)
    tables.close()


def test_the_optimizer_is_one_of_pytorch() -> None:
    tables, optimizer = own_tables("ordinary")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = tables.weights("pages")
    ids = torch.tensor([[1, 2], [2, 2]])
    for rate in (0.1, 0.05):
        tables({"pages": ids})["pages"].sum().backward()
        (rows,) = optimizer.param_groups[0]["params"]
        torch.nn.utils.clip_grad_norm_([rows], 1e9)
        rows.grad.mul_(2)  # as a scaler of gradients does
        optimizer.step()
        scheduler.step()
        before[1] -= 2 * rate
        before[2] -= 6 * rate
    assert torch.allclose(tables.weights("pages"), before, atol=1e-14)
    tables({"pages": ids})["pages"].sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.allclose(tables.weights("pages"), before, atol=1e-14)
    tables.close()


def count_leaves() -> int:
    return sum(
        isinstance(each, Tensor) and hasattr(each, "weft_pulled") for each in gc.get_objects()
    )


def test_a_lookup_whose_gradient_is_never_computed_leaves_nothing_behind() -> None:
    gc.collect()  # Errors of other tests hold leaves in circles.
    tables, optimizer = own_tables("evaluated")
    ids = {"seen": torch.tensor([[1, 2, 3]])}
    with torch.no_grad():
        expected = tables(ids)["seen"]
        assert not expected.requires_grad
    found = tables(ids)["seen"]
    assert torch.equal(found, expected)
    assert count_leaves() == 1
    del found
    assert count_leaves() == 0  # Without the garbage collector.
    assert optimizer.param_groups[0]["params"] == []
    tables.close()


def test_tables_cannot_be_copied() -> None:
    tables, _ = own_tables("copied")
    with pytest.raises(SerializationError, match="Tables cannot be copied or sent"):
        copy.deepcopy(nn.ModuleDict({"tables": tables}))
    assert tables({"seen": torch.tensor([[1]])})["seen"].shape == (1, 4)
    tables.close()


def test_copies_are_ordinary_parameters_with_the_same_values() -> None:
    tables, _ = own_tables("rows")
    names = ("words", "users", "pages", "tags")
    copies, _ = own_tables("copies", dict.fromkeys(names, Copies()))
    batch = draw_batch(0, 1, torch.float64)
    found, expected = copies(batch.inputs), tables(batch.inputs)
    for name, output in expected.items():
        assert torch.allclose(found[name], output, atol=1e-15), name
    assert {name for name, _ in copies.named_parameters()} == {f"copies.{name}" for name in names}
    outputs_loss(found, batch.target).backward()  # type: ignore[no-untyped-call]
    assert all(copy.grad is not None for copy in copies.copies.values())
    tables.close()
    copies.close()


def test_set_weights_sets_all_parts_and_counts_are_exact() -> None:
    tables, optimizer = own_tables("set", {"words": ColumnWise(*SERVERS)})
    for name, rows, dim in [("words", 40, 6), ("users", 23, 6)]:
        values = torch.randn(rows, dim, dtype=torch.float64)
        tables.set_weights(name, values)
        assert torch.equal(tables.weights(name), values)
    with pytest.raises(BadIds, match=r"on worker2, worker3 has \[40, 6\] values") as caught:
        tables.set_weights("words", torch.zeros(4, 6))
    assert caught.value.server == "worker2, worker3"
    tables({"users": torch.tensor([[4, 4, 5]]), "seen": torch.tensor([[1], [1]])})[
        "users"
    ].sum().backward()
    optimizer.step()
    traffic = tables.traffic()
    # As rows: fewer bytes than a sum from each of two servers.
    assert traffic["users"] == Traffic(3, 2, 2 * (4 + 48), 2 * (4 + 48))
    assert traffic["seen"] == Traffic(2, 1, 4 + 32, 0)  # Its output was not used.
    with torch.no_grad():
        tables({"users": torch.arange(20)[None]})
    # As sums: 19 ids without padding, and a length and a sum from each server.
    assert tables.traffic()["users"].pulled_bytes == 104 + 19 * 4 + 2 * (4 + 48)
    tables.close()
