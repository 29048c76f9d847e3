"""Decides how each call ends, whether its function runs, and which workers are told.

The problem: a call may be answered, time out, be cancelled, and lose its worker or its caller, all
at the same time on different threads; and its nested calls have to end with it. A lock around all
of that would cost more than a small call.

The idea: a call is one entry of a table. The thread that removes the entry, in one atomic step (a
single C function), ends the call. So it ends once, without a lock.

Guarantees, see ``docs/protocols/calls.md``: **Once**, a function runs at most once for a call;
**Bounded**, a call ends by its answer, its timeout, or the loss of its worker; **In vain**, no
function begins after its caller has stopped waiting, and nested calls end with their parent.

The rules of this package: ``client`` is the caller's side, with the calls in ``kept`` that wait for
a connection; ``server`` is the callee's side, with its slow functions; ``table`` has the
entries, ``failures`` the errors. Every call takes the *hot path*: the data, and the few methods
marked so, which return no actions. All other methods are rare events and may return actions. Any
thread may call any method at any time.
"""

from torchweft.protocol.calls.client import (
    Action,
    CallClient,
    Complete,
    TellCancelled,
    nest,
)
from torchweft.protocol.calls.failures import function_name
from torchweft.protocol.calls.kept import KeptCall, Request, SimpleRequest
from torchweft.protocol.calls.server import (
    SLOW_S,
    AnsweredCall,
    CallServer,
    CancelNested,
    ServedCall,
    SlowFunctions,
    has_awaited,
)
from torchweft.protocol.calls.table import CallTable, Named, OpenCall, Subject

__all__ = [
    "CallTable",
    "CallClient",
    "OpenCall",
    "KeptCall",
    "Request",
    "SimpleRequest",
    "Action",
    "Complete",
    "TellCancelled",
    "nest",
    "CallServer",
    "ServedCall",
    "AnsweredCall",
    "CancelNested",
    "has_awaited",
    "SLOW_S",
    "SlowFunctions",
    "Named",
    "Subject",
    "function_name",
]
