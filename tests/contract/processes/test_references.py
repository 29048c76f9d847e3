"""``RRef``: use, passing on, failing values, and that nothing stays when all handles are gone.

The ``group`` fixture checks after every test that no worker has kept a reference.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests import remains
from tests.contract.processes import functions
from tests.contract.processes.functions import Tracked, wait_until
from torchweft import rpc
from torchweft.errors import CallTimeout, ConfigurationError, SerializationError
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")
EVERYBODY = ["driver", "worker0", "worker1"]


def alive_on(worker: str) -> int:
    count: int = rpc.rpc_sync(worker, functions.count_tracked)
    return count


def await_end_on(worker: str) -> None:
    wait_until(lambda: alive_on(worker) == 0, lambda: f"values live on {worker}")


def await_confirmation_at(worker: str, reference: rpc.RRef[Any]) -> None:
    wait_until(
        lambda: bool(rpc.rpc_sync(worker, functions.is_confirmed, args=(reference,))),
        lambda: f"the owner never confirmed {worker}",
    )


# Use


@pytest.mark.parametrize("owner", EVERYBODY)
def test_a_value_lives_as_long_as_its_reference(group: Cluster, owner: str) -> None:
    reference = rpc.remote(owner, Tracked, args=(5,))
    assert reference.to_here().content == 5
    assert reference.owner() == rpc.get_worker_info(owner)
    assert reference.owner_name() == owner
    assert reference.is_owner() == (owner == "driver")
    wait_until(reference.confirmed_by_owner, lambda: "the owner never confirmed")
    assert alive_on(owner) == 1
    del reference
    await_end_on(owner)


def test_a_value_of_ones_own(group: Cluster) -> None:
    value = Tracked([1])
    reference = rpc.RRef(value, type_hint=Tracked)
    assert reference.is_owner()
    assert reference.confirmed_by_owner()
    assert reference.local_value() is reference.to_here() is value
    assert rpc.rpc_sync("worker0", functions.fetch_content, args=(reference,)) == [1]
    assert reference.rpc_sync().get() == [1]
    del reference, value
    await_end_on("driver")


def test_local_value_is_for_the_owner(group: Cluster) -> None:
    reference = rpc.remote("worker0", Tracked)
    with pytest.raises(ConfigurationError, match=r"owner only.*'worker0'.*to_here\(\)"):
        reference.local_value()


def test_three_kinds_of_proxy(group: Cluster) -> None:
    for owner in EVERYBODY:
        reference = rpc.remote(owner, functions.Accumulator, args=(1.0,))
        assert reference.rpc_sync().add(1.0) == 2.0
        assert reference.rpc_async().add(1.0).wait() == 3.0
        assert reference.remote().add(1.0).to_here() == 4.0
        assert reference.rpc_sync()(amount=1.0) == 5.0
        assert reference.rpc_sync(timeout=5).where() == owner
        assert reference.rpc_sync().unit_of(2) == "2 steps"
        with pytest.raises(LookupError, match=r"at 5\.0"):
            reference.rpc_sync().fail()
        with pytest.raises(LookupError, match=r"at 5\.0"):
            reference.remote().fail().to_here()
        with pytest.raises(AttributeError, match="no_such_method"):
            reference.rpc_sync().no_such_method()


def test_proxies_travel(group: Cluster) -> None:
    reference = rpc.remote("worker0", functions.Accumulator, args=(1.0,))
    for proxy in (reference.rpc_sync(timeout=5), reference.rpc_async()):
        sent = rpc.rpc_sync("worker1", functions.identity, args=(proxy,))
        assert repr(sent) == repr(proxy)
    assert sent.add(1.0).wait() == 2.0


def test_references_are_copied_by_reference_and_never_pickled(group: Cluster) -> None:
    reference = rpc.remote("worker0", Tracked)
    assert copy.deepcopy([reference])[0] is copy.copy(reference) is reference
    with pytest.raises(SerializationError, match="arguments or the result of an RPC"):
        pickle.dumps(reference)
    assert "'worker0'" in repr(reference)


# Passing references on


def test_user_to_user(group: Cluster) -> None:
    reference = rpc.remote("worker0", Tracked, args=("x",))
    assert rpc.rpc_sync("worker1", functions.fetch_content, args=(reference,)) == "x"
    rpc.rpc_sync("worker1", functions.keep, args=("mine", reference))
    await_confirmation_at("worker1", reference)
    del reference
    given = rpc.rpc_sync("worker1", functions.give, args=("mine",))
    rpc.rpc_sync("worker1", functions.drop, args=("mine",))
    assert given.to_here().content == "x"
    del given
    await_end_on("worker0")


def test_owner_to_user_and_user_to_owner(group: Cluster) -> None:
    reference = rpc.rpc_sync("worker0", functions.make_reference, args=("x",))
    assert reference.owner_name() == "worker0"
    back = rpc.rpc_sync("worker0", functions.identity, args=(reference,))
    assert back.id == reference.id
    del reference
    assert rpc.rpc_sync("worker0", functions.fetch_content, args=(back,)) == "x"
    mine = rpc.RRef(Tracked("y"))
    home = functions.call_through(["worker0", "worker1", "driver"], functions.identity, (mine,))
    del mine
    assert home.is_owner()
    assert home.local_value().content == "y"


def test_a_reference_made_by_a_third(group: Cluster) -> None:
    made = rpc.rpc_sync("worker0", functions.make_on, args=("worker1", "z"))
    assert made.owner_name() == "worker1"
    assert made.to_here().content == "z"
    home = rpc.rpc_sync("worker0", functions.make_on, args=("driver", "z"))
    assert home.is_owner()
    assert home.to_here().content == "z"


def test_references_in_containers_and_objects(group: Cluster) -> None:
    references = [rpc.remote(name, Tracked, args=(name,)) for name in EVERYBODY]
    content = {"list": references, ("tuple",): (references[0], Tracked(references[1]))}
    back = functions.call_through(["worker0", "worker1"], functions.identity, (content,))
    assert [reference.to_here().content for reference in back["list"]] == EVERYBODY
    assert back["list"][0] is back[("tuple",)][0]
    assert back[("tuple",)][1].content.to_here().content == "worker0"


def test_a_reference_to_a_reference(group: Cluster) -> None:
    inner = rpc.remote("worker1", Tracked, args=("inner",))
    outer = rpc.remote("worker0", functions.identity, args=(inner,))
    del inner
    assert outer.to_here().to_here().content == "inner"
    assert rpc.rpc_sync("worker1", functions.fetch_content, args=(outer.to_here(),)) == "inner"
    of_own = rpc.RRef(rpc.RRef(outer))
    assert of_own.to_here().to_here() is outer


def test_handing_on_by_many_threads(group: Cluster) -> None:
    references = [rpc.remote(name, Tracked, args=(name,)) for name in EVERYBODY]

    def pass_around(number: int) -> bool:
        names = [EVERYBODY[(number + step) % 3] for step in range(4)]
        given = functions.call_through(names, functions.identity, (references,))
        return [reference.to_here().content for reference in given] == EVERYBODY

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(pass_around, range(40)))


def test_churn_leaves_no_trace_in_any_table(group: Cluster) -> None:
    for number in range(100):
        made = rpc.remote(EVERYBODY[number % 3], Tracked, args=(number,))
        rpc.rpc_async(EVERYBODY[(number + 1) % 3], functions.fetch_content, args=(made,)).wait()
    del made
    for name in EVERYBODY:
        wait_until(
            lambda name=name: not rpc.rpc_sync(name, remains.bookkeeping_sizes),  # type: ignore[misc]
            lambda name=name: f"{name}: {rpc.rpc_sync(name, remains.bookkeeping_sizes)}",  # type: ignore[misc]
        )


@pytest.mark.parametrize("way", ["tuple", "list", "keyword"])
def test_a_call_keeps_the_references_among_its_arguments(group: Cluster, way: str) -> None:
    reference = rpc.remote("worker0", Tracked, args=(way,))
    args: Any = [way, reference]
    kwargs = {"value": args.pop()} if way == "keyword" else {}
    given = tuple(args) if way == "tuple" else args
    kept = weakref.ref(reference)
    call = rpc.rpc_async("worker0", functions.pass_gate, args=given, kwargs=kwargs)
    # The program may use them for the next call.
    args.clear()
    kwargs.clear()
    del reference, given
    assert kept() is not None
    rpc.rpc_sync("worker0", functions.open_gate, args=(way,))
    assert call.wait().to_here().content == way
    wait_until(lambda: kept() is None, lambda: "the call keeps its arguments after its end")


# Values that are still being computed, or failed


@pytest.mark.parametrize("owner", ["driver", "worker0"])
def test_fetching_what_is_being_made_holds_no_thread(group: Cluster, owner: str) -> None:
    reference = rpc.remote(owner, functions.pass_gate, args=(f"making {owner}", 5))
    fetches = [
        rpc.rpc_async(name, functions.call_through, args=([], fetch, (reference,)))
        for name in ("worker0", "worker1")
        for _ in range(8)
    ]
    calls = [reference.rpc_async().bit_length() for _ in range(8)]
    references = [reference.remote().bit_length() for _ in range(8)]
    with pytest.raises(CallTimeout, match="RPC ran for more than"):
        reference.to_here(timeout=0.05)
    rpc.rpc_sync(owner, functions.open_gate, args=(f"making {owner}",))
    assert torch.futures.wait_all(fetches) == [5] * 16
    assert torch.futures.wait_all(calls) == [3] * 8
    assert [made.to_here() for made in references] == [3] * 8
    assert reference.to_here() == 5


def fetch(reference: rpc.RRef[Any]) -> Any:
    return reference.to_here()


@pytest.mark.parametrize("owner", ["driver", "worker0"])
def test_a_value_that_failed(group: Cluster, owner: str) -> None:
    reference = rpc.remote(owner, functions.fail_oddly)
    for _ in range(2):
        with pytest.raises(functions.OddError, match="code 7: seven") as caught:
            reference.to_here()
        assert caught.value.code == 7
        with pytest.raises(functions.OddError):
            rpc.rpc_sync("worker1", fetch, args=(reference,))
        with pytest.raises(functions.OddError):
            reference.rpc_sync().anything()
        with pytest.raises(functions.OddError):
            reference.remote().anything().to_here()


@pytest.mark.parametrize("owner", ["driver", "worker0"])
def test_tracebacks_keep_nothing_alive(group: Cluster, owner: str) -> None:
    kept = [rpc.remote("worker1", Tracked)]
    failed = rpc.remote(owner, functions.fail_holding, args=(kept[0],))
    call = rpc.rpc_async(owner, functions.fail_holding, args=(kept[0],))
    for wait in (failed.to_here, call.wait, call.wait):
        with pytest.raises(ValueError, match="of a call with a reference"):
            wait()
    kept.clear()
    await_end_on("worker1")
    with pytest.raises(ValueError, match="of a call with a reference"):
        failed.to_here()


def test_a_call_that_cannot_be_made_leaves_no_reference(group: Cluster) -> None:
    reference = rpc.remote("worker0", Tracked)
    for start in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(SerializationError):
            start("worker1", functions.identity, args=([reference, functions.make_lock()],))
    assert reference.to_here().content is None
    with pytest.raises(SerializationError):
        rpc.rpc_sync("worker1", functions.identity, args=([reference, functions.Unreadable()],))


# Reference cycles


def test_a_circle_through_the_owner_lasts_until_it_is_broken(group: Cluster) -> None:
    first = rpc.remote("worker0", Tracked)
    second = rpc.remote("worker1", Tracked)
    first.rpc_sync().set_other(second)
    second.rpc_sync().set_other(first)
    first.rpc_sync().set_other([second, first])
    del second
    assert alive_on("worker1") == 1
    first.rpc_sync().set_other(None)
    await_end_on("worker1")
    assert alive_on("worker0") == 1


def test_counts_are_of_this_worker(group: Cluster) -> None:
    mine, theirs = rpc.RRef(1), rpc.remote("worker0", Tracked)
    assert remains.count_references() == {"owned": 1, "held": 1}
    assert rpc.rpc_sync("worker0", remains.count_references)["owned"] == 1
    del mine, theirs
