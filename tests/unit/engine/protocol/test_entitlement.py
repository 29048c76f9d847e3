"""The table of what a member may say about others: complete, as documented, and in force."""

from __future__ import annotations

import importlib
import typing
from pathlib import Path
from typing import Any

import pytest

from tests.marked import names_of
from torchweft.engine.codec.registry import (
    REGISTERED_TOGETHER,
    remotely_callable,
    remotely_callable_unless_strict,
)
from torchweft.engine.protocol import backward, references
from torchweft.engine.protocol.backward import (
    CONNECTION,
    PASS_RULES,
    Abort,
    Discover,
    Failed,
    Report,
    Settled,
    check_gradients,
    check_pass_message,
    check_released,
)
from torchweft.engine.protocol.leaving import ClosedLeaving, Leader, Leaving, Step
from torchweft.engine.protocol.references import (
    REFERENCE_RULES,
    Drop,
    DropAck,
    Gone,
    Hold,
    HoldAck,
    NotCreated,
    check_reference_message,
)
from torchweft.engine.protocol.registration import LEADER
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId, scoped_id

PAGE = Path(__file__).parents[4] / "docs/security/members.md"
ME, OTHER, LIAR = 1, 0, 2
SOURCE = Path(__file__).parents[4] / "src/torchweft"


def names_on_page() -> set[str]:
    return {line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")}


def modules_with(text: str) -> set[str]:
    return {
        "torchweft." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in SOURCE.rglob("*.py")
        if text in path.read_text()
    }


def test_every_message_has_a_rule() -> None:
    assert REFERENCE_RULES.keys() == set(typing.get_args(references.Message))
    assert PASS_RULES.keys() == set(typing.get_args(backward.Message)) - {backward.Gradients}


def test_the_page_has_a_row_for_each_message_function_and_port_of_members() -> None:
    messages = {kind.name for kind in Kind}
    messages |= {kind.__name__ for kind in (*REFERENCE_RULES, *PASS_RULES)}
    names = names_of(remotely_callable, remotely_callable_unless_strict)
    callable_by_all = {name.partition(":")[0] for name in names}
    named = {
        each.__module__
        for package in REGISTERED_TOGETHER
        for each in importlib.import_module(package).CALLABLES
        if not (isinstance(each, type) and issubclass(each, Exception))
    }
    exposing = modules_with("\n    @expose\n")
    opening = modules_with("_ports.open(")
    assert names_on_page() == messages | callable_by_all | named | exposing | opening


def takes(machine: Leaving, sender: int, step: Step) -> bool:
    try:
        machine.received(sender, step, [0, 0, 0])
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize("step", Step)
def test_steps_of_a_shutdown(step: Step) -> None:
    is_led = step in (Step.PROBE, Step.SETTLE, Step.CLOSE)
    assert takes(ClosedLeaving(), LEADER, step) is is_led
    assert not takes(ClosedLeaving(), LIAR, step)
    is_for_leader = step in (Step.READY, Step.REPORT, Step.SETTLED)
    assert takes(Leader({LEADER, ME, LIAR}), LIAR, step) is is_for_leader


def test_messages_that_are_released_are_of_the_receiver() -> None:
    own, others = scoped_id(ME, 5), scoped_id(OTHER, 5)
    check_released(ME, LIAR, [own])
    with pytest.raises(ProtocolError, match="releases message"):
        check_released(ME, LIAR, [own, others])


OWN_VALUE, THEIR_VALUE = ReferenceId(OTHER, ME, 3), ReferenceId(LIAR, LIAR, 3)
STATEMENTS: list[tuple[Any, bool]] = [
    (Hold(OWN_VALUE, 1, 0), True),
    (Drop(OWN_VALUE, 1), True),
    (Hold(ReferenceId(ME, OTHER, 3), 1, 0), False),
    (Drop(THEIR_VALUE, 1), False),
    (NotCreated(ReferenceId(LIAR, ME, 3)), True),
    (NotCreated(OWN_VALUE), False),
    *((kind(THEIR_VALUE, 1), True) for kind in (HoldAck, Gone, DropAck)),
    *((kind(ReferenceId(ME, OTHER, 3), 1), False) for kind in (HoldAck, Gone, DropAck)),
]


@pytest.mark.parametrize(("message", "is_right"), STATEMENTS, ids=repr)
def test_statements_about_references(message: Any, is_right: bool) -> None:
    try:
        check_reference_message(ME, LIAR, message)
    except ProtocolError:
        assert not is_right
    else:
        assert is_right


OF_ME, OF_OTHER, OF_LIAR = (scoped_id(worker, 7) for worker in (ME, OTHER, LIAR))
PARTS: list[tuple[int, Any, bool]] = [
    (OF_LIAR, Settled(), True),
    (OF_OTHER, Settled(), False),
    (OF_LIAR, Discover((scoped_id(ME, 1),)), True),
    (OF_LIAR, Discover((scoped_id(OTHER, 1),)), False),
    (OF_OTHER, Discover(()), False),
    (OF_ME, Discover(()), False),
    (OF_ME, Failed(LIAR, "mul", b""), True),
    (OF_ME, Failed(OTHER, "mul", b""), False),
    (OF_ME, Failed(OTHER, CONNECTION, b""), True),
    (OF_OTHER, Failed(LIAR, "mul", b""), False),
    (OF_ME, Abort(), False),
    (OF_OTHER, Abort(), True),
    (OF_OTHER, Report(backward.Progress()), True),
]


@pytest.mark.parametrize(("pass_id", "message", "is_right"), PARTS, ids=repr)
def test_messages_of_passes(pass_id: int, message: Any, is_right: bool) -> None:
    try:
        check_pass_message(ME, LIAR, pass_id, message)
    except ProtocolError:
        assert not is_right
    else:
        assert is_right


def test_gradients_are_of_messages_that_were_sent_to_their_sender() -> None:
    own, recorded = scoped_id(ME, 3), scoped_id(LIAR, 3)
    check_gradients(ME, LIAR, own, 0, LIAR)
    check_gradients(ME, LIAR, own, recorded, None)
    wrong = [
        (own, 0, OTHER),
        (scoped_id(OTHER, 3), 0, None),
        (0, 0, None),
        (own, scoped_id(OTHER, 3), LIAR),
    ]
    for message_id, recorded_id, to_worker in wrong:
        with pytest.raises(ProtocolError, match="sends gradients of message"):
            check_gradients(ME, LIAR, message_id, recorded_id, to_worker)
