"""Tables, gates, snapshots and weights of one member, and another one that speaks in its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchweft import checkpoint, embedding, hybrid, rl, rpc, weights
from torchweft.checkpoint import StepGate, gate, owners
from torchweft.embedding import (
    SGD,
    TableConfig,
    Tables,
    client,
    plan_tables,
)
from torchweft.embedding.server import Options
from torchweft.errors import CheckpointError, ConfigurationError, NotAllowed
from torchweft.hybrid.clipping import measure
from torchweft.weights import Publisher, Subscriber, publisher
from torchweft.weights.versions import Version

LIMIT_S = 20.0
HONEST, SERVER, LIAR = "honest", "server", "liar"
RANKS = {HONEST: 0, SERVER: 1, LIAR: 2}
PACKAGES = (checkpoint, embedding, hybrid, rl, weights)
WORDS = TableConfig("words", 4, 2, "none", torch.float64)
STEP = "step"
FILE = "000001-step1-0123abcd", "1-server.pt"

_kept: dict[str, Any] = {}


def join(name: str, method: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    callables: list[Any] = [each for package in PACKAGES for each in package.CALLABLES]
    is_strict = name == SERVER
    options = rpc.RpcBackendOptions(
        init_method=method,
        init_timeout=LIMIT_S,
        rpc_timeout=LIMIT_S,
        strict=is_strict,
        callables=tuple(callables) if is_strict else (),
    )
    rpc.init_rpc(name, rank=RANKS[name], world_size=len(RANKS), rpc_backend_options=options)


def shared(what: str) -> Any:
    """Returns a reference that members may be given, such as that of a gate."""
    return _kept[what]


# What the honest member makes, and how it finds it at last


def begin(directory: str) -> None:
    plan = plan_tables([WORDS], [SERVER], trainers=1)
    tables = Tables(plan, name="alone", trainers=[HONEST])
    _kept["optimizer"] = tables.optimizer(SGD(lr=0.5))
    _kept["tables"], _kept["before"] = tables, tables.weights("words")
    members = HONEST, SERVER
    grouped = Options(plan.layout, members, 0, True, 0, groups=(members,))
    _kept["options"] = grouped
    _kept["host"] = tables._client._hosts.references[SERVER]
    _kept["group"], _ = rpc.rpc_sync(HONEST, client.join, ("grouped", grouped, 0, 0, {}, LIMIT_S))
    made = StepGate()
    _kept["gate"] = made.reference
    rpc.rpc_sync(HONEST, gate._begin, (made.reference, STEP, False))
    *_, _kept["part"] = rpc.rpc_sync(SERVER, owners.capture, ({}, False))
    _kept["publisher"] = rpc.RRef(Publisher(nn.Linear(2, 1)))
    _kept["inbox"] = rpc.rpc_sync(SERVER, follow, (_kept["publisher"],))
    _kept["directory"] = directory


@rpc.register
def follow(of: rpc.RRef[Publisher]) -> rpc.RRef[Any]:
    _kept["module"] = nn.Linear(2, 1)
    subscriber = Subscriber(of, _kept["module"], timeout=LIMIT_S)
    _kept["subscriber"] = subscriber
    return subscriber._inbox


@rpc.register
def take(timeout_s: float) -> int:
    subscriber: Subscriber = _kept["subscriber"]
    return subscriber.update(timeout_s)


def finish() -> dict[str, Any]:
    """Uses everything once; returns what came of it."""
    tables, found = _kept["tables"], dict[str, Any]()
    _kept["optimizer"].zero_grad()
    tables({"words": torch.tensor([1])})["words"].sum().backward()
    _kept["optimizer"].step()
    found["moved"] = (_kept["before"] - tables.weights("words")).tolist()
    tables.close()
    found["inside"] = rpc.rpc_sync(HONEST, gate._inside, (_kept["gate"],))
    given = _kept["part"], _kept["directory"], *FILE
    found["written"] = rpc.rpc_sync(SERVER, owners.write, given)[0] > 0
    _kept["publisher"].local_value().publish()
    found["version"] = rpc.rpc_sync(SERVER, take, (LIMIT_S,))
    _kept["group"].rpc_sync().close()
    return found


# The liar


def tell(lie: str) -> str:
    """Tells a lie; returns the error, or the answer."""
    try:
        return repr(LIES[lie]())
    except (NotAllowed, ConfigurationError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"


def _told(what: str) -> Any:
    return rpc.rpc_sync(HONEST, shared, (what,))


def _push(trainer: int) -> Any:
    pushes = [(0, 1, [(torch.tensor([1]), torch.full((1, 2), 9.0, dtype=torch.float64))])]
    return _told("host").rpc_sync().push(trainer, 0, 100.0, 0, pushes)


def _announce() -> Any:
    life = _told("publisher").rpc_sync().subscribe(rpc.RRef(3)).publisher
    return rpc.rpc_sync(SERVER, publisher.announce, (_told("inbox"), Version(life, 99)))


def _write() -> Any:
    return rpc.rpc_sync(SERVER, owners.write, (_told("part"), _told("directory"), *FILE))


def _join_group() -> Any:
    # Its own options name it a member of the group that others have made.
    options = _told("options")._replace(groups=((HONEST, LIAR),), trainers=(HONEST, LIAR))
    return rpc.rpc_sync(HONEST, client.join, ("grouped", options, 0, 0, {}, LIMIT_S))


_MAY_NOT = f"NotAllowed: worker {LIAR!r} may not"
_KEY = "alone", "token", 1
LIES: dict[str, Callable[[], Any]] = {
    "a push of another trainer": lambda: _push(0),
    "a push of the last trainer": lambda: _push(-1),
    "a pull of another trainer": lambda: _told("host").rpc_sync().pull(0, 0, []),
    "another trainer closes tables": lambda: _told("host").rpc_sync().close(),
    "gradients of another trainer": lambda: rpc.rpc_sync(SERVER, measure, (_KEY, 0, 2.0, True, {})),
    "another is in the group": lambda: rpc.rpc_sync(
        HONEST, client.join, ("grouped", _told("options"), 0, 0, {}, LIMIT_S)
    ),
    "this worker is in the group": _join_group,
    "a push of another member": lambda: _told("group").rpc_sync().push(1, 0, 0.1, 0, {}),
    "a pull of another member": lambda: _told("group").rpc_sync().pull(1, 0, {}),
    "another member leaves": lambda: _told("group").rpc_sync().close(),
    "another's step has ended": lambda: rpc.rpc_sync(HONEST, gate._end, (_told("gate"), STEP)),
    "another's part is dropped": lambda: rpc.rpc_sync(SERVER, owners.drop, (_told("part"),)),
    "another's part is written": _write,
    "another's version": _announce,
    "another's subscription ends": lambda: (
        _told("publisher").rpc_sync().unsubscribe(_told("inbox"))
    ),
}
NOT_USED = f"ConfigurationError: worker {LIAR!r} does not use tables"
OUTCOMES = {
    "a push of the last trainer": "ConfigurationError: trainer -1 of 1 does not exist",
    "another trainer closes tables": f"{NOT_USED} 'alone' on worker {SERVER!r}",
    "another member leaves": f"{NOT_USED} 'grouped' on worker {HONEST!r}",
    "another's step has ended": "None",
    "another's part is dropped": "None",
    "another's part is written": f"CheckpointError: worker {SERVER!r} holds nothing for worker "
    f"{LIAR!r}",
    "another's version": "False",
}
"""How the answers begin; those of the other lies name both workers."""


def expected(lie: str) -> str:
    return OUTCOMES.get(lie, _MAY_NOT)
