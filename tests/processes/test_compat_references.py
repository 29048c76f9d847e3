"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import Tracked, options
from tests.contract.processes.test_compat_references import unmade
from torchweft import rpc
from torchweft.compat.rpc import RRef, api
from torchweft.compat.rpc.rref_proxy import RRefProxy
from torchweft.errors import CallTimeout, NotOwner
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors")


@pytest.fixture(scope="module")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    compat = options(reference_type=RRef)  # type: ignore[arg-type]
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=compat) as group:
        yield group


def test_text_numbers_what_the_process_has_made(group: Cluster) -> None:
    own = RRef(1)
    first = own._local_id
    other = api.remote("worker0", Tracked)
    me = rpc.get_worker_info().id
    assert str(own) == f"OwnerRRef(GloballyUniqueId(created_on={me}, local_id={first}))"
    assert str(other) == (
        f"UserRRef(RRefId = GloballyUniqueId(created_on={me}, local_id={first + 1}), "
        f"ForkId = GloballyUniqueId(created_on={me}, local_id={first + 2}))"
    )
    there = rpc.get_worker_info("worker0").id
    assert f"created_on={there}" in str(rpc.rpc_sync("worker0", functions.make_reference))
    with pytest.raises(NotOwner, match=rf"For UserRRef.*local_id={first + 2}\).*Call it on owner"):
        other.local_value()


def test_a_proxy_knows_the_methods_where_no_result_tells(group: Cluster) -> None:
    reference = api.remote("worker0", functions.Accumulator, (1.0,))
    for proxy in (reference.remote(), RRefProxy(reference, api.remote)):
        with pytest.raises(AttributeError, match="has no attribute 'non_exist'"):
            proxy.non_exist()
        assert proxy.unit_of(2).to_here() == "2 steps"
    with pytest.raises(AttributeError, match="has no attribute 'non_exist'"):
        reference.rpc_sync().non_exist()
    with pytest.raises(AttributeError, match="has no attribute 'non_exist'"):
        reference.rpc_async().non_exist().wait()
    too_late = pytest.raises(CallTimeout, match="RPC ran for more than")
    with unmade("worker0", "proxy") as slow, too_late:
        slow.remote(timeout=0.05).bit_length()
