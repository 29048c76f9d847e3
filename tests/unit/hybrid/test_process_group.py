"""The back end of a process group, for each line of the table, and what stands against it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import ConfigurationError
from torchweft.hybrid import Facts, choose_backend, gather_facts

ALL = ("gloo", "nccl", "mpi")


def group(device: str = "cpu", backends: tuple[str, ...] = ALL, **networks: bool) -> list[Facts]:
    """Returns two workers on two hosts."""
    return [Facts(f"host{rank}", device, backends, **networks) for rank in range(2)]


@pytest.mark.parametrize(
    ("facts", "backend", "reason"),
    [
        (group("cuda:0", has_infiniband=True), "nccl", "GPUDirect"),
        (group("cuda:0"), "nccl", "Ethernet"),
        (group(has_infiniband=True, has_ip_over_infiniband=True), "gloo", "on which IP runs"),
        (group(has_infiniband=True), "mpi", "without IP"),
        (group(), "gloo", "Ethernet"),
        ([Facts("host"), Facts("host")], "gloo", "one host"),
        # Of one host, no network matters.
        ([Facts("host", has_infiniband=True)] * 2, "gloo", "one host"),
    ],
)
def test_the_table(facts: list[Facts], backend: str, reason: str) -> None:
    choice = choose_backend(facts)
    assert choice.backend == backend
    assert reason in choice.reason
    assert not choice.passed_over


def test_a_back_end_that_is_missing_is_passed_over_and_named() -> None:
    facts = group("cuda:0", ("gloo",))
    assert str(choose_backend(facts)) == (
        "gloo: GPUs without NCCL: broadcast and all-reduce through host memory; "
        "not nccl: PyTorch of rank 0 on host0 is built without it"
    )
    facts = group(backends=("gloo",), has_infiniband=True)
    assert "slower network" in choose_backend(facts).reason
    assert choose_backend(group(backends=("mpi",))).backend == "mpi"


def test_ranks_that_share_a_gpu_cannot_use_nccl() -> None:
    choice = choose_backend([Facts("host", "cuda:0", ALL)] * 2)
    assert choice.backend == "gloo"
    assert choice.passed_over == (("nccl", "2 ranks share cuda:0 of host"),)
    apart = [Facts("host", f"cuda:{rank}", ALL) for rank in range(2)]
    assert choose_backend(apart).backend == "nccl"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ([], "no worker"),
        ([Facts("a"), Facts("b", "cuda:0")], "rank 0 trains on cpu, and rank 1 on cuda:0"),
        ([Facts("a", backends=("nccl",))], "no back end fits all workers: gloo: .*mpi:"),
    ],
)
def test_what_cannot_work_is_said(facts: list[Facts], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose_backend(facts)


facts_of_workers = st.lists(
    st.builds(
        Facts,
        st.sampled_from("ab"),
        st.sampled_from(["cpu", "cuda:0", "cuda:1"]),
        st.sets(st.sampled_from(sorted(ALL))).map(tuple),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@given(facts_of_workers)
def test_a_choice_serves_every_worker(facts: list[Facts]) -> None:
    try:
        choice = choose_backend(facts)
    except ConfigurationError:
        return
    assert all(choice.backend in each.backends for each in facts)
    if choice.backend == "nccl":
        assert len({(each.host, each.device) for each in facts}) == len(facts)
    assert (choice.backend == "nccl") <= all(each.device != "cpu" for each in facts)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_infiniband_is_found_where_the_kernel_shows_it(tmp_path: Path) -> None:
    assert not gather_facts("cpu", tmp_path).has_infiniband
    port = tmp_path / "class/infiniband/mlx5_0/ports/1/state"
    write(port, "1: DOWN")
    assert not gather_facts("cpu", tmp_path).has_infiniband
    write(port, "4: ACTIVE")
    write(tmp_path / "class/net/eth0/type", "1")
    write(tmp_path / "class/net/eth0/operstate", "up")
    found = gather_facts("cpu", tmp_path)
    assert (found.has_infiniband, found.has_ip_over_infiniband) == (True, False)
    write(tmp_path / "class/net/ib0/type", "32")
    write(tmp_path / "class/net/ib0/operstate", "down")
    assert not gather_facts("cpu", tmp_path).has_ip_over_infiniband
    write(tmp_path / "class/net/ib0/operstate", "up")
    assert gather_facts("cpu", tmp_path).has_ip_over_infiniband
