"""Attacks that a member of a group, which has the secret, can try on a strict worker.

Each attack is a row of the table in ``docs/security/attackers.md``, like those of strangers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.contract.processes import attacks, functions
from tests.internal import overridden
from tests.processes import strange_members
from tests.processes.stranger_groups import ATTACKER, OTHER, VICTIM, Group
from tests.processes.strangers import frame
from torchweft.engine.wire.frames import HEADER
from torchweft.engine.wire.messages import Kind

CALLABLES = (
    *(attacks.Model, functions.identity, functions.name_here, strange_members.hold),
    *(strange_members.make_handle, torch.optim.Adam),
)
OPTIONS = {"callables": CALLABLES, "strict": True, "num_worker_threads": 2}
SETTINGS = {
    "WEFT_FRAME_LIMIT_BYTES": str(1 << 24),
    "WEFT_QUEUE_LIMIT_CALLS": "20",
    **overridden(TENSOR_LIMIT=100, CONTROL_LIMIT_BYTES=1 << 20),
}
HUNG_UP = "is welcome, then hung up on"


class MemberRow(NamedTuple):
    """A row of the table: an attack and its expected result.

    ``attack`` gets the path of a file that must not appear.
    """

    title: str
    attack: Callable[[Group, str], str]
    result: str


def _frames(content: bytes, as_worker: str = "") -> Callable[[Group, str], str]:
    def run(group: Group, path: str) -> str:
        said, is_hung_up = group.do(
            ATTACKER, strange_members.send_frames, VICTIM, content, as_worker
        )
        assert is_hung_up
        return HUNG_UP if said == ["welcome"] else ", ".join(said)

    return run


def _call(function: Callable[[str, str], str]) -> Callable[[Group, str], str]:
    return lambda group, path: str(group.do(ATTACKER, function, VICTIM, path))


def _too_many_calls(group: Group, path: str) -> str:
    group.do(ATTACKER, strange_members.begin_many_calls, VICTIM)
    group.do(VICTIM, strange_members.open_gate)
    return ", ".join(group.do(ATTACKER, strange_members.end_many_calls))


MEMBERS = [
    MemberRow(
        "a frame of 1 TiB is announced",
        _frames(HEADER.pack(Kind.CALL, 0, 1, 0, 1) + (1 << 40).to_bytes(8, "little")),
        HUNG_UP,
    ),
    MemberRow(
        "a control part of 1 GiB is announced",
        _frames(HEADER.pack(Kind.CALL, 0, 0, 1 << 30, 1)),
        HUNG_UP,
    ),
    MemberRow(
        "65,535 tensors of 1 GiB are announced",
        _frames(HEADER.pack(Kind.CALL, 0, 65535, 0, 1) + 65535 * (1 << 30).to_bytes(8, "little")),
        HUNG_UP,
    ),
    MemberRow("a message of an unknown kind", _frames(frame(200, b"")), HUNG_UP),
    MemberRow("a greeting in the middle", _frames(frame(Kind.HELLO, b"{}")), HUNG_UP),
    MemberRow("a call whose parts make no sense", _frames(frame(Kind.CALL, b"\xff" * 99)), HUNG_UP),
    MemberRow("says that it is another member", _frames(b"", OTHER), "turned away: crossed"),
    MemberRow(
        "more tensors in a call than the limit",
        _call(strange_members.send_many_tensors),
        "SerializationError",
    ),
    MemberRow("more calls than may wait", _too_many_calls, "QueueFull, its result"),
    MemberRow("calls os.system by its name", _call(strange_members.call_by_name), "NotAllowed"),
    MemberRow(
        "makes an array of objects out of bytes (numpy.ndarray)",
        _call(strange_members.call_ndarray),
        "NotAllowed",
    ),
    MemberRow(
        "a pickle with an array of objects made of bytes, or with a false dtype",
        _call(strange_members.send_arrays),
        "NotAllowed",
    ),
    MemberRow(
        "compiles a module with options of its own (Module.compile)",
        _call(strange_members.compile_module),
        "NotAllowed",
    ),
    MemberRow(
        "calls a function of torch that imports, or writes files",
        _call(strange_members.call_torch),
        "NotAllowed",
    ),
    MemberRow(
        "makes a sparse tensor by methods of tensors, and breaks it",
        _call(strange_members.break_sparse),
        "NotAllowed",
    ),
    MemberRow(
        "sends a sparse tensor that reaches outside its memory",
        _call(strange_members.send_sparse),
        "ProtocolError",
    ),
    MemberRow(
        "sets and dicts of 20,000 keys that all have one hash",
        _call(strange_members.send_one_hash),
        "SerializationError",
    ),
    MemberRow(
        "a nest of lists that each hold the one before twice: 2^60 in 700 bytes",
        _call(strange_members.send_nest),
        "SerializationError",
    ),
    MemberRow(
        "expanded tensors (stride 0) of 2^32 elements, within and outside of autograd contexts",
        _call(strange_members.send_expanded),
        "SerializationError",
    ),
    MemberRow(
        "one tensor in 100,000 places",
        _call(strange_members.repeat_tensor),
        "SerializationError",
    ),
    MemberRow(
        "has Weft's entry points for modules call methods of another object",
        _call(strange_members.use_entry_points),
        "ArgumentTypeError, NotAllowed",
    ),
    MemberRow(
        "the same with a module that no RemoteModule made",
        _call(strange_members.use_foreign_module),
        "NotAllowed",
    ),
    MemberRow(
        "asks for a fused optimizer, which looks at no sizes, or for one that is not registered",
        _call(strange_members.fuse),
        "NotAllowed",
    ),
    MemberRow(
        "a pickle that calls os.system (pickle bomb)",
        _call(strange_members.send_pickle),
        "NotAllowed",
    ),
]
