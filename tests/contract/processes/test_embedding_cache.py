"""Cached rows and values of low precision, with two servers and two trainers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweft
from benchmarks.embedding.text_cache import (
    hits_by_pass,
    hits_in_training,
    hits_of_most_frequent,
    read_batches,
    share_left_by_look_ahead,
)
from tests.contract.processes.embedding_functions import (
    configs_of,
    draw_batch,
    skewed,
    train,
)
from torchweft import rpc
from torchweft.embedding import (
    SGD,
    Cache,
    Constant,
    Jagged,
    RowWise,
    TableConfig,
    Tables,
    TableWise,
    Wire,
    plan_tables,
)
from torchweft.errors import ConfigurationError
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
SERVERS = ["worker0", "worker1"]
OTHER = "worker2"
TEXTS = "WEFT_TEST_WIKITEXT2"
"""Names the folder of the validation and test parts, ``valid.txt`` and ``test.txt``."""

STEPS, ROWS = 12, 40
COUNTERS = TableConfig("words", ROWS, 4, "none", torch.float64, Constant(0.0))


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=3, nursery=nursery):
        yield


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


def counters(place: Any = None) -> Any:
    return plan_tables([COUNTERS], SERVERS, places={"words": place or RowWise(*SERVERS)})


def test_outputs_and_gradients_are_those_without_a_cache(make: Any) -> None:
    cached, plain = make(name="cached", cache=Cache(0.3)), make(name="plain")
    for step in range(6):
        inputs = draw_batch(0, step, torch.float64).inputs
        found, expected = cached(inputs), plain(inputs)
        for name, output in expected.items():
            # Plain tables may be pooled by the servers: another order of sums.
            assert torch.allclose(found[name], output, rtol=0, atol=1e-14), name
    moved, whole = cached.traffic(), plain.traffic()
    for name in ("users", "tags"):
        assert (moved[name].ids, moved[name].rows) == (whole[name].ids, whole[name].rows)
        assert 0 < moved[name].hits < moved[name].rows
    assert whole["users"].hits == 0


@pytest.mark.parametrize("place", [TableWise("worker1"), RowWise(*SERVERS)])
def test_a_cached_step_without_an_old_row_is_that_without_a_cache(place: Any) -> None:
    weights = []
    for cache in (None, Cache(1.0)):
        tables = Tables(counters(place), name=f"{cache}", staleness=1, cache=cache)
        optimizer = tables.optimizer(SGD(lr=0.5))
        for begin in (0, 20, 5):  # Rows 5 to 15 come back with a version that is too old.
            ids = torch.arange(begin, begin + 10)
            optimizer.zero_grad()
            (tables({"words": ids})["words"] - 1).square().sum().backward()
            optimizer.step()
        weights.append(tables.weights("words"))
        tables.close()
    assert torch.equal(*weights)


def test_hits_and_bytes_are_counted(make: Any) -> None:
    tables = make([COUNTERS], cache=Cache(1.0))
    tables({"words": torch.tensor([1, 2, 3, 3])})
    tables({"words": torch.tensor([2, 3, 4, 2])})
    moved = tables.traffic()["words"]
    assert (moved.ids, moved.rows, moved.hits) == (8, 6, 2)
    assert moved.pulled_bytes == (6 - 2) * (4 + 4 * 8)
    tables.clear_cache()
    tables({"words": torch.tensor([2])})
    assert tables.traffic()["words"].hits == 2


def test_rows_that_were_set_are_not_those_of_the_cache(make: Any, tmp_path: Path) -> None:
    tables = make([COUNTERS], cache=Cache(1.0), staleness=3)
    tables.optimizer(SGD())
    ids = torch.arange(ROWS)
    tables({"words": ids})
    values = torch.randn(ROWS, 4, dtype=torch.float64)
    tables.set_weights("words", values)
    assert torch.equal(tables({"words": ids})["words"], values)
    tables.save(tmp_path, step=0)
    tables.set_weights("words", values + 1)
    assert torch.equal(tables({"words": ids})["words"], values + 1)
    tables.restore(tmp_path)
    assert torch.equal(tables({"words": ids})["words"], values)


def test_a_stream_pulls_a_row_once_for_all_batches_that_wait_for_it(make: Any) -> None:
    tables = make([COUNTERS], cache=Cache(0.0))
    ids = [[1, 2], [2, 3], [9], [3, 1], [2]]
    batches = [{"words": torch.tensor(each)} for each in ids]
    with tables.stream(batches, 2) as stream:
        for batch, out in stream:
            assert len(out["words"]) == len(batch["words"])
    # Of 8 rows, the second 2 and the second 3 are held; 1 and the last 2 are too far.
    moved = tables.traffic()["words"]
    assert (moved.rows, moved.hits) == (8, 2)


def test_caches_that_cannot_keep_the_promise_are_refused(make: Any) -> None:
    tables = make(cache=Cache(0.1))
    with pytest.raises(ConfigurationError, match="have staleness=0, so no cached row is valid"):
        tables.optimizer(SGD())
    with pytest.raises(ConfigurationError, match=r"needs a limit of its own"):
        make(name="a", staleness=None, cache=Cache(0.1))
    with pytest.raises(ConfigurationError, match="steps=3, and the tables staleness=2"):
        make(name="b", staleness=2, cache=Cache(0.1, steps=3))
    with pytest.raises(ConfigurationError, match="not among the trainers"):
        make(name="c", trainers=[OTHER], staleness=2, cache=Cache(0.1))


# Low precision

BOUNDS = {"fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2}


@pytest.mark.parametrize("form", ["fp16", "bf16", "int8"])
def test_training_in_low_precision_is_near_that_without(form: Any) -> None:
    plan = plan_tables(configs_of(torch.float32), SERVERS)
    me = [rpc.get_worker_info().name]
    exact, _, _ = train(plan, me, 0, "sgd", 5, torch.float32)
    found, _, _ = train(plan, me, 0, "sgd", 5, torch.float32, wire=Wire(form, form))
    errors = [float((found[name] - exact[name]).abs().max()) for name in exact]
    assert 0 < max(errors) < BOUNDS[form]


def test_two_trainers_in_low_precision_repeat_bit_by_bit() -> None:
    plan = plan_tables(configs_of(torch.float32), SERVERS)
    trainers = [rpc.get_worker_info().name, OTHER]
    runs = []
    for _ in range(2):
        given = (plan, trainers, 1, "adagrad", 4, torch.float32)
        options = {"wire": Wire("fp16", "int8")}
        other = rpc.rpc_async(OTHER, train, args=given, kwargs=options)
        runs.append(train(plan, trainers, 0, "adagrad", 4, torch.float32, **options)[0])
        other.wait()
    for name, values in runs[0].items():
        assert torch.equal(values, runs[1][name])


@pytest.mark.parametrize(
    ("wire", "pulled", "pushed"),
    [(Wire("fp16", "int8"), 4 + 2 * 6, 4 + 6 + 4), (Wire("int8"), 4 + 6 + 4, 4 + 8 * 6)],
)
def test_the_bytes_of_messages_are_counted(make: Any, wire: Wire, pulled: int, pushed: int) -> None:
    tables = make(wire=wire)
    optimizer = tables.optimizer(SGD())
    tables({"pages": torch.tensor([5, 5, 8])})["pages"].sum().backward()
    optimizer.step()
    moved = tables.traffic()["pages"]
    assert (moved.rows, moved.pulled_bytes, moved.pushed_bytes) == (2, 2 * pulled, 2 * pushed)


def test_sums_of_bags_travel_in_low_precision_too() -> None:
    config = TableConfig("bags", 500, 32, "sum", torch.float64)
    plan = plan_tables([config], SERVERS, places={"bags": TableWise(SERVERS[0])})
    ids = Jagged(torch.arange(500), torch.tensor([0, 250]))  # Sums move fewer bytes than rows.
    with torch.no_grad():
        exact = Tables(plan, name="exact")({"bags": ids})["bags"]
    tables = Tables(plan, name="int8", wire=Wire("int8", "int8"))
    optimizer = tables.optimizer(SGD(lr=1.0))
    before = tables.weights("bags")
    found = tables({"bags": ids})["bags"]
    error = (found - exact).abs().amax(1)
    assert bool((error <= exact.abs().amax(1) / 254 * (1 + 1e-6)).all())
    assert bool((error > 0).all())
    (found * 3).sum().backward()
    optimizer.step()
    change = before - tables.weights("bags")
    assert torch.allclose(change, torch.full_like(change, 3.0), rtol=1e-6)
    tables.close()


# A text


def test_a_generated_text_has_the_hits_that_a_count_finds(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = skewed(20 * 35 * 12, 3000, generator).tolist()
    path = tmp_path / "text"
    path.write_text("\n".join(" ".join(map(str, ids[k : k + 19])) for k in range(0, len(ids), 19)))
    words, batches = read_batches([path])
    assert len(batches) == 12
    assert sum(batch.numel() for batch in batches) == 12 * 700
    last: dict[int, int] = {}
    pulled = needed = 0
    for number, batch in enumerate(batches):
        for word in batch.unique().tolist():
            needed += 1
            pulled += number - last.get(word, -100) > 3
            last[word] = number
    left = share_left_by_look_ahead(SERVERS[0], words, batches, 3)
    assert left == pytest.approx(pulled / needed)
    first, second = hits_by_pass(SERVERS[0], words, batches, Cache(1.0))
    assert first == pytest.approx(1 - len(last) / needed)
    assert second == 1
    counts = Counter(word for batch in batches for word in batch.unique().tolist())
    kept = sum(count for _, count in counts.most_common(words // 10))
    found = hits_of_most_frequent(words, batches, 0.1)
    assert found == pytest.approx(kept / counts.total())
    assert hits_in_training(SERVERS[0], words, batches, 1) > 0


@pytest.mark.timeout(300)  # two thousand lookups
@pytest.mark.skipif(TEXTS not in os.environ, reason=f"{TEXTS} does not name a folder with texts")
def test_wikitext_has_the_hits_of_the_page() -> None:
    folder = Path(os.environ[TEXTS])
    words, batches = read_batches([folder / "valid.txt", folder / "test.txt"])
    assert (words, len(batches)) == (18_328, 661)
    assert hits_of_most_frequent(words, batches, 0.1) == pytest.approx(0.65, abs=0.001)
    for hits in hits_by_pass(SERVERS[0], words, batches, Cache(0.1)):
        assert hits == pytest.approx(0.65, abs=0.02)
    assert share_left_by_look_ahead(SERVERS[0], words, batches, 10) == pytest.approx(0.38, abs=0.01)
