"""What a member may say about others: one row for each kind of message.

Members share a secret, not their aims. A worker keeps most of its state by peer, and then a message
can concern nothing but what it keeps for the sender. The rows below say so, and name the messages
that concern others: there, the sender must be the leader of the pass, the owner of the value, or
whoever else the row names. ``agent.receiving`` checks this before the handler runs. A sender that
is not entitled to its message is turned away by name, and no other member notices.

Backward passes concern workers that do not know each other, so that nobody can check who takes
part. Their numbers are therefore secrets: half of the number of a context is random, a pass is
found by its number and that of its context, and only those that take part are told.

``docs/security/members.md`` shows this table; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torchweft.errors import ProtocolError
from torchweft.ids import WORKER_SHIFT
from torchweft.protocol.backward import (
    CONNECTION,
    Abort,
    Discover,
    Failed,
    Report,
    Settled,
)
from torchweft.protocol.backward import Message as PassMessage
from torchweft.protocol.membership.leader import Step
from torchweft.protocol.membership.registration import LEADER
from torchweft.wire.frames import Buffer
from torchweft.wire.messages import Kind, decode_ints, decode_step
from torchweft.wire.references import (
    Drop,
    DropAck,
    Gone,
    Handed,
    HandedAck,
    Hold,
    HoldAck,
    Message,
    NotCreated,
    NotHanded,
)

Check = Callable[[int, int, Buffer], None]
"""Takes the receiver, the sender and the control part; raises ProtocolError if the sender is not
entitled to the message."""


class Rule(NamedTuple):
    """One row: who may send a kind of message, and about what.

    Attributes:
        senders: Who may send it.
        about: What it may concern.
        check: Checks what the message itself shows; None where there is nothing to check.
        has_records: Whether the receiver also looks at its records; the handler's module gives the
            check to ``Receiver.on``.
    """

    senders: str
    about: str
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

_ANY = "any member"
_HANDSHAKE = "both sides of a new connection"
_NEVER = "nobody, once the connection is made"
_NOTHING = "nothing: it ends the connection"
_OWN_CALL = "a call of the sender: its own numbers, records and values that it makes; references \
that it hands on; a context whose number it knows"

RULES: dict[Kind, Rule] = {
    Kind.HELLO: Rule(_HANDSHAKE, "the sender itself; later " + _NOTHING),
    Kind.WELCOME: Rule(_HANDSHAKE, "the sender itself; later " + _NOTHING),
    Kind.CHALLENGE: Rule(_HANDSHAKE, "the sender itself; later " + _NOTHING),
    Kind.VOUCHER: Rule(_HANDSHAKE, "the sender itself; later " + _NOTHING),
    Kind.REPORT: Rule("a worker, to an observer", "the worker; to a worker " + _NOTHING),
    Kind.VERDICT: Rule(_ANY, "the channels between the two"),
    Kind.ACKNOWLEDGED: Rule(_ANY, "the session between the two"),
    Kind.GOODBYE: Rule(_ANY, "the sender's own leaving"),
    Kind.CALL: Rule(_ANY, _OWN_CALL),
    Kind.REPLY: Rule("the callee", "a call to the sender"),
    Kind.CANCEL: Rule("the caller", "calls of the sender"),
    Kind.POST: Rule(_ANY, "a port; its owner says whose values it takes"),
    Kind.REFERENCES: Rule(
        "the owner, a user or the creator of the value; both sides of a handover",
        "the sender's own use, creation or handover; its own values",
    ),
    Kind.FAILED: Rule("the owner of a value", "a failed creation at the sender; it is logged"),
    Kind.PULLED: Rule("the receiver of tensors", "tensors sent to the sender"),
    Kind.SUPPLY: Rule("the receiver of tensors", "tensors sent to the sender"),
    Kind.UNSENT: Rule("the sender of tensors", "tensors of the sender"),
    Kind.DATA_BROKEN: Rule("the receiver of tensors", "data connections between the two"),
    Kind.DEVICE_FREED: Rule("the owner of device memory", "memory of the sender"),
    Kind.REMOTE_MEMORY: Rule(_ANY, "remote memory between the two"),
    Kind.BACKWARD: Rule(
        "the leader of the pass, or a worker that takes part in it",
        "a pass of a context whose number the sender knows; its own failure",
        has_records=True,
    ),
    Kind.GRADIENTS: Rule(
        "the receiver of the message",
        "a message that this worker sent to the sender, in the same context or outside of contexts",
        has_records=True,
    ),
    Kind.PASS_SPAN: Rule("a worker that takes part in the pass", "the sender's part of the pass"),
    Kind.RELEASE_CONTEXT: Rule(
        "the opener of the context; a worker that exchanged messages of it with this worker, if "
        "the opener did not",
        "the context",
    ),
    Kind.RELEASE_MESSAGES: Rule(
        "the receiver of the messages",
        "messages that this worker sent to the sender",
        _check_own_messages,
    ),
    Kind.SHUTDOWN: Rule(
        "rank 0 to lead, any member about itself",
        "the end of a closed group; the sender's own leaving",
        _check_step,
    ),
    Kind.STACKS: Rule(_ANY, "nothing: it asks what this worker is doing"),
    Kind.DUMP: Rule(_ANY, "nothing: it has this worker write a report"),
}
"""By kind, what a member may say."""


# Messages about references


def _of_user(me: int, sender: int, message: Hold | Drop) -> bool:
    return message.reference.owner == me


def _of_creator(me: int, sender: int, message: NotCreated) -> bool:
    return message.reference.owner == me and message.reference.creator == sender


def _of_owner(me: int, sender: int, message: HoldAck | Gone | DropAck) -> bool:
    return message.reference.owner == sender


def _between_the_two(me: int, sender: int, message: Handed | HandedAck | NotHanded) -> bool:
    return True


REFERENCE_RULES: dict[type[Message], tuple[str, Callable[[int, int, Any], bool]]] = {
    Hold: ("a user, to the owner: its own use", _of_user),
    Drop: ("a user, to the owner: its own use", _of_user),
    NotCreated: ("the creator, to the owner: its own creation", _of_creator),
    HoldAck: ("the owner, to a user: its own value", _of_owner),
    Gone: ("the owner, to a user: its own value", _of_owner),
    DropAck: ("the owner, to a user: its own value", _of_owner),
    Handed: ("the receiver of a handover, to its sender", _between_the_two),
    HandedAck: ("the sender of a handover, to its receiver", _between_the_two),
    NotHanded: ("the sender of a handover, to its receiver", _between_the_two),
}
"""By type of message, who may send it, to whom, about what."""


def check_reference_message(me: int, sender: int, message: Message) -> None:
    """Checks that ``sender`` may say to ``me`` what a message about references says.

    Raises:
        ProtocolError: It may not.
    """
    if not REFERENCE_RULES[type(message)][1](me, sender, message):
        raise ProtocolError(f"worker {sender} has no say in {message} at {me}")


# Messages of backward passes


def _from_leader(me: int, sender: int, leader: int, message: Discover | Settled) -> bool:
    is_own = sender == leader != me
    if isinstance(message, Discover):
        return is_own and all(each >> WORKER_SHIFT == me for each in message.message_ids)
    return is_own


def _to_leader(me: int, sender: int, leader: int, message: Failed) -> bool:
    return me == leader and (message.worker == sender or message.operation == CONNECTION)


def _to_others(me: int, sender: int, leader: int, message: Abort) -> bool:
    return me != leader


def _between_partners(me: int, sender: int, leader: int, message: Report) -> bool:
    return True


PASS_RULES: dict[type, tuple[str, Callable[[int, int, int, Any], bool]]] = {
    Discover: ("the leader: messages of this worker", _from_leader),
    Settled: ("the leader", _from_leader),
    Failed: ("any part, to the leader: its own failure, or a worker that it has lost", _to_leader),
    Report: ("any part, to a worker that sent it a message of the pass", _between_partners),
    Abort: (
        "the leader, or a part that exchanged gradients with this worker; never to the leader",
        _to_others,
    ),
}
"""By type of message, who may send it, about what. A part of a pass that this worker does not know
has no effect, unless it is of the leader, or gradients of a message that this worker sent."""


def check_pass_message(me: int, sender: int, pass_id: int, message: PassMessage) -> None:
    """Checks that ``sender`` may say to ``me`` what a message of a backward pass says.

    Raises:
        ProtocolError: It may not.
    """
    leader = pass_id >> WORKER_SHIFT
    if not PASS_RULES[type(message)][1](me, sender, leader, message):
        raise ProtocolError(
            f"worker {sender} may not send {type(message).__name__} to worker {me} in pass "
            f"{pass_id}, which worker {leader} leads"
        )


def check_gradients(
    me: int, sender: int, message_id: int, recorded_id: int, to_worker: int | None
) -> None:
    """Checks that ``sender`` may send gradients of a message.

    Args:
        me: This worker, which must have sent the message.
        sender: The sender of the gradients.
        message_id: The message.
        recorded_id: The number under which the sender has recorded the gradients, or 0.
        to_worker: The receiver of the message; None if there is no record of it any more.

    Raises:
        ProtocolError: It may not.
    """
    is_own = message_id and message_id >> WORKER_SHIFT == me and to_worker in (None, sender)
    if not is_own or (recorded_id and recorded_id >> WORKER_SHIFT != sender):
        raise ProtocolError(
            f"worker {sender} sends gradients of message {message_id}, which worker {me} did not "
            "send to it"
        )


# What members may have functions of Weft do, by the modules of these functions

ENTRIES: dict[str, str] = {
    "torchweft.rpc.serving": "a value whose number the caller knows; a pass of a context likewise",
    "torchweft.rpc.collective": "a gathering that both take part in: its own value and failure, or "
    "the outcome, if the caller leads it",
    "torchweft.observe.examining": "nothing: they measure",
    "torchweft.rpc.stream_sources": "a stream that the caller has begun",
    "torchweft.observe.tracing.recorder": "a trace that the caller has begun",
    "torchweft.nn.owner": "a module whose number the caller knows",
    "torchweft.optim.local": "an optimizer whose number the caller knows",
    "torchweft.optim.clipping": "gradients of a context whose number the caller knows",
    "torchweft.mapreduce.shared": "a shared argument whose number the caller knows",
    "torchweft.mapreduce.ending": "why the caller itself ends",
    "torchweft.compat.rpc.api": "a gathering that both take part in",
    "torchweft.compat.rpc.references": "a value whose number the caller knows",
}
"""By module, what the functions that every member may call can concern."""
FUNCTIONS: dict[str, str] = {
    "torchweft.embedding.host": "pulls, pushes and the end of a use of the caller itself; state "
    "and rows of tables whose name it knows",
    "torchweft.embedding.aggregator": "pulls, pushes and the end of a use of the caller itself, as "
    "a member of the group",
    "torchweft.embedding.occupied": "rows of tables whose name the caller knows",
    "torchweft.embedding.saved": "state and rows of tables whose name the caller knows",
    "torchweft.hybrid.clipping": "gradients of the caller itself, as a trainer of the tables",
    "torchweft.hybrid.missing": "nothing: it tells how far this trainer is",
    "torchweft.hybrid.remote": "nothing: it measures gradients of contexts whose numbers the "
    "caller knows",
    "torchweft.weights.inbox": "versions of the caller's own publishers, to subscribers that "
    "follow them",
    "torchweft.weights.publisher": "subscriptions and fetches of the caller itself, at a publisher "
    "whose number it knows",
    "torchweft.rl.observer": "an observer whose number the caller knows",
    "torchweft.rl.replay": "a replay buffer whose number the caller knows",
    "torchweft.rl.agent": "an agent whose number the caller knows: any environment of it",
    "torchweft.checkpoint.owner": "parts that are held for the caller; files at paths that it "
    "gives, and values whose numbers it knows",
    "torchweft.checkpoint.gate": "steps and closes of the caller itself, at a gate whose number it "
    "knows",
}
"""By module, what the functions that a program names for a strict worker, and the exposed methods
of Weft's own classes, can concern."""
PORTS = {
    "torchweft.pipeline.runner": "a pipe that the sender is a worker of: values of its own stages",
}
"""By module, what values for its ports can concern."""
