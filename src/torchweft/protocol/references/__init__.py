"""Keeps a remotely referenced value alive for exactly as long as a reference to it exists.

The problem: many workers hold references to a value on its *owner*, pass them on in messages, and
drop them, while the network delays, repeats, reorders and loses their messages. If each *user* sent
the owner increments and decrements, a decrement that overtakes the increment of a third worker
would free a value that is in use; a repeated decrement would free it twice.

The idea: no counts travel, only states. Each user has one entry per reference, whatever the
number of its handles, and tells the owner "I hold it" or "I hold it no longer", numbered by a
version, until the owner has answered; the owner believes the highest version it has seen. A worker
that hands a reference on keeps its own entry until the owner knows the receiver's.

Guarantees, which the tests name as well: **G1** the owner learns of every user's end; **G2** a
reference handed on keeps the value alive until the receiver is registered; **G3** when a worker is
lost, the owner drops its holds, and users of values that it owned are told; **G4** a graceful
shutdown leaves no references, and reports any that are left.

The rules of this folder: ``machine`` is the shell's interface, made of the owner's half, the user's
half and the handovers; every request is repeated until answered (``delivery``); received numbers
take little memory (``protocol.numbers``). ``docs/protocols/references.md`` has the scenarios.
"""

from torchweft.protocol.references.delivery import (
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
from torchweft.wire.references import NO_TOKEN

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
    "NO_TOKEN",
]
