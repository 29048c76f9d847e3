"""The address where a worker listens, the one that it announces, and its peers' versions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore

from torchweft.engine.protocol.registration import Registration
from torchweft.engine.worker.peers import Members
from torchweft.errors import ConfigurationError
from torchweft.rpc import joining
from torchweft.rpc.joining import _compare_versions, _where_to_listen
from torchweft.rpc.options import RpcBackendOptions
from torchweft.secret import Secret

SECRET = Secret(b"sixteen bytes at least")
NEAR = ("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(
    ("listen", "secret", "store_host", "expected"),
    [
        ("", None, "10.0.0.1", NEAR),
        ("", None, "", NEAR),
        ("", SECRET, "", NEAR),
        ("", SECRET, "unknown", NEAR),
        ("", SECRET, "127.0.0.1", NEAR),
        ("", SECRET, "10.0.0.1", ("10.0.0.2", "10.0.0.2")),
        ("127.0.0.1", SECRET, "10.0.0.1", NEAR),
        ("10.0.0.9", SECRET, "10.0.0.1", ("10.0.0.9", "10.0.0.9")),
        ("0.0.0.0", SECRET, "10.0.0.1", ("0.0.0.0", "10.0.0.2")),
        ("::", SECRET, "10.0.0.1", ("::", "10.0.0.2")),
        ("0.0.0.0", SECRET, "127.0.0.1", ("0.0.0.0", "127.0.0.1")),
    ],
)
def test_where_a_worker_listens(
    monkeypatch: pytest.MonkeyPatch,
    listen: str,
    secret: Secret | None,
    store_host: str,
    expected: tuple[str, str],
) -> None:
    options = use(monkeypatch, listen, secret, store_host)
    assert _where_to_listen(options, HashStore()) == expected


@pytest.mark.parametrize("listen", ["0.0.0.0", "::"])
def test_all_addresses_where_nothing_says_which_one_others_reach(
    monkeypatch: pytest.MonkeyPatch, listen: str
) -> None:
    options = use(monkeypatch, listen, SECRET, "")
    with pytest.raises(ConfigurationError, match="set WEFT_LISTEN"):
        _where_to_listen(options, HashStore())


def test_other_versions_are_warned_of_once_for_each_difference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = {"Python": "3.11", "torch": "2.12.0", "Weft": "0.1.0"}
    me = registration(0, {**other, "torch": "2.13.0"})
    others = [registration(rank, other) for rank in (1, 2)]
    others.append(registration(3, {**other, "Python": "3.12"}))
    others.append(registration(4, {**other, "torch": "2.13.0"}))
    members = Members(me, others, is_open=False)
    members.on_joined(partial(_compare_versions, me, set()))
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "worker 'worker1' has other versions than worker 'worker0', this one: "
        "torch 2.12.0 (here 2.13.0)",
        "worker 'worker3' has other versions than worker 'worker0', this one: "
        "Python 3.12 (here 3.11), torch 2.12.0 (here 2.13.0)",
    ]


def registration(rank: int, versions: dict[str, str]) -> Registration:
    return Registration(f"worker{rank}", rank, (), facts={"versions": versions})


def use(
    monkeypatch: pytest.MonkeyPatch, listen: str, secret: Secret | None, store_host: str
) -> Any:
    ways = {"10.0.0.1": "10.0.0.2", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(joining.rendezvous, "host_of", lambda store: store_host)
    monkeypatch.setattr(joining, "own_address_towards", lambda host: ways.get(host, ""))
    return RpcBackendOptions(listen=listen, secret=secret)
