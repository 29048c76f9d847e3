"""Keeps a remotely referenced value alive for exactly as long as somebody can ask for it.

The problem: many workers hold references to a value on its *owner*, pass them on in messages, and
drop them, while the network delays, repeats, reorders and loses what they tell one another. Let
each *user* tell the owner "one more" and "one less", and a "one less" that overtakes the "one
more" of a third worker frees a value that is in use; a repeated one frees it twice.

The idea: no counts travel, only states. Each user has one entry per reference, whatever the
number of its handles, and tells the owner "I hold it" or "I hold it no longer", numbered by a
version, until the owner has answered; the owner believes the highest version it has seen. And
whoever hands a reference on keeps its own entry until the receiver's is known to the owner.

Guarantees, which the tests name as well: **G1** the owner learns of every user's end; **G2** a
reference handed on keeps the value alive until the receiver is registered; **G3** when a worker is
lost, the owner drops what it held, and users of what it owned are told; **G4** at a graceful
shutdown nothing is left, and what is left is named.

The rules of this folder: ``machine`` is what the shell sees, made of the owner's half, the user's
half and the handovers; every request is repeated until answered (``outbox``); nothing is
remembered for ever (``seen``). ``docs/protocols/references.md`` has the scenarios.
"""

from torchweft.protocol.references.actions import (
    Action,
    Census,
    Confirmed,
    Leak,
    OwnerLost,
    ReleaseValue,
    Send,
    ValueGone,
)
from torchweft.protocol.references.machine import References
from torchweft.wire.references import NO_TOKEN, Message

__all__ = [
    "References",
    "Action",
    "Send",
    "ReleaseValue",
    "Confirmed",
    "ValueGone",
    "OwnerLost",
    "Census",
    "Leak",
    "Message",
    "NO_TOKEN",
]
