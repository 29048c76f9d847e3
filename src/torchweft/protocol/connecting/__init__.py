"""Decides about the connection of one worker to another: who dials, who accepts, who is lost.

The problem: both sides may dial at once; a greeting may be lost, repeated or overtaken; a peer
may be dead, stopped, or cut off in one direction. Two wrong answers are expensive: two sides that
take different connections for *the* connection, and a peer that is declared lost though it lives.

The idea: one machine for each peer, at either side. The shell reports events with the time, under
one lock for each peer, and carries out the actions; nothing else decides. A first connection over
TCP is an *offer*: it has the name of a session, which all attempts of one side have in common. The
acceptor knows a repeated offer by the name, and a stale one by the number of its attempt. From its
first ``HELLO`` on, an offer of the worker with the higher id stands until it is answered.

``machine`` is the part that the shell sees; ``first_dial`` has the patience of first connections,
``contact`` that of sessions; ``reaching`` says what failed addresses mean, ``hello`` is the
greeting. ``docs/protocols/connecting.md`` has the states, events and actions.
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
from torchweft.protocol.connecting.reaching import Outcome, Reaching

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
    "Outcome",
    "Reaching",
]
