"""Decides about calls: how each ends, whether its function runs, and who is told.

The problem: a call may be answered, be late, be cancelled, and lose its worker or its caller, all
at the same time and seen by different threads; and what its function calls in turn has to end with
it. A lock around all of that would cost more than a small call.

The idea: a call is one entry of a table, and the thread that takes the entry out, a single step
of a function in C, has ended the call. So it ends once, without a lock.

Guarantees, see ``docs/protocols/calls.md``: **Once**, a function runs at most once for a call;
**Bounded**, a call ends by its answer, its timeout, or the loss of its worker; **In vain**, no
function begins for which nobody waits, and nested calls end with their parent.

The rules of this package: ``client`` is the side of the caller, ``server`` that of the callee,
``table`` the entries, ``failures`` the errors. The *hot path* is the data and the few methods that
say so: each call goes through them, and they return no actions. All other methods are rare events;
those that have something to be done return actions. Any thread may call any of them at any time.
"""

from torchweft.protocol.calls.client import (
    Action,
    CallClient,
    Complete,
    Completion,
    TellCancelled,
    nest,
)
from torchweft.protocol.calls.failures import function_name
from torchweft.protocol.calls.server import (
    AnsweredCall,
    CallServer,
    CancelNested,
    ServedCall,
    has_awaited,
)
from torchweft.protocol.calls.table import CallTable, Named, OpenCall, Subject

__all__ = [
    "CallTable",
    "CallClient",
    "OpenCall",
    "Completion",
    "Action",
    "Complete",
    "TellCancelled",
    "nest",
    "CallServer",
    "ServedCall",
    "AnsweredCall",
    "CancelNested",
    "has_awaited",
    "Named",
    "Subject",
    "function_name",
]
