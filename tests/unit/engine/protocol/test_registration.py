from __future__ import annotations

import json

import pytest

from torchweft.engine.protocol.registration import (
    Directory,
    Registration,
    assemble,
    why_apart,
    why_not_by_value,
)
from torchweft.errors import (
    ConfigurationError,
    ProtocolError,
)


def registration(rank: int, name: str = "") -> Registration:
    addresses = (f"unix:@{rank}", f"tcp:h:{rank}")
    return Registration(name or f"worker{rank}", rank, addresses, main="train", facts={"a": [1]})


def group(*ranks: int) -> dict[int, Registration]:
    return {rank: registration(rank) for rank in ranks}


def placed(rank: int, network: object, *, is_far: bool, has_secret: bool) -> Registration:
    facts = {
        "host": f"host-{network}",
        "network": network,
        "is_far": is_far,
        "has_secret": has_secret,
    }
    return Registration(f"worker{rank}", rank, (), facts=facts)


def test_workers_of_two_hosts_without_a_secret_are_told_how_to_get_one() -> None:
    workers = [placed(rank, "aab"[rank], is_far=False, has_secret=False) for rank in range(3)]
    said = why_apart(workers)
    assert "'worker0' (rank 0, host host-a) and worker 'worker2' (rank 2, host host-b)" in said
    assert "torchweft secret new weft.secret" in said
    assert "export WEFT_SECRET_FILE=weft.secret" in said
    assert why_apart(reversed(workers))


def running(rank: int, versions: object) -> Registration:
    return Registration(f"worker{rank}", rank, (), facts={"versions": versions})


HERE = {"Python": "3.11", "torch": "2.13.0+cpu", "Weft": "0.1.0"}


def test_functions_by_value_stay_within_one_minor_version_of_python() -> None:
    mine, same = running(0, HERE), running(1, {**HERE, "torch": "2.12.0"})
    assert why_not_by_value(mine, same) == ""
    assert why_not_by_value(mine, running(1, {})) == ""
    said = why_not_by_value(mine, running(1, {**HERE, "Python": "3.12"}))
    assert said.startswith("worker 'worker1' runs Python 3.12, this one 3.11: functions do not")


def strict_about_versions(rank: int, torch: str, *, refuses: bool = True) -> Registration:
    facts = {"versions": {**HERE, "torch": torch}, "refuses_versions": refuses, "host": f"h{rank}"}
    return Registration(f"worker{rank}", rank, (), facts=facts)


def test_another_minor_version_of_torch_is_refused_to_all() -> None:
    first, alike = strict_about_versions(0, "2.13.0+cpu"), strict_about_versions(1, "2.13.1")
    assert not assemble({0: first, 1: alike}, 2, "token", 0.5).refusal
    other = strict_about_versions(1, "2.7.1", refuses=False)
    with pytest.raises(ConfigurationError) as caught:
        assemble({0: first, 1: other}, 2, "token", 0.5)
    assert str(caught.value).startswith(
        "the workers run different versions of torch: torch 2.13.0+cpu on worker 'worker0' "
        "(rank 0, host h0), torch 2.7.1 on worker 'worker1' (rank 1, host h1). Install one "
        "version on all hosts, for instance: pip install torch==2.13.0."
    )
    allowed = strict_about_versions(0, "2.13.0", refuses=False)
    assert not assemble({0: allowed, 1: other}, 2, "token", 0.5).refusal
    untold = Registration("worker1", 1, (), facts={"versions": {"torch": 2}})
    assert not assemble({0: first, 1: untold}, 2, "token", 0.5).refusal


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token", 1),
        ("refusal", None),
        ("missing", ["1"]),
        ("kind", 0),
        ("workers", [1]),
    ],
)
def test_a_directory_with_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    told = {**json.loads(assemble(group(0), 1, "token", 0.5).encode()), field: value}
    with pytest.raises(ProtocolError, match="is malformed"):
        Directory.decode(json.dumps(told).encode())
