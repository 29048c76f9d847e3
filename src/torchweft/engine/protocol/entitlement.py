"""What a member may say about others: one rule for each kind of message.

Members share a secret, not their aims. A worker keeps most of its state by peer, and then a message
can concern nothing but what it keeps for the sender. The rules check messages that concern others:
there, the sender must be the leader of the pass, the owner of the value, or whoever else
``docs/security/members.md`` names, which has a row for each kind. Those for backward passes and
references are in ``protocol.backward`` and ``protocol.references``. ``worker.receiving`` checks
this before the handler runs. A sender that is not entitled to its message is turned away by name,
and no other member notices.

Backward passes concern workers that do not know each other, so that nobody can check who takes
part. Their numbers are therefore secrets: half of the number of a context is random, a pass is
found by its number and that of its context, and only those that take part are told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torchweft.engine.protocol.leaving import Step
from torchweft.engine.protocol.registration import LEADER
from torchweft.engine.wire.frames import Buffer
from torchweft.engine.wire.messages import Kind, decode_ints, decode_step
from torchweft.errors import ProtocolError
from torchweft.ids import WORKER_SHIFT

Check = Callable[[int, int, Buffer], None]
"""Takes the receiver, the sender and the control part; raises ProtocolError if the sender is not
entitled to the message."""


class Rule(NamedTuple):
    """What is checked of a kind of message.

    Attributes:
        check: Checks what the message itself shows; None where there is nothing to check.
        has_records: Whether the receiver also looks at its records; the handler's module gives the
            check to ``Receiver.on``.
    """

    check: Check | None = None
    has_records: bool = False


def _check_step(me: int, sender: int, control: Buffer) -> None:
    step, _, _ = decode_step(control)
    if step in LED_STEPS and sender != LEADER:
        raise ProtocolError(f"worker {sender} sends shutdown step {step}, which rank 0 alone sends")
    if step in STEPS_TO_LEADER and me != LEADER:
        raise ProtocolError(f"shutdown step {step} is for rank {LEADER} only")


def _check_own_messages(me: int, sender: int, control: Buffer) -> None:
    for message_id in decode_ints(control):
        if message_id >> WORKER_SHIFT != me:
            raise ProtocolError(
                f"worker {sender} releases message {message_id}, which is not of worker {me}"
            )


LED_STEPS = frozenset({Step.PROBE, Step.SETTLE, Step.CLOSE})
"""Steps of a shutdown that rank 0 alone sends."""
STEPS_TO_LEADER = frozenset({Step.READY, Step.REPORT, Step.SETTLED})
"""Steps of a shutdown that rank 0 alone takes."""

RULES: dict[Kind, Rule] = {
    **dict.fromkeys(Kind, Rule()),
    Kind.SHUTDOWN: Rule(_check_step),
    Kind.RELEASE_MESSAGES: Rule(_check_own_messages),
    Kind.BACKWARD: Rule(has_records=True),
    Kind.GRADIENTS: Rule(has_records=True),
}
"""By kind, what is checked. All others can concern only what the receiver keeps for the sender."""
