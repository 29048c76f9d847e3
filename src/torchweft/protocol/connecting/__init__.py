"""Decides how two workers connect: which side dials or accepts, and when a peer is lost.

The problem: both sides may dial at once; a greeting may be lost, repeated or overtaken; a peer
may be dead, stopped, or cut off in one direction. Two errors are expensive: the two sides keep
different connections, or a living peer is declared lost.

The idea: each side has one state machine per peer. The shell reports events with the time, under
one lock per peer, and carries out the actions; only the machine decides. A first connection over
TCP is an *offer* that names a session; all attempts of one side use the same name. The acceptor
recognizes a repeated offer by this name, and a stale one by its attempt number. From its first
``HELLO`` on, the offer of the worker with the higher id stands until it is answered.

``machine`` is the shell's interface; ``first_dial`` has the retry policy of first connections,
``contact`` the failure detector of sessions, and the times at which a worker looks at them.
``reaching`` chooses addresses and classifies their failures, ``failures`` has the errors of
dialling and their meaning, ``strangers`` bounds unauthenticated connections, ``hello`` is the
greeting, ``unsent`` keeps messages for the first connection. ``docs/protocols/connecting.md`` has
the states, events and actions.
"""

from torchweft.protocol.connecting.actions import (
    Action,
    Answer,
    Busy,
    Dial,
    Done,
    Failure,
    Lose,
    Patience,
    Probe,
    Redial,
    Resume,
    State,
    Step,
    Terms,
    Verdict,
    Wait,
)
from torchweft.protocol.connecting.hello import Hello, Purpose
from torchweft.protocol.connecting.machine import Connecting
from torchweft.protocol.connecting.reaching import Means, Outcome, Reaching
from torchweft.protocol.connecting.unsent import Outgoing, Unsent, UnsentMessages

__all__ = [
    "Connecting",
    "State",
    "Terms",
    "Patience",
    "Failure",
    "Step",
    "Dial",
    "Wait",
    "Done",
    "Busy",
    "Lose",
    "Action",
    "Redial",
    "Resume",
    "Probe",
    "Hello",
    "Purpose",
    "Answer",
    "Verdict",
    "Means",
    "Outcome",
    "Reaching",
    "Unsent",
    "UnsentMessages",
    "Outgoing",
]
